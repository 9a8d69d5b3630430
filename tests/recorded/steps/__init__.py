"""Whole training and inference runs, recorded on the CUDA build of PyTorch, against their prediction.

``runs`` predicts a recorded run, ``table`` compares all of them, ``differ`` shows where one first goes another way.
"""
