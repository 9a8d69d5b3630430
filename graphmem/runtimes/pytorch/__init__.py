"""PyTorch: its caching allocator, in replays and while a captured program runs."""

from graphmem.runtimes.pytorch.runtime import RUNTIME as RUNTIME
from graphmem.runtimes.pytorch.runtime import configuration_text as configuration_text
from graphmem.runtimes.pytorch.runtime import default_allocator as default_allocator
