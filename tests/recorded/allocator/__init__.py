"""PyTorch's own caching allocator under random sequences of events, recorded on the stub driver."""
