"""What the kernels of a provider do: write over their inputs, take working buffers, pack weights."""
