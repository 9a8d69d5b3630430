"""The decisions of a session: which tensors share a buffer, and what its runs allocate and free, in which order."""
