"""What a session decides: which tensors share a buffer, and what its runs allocate and free, in which order."""
