"""PyTorch's CUDA caching allocator, byte for byte (``c10/cuda/CUDACachingAllocator.cpp``, torch 2.4 to 2.13)."""

from graphmem.allocators.pytorch_caching.allocator import PyTorchCachingAllocator

__all__ = ["PyTorchCachingAllocator"]
