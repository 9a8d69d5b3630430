"""TensorFlow: an allocator with a limit of its own, under a captured step or a graph run operator by operator."""

from graphmem.runtimes.tensorflow.runtime import RUNTIME as RUNTIME
