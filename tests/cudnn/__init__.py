"""Asking an installed cuDNN."""
