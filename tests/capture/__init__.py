"""Capturing PyTorch: what a step allocates, and when."""
