"""The graph as ONNX Runtime executes it: its own optimizer run on a model whose weights are a file of holes.

Weights are replaced by references to one sparse file, so that none is read and all the fusions that look at types,
shapes and small constants still happen. A second session, in which every tensor is an output, gives the symbolic shapes
that its planner compares. Both sessions are made and never run.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from graphmem.base.records import dataclass
from graphmem.base.signals import interruptible
from graphmem.errors import SourceError
from graphmem.graph.constant_work import constant_work
from graphmem.graph.contents import PAYLOADS
from graphmem.graph.model import ELEMENT_BITS, Dimension, TensorSpec
from graphmem.graph.onnx_import import read_model, spec_of_tensor, spec_of_value, subgraphs
from graphmem.graph.onnx_stream import KEPT_PAYLOAD_BYTES
from graphmem.graph.shapes import scope_of
from graphmem.runtimes.onnxruntime import cuda_fusions, half_precision
from graphmem.runtimes.onnxruntime.levels import LEVELS

if TYPE_CHECKING:
    import onnxruntime

#: Constant folding computes with the weights it folds, holes or not; beyond this it is left out, to stay within memory.
MAX_FOLDED_BYTES = 1 << 30
#: Multiplications of constants with constants, some seconds of one core; beyond this they are not folded either.
MOST_MULTIPLICATIONS = 1 << 33
#: Nodes that read one tensor: with 5,000 of them onnxruntime 1.31.1 takes 10 s, with 10,000 four times as long.
MOST_READERS = 2048
#: Optimizers that change nodes of the CPU provider alone (``GenerateTransformers``, ``graph_transformer_utils.cc``):
#: the CUDA provider of 1.31.1 executes the same graphs without what they make.
CPU_ONLY = (
    "GemmActivationFusion", "ConvActivationFusion", "MatMulIntegerToFloatFusion", "DynamicQuantizeMatMulFusion",
    "QDQS8ToU8Transformer", "QDQSelectorActionTransformer", "Avx2WeightS8ToU8Transformer", "DQMatMulNBitsFusion",
    "SliceConcatToSpaceToDepthFusion",
)  # fmt: skip
_WEIGHTS = "weights"


@dataclass(frozen=True)
class OptimizedModel:
    """``model`` without weights, made from ``source``; ``symbolic`` are types and shapes before binding (``""``: a
    dimension without a name; a scalar may also be a tensor of unknown rank); ``level`` is the level that was run, lower
    than the one asked for where there is a ``reason``; ``provider`` is the one whose half precision it has;
    ``is_folded``: constants were folded, as ONNX Runtime would."""

    source: onnx.ModelProto
    model: onnx.ModelProto
    symbolic: Mapping[str, TensorSpec]
    level: str
    runtime_version: str = ""
    reason: str = ""
    provider: str = "cpu"
    is_folded: bool = True


def optimize(model: onnx.ModelProto, level: str, provider: str = "cpu") -> OptimizedModel:
    """``model`` after ONNX Runtime's optimizations of ``level`` for its CPU provider.

    For another ``provider`` half precision stays half precision, though the CPU's kernels have none: see
    :mod:`graphmem.graph.half_precision`. Where onnxruntime is not installed, or refuses the model, the graph stays as
    it is and the shapes are ONNX's.
    """
    try:
        import onnxruntime
    except ImportError:
        return _unoptimized(model, "onnxruntime is not installed")
    crowded = _most_read(model)
    if crowded is not None:
        return _unoptimized(model, f"{crowded}, and onnxruntime's optimizer takes time quadratic in them")
    try:
        with tempfile.TemporaryDirectory(prefix="graphmem-") as directory:
            place = Path(directory)
            is_half = provider != "cpu" and half_precision.has_half(model)
            source = half_precision.widened(model) if is_half else model
            if source is None:
                return _unoptimized(model, "its conversions to half precision are not followed through the optimizer")
            on_cuda = provider != "cpu"
            if on_cuda:
                source = cuda_fusions.hidden(source)
            is_folded = may_fold_constants(source)
            left_out = (*(CPU_ONLY if on_cuda else ()), *(() if is_folded else ("ConstantFolding",)))
            changed = _optimized_by(source, level, place, left_out)
            if is_half:
                changed = half_precision.narrowed(changed, model)
            if on_cuda:
                changed = cuda_fusions.shown(changed)
            symbolic = _symbolic_shapes(changed, place)
            if on_cuda and level not in ("disabled", "basic"):
                changed = cuda_fusions.fuse_bias_softmax(changed, symbolic)
            version = onnxruntime.__version__
            return OptimizedModel(model, changed, symbolic, level, version, provider=provider, is_folded=is_folded)
    except SourceError:
        raise
    except Exception as error:  # onnxruntime raises its own kinds, and has kernels for the CPU only
        return _unoptimized(model, f"onnxruntime {onnxruntime.__version__} refuses the model: {_reason(error)}")


def _optimized_by(model: onnx.ModelProto, level: str, directory: Path, left_out: Sequence[str]) -> onnx.ModelProto:
    """``model`` after all optimizers but those named ``left_out``."""
    source, target = directory / "model.onnx", directory / "optimized.onnx"
    source.write_bytes(_without_weights(model, directory).SerializeToString())
    options = _options(level)
    options.optimized_model_filepath = str(target)
    _session(source, options, left_out)
    return read_model(target)


def _most_read(model: onnx.ModelProto) -> str | None:
    """Words for a tensor that more than :data:`MOST_READERS` nodes read, if there is one; constants do not count."""
    constants = {tensor.name for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in set(node.input) if name not in constants)
    name, count = max(readers.items(), key=lambda item: item[1], default=("", 0))
    return f"{count} nodes read {name!r}" if name and count > MOST_READERS else None


def may_fold_constants(model: onnx.ModelProto) -> bool:
    """Whether folding the constants of ``model`` takes little memory and time: by the weights that it computes with,
    and by what it computes (:mod:`graphmem.graph.constant_work`)."""
    if foldable_bytes(model) > MAX_FOLDED_BYTES:
        return False
    work = constant_work(model)
    return work.made_bytes <= MAX_FOLDED_BYTES and work.multiplications <= MOST_MULTIPLICATIONS


def foldable_bytes(model: onnx.ModelProto) -> int:
    """Bytes of the weights that constant folding would compute with: those that only meet other constants."""
    sizes = {tensor.name: spec_of_tensor(tensor).nbytes for tensor in model.graph.initializer}
    total = 0
    for node in model.graph.node:
        named = [name for name in node.input if name]
        if named and all(name in sizes for name in named):
            total += sum(sizes[name] for name in named)
    return total


def _options(level: str) -> onnxruntime.SessionOptions:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it thinks of the model is no news to the user
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, LEVELS[level])
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _session(
    path: Path, options: onnxruntime.SessionOptions, left_out: Sequence[str] = ()
) -> onnxruntime.InferenceSession:
    import onnxruntime

    # the fallback prints to standard output, where graphmem's answer goes
    return interruptible(
        lambda: onnxruntime.InferenceSession(
            str(path),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=list(left_out),
            enable_fallback=0,
        )
    )


def _without_weights(model: onnx.ModelProto, directory: Path) -> onnx.ModelProto:
    """A copy of ``model`` whose large initializers all lie in one file of zeros, at the same place."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    largest = 0
    for tensor in _constants(copy.graph):
        size = spec_of_tensor(tensor).nbytes
        if _has_values(tensor, size):
            continue
        largest = max(largest, size)
        for field in PAYLOADS:
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in (("location", _WEIGHTS), ("offset", "0"), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)
    with (directory / _WEIGHTS).open("wb") as file:
        file.truncate(max(largest, 1))  # holes: no disk, no writing
    return copy


def _has_values(tensor: onnx.TensorProto, size: int) -> bool:
    inside = tensor.data_location != onnx.TensorProto.EXTERNAL
    return not size or (inside and size <= KEPT_PAYLOAD_BYTES and any(len(getattr(tensor, f)) for f in PAYLOADS))


def _constants(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The initializers of ``graph`` and of its subgraphs; large ``Constant`` nodes are made initializers first."""
    for node in list(graph.node):
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            if not _has_values(tensor, spec_of_tensor(tensor).nbytes):
                added = graph.initializer.add()
                added.CopyFrom(tensor)
                added.name = node.output[0]
                graph.node.remove(node)
                continue
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _constants(attribute.g)
    yield from graph.initializer


def _symbolic_shapes(model: onnx.ModelProto, directory: Path) -> dict[str, TensorSpec]:
    """ONNX Runtime's own inferred shapes of all tensors that nodes make: a session with each of them as output.

    Those of subgraphs stand beside the others, under names that begin with :func:`scope_of`.
    """
    copy = _without_weights(model, directory)
    hoist(copy.graph)
    outputs = {value.name for value in copy.graph.output}
    for node in copy.graph.node:
        for name in node.output:
            if name and name not in outputs:
                copy.graph.output.append(onnx.ValueInfoProto(name=name))
                outputs.add(name)
    path = directory / "shapes.onnx"
    path.write_bytes(copy.SerializeToString())
    session = _session(path, _options("disabled"))
    found = {}
    for value in (*session.get_outputs(), *session.get_inputs()):
        kind = value.type.removeprefix("tensor(").removesuffix(")")  # "tensor(float16)"; others are no tensors
        kind = {"float": "float32", "double": "float64"}.get(kind, kind)
        if kind in ELEMENT_BITS:
            found[value.name] = TensorSpec(value.name, kind, tuple(_dimension(d) for d in value.shape))
    return found


def hoist(graph: onnx.GraphProto, scope: str = "") -> None:
    """Set copies of the nodes of subgraphs before the node that has them, all names made there beginning with
    :func:`scope_of`; what a subgraph is given becomes an input of ``graph``, a slice that a ``Scan`` reads a node."""
    nodes = []
    for node in graph.node:
        for attribute, body in subgraphs(node).items():
            inside = onnx.GraphProto()
            inside.CopyFrom(body)
            prefix = scope + scope_of(next(filter(None, node.output), node.name).removeprefix(scope), attribute)
            _rename(inside, prefix)
            nodes += _take_inputs_out(node, inside, graph)
            hoist(inside, prefix)
            nodes += inside.node
            graph.initializer.extend(inside.initializer)
            graph.input.extend(inside.input)
            declared = (*inside.value_info, *inside.output)  # types that a subgraph declares hold too
            graph.value_info.extend(value for value in declared if value.type.WhichOneof("value"))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(graph: onnx.GraphProto, prefix: str) -> None:
    """Let the names that ``graph`` makes begin with ``prefix``, wherever it and its subgraphs read them."""
    made = {name for node in graph.node for name in node.output if name}
    made.update(value.name for value in (*graph.input, *graph.initializer))
    for node in graph.node:
        node.name = prefix + node.name if node.name else ""
        for body in subgraphs(node).values():
            _rename_read(body, made, prefix)
        for names in (node.input, node.output):
            names[:] = [prefix + name if name in made else name for name in names]
    for value in (*graph.input, *graph.initializer, *graph.value_info, *graph.output):
        value.name = prefix + value.name


def _rename_read(graph: onnx.GraphProto, made: Container[str], prefix: str) -> None:
    own = {name for node in graph.node for name in node.output} | {v.name for v in (*graph.input, *graph.initializer)}
    for node in graph.node:
        for body in subgraphs(node).values():
            _rename_read(body, made, prefix)
        node.input[:] = [prefix + name if name in made and name not in own else name for name in node.input]


def _take_inputs_out(node: onnx.NodeProto, inside: onnx.GraphProto, graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Remove the inputs of the body ``inside``, for a ``Scan`` all of them, their types going to ``graph``; for other
    nodes only those that are constants. The nodes, to be run before, that make what a ``Scan`` gives its runs."""
    constants = {tensor.name for tensor in inside.initializer}
    inputs = [value for value in inside.input if value.name not in constants]
    del inside.input[:]
    if node.op_type != "Scan":
        inside.input.extend(inputs)
        return []
    graph.value_info.extend(value for value in inputs if value.type.WhichOneof("value"))
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    states = len(node.input) - attributes["num_scan_inputs"]
    axes = attributes.get("scan_input_axes") or [0] * attributes["num_scan_inputs"]
    zero = onnx.helper.make_tensor(f"{inputs[0].name}/0", onnx.TensorProto.INT64, [], [0])
    graph.initializer.append(zero)
    made = []
    for position, (given, value) in enumerate(zip(node.input, inputs, strict=False)):
        if position < states:
            made.append(onnx.helper.make_node("Identity", [given], [value.name], f"{value.name}/given"))
        else:
            slices = {"axis": axes[position - states]}
            made.append(
                onnx.helper.make_node("Gather", [given, zero.name], [value.name], f"{value.name}/slice", **slices)
            )
    return made


def _dimension(value: object) -> Dimension:
    return value if isinstance(value, int) and value >= 0 else value if isinstance(value, str) else ""


def _unoptimized(model: onnx.ModelProto, reason: str) -> OptimizedModel:
    return OptimizedModel(model, model, onnx_symbolic_shapes(model), "disabled", reason=reason)


def onnx_symbolic_shapes(model: onnx.ModelProto) -> dict[str, TensorSpec]:
    """Symbolic shapes by ONNX's own inference, which comes close to ONNX Runtime's; names it makes up are no names."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # whatever onnx's C++ throws; no shape is known then
        inferred = model
    known = {}
    for value in (*inferred.graph.input, *inferred.graph.output, *inferred.graph.value_info):
        spec = spec_of_value(value) if value.type.HasField("tensor_type") else None
        if spec is not None:
            named = tuple("" if isinstance(d, str) and (d == "?" or d.startswith("unk__")) else d for d in spec.shape)
            known[spec.name] = TensorSpec(spec.name, spec.dtype, named)
    return known


#: What onnxruntime puts before its reason: its error code, the (temporary) file, its own source and function.
_PREFIXES = (
    re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : "),
    re.compile(r"^Load model from .*? failed: ?", re.DOTALL),
    re.compile(r"^/\S+:\d+ "),
)


def _reason(error: BaseException) -> str:
    """The reason alone: ``Unsupported model IR version: 14, max supported IR version: 13``."""
    text = " ".join(str(error).split()) or type(error).__name__
    for prefix in _PREFIXES:
        text, found = prefix.subn("", text)
    if found:  # the function that noticed, with the types of its arguments
        text = _behind_parentheses(text) or text
    return re.sub(r"\S*/graphmem-\w+/\S*", "the file", text)[:300]


def _behind_parentheses(text: str) -> str:
    """The text behind the first pair of parentheses and all that is nested in them, and a ``const`` after it."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == ")" and depth == 0:
            return text[index + 1 :].removeprefix(" const").strip()
    return ""
