"""Asks a cuDNN, without a card, what its recurrent networks take: ``cudnnGetRNNTempSpaceSizes``.

``cudnnCreate`` needs a card, so the handle is made up: a zeroed buffer with the version of the device in the one word
that the sizes depend on, found by trying every word of the first 4 KiB with 9.20. The sizes are told together with an
error, for cuDNN looks for its device last.
"""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: ``cudnnDataType_t``, ``cudnnRNNMode_t``, ``cudnnRNNAlgo_t`` (cudnn_ops_v9.h, cudnn_adv_v9.h).
TYPES = {"fp32": 0, "fp64": 1, "fp16": 2, "bf16": 9}
MODES = {"RNN": 1, "LSTM": 2, "GRU": 3}
STANDARD, PERSIST_STATIC, PERSIST_STATIC_SMALL_H = 0, 1, 3
DOUBLE_BIAS, LINEAR_INPUT, PADDED_IO, SEQUENCES_FIRST = 2, 0, 1, 0
DEFAULT_MATH, TENSOR_MATH = 0, 1
#: ``CUDNN_STATUS_EXECUTION_FAILED_CUDART``: there is no device.
NO_DEVICE = 5003
_HANDLE_BYTES, _DEVICE_VERSION = 1 << 16, 104

Line = dict[str, Any]


def algorithm(line: Line, multiprocessors: int) -> int:
    """What PyTorch 2.13 chooses for the forward pass of a network that is not packed, from compute capability 8.0 on
    but for 8.6 (``get_algo``, aten/src/ATen/native/cudnn/RNN.cpp)."""
    hidden, batch, mode = line["hidden"], line["batch"], line["mode"]
    if line["projected"]:
        return STANDARD
    if line["dtype"] != "fp64" and hidden <= (384 if mode == "RNN" else 192):
        return PERSIST_STATIC_SMALL_H
    usual = line["layers"] == 1 == line["directions"] and hidden <= 1024 and hidden % 128 == 0 == line["inputs"] % 128
    fits = mode != "GRU" and batch % 8 == 0 and batch <= 128 and (mode == "LSTM" or batch < 96 or hidden < 896)
    return PERSIST_STATIC if line["dtype"] == "fp16" and usual and fits and multiprocessors >= 98 else STANDARD


@dataclass
class Rnn:
    """The library at ``path``, asked for a card of that compute capability."""

    path: Path
    capability: tuple[int, int]
    multiprocessors: int

    def __post_init__(self) -> None:
        self._library = c.CDLL(str(self.path))
        self._library.cudnnGetVersion.restype = c.c_size_t
        self.version = int(self._library.cudnnGetVersion())
        self._handle = c.create_string_buffer(_HANDLE_BYTES)
        major, minor = self.capability
        c.c_int.from_buffer(self._handle, _DEVICE_VERSION).value = 100 * major + 10 * minor

    def spaces(self, line: Line) -> tuple[int, int]:
        """Work and reserve space of a network in bytes. Raises ``RuntimeError`` with cuDNN's status."""
        network, data = self._network(line), self._data(line)
        work, reserve = c.c_size_t(), c.c_size_t()
        status = self._library.cudnnGetRNNTempSpaceSizes(
            c.byref(self._handle), network, line["train"], data, c.byref(work), c.byref(reserve)
        )
        if status not in (0, NO_DEVICE):
            raise RuntimeError(f"cudnnGetRNNTempSpaceSizes: {status} for {line}")
        self._call("cudnnDestroyRNNDescriptor", network)
        self._call("cudnnDestroyRNNDataDescriptor", data)
        return work.value, reserve.value

    def _network(self, line: Line) -> c.c_void_p:
        dtype = TYPES[line["dtype"]]
        half = line["dtype"] in ("fp16", "bf16")
        network = self._new("cudnnCreateRNNDescriptor")
        self._call(
            "cudnnSetRNNDescriptor_v8", network, algorithm(line, self.multiprocessors), MODES[line["mode"]],
            DOUBLE_BIAS, line["directions"] - 1, LINEAR_INPUT, dtype, TYPES["fp32"] if half else dtype,
            TENSOR_MATH if half else DEFAULT_MATH, line["inputs"], line["hidden"], line["projected"] or line["hidden"],
            line["layers"], self._new("cudnnCreateDropoutDescriptor"), PADDED_IO,
        )  # fmt: skip
        return network

    def _data(self, line: Line) -> c.c_void_p:
        lengths = (c.c_int * line["batch"])(*[line["steps"]] * line["batch"])
        data = self._new("cudnnCreateRNNDataDescriptor")
        self._call(
            "cudnnSetRNNDataDescriptor", data, TYPES[line["dtype"]], SEQUENCES_FIRST, line["steps"], line["batch"],
            line["inputs"], lengths, c.byref(c.c_double(0)),
        )  # fmt: skip
        return data

    def _new(self, function: str) -> c.c_void_p:
        descriptor = c.c_void_p()
        self._call(function, c.byref(descriptor))
        return descriptor

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise RuntimeError(f"{function}: {status}")
