"""PyTorch's own operator database (``torch.testing._internal``), every entry that starts, forward and backward.

Nobody here chose these operators or their inputs. ``record`` runs on a CUDA build, ``table`` and ``differ`` compare a
capture with what was recorded: ``python -m tests.recorded op_db record|table|differ``.
"""
