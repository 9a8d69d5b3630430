"""Rematerialisation: buffers that are dropped and made again, to stay within a budget."""
