"""Graphs of ``torch.fx`` both ways: their memory as a :class:`graphmem.plan_memory.Graph`, and what was planned of that
written back into them. Public doors are in :mod:`graphmem.plan_memory`."""
