"""A session of the installed onnxruntime on the CPU, whose arena can be read."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from graphmem.accuracy.onnxruntime import capi

_LEVELS = {"disabled": 0, "basic": 1, "extended": 2, "layout": 3, "all": 99}
_Pointer = capi.POINTER
_Text = c.POINTER(c.c_char_p)
_Handles = c.POINTER(_Pointer)


class CpuSession:
    """One session in ``environment``. Raises :class:`~graphmem.accuracy.onnxruntime.capi.OrtError`.

    ``threads`` are those of one operator: working buffers of some kernels depend on them, so a machine's number would
    make records differ. ``entries`` are configuration entries by their own names; ``configure`` is given the session's
    options when the rest is set.
    """

    def __init__(
        self,
        model: Path,
        environment: Any,
        *,
        level: str = "all",
        threads: int = 1,
        memory_pattern: bool = True,
        entries: Mapping[str, str] | None = None,
        configure: Callable[[Any], None] = lambda options: None,
    ) -> None:
        self.inputs, self.outputs = _signature(model)
        options = capi.made("CreateSessionOptions")
        for key, value in (entries or {}).items():
            _entry("AddSessionConfigEntry", options, key, value)
        capi.call("SetIntraOpNumThreads", (_Pointer, options), (c.c_int, threads))
        capi.call("SetSessionGraphOptimizationLevel", (_Pointer, options), (c.c_int, _LEVELS[level]))
        capi.call("EnableMemPattern" if memory_pattern else "DisableMemPattern", (_Pointer, options))
        configure(options)
        path = str(model).encode()
        self.handle = capi.made(
            "CreateSession", (_Pointer, environment), (c.c_char_p, path), (_Pointer, options)
        )  # fmt: skip

    def arena(self) -> Any:
        """The session's arena, for :func:`~graphmem.accuracy.onnxruntime.capi.statistics`."""
        info = capi.memory_info(True)
        return capi.made("CreateAllocator", (_Pointer, self.handle), (_Pointer, info))

    def run(self, feeds: Mapping[str, Any], entries: Mapping[str, str] | None = None) -> Values:
        """Run once. A feed is an array, or a shape: then 0.5 everywhere, or 0 where it holds integers."""
        options = capi.made("CreateRunOptions")
        for key, value in (entries or {}).items():
            _entry("AddRunConfigEntry", options, key, value)
        arrays = [_array(feeds[name], dtype) for name, (_, dtype) in self.inputs.items()]
        kinds = [kind for kind, _ in self.inputs.values()]
        values = [_tensor(array, kind) for array, kind in zip(arrays, kinds, strict=True)]
        results = (_Pointer * len(self.outputs))()
        capi.call(
            "Run", (_Pointer, self.handle), (_Pointer, options), (_Text, _names(self.inputs)),
            (_Handles, (_Pointer * len(values))(*values)), (c.c_size_t, len(values)),
            (_Text, _names(self.outputs)), (c.c_size_t, len(self.outputs)), (_Handles, results),
        )  # fmt: skip
        return Values([*results, *values], arrays)


class Values:
    """The tensors of a run, alive until :meth:`release`; ``arrays`` is the memory of its inputs."""

    def __init__(self, handles: Sequence[Any], arrays: Sequence[Any]) -> None:
        self._handles = handles
        self.arrays = arrays

    def release(self) -> None:
        """Give the outputs back to the arena."""
        release = capi.function("ReleaseValue", _Pointer, result=None)
        for handle in self._handles:
            release(handle)


def _signature(path: Path) -> tuple[dict[str, tuple[int, Any]], list[str]]:
    """Inputs with ONNX's number of their element type and numpy's type, and the names of the outputs."""
    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input if value.name not in constants}
    inputs = {name: (kind, onnx.helper.tensor_dtype_to_np_dtype(kind)) for name, kind in kinds.items()}
    return inputs, [value.name for value in graph.output]


def _array(feed: Any, dtype: Any) -> Any:
    if isinstance(feed, np.ndarray):
        return np.ascontiguousarray(feed, dtype)
    return np.full(tuple(feed), 0.5 if np.issubdtype(dtype, np.floating) else 0, dtype)


def _tensor(array: Any, kind: int) -> Any:
    dims = (c.c_int64 * max(1, array.ndim))(*array.shape)
    return capi.made(
        "CreateTensorWithDataAsOrtValue", (_Pointer, capi.memory_info(False)), (_Pointer, array.ctypes.data),
        (c.c_size_t, array.nbytes), (c.POINTER(c.c_int64), dims), (c.c_size_t, array.ndim), (c.c_int, kind),
    )  # fmt: skip


def _names(names: Any) -> Any:
    encoded = [name.encode() for name in names]
    return (c.c_char_p * len(encoded))(*encoded)


def _entry(function: str, options: object, key: str, value: str) -> None:
    capi.call(function, (_Pointer, options), (c.c_char_p, key.encode()), (c.c_char_p, value.encode()))
