"""The memory of a recurrent network by the user's cuDNN: ``cudnnGetRNNTempSpaceSizes``, without a card.

``cudnnCreate`` needs a card, so the handle is made up: zeros, and cuDNN's description of the device in the place where
a real handle has it, which follows its own order of fields (of 9.20 and 9.28; four of its words were found before by
trying every word of the first 4 KiB). The sizes come together with an error, for the library looks for its device
last.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

from graphmem.base.records import dataclass
from graphmem.cudnn.descriptors import CudnnError
from graphmem.cudnn.plans import DATA_TYPES, ITEM_BYTES

#: ``cudnnRNNMode_t`` and ``cudnnRNNAlgo_t`` (cudnn_adv_v9.h).
RELU, TANH, LSTM, GRU = range(4)
STANDARD, PERSIST_STATIC, PERSIST_STATIC_SMALL_H = 0, 1, 3
_DOUBLE_BIAS, _LINEAR_INPUT = 2, 0
#: Whether input and output may be padded, and how they lie: padded (steps first), or packed.
_PADDED, _PADDED_LAYOUT = 1, 0
_PACKED, _PACKED_LAYOUT = 0, 1
_DEFAULT_MATH, _TENSOR_MATH, _FMA_MATH = 0, 1, 2
#: Statuses: done; there is no device (``CUDNN_STATUS_EXECUTION_FAILED_CUDART``).
_DONE, _NO_DEVICE = 0, 5003
#: Where a handle has the fields of :func:`graphmem.cudnn.card.description`, in cuDNN's own order: words of four bytes,
#: an array one after the other, but for ``totalGlobalMem`` (eight, at a multiple of eight).
_FIELDS = (
    "maxGridSize", "maxBlockSize", "regsPerBlock", "multiProcessorCount", "warpSize", "maxSharedMemoryPerBlock",
    "maxSharedMemoryPerBlockOptin", "reservedSharedMemoryPerBlock", "maxRegistersPerSM", "maxCtasPerSM",
    "maxThreadsPerBlock", "maxThreadsPerSM", "pciDeviceId", "isTccDriver", "supportCoopLaunch", "totalGlobalMem",
    "smClockRateKHz", "memClockRateKHz", "l2CacheSize", "cudaDeviceId", "deviceVer",
)  # fmt: skip
#: Fields that came later, with the one that each stands after: in 9.28, not yet in 9.20.
_LATER = {
    "smCountOrigin": "multiProcessorCount",
    "oversizedSharedMemoryPerBlock": "maxSharedMemoryPerBlockOptin",
    "memoryBusWidth": "memClockRateKHz",
}
_LATER_SINCE = 92100
_WIDE = "totalGlobalMem"
_HANDLE_BYTES = 1 << 16
#: Somewhere on a card: a dropout descriptor wants the address of its generators, which nobody follows.
_SOMEWHERE = 1 << 40


@dataclass(frozen=True, slots=True)
class Network:
    """A recurrent network and its input, as PyTorch describes them to cuDNN.

    ``steps`` and ``batch``: of the longest sequence, and how many there are. ``lengths``: those of packed sequences;
    empty where all have ``steps`` (padded). ``projected``: width of the output if it is another than ``hidden``, or 0.
    """

    mode: int
    algorithm: int
    dtype: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    projected: int
    layers: int
    directions: int
    dropout: bool = False
    tf32: bool = True
    lengths: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return ITEM_BYTES[self.dtype]

    @property
    def multiplies_fully(self) -> bool:
        """Whether fp32 is not rounded to TF32 (``torch.backends.cudnn.allow_tf32 = False``)."""
        return self.dtype == "float32" and not self.tf32

    @property
    def rows(self) -> int:
        """Steps of all sequences together."""
        return sum(self.lengths) or self.steps * self.batch

    @property
    def outputs(self) -> int:
        """Values that one direction of a layer gives on."""
        return self.projected or self.hidden


def spaces(
    library: c.CDLL, version: int, device: dict[str, object], network: Network, training: bool
) -> tuple[int, int]:
    """Work and reserve space in bytes, as the library, of that version (92000: 9.20), gives them for a card of that
    description.

    Raises :class:`CudnnError` when it gives none.
    """
    work, reserve = c.c_size_t(), c.c_size_t()
    with_handle = _handle(version, device)
    made: list[tuple[str, c.c_void_p]] = []
    try:
        described = _describe(library, with_handle, network, made), _data(library, network, made)
        status = library.cudnnGetRNNTempSpaceSizes(
            c.byref(with_handle), described[0], int(training), described[1], c.byref(work), c.byref(reserve)
        )
    finally:
        for kind, descriptor in reversed(made):
            getattr(library, f"cudnnDestroy{kind}Descriptor")(descriptor)
    if status not in (_DONE, _NO_DEVICE) or not work.value:
        raise CudnnError(f"cudnnGetRNNTempSpaceSizes: status {status}")
    return work.value, reserve.value


def _handle(version: int, device: dict[str, Any]) -> Any:
    after = {before: name for name, before in _LATER.items()} if version >= _LATER_SINCE else {}
    handle, at = c.create_string_buffer(_HANDLE_BYTES), 0
    for name in (one for field in _FIELDS for one in (field, after.get(field)) if one is not None):
        value = device[name]
        words = value if isinstance(value, list) else [value]
        kind = c.c_int64 if name == _WIDE else c.c_int
        at = -(-at // c.sizeof(kind)) * c.sizeof(kind)
        c.memmove(c.byref(handle, at), (kind * len(words))(*words), c.sizeof(kind) * len(words))
        at += c.sizeof(kind) * len(words)
    return handle


def _describe(library: c.CDLL, handle: Any, network: Network, made: list[tuple[str, c.c_void_p]]) -> c.c_void_p:
    """``RNNDescriptor::set`` of ``aten/src/ATen/cudnn/Descriptors.h``: half types are summed in fp32."""
    dtype, half = DATA_TYPES[network.dtype], network.itemsize == ITEM_BYTES["float16"]
    math = _TENSOR_MATH if network.dtype == "float16" else _FMA_MATH if network.multiplies_fully else _DEFAULT_MATH
    dropout = _new(library, "Dropout", made)
    if network.dropout:
        size = c.c_size_t()
        _call(library.cudnnDropoutGetStatesSize, c.byref(handle), c.byref(size))
        _call(
            library.cudnnRestoreDropoutDescriptor, dropout, c.byref(handle), c.c_float(0.5), c.c_void_p(_SOMEWHERE),
            size, c.c_ulonglong(0),
        )  # fmt: skip
    described = _new(library, "RNN", made)
    _call(
        library.cudnnSetRNNDescriptor_v8, described, network.algorithm, network.mode, _DOUBLE_BIAS,
        network.directions - 1, _LINEAR_INPUT, dtype, DATA_TYPES["float32"] if half else dtype, math, network.inputs,
        network.hidden, network.outputs, network.layers, dropout, _PACKED if network.lengths else _PADDED,
    )  # fmt: skip
    return described


def _data(library: c.CDLL, network: Network, made: list[tuple[str, c.c_void_p]]) -> c.c_void_p:
    lengths = network.lengths or (network.steps,) * network.batch
    data = _new(library, "RNNData", made)
    _call(
        library.cudnnSetRNNDataDescriptor, data, DATA_TYPES[network.dtype],
        _PACKED_LAYOUT if network.lengths else _PADDED_LAYOUT, network.steps, network.batch, network.inputs,
        (c.c_int * len(lengths))(*lengths), c.byref(c.c_double(0)),
    )  # fmt: skip
    return data


def _new(library: c.CDLL, kind: str, made: list[tuple[str, c.c_void_p]]) -> c.c_void_p:
    descriptor = c.c_void_p()
    _call(getattr(library, f"cudnnCreate{kind}Descriptor"), c.byref(descriptor))
    made.append((kind, descriptor))
    return descriptor


def _call(function: Callable[..., int], *arguments: object) -> None:
    if status := function(*arguments):
        raise CudnnError(f"{getattr(function, '__name__', function)}: status {status}")
