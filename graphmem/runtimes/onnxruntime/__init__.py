"""ONNX Runtime: how its sessions plan, what its kernels take, its options, and what there is to say of a run."""

from graphmem.runtimes.onnxruntime.runtime import RUNTIME as RUNTIME
