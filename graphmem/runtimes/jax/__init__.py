"""JAX: XLA's assignment of buffers, its client's calls, and its allocator."""

from graphmem.runtimes.jax.runtime import RUNTIME as RUNTIME
