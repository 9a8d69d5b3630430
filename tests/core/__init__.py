"""Replay, training steps, cards, and the house itself."""
