"""The memory of a provider's kernels: they write over their inputs, take working buffers, pack weights."""
