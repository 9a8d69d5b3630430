"""The shape of every tensor of a bound graph, node by node, with ONNX's own inference rules.

Each node goes through the C++ rule of its operator (``onnx.shape_inference.infer_node_outputs``), which is given the
known values of small inputs; so an error names its node and ONNX's reason. Outputs of operators ONNX does not know
come from the shapes written in the file, or from ONNX Runtime's rules when onnxruntime is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, numpy_helper, shape_inference

from graphmem.errors import ShapeError, SourceError
from graphmem.graph import onnx_import
from graphmem.graph.binding import Binding
from graphmem.graph.folding import Value, fold, may_fold
from graphmem.graph.model import Node, TensorSpec
from graphmem.graph.order import execution_order
from graphmem.graph.selected import shapes_of_selected

_SUBGRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_RESHAPING = frozenset(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose"))


class _Types(dict[str, onnx.TypeProto]):
    """The specs as ONNX's C++ rules read them, made when they are asked for."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__()
        self._specs = specs

    def __missing__(self, name: str) -> onnx.TypeProto:
        spec = self._specs[name]
        self[name] = made = helper.make_tensor_type_proto(element_type(spec.dtype), list(spec.shape))
        return made


@dataclass
class ModelFacts:
    """What holds for a model whatever its inputs are bound to; made once by :func:`facts_of`."""

    model: onnx.ModelProto
    directory: Path | None
    nodes: tuple[Node, ...] = ()
    protos: tuple[onnx.NodeProto, ...] = ()
    order: tuple[int, ...] = ()
    opsets: dict[str, int] = field(default_factory=dict)
    inner: tuple[TensorSpec, ...] = ()  # as declared, dimensions free
    outputs: tuple[tuple[str, TensorSpec | None], ...] = ()
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    data: dict[str, onnx.TensorProto] = field(default_factory=dict)  # ``values`` as the C++ rules read them
    constants: list[str] = field(default_factory=list)
    schemas: dict[tuple[str, str], Any] = field(default_factory=dict)

    def add_constant(self, tensor: onnx.TensorProto, name: str) -> None:
        self.specs[name] = onnx_import.spec_of_tensor(tensor, name)
        value = onnx_import.value_of_tensor(tensor, self.directory)
        if value is not None:
            self.values[name] = value
            self.data[name] = numpy_helper.from_array(value, name)
        self.constants.append(name)


def facts_of(model: onnx.ModelProto, directory: Path | None = None) -> ModelFacts:
    """Read the nodes, constants and declared shapes of ``model``. ``Constant`` nodes become constants.

    Raises :class:`SourceError` for what graphmem does not plan: subgraphs, sequences, sparse tensors.
    """
    graph = model.graph
    facts = ModelFacts(model, directory, opsets=onnx_import.opset_versions(model))
    for tensor in graph.initializer:
        facts.add_constant(tensor, tensor.name)
    for sparse in graph.sparse_initializer:
        raise SourceError(f"initializer {sparse.values.name!r} is sparse; graphmem plans dense tensors only")
    facts.nodes = tuple(onnx_import.node_of_proto(proto, index) for index, proto in enumerate(graph.node))
    facts.protos = tuple(graph.node)
    facts.order = tuple(execution_order(facts.nodes))
    facts.inner = tuple(_declared_tensors((*graph.value_info, *graph.output)))
    facts.outputs = tuple((value.name, onnx_import.spec_of_value(value)) for value in graph.output)
    return facts


def _declared_tensors(values: Iterable[onnx.ValueInfoProto]) -> Iterator[TensorSpec]:
    for value in values:
        spec = onnx_import.spec_of_value(value) if value.type.WhichOneof("value") == "tensor_type" else None
        if spec is not None:
            yield spec


#: Shape rules of operators that ONNX does not know: (model, node, types by tensor, constants by tensor) -> types of the
#: node's outputs with all dimensions known, and whose rules gave them; no types where there is no rule.
ForeignRules = Callable[
    [onnx.ModelProto, onnx.NodeProto, Mapping[str, onnx.TypeProto], Mapping[str, onnx.TensorProto]],
    tuple[dict[str, onnx.TypeProto], str],
]


def _no_rules(*_: object) -> tuple[dict[str, onnx.TypeProto], str]:
    return {}, ""


@dataclass
class Propagation:
    """What is known so far; lives inside one :func:`propagate`."""

    facts: ModelFacts
    annotated: dict[str, TensorSpec]
    hints: dict[str, TensorSpec]
    specs: dict[str, TensorSpec]
    values: dict[str, Value]
    data: dict[str, onnx.TensorProto]
    constants: list[str]
    types: _Types
    foreign: ForeignRules = _no_rules
    selected: float | None = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> onnx.ModelProto:
        """The model itself."""
        return self.facts.model

    @property
    def opsets(self) -> dict[str, int]:
        """Operator-set versions by domain."""
        return self.facts.opsets

    def add(self, spec: TensorSpec, value: Value | None = None) -> None:
        self.specs[spec.name] = spec
        if value is not None:
            self.values[spec.name] = value
            self.data[spec.name] = numpy_helper.from_array(value, spec.name)

    def add_constant(self, tensor: onnx.TensorProto, name: str) -> None:
        self.add(onnx_import.spec_of_tensor(tensor, name), onnx_import.value_of_tensor(tensor, self.facts.directory))
        self.constants.append(name)


def element_type(dtype: str) -> int:
    """ONNX's number of a graphmem element type."""
    name = {"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper())
    return int(onnx.TensorProto.DataType.Value(name))


def propagate(
    facts: ModelFacts,
    binding: Binding,
    symbolic: Mapping[str, TensorSpec] | None = None,
    foreign: ForeignRules = _no_rules,
) -> Propagation:
    """Specs of all tensors of a model for the bound inputs.

    ``symbolic`` are shapes that ONNX Runtime's own inference gave, which are taken where the bound inputs make numbers
    of them; ``foreign`` are the rules of operators that ONNX does not know. Raises :class:`ShapeError` naming the node
    whose output shape cannot be found, :class:`SourceError` for unknown domains and tensors.
    """
    specs = dict(facts.specs)
    state = Propagation(
        facts,
        _bound_shapes(facts.inner, binding.symbols, scalars=True) if binding.keeps_annotations else {},
        _bound_shapes((symbolic or {}).values(), binding.symbols, scalars=False),
        specs,
        dict(facts.values),
        dict(facts.data),
        list(facts.constants),
        _Types(specs),
        foreign,
        binding.selected,
    )
    for spec in binding.inputs:
        state.add(spec)
        element_type(spec.dtype)
    for index in facts.order:
        _visit(state, facts.nodes[index], facts.protos[index])
    _check_outputs(facts, state, binding)
    return state


def _bound_shapes(
    declared: Iterable[TensorSpec], symbols: Mapping[str, int], *, scalars: bool
) -> dict[str, TensorSpec]:
    """The specs all of whose dimensions are numbers once ``symbols`` are bound.

    Without ``scalars`` those of rank 0 are left out, where they may also be tensors of unknown rank.
    """
    bound: dict[str, TensorSpec] = {}
    for spec in declared:
        dims = tuple([symbols.get(d, d) if isinstance(d, str) else d for d in spec.shape])
        if (dims or scalars) and not any(isinstance(d, str) for d in dims):
            bound[spec.name] = TensorSpec(spec.name, spec.dtype, dims)
    return bound


def _visit(state: Propagation, node: Node, proto: onnx.NodeProto) -> None:
    if any(attribute.type in _SUBGRAPHS for attribute in proto.attribute):
        raise SourceError(f"{node} has subgraphs; graphmem cannot plan control flow (If, Loop, Scan) yet")
    for name in filter(None, node.inputs):
        if name not in state.specs:
            raise SourceError(f"{node} reads {name!r}, which nothing produces")
    for name in filter(None, node.outputs):
        if name in state.specs:
            raise SourceError(f"{node} produces {name!r}, which is an input or an initializer already")
    if node.op_type == "Constant" and not node.domain:
        state.add_constant(_constant(node, proto), node.outputs[0])
        return
    hinted = [state.hints[name] for name in node.outputs if name in state.hints]
    if hinted and len(hinted) == sum(map(bool, node.outputs)) and not may_fold(node.op_type, node.domain, hinted):
        state.specs.update((spec.name, spec) for spec in hinted)
        _check_elements(state, node)
        return
    outputs = _infer(state, node, proto)
    values = fold(proto, node.domain, state.opsets.get("", 1), state.specs, state.values, outputs)
    if any(spec.name not in values and not _is_known(spec.shape) for spec in outputs):
        outputs = _with_selected(state, node, proto, outputs)
    for spec in outputs:
        value = values.get(spec.name)
        shape = spec.shape if value is None else value.shape
        if not _is_known(shape):
            shown = "x".join(map(str, shape))
            raise ShapeError(
                f"{node}: the shape of output {spec.name!r} ({shown}) depends on data or cannot be inferred"
            )
        state.add(TensorSpec(spec.name, spec.dtype, tuple(shape)), value)
    _check_elements(state, node)


def _is_known(shape: tuple[Any, ...]) -> bool:
    return not any(isinstance(dimension, str) or dimension < 0 for dimension in shape)


def _with_selected(
    state: Propagation, node: Node, proto: onnx.NodeProto, outputs: list[TensorSpec]
) -> list[TensorSpec]:
    """The outputs, and of those that data decides as much as is taken; which ones is noted."""
    shapes = shapes_of_selected(proto, state.specs, state.values, state.selected)
    if shapes:
        named = ", ".join(f"{node.op_type} {name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        note = "sizes that data decides, taken at " + (
            "most" if state.selected is None else f"{state.selected:g} of it"
        )
        state.notes[note] = f"{state.notes[note]}, {named}" if note in state.notes else named
    return [TensorSpec(spec.name, spec.dtype, shapes.get(spec.name, spec.shape)) for spec in outputs]


def _constant(node: Node, proto: onnx.NodeProto) -> onnx.TensorProto:
    """The tensor of a ``Constant`` node, whichever of its attributes holds it."""
    if len(proto.attribute) != 1 or not node.outputs:
        raise SourceError(f"{node} must have exactly one attribute, its value")
    attribute = proto.attribute[0]
    if attribute.name == "value":
        return attribute.t
    kinds = {
        "value_int": (onnx.TensorProto.INT64, [attribute.i], []),
        "value_ints": (onnx.TensorProto.INT64, list(attribute.ints), [len(attribute.ints)]),
        "value_float": (onnx.TensorProto.FLOAT, [attribute.f], []),
        "value_floats": (onnx.TensorProto.FLOAT, list(attribute.floats), [len(attribute.floats)]),
        "value_string": (onnx.TensorProto.STRING, [attribute.s], []),
        "value_strings": (onnx.TensorProto.STRING, list(attribute.strings), [len(attribute.strings)]),
    }
    if attribute.name not in kinds:
        raise SourceError(f"{node} holds its value as {attribute.name!r}; graphmem plans dense tensors only")
    kind, values, shape = kinds[attribute.name]
    return helper.make_tensor(node.outputs[0], kind, shape, values)


def _infer(state: Propagation, node: Node, proto: onnx.NodeProto) -> list[TensorSpec]:
    wanted = [name for name in node.outputs if name]
    schema = _schema(state, node)
    if schema is None:
        return _without_schema(state, node, proto, wanted)
    types = {name: state.types[name] for name in node.inputs if name}
    data = {name: state.data[name] for name in types if name in state.data}
    try:
        inferred = shape_inference.infer_node_outputs(
            schema, proto, types, data, None, list(state.model.opset_import), state.model.ir_version
        )
    except Exception as error:  # whatever onnx's C++ throws: InferenceError, ValidationError, RuntimeError, ...
        raise ShapeError(f"{node}: {_reason(error)} (inputs: {_inputs_text(state, node)})") from None
    return [_spec_of_type(node, name, inferred.get(name)) for name in wanted]


def _schema(state: Propagation, node: Node) -> Any:
    key = (node.domain, node.op_type)
    schemas = state.facts.schemas
    if key not in schemas:
        if node.domain not in state.opsets:
            raise SourceError(f"{node}: the model imports no operator set for domain {node.domain!r}")
        try:
            schema = onnx.defs.get_schema(node.op_type, state.opsets[node.domain], node.domain)
        except Exception:  # onnx.defs.SchemaError, a plain Exception in some versions; an int beyond C++'s TypeError
            schema = None
        if schema is not None and not schema.has_type_and_shape_inference_function:
            schema = None
        schemas[key] = schema
    return schemas[key]


def _without_schema(state: Propagation, node: Node, proto: onnx.NodeProto, wanted: list[str]) -> list[TensorSpec]:
    if all(name in state.hints for name in wanted):
        state.notes["operators unknown to ONNX"] = "shapes by the rules of onnxruntime"
        return [state.hints[name] for name in wanted]
    if all(name in state.annotated for name in wanted):
        state.notes["operators unknown to ONNX"] = "shapes taken from the file"
        return [state.annotated[name] for name in wanted]
    found, source = state.foreign(state.model, proto, state.types, state.data)
    if found:
        state.notes["operators unknown to ONNX"] = f"shapes by the rules of {source}"
        return [_spec_of_type(node, name, found[name]) for name in wanted]
    domain = node.domain or "ai.onnx"
    raise ShapeError(
        f"node {node.name!r}: operator {node.op_type} of domain {domain!r} (version {state.opsets[node.domain]}) is "
        "unknown, so the shapes of its outputs are; write them into the file's value_info, or install onnxruntime if "
        "it is one of ONNX Runtime's operators"
    )


def _spec_of_type(node: Node, name: str, kind: onnx.TypeProto | None) -> TensorSpec:
    if kind is None or kind.WhichOneof("value") is None:
        raise ShapeError(f"{node}: nothing is known about output {name!r}")
    value = onnx.ValueInfoProto(name=name, type=kind)
    spec = onnx_import.spec_of_value(value)
    if spec is None:
        raise ShapeError(f"{node}: the shape of output {name!r} depends on data or cannot be inferred")
    return spec


def _check_elements(state: Propagation, node: Node) -> None:
    """ONNX does not compare a fixed Reshape target with its input; a batch baked into the file shows here."""
    if node.domain or node.op_type not in _RESHAPING or not node.inputs or not node.inputs[0] or not node.outputs[0]:
        return
    source, target = state.specs[node.inputs[0]], state.specs[node.outputs[0]]
    if source.elements != target.elements:
        raise ShapeError(
            f"{node}: cannot make {target} of {source}; a size fixed in the file does not go with the bound dimensions"
        )


def _check_outputs(facts: ModelFacts, state: Propagation, binding: Binding) -> None:
    for name, declared in facts.outputs:
        if name not in state.specs:
            raise SourceError(f"nothing produces the graph's output {name!r}")
        shape = state.specs[name].shape
        if binding.rebatched and declared is not None and declared.shape and shape:
            old, new = binding.rebatched
            if declared.shape[0] == old and shape[0] != new:
                raise ShapeError(
                    f"the batch is fixed in the file: with {new} in place of {old}, output {name!r} is "
                    f"{state.specs[name]}; export the model with a dynamic batch"
                )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _inputs_text(state: Propagation, node: Node) -> str:
    return ", ".join(f"{name} {state.specs[name]}" for name in node.inputs if name)
