"""Loops with side streams and with several processes, compared with the CUDA build."""
