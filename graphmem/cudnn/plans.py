"""The plans that PyTorch gets from cuDNN for a convolution, and the workspace that each asks for.

Follows ``aten/src/ATen/native/cudnn/Conv_v8.cpp`` of PyTorch: ``getTensorDescriptor`` (dense strides in the memory
format that runs, dimensions of 1 included), ``getConvDescriptor`` (half types are summed in fp32),
``filterEngineConfigs``, and the order: the plans of the heuristics, then those of the fallback list.

Plans of engines that compile their kernel at run time (``CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION``) are not built,
which takes a device: their configurations are supported, and report the same workspace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphmem.base.records import dataclass
from graphmem.cudnn.descriptors import CudnnError, Descriptor, Descriptors, Kind, Type

#: Types of values by their names in PyTorch: ``cudnnDataType_t``.
DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
#: Bytes of a value of each type.
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
#: Kinds of operations, and the numbers of their first attributes: alpha, beta, convolution, and three tensors.
_OPERATIONS = {
    "forward": (Kind.FORWARD, 700),
    "backward data": (Kind.BACKWARD_DATA, 706),
    "backward weight": (Kind.BACKWARD_FILTER, 712),
}
#: ``cudnnBackendHeurMode_t``; B where ``TORCH_CUDNN_USE_HEURISTIC_MODE_B`` is 1 (``cudnnv8_use_heur_mode_b``).
INSTANT, MODE_B, FALLBACK = 0, 1, 2
_CROSS_CORRELATION = 1
_TENSOR_CORE, _DOWN_CONVERT_INPUTS, _NONDETERMINISTIC = 0, 1, 4
_RUNTIME_COMPILATION = 0
#: Room for the notes of an engine; cuDNN 9.20 knows 10 numerical ones and 5 of behavior.
_NOTES = 16


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution as PyTorch describes it to cuDNN; shapes of input, filter and output. A transposed convolution is
    the ``backward data`` of the one it transposes. ``alignments``: bytes that divide the addresses, at most 32.
    ``padding_after``: where it is another than ``padding``; ``down_converts``: engines that round their inputs down are
    taken too, which PyTorch leaves out."""

    direction: str
    dtype: str
    input: tuple[int, ...]
    filter: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    channels_last: bool
    tf32: bool = True
    deterministic: bool = False
    alignments: tuple[int, int, int] = (32, 32, 32)
    padding_after: tuple[int, ...] = ()
    down_converts: bool = False


def workspaces(descriptors: Descriptors, device: Descriptor, convolution: Convolution, mode: int) -> list[int]:
    """Bytes that the plans ask for, in the order in which PyTorch tries them.

    Raises :class:`CudnnError` when there is no plan.
    """
    found = [size for size, _ in plans(descriptors, device, convolution, mode)]
    if not found:
        raise CudnnError("no plan for this convolution")
    return found


def plans(
    descriptors: Descriptors, device: Descriptor, convolution: Convolution, mode: int
) -> Iterator[tuple[int, Descriptor]]:
    """Bytes and engine configurations of the plans, in the order in which PyTorch tries them."""
    graph = _graph(descriptors, convolution)
    for source in (mode, FALLBACK):
        for config in _configurations(descriptors, device, graph, source):
            size = _workspace(descriptors, device, config, convolution)
            if size is not None:
                yield size, config


def tried_out(
    descriptors: Descriptors, device: Descriptor, convolution: Convolution, modes: Sequence[int]
) -> list[int]:
    """Bytes of the plans that TensorFlow tries out: those of the heuristics' lists, without the fallback, each plan
    once, which is an engine with its knobs (``GetConvolveRunners``, cuda_dnn.cc)."""
    graph = _graph(descriptors, convolution)
    found: dict[tuple[tuple[int, ...], ...], int] = {}
    for mode in modes:
        for config in _configurations(descriptors, device, graph, mode):
            size = _workspace(descriptors, device, config, convolution)
            if size is not None:
                found.setdefault(_tag(descriptors, config), size)
    return list(found.values())


#: No engine has more knobs (``CUDNN_KNOB_TYPE_COUNTS``).
_KNOBS = 64


def _tag(descriptors: Descriptors, config: Descriptor) -> tuple[tuple[int, ...], ...]:
    (engine,) = descriptors.fill(config, 300, Kind.ENGINE, 1)
    choices = descriptors.fill(config, 302, Kind.KNOB_CHOICE, _KNOBS)
    knobs = (
        (*descriptors.numbers(choice, 600, Type.KNOB_TYPE, 1), *descriptors.numbers(choice, 601, Type.INT64, 1))
        for choice in choices
    )
    return (tuple(descriptors.numbers(engine, 1301, Type.INT64, 1)), *sorted(knobs))


def dense_strides(shape: Sequence[int], channels_last: bool) -> list[int]:
    """Strides of a dense tensor; a dimension of 1 has the stride it would have otherwise (``fixSizeOneDimStride``)."""
    order = (1, *range(len(shape) - 1, 1, -1), 0) if channels_last else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 1
    for dimension in order:
        strides[dimension] = step
        step *= shape[dimension]
    return strides


def _graph(descriptors: Descriptors, convolution: Convolution) -> Descriptor:
    """One operation. Its tensors stand in the order filter, input, output."""
    c, double = convolution, convolution.dtype == "float64"
    kind, first = _OPERATIONS[c.direction]
    shapes = (("w", c.filter, c.alignments[1]), ("x", c.input, c.alignments[0]), ("y", c.output, c.alignments[2]))
    tensors = [_tensor(descriptors, c, name, shape, alignment) for name, shape, alignment in shapes]
    operation = descriptors.make(kind)
    scale = Type.DOUBLE if double else Type.FLOAT
    descriptors.set(operation, first, scale, [1.0])
    descriptors.set(operation, first + 1, scale, [0.0])
    for number, descriptor in enumerate((_convolution(descriptors, c), *tensors), first + 2):
        descriptors.set(operation, number, Type.DESCRIPTOR, [descriptor])
    descriptors.finalize(operation)
    graph = descriptors.make(Kind.GRAPH)
    descriptors.set(graph, 801, Type.DESCRIPTOR, [operation])
    descriptors.finalize(graph)
    return graph


def _tensor(
    descriptors: Descriptors, convolution: Convolution, name: str, shape: tuple[int, ...], alignment: int
) -> Descriptor:
    tensor = descriptors.make(Kind.TENSOR)
    descriptors.set(tensor, 902, Type.INT64, shape)
    descriptors.set(tensor, 903, Type.INT64, dense_strides(shape, convolution.channels_last))
    descriptors.set(tensor, 906, Type.INT64, [ord(name)])
    descriptors.set(tensor, 900, Type.INT64, [alignment])
    descriptors.set(tensor, 901, Type.DATA_TYPE, [DATA_TYPES[convolution.dtype]])
    descriptors.finalize(tensor)
    return tensor


def _convolution(descriptors: Descriptors, convolution: Convolution) -> Descriptor:
    made = descriptors.make(Kind.CONVOLUTION)
    descriptors.set(made, 100, Type.DATA_TYPE, [1 if convolution.dtype == "float64" else 0])
    descriptors.set(made, 101, Type.CONVOLUTION_MODE, [_CROSS_CORRELATION])
    descriptors.set(made, 102, Type.INT64, convolution.dilation)
    descriptors.set(made, 103, Type.INT64, convolution.stride)
    descriptors.set(made, 104, Type.INT64, convolution.padding_after or convolution.padding)
    descriptors.set(made, 105, Type.INT64, convolution.padding)
    descriptors.set(made, 106, Type.INT64, [len(convolution.stride)])
    descriptors.finalize(made)
    return made


def _configurations(descriptors: Descriptors, device: Descriptor, graph: Descriptor, mode: int) -> Iterator[Descriptor]:
    heuristics = descriptors.make(Kind.HEURISTICS)
    descriptors.set(heuristics, 201, Type.DESCRIPTOR, [graph])
    descriptors.set(heuristics, 200, Type.HEURISTIC_MODE, [mode])
    descriptors.set(heuristics, 204, Type.DESCRIPTOR, [device])
    try:
        descriptors.finalize(heuristics)
        count = descriptors.count(heuristics, 202, Type.DESCRIPTOR)
    except CudnnError:  # a mode that knows nothing of such a convolution; the fallback list is asked next
        return
    yield from descriptors.fill(heuristics, 202, Kind.ENGINE_CONFIG, min(count, 1))  # often nobody asks for more
    yield from descriptors.fill(heuristics, 202, Kind.ENGINE_CONFIG, count)[1:]


def _workspace(
    descriptors: Descriptors, device: Descriptor, config: Descriptor, convolution: Convolution
) -> int | None:
    """Bytes of a configuration's plan, None where PyTorch leaves it out or it does not build."""
    try:
        if is_left_out(notes_of(descriptors, config), convolution):
            return None
        (engine,) = descriptors.fill(config, 300, Kind.ENGINE, 1)
        if _RUNTIME_COMPILATION in descriptors.numbers(engine, 1305, Type.BEHAVIOR_NOTE, _NOTES):
            return descriptors.numbers(config, 303, Type.INT64, 1)[0]
        plan = descriptors.make(Kind.PLAN)
        descriptors.set(plan, 401, Type.DESCRIPTOR, [config])
        descriptors.set(plan, 407, Type.DESCRIPTOR, [device])
        descriptors.finalize(plan)
        return descriptors.numbers(plan, 402, Type.INT64, 1)[0]
    except (CudnnError, ValueError, IndexError):
        return None


def notes_of(descriptors: Descriptors, config: Descriptor) -> list[int]:
    """The numerical notes of a configuration's engine (``cudnnBackendNumericalNote_t``)."""
    (engine,) = descriptors.fill(config, 300, Kind.ENGINE, 1)
    return descriptors.numbers(engine, 1303, Type.NUMERICAL_NOTE, _NOTES)


def is_left_out(notes: Sequence[int], convolution: Convolution) -> bool:
    """Whether PyTorch (``filterEngineConfigs``), or ONNX Runtime, does not take an engine with these notes."""
    if (_DOWN_CONVERT_INPUTS in notes and not convolution.down_converts) or (
        convolution.deterministic and _NONDETERMINISTIC in notes
    ):
        return True
    rounds = convolution.dtype == "float32" or convolution.down_converts  # ONNX Runtime leaves them out of all types
    return rounds and not convolution.tf32 and _TENSOR_CORE in notes
