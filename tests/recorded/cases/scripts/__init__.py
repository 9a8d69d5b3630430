"""Whole programs, written as people publish them: recorded as they are, and predicted by ``graphmem run``."""
