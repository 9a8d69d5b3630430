"""The shape of every tensor of a bound graph, node by node, with ONNX's own inference rules.

Each node goes through the C++ rule of its operator (``onnx.shape_inference.infer_node_outputs``), which is given the
known values of small inputs; so an error names its node and ONNX's reason. Outputs of operators ONNX does not know
come from the shapes written in the file, or from ONNX Runtime's rules when onnxruntime is installed. A subgraph is a
scope of its own that sees what is around it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, numpy_helper, shape_inference

from graphmem.base.records import dataclass
from graphmem.errors import ShapeError, SourceError
from graphmem.graph import control_flow, onnx_import
from graphmem.graph.binding import Binding
from graphmem.graph.control_flow import FollowedBody, Given
from graphmem.graph.folding import Value, fold, is_small, may_fold
from graphmem.graph.learners import learner_outputs
from graphmem.graph.model import Node, TensorSpec
from graphmem.graph.order import execution_order
from graphmem.graph.remembered import Answer, Remembered
from graphmem.graph.selected import shapes_of_selected
from graphmem.graph.sequences import sequence_outputs

_BROADCASTING = frozenset(
    ("Add", "Sub", "Mul", "Div", "Pow", "Where", "Equal", "Less", "Greater", "And", "Or", "PRelu")
)
_WINDOWED = frozenset(("Conv", "MaxPool", "AveragePool", "LpPool"))
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


class _Data(dict[str, onnx.TensorProto]):
    """The values as ONNX's C++ rules read them, made when they are asked for."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        super().__init__()
        self._values = values

    def __missing__(self, name: str) -> onnx.TensorProto:
        self[name] = made = numpy_helper.from_array(self._values[name], name)
        return made


@dataclass
class ModelFacts:
    """The facts of a model, or a subgraph of it, that hold whatever its inputs are bound to; made once by
    :func:`facts_of`. ``bodies`` are the subgraphs of its nodes by :attr:`Node.key`, then by attribute."""

    model: onnx.ModelProto
    directory: Path | None
    inputs: tuple[str, ...] = ()
    nodes: tuple[Node, ...] = ()
    protos: tuple[onnx.NodeProto, ...] = ()
    order: tuple[int, ...] = ()
    opsets: dict[str, int] = field(default_factory=dict)
    inner: tuple[TensorSpec, ...] = ()  # as declared, dimensions free
    outputs: tuple[tuple[str, TensorSpec | None], ...] = ()
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    schemas: dict[str, onnx.defs.OpSchema | None] = field(default_factory=dict)
    bodies: dict[str, dict[str, ModelFacts]] = field(default_factory=dict)
    remembered: Remembered = field(default_factory=Remembered)

    def implied(self) -> dict[tuple[str, int], int]:
        """The dimensions of inputs, as (name, position), that weights they are multiplied with fix."""
        found: dict[tuple[str, int], int] = {}
        for node in self.nodes:
            weight = self.specs.get(node.inputs[1]) if len(node.inputs) > 1 else None
            if weight is None or node.inputs[0] not in self.inputs or len(weight.shape) < 2:
                continue
            if node.op_type in ("Conv", "FusedConv"):
                found[node.inputs[0], 1] = int(weight.shape[1]) * int(node.attributes.get("group", 1))
            elif node.op_type == "MatMul" and len(weight.shape) == 2:
                found[node.inputs[0], -1] = int(weight.shape[0])
        return found

    def operators(self) -> set[str]:
        """The operators of the nodes, those of subgraphs included."""
        inner = (body.operators() for bodies in self.bodies.values() for body in bodies.values())
        return {node.op_type for node in self.nodes}.union(*inner)

    def add_constant(self, tensor: onnx.TensorProto, name: str) -> None:
        self.specs[name] = onnx_import.spec_of_tensor(tensor, name)
        value = onnx_import.value_of_tensor(tensor, self.directory)
        if value is not None:
            self.values[name] = value
        self.constants.append(name)


def facts_of(model: onnx.ModelProto, directory: Path | None = None) -> ModelFacts:
    """Read the nodes, constants and declared shapes of ``model``. ``Constant`` nodes become constants.

    Raises :class:`SourceError` for what graphmem does not plan: sequences, sparse tensors.
    """
    return _facts_of(model.graph, ModelFacts(model, directory, opsets=onnx_import.opset_versions(model)))


def _facts_of(graph: onnx.GraphProto, facts: ModelFacts) -> ModelFacts:
    for tensor in graph.initializer:
        facts.add_constant(tensor, tensor.name)
    for sparse in graph.sparse_initializer:
        raise SourceError(f"initializer {sparse.values.name!r} is sparse; graphmem plans dense tensors only")
    nodes = []
    for index, proto in enumerate(graph.node):
        node = onnx_import.node_of_proto(proto, index)
        inner = onnx_import.subgraphs(proto)
        if inner:
            bodies = {name: _facts_of(body, _inside(facts)) for name, body in inner.items()}
            node = replace(node, implicit_inputs=tuple(control_flow.inner_reads(bodies)))
            facts.bodies[node.key] = bodies
        nodes.append(node)
    facts.nodes = tuple(nodes)
    facts.protos = tuple(graph.node)
    facts.order = tuple(execution_order(facts.nodes))
    facts.inputs = tuple(value.name for value in graph.input if value.name not in facts.specs)
    facts.inner = tuple(filter(None, map(_declared, (*graph.value_info, *graph.output))))
    facts.outputs = tuple((value.name, _declared(value)) for value in graph.output)
    return facts


def _inside(facts: ModelFacts) -> ModelFacts:
    """Facts of a subgraph, still empty."""
    return ModelFacts(
        facts.model, facts.directory, opsets=facts.opsets, schemas=facts.schemas, remembered=facts.remembered
    )


def _declared(value: onnx.ValueInfoProto) -> TensorSpec | None:
    """The spec of an output as declared; None where that is left to inference, or is no tensor's."""
    return onnx_import.spec_of_value(value) if value.type.WhichOneof("value") == "tensor_type" else None


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
    """The shapes and values known so far of a graph, or of a subgraph inside its ``outer`` one; lives inside one
    :func:`propagate`.

    ``scope`` begins the names of its tensors in ``symbolic``; ``bodies`` are the subgraphs followed so far.
    """

    facts: ModelFacts
    binding: Binding
    symbolic: Mapping[str, TensorSpec]
    foreign: ForeignRules = _no_rules
    scope: str = ""
    outer: Propagation | None = None
    notes: dict[str, str] = field(default_factory=dict)
    bodies: dict[str, Mapping[str, FollowedBody]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts, outer, symbols = self.facts, self.outer, self.binding.symbols
        self.own_specs = dict(facts.specs)
        self.specs: MutableMapping[str, TensorSpec] = self.own_specs
        self.values: MutableMapping[str, Value] = dict(facts.values)
        if outer is not None:
            self.specs, self.values = ChainMap(self.own_specs, outer.specs), ChainMap(self.values, outer.values)
        self.constants = list(facts.constants)
        self.types, self.data = _Types(self.specs), _Data(self.values)
        self.annotated = _bound_shapes(facts.inner, symbols, scalars=True) if self.binding.keeps_annotations else {}
        own = self.symbolic.values() if outer is None else symbolic_inside(self.symbolic, self.scope, facts).values()
        self.hints = _bound_shapes(own, symbols, scalars=False)

    def child(self, facts: ModelFacts, scope: str = "") -> Propagation:
        """A subgraph inside this graph, of which nothing is known yet."""
        return Propagation(facts, self.binding, self.symbolic, self.foreign, scope, self, self.notes)

    def unfollowed(self, node: Node, attribute: str) -> Propagation:
        """A subgraph of ``node`` that does not run: only its constants, and those inside it, are what they are."""
        facts = self.facts.bodies[node.key][attribute]
        inside = self.child(facts, self.scope + scope_of(node.key, attribute))
        for name in (*facts.inputs, *(name for one in facts.nodes for name in one.outputs if name)):
            inside.add(TensorSpec(name, "float32", ()))
        for one, proto in zip(facts.nodes, facts.protos, strict=True):
            if one.op_type == "Constant" and not one.domain:
                inside.add_constant(_constant(one, proto), one.outputs[0])
            if one.key in facts.bodies:
                bodies = sorted(facts.bodies[one.key].items(), reverse=True)  # then_branch first
                inside.bodies[one.key] = {n: FollowedBody(b, (inside.unfollowed(one, n),), ()) for n, b in bodies}
        return inside

    def symbolic_spec(self, name: str) -> TensorSpec | None:
        """The spec of a tensor of this scope, or of one around it, before anything was bound."""
        if self.outer is not None and name not in self.own_specs and name not in self.facts.inputs:
            around = self.outer.symbolic_spec(name)
            if around is not None:
                return around
        return self.symbolic.get(self.scope + name)

    def is_constant(self, name: str) -> bool:
        """Whether a tensor that is read here is an initializer, of this scope or of one around it."""
        if name in self.constants:
            return True
        return self.outer is not None and name not in self.own_specs and self.outer.is_constant(name)

    def sources_of(self, name: str) -> list[str]:
        """The inputs of the model, small enough to be given a value, that ``name`` is computed from."""
        made_by = {made: node for node in self.facts.nodes for made in node.outputs}
        found, seen, stack = [], set(), [name]
        while stack:
            one = stack.pop()
            if one in seen or one in self.values:
                continue
            seen.add(one)
            if one in made_by:
                stack.extend(made_by[one].reads)
            elif self.outer is not None and one not in self.facts.inputs:
                found += self.outer.sources_of(one)
            elif self.outer is None and one in self.facts.inputs and is_small(self.specs[one]):
                found.append(one)
        return list(dict.fromkeys(found))

    @property
    def opsets(self) -> dict[str, int]:
        """Operator-set versions by domain."""
        return self.facts.opsets

    def add(self, spec: TensorSpec, value: Value | None = None) -> None:
        self.specs[spec.name] = spec
        if value is not None:
            self.values[spec.name] = value

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
    state = Propagation(facts, binding, symbolic or {}, foreign)
    for spec in binding.inputs:
        state.add(spec, binding.values.get(spec.name))
        element_type(spec.dtype)
    _visit_all(state)
    _check_outputs(facts, state, binding)
    return state


def _visit_all(state: Propagation) -> None:
    for index in state.facts.order:
        _visit(state, state.facts.nodes[index], state.facts.protos[index])


def symbolic_inside(symbolic: Mapping[str, TensorSpec], scope: str, facts: ModelFacts) -> dict[str, TensorSpec]:
    """Those of ``symbolic`` that are tensors of the subgraph whose names begin with ``scope``, by their own names."""
    names = (*facts.inputs, *(name for node in facts.nodes for name in node.outputs))
    return {name: replace(symbolic[scope + name], name=name) for name in names if scope + name in symbolic}


def scope_of(node_key: str, attribute: str) -> str:
    """The beginning of the names of the tensors of a subgraph where they stand beside those around it."""
    return f"{node_key}/{attribute}/"


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
    _check_names(state, node)
    if node.key in state.facts.bodies:
        _follow(state, node)
    elif (made := sequence_outputs(state, node)) is not None:
        for spec, value in made:
            state.add(spec, value)
    elif node.op_type == "Constant" and not node.domain:
        state.add_constant(_constant(node, proto), node.outputs[0])
    else:
        hinted = [state.hints[name] for name in node.outputs if name in state.hints]
        is_hinted = hinted and len(hinted) == sum(map(bool, node.outputs))
        if not is_hinted or may_fold(node.op_type, node.domain, hinted):
            _add_outputs(state, node, proto)
        else:
            state.specs.update((spec.name, spec) for spec in hinted)
            _check_sizes(state.specs, node)


def _check_names(state: Propagation, node: Node) -> None:
    """Raises :class:`SourceError` for a node that reads what is not there, or produces what is."""
    for name in node.reads:
        if name not in state.specs:
            raise SourceError(f"{node} reads {name!r}, which nothing produces")
    for name in filter(None, node.outputs):
        if name in state.own_specs:
            raise SourceError(f"{node} produces {name!r}, which is an input or an initializer already")


def _add_outputs(state: Propagation, node: Node, proto: onnx.NodeProto) -> None:
    """The outputs of a node by the rule of its operator, with their values where those are known and small. What the
    rules gave for an equal node with equal inputs is taken again, with whatever was bound then."""
    remembered = state.facts.remembered
    is_asked = state.facts.schemas.get(node.operator) is not None or not _in_words(state, node)
    question = remembered.question(proto, state.specs, state.values) if is_asked else None
    known = remembered.answer(question)
    if known is None:
        known = _answer(state, node, proto)
        if known.is_alike:
            remembered.keep(question, known)
    for name, (dtype, shape, value) in zip(filter(None, node.outputs), known.outputs, strict=True):
        state.add(TensorSpec(name, dtype, shape), value)
    if known.source:
        state.notes[_UNKNOWN] = known.source


def _answer(state: Propagation, node: Node, proto: onnx.NodeProto) -> Answer:
    outputs, source = _infer(state, node, proto)
    values = fold(proto, node.domain, state.opsets.get("", 1), state.specs, state.values, outputs)
    is_alike = all(spec.name in values or _is_known(spec.shape) for spec in outputs)
    if not is_alike:
        outputs = _with_selected(state, node, proto, outputs)
    found: list[tuple[str, tuple[Any, ...], Value | None]] = []
    for spec in outputs:
        value = values.get(spec.name)
        shape = spec.shape if value is None else value.shape
        if not _is_known(shape):
            shown = "x".join(map(str, shape))
            raise ShapeError(
                f"{node}: the shape of output {spec.name!r} ({shown}) depends on data or cannot be inferred"
            )
        found.append((spec.dtype, tuple(shape), value))
    specs = state.specs.new_child() if isinstance(state.specs, ChainMap) else ChainMap({}, state.specs)
    specs.update((spec.name, TensorSpec(spec.name, *one[:2])) for spec, one in zip(outputs, found, strict=True))
    _check_sizes(specs, node)
    return Answer(tuple(found), source, is_alike)


def _follow(state: Propagation, node: Node) -> None:
    """A node with subgraphs."""
    if node.domain or node.op_type not in control_flow.OPERATORS:
        raise SourceError(f"{node} has subgraphs; of such operators If, Loop and Scan are planned")
    bodies = state.facts.bodies[node.key]
    attributes = {id(facts): name for name, facts in bodies.items()}

    def run(facts: ModelFacts, given: Sequence[Given]) -> Propagation:
        if len(given) != len(facts.inputs):
            raise ShapeError(f"{node}: its subgraph takes {len(facts.inputs)} inputs and is given {len(given)}")
        inside = state.child(facts, state.scope + scope_of(node.key, attributes[id(facts)]))
        for name, one in zip(facts.inputs, given, strict=True):
            inside.add(replace(one.spec, name=name), one.value)
        _visit_all(inside)
        for name, _ in facts.outputs:
            if name not in inside.own_specs:
                raise SourceError(f"{node}: nothing produces the output {name!r} of its subgraph")
        return inside

    followed = control_flow.follow(state, node, bodies, run)
    state.bodies[node.key] = followed.bodies
    for key, note in followed.notes:
        state.notes[key] = f"{state.notes[key]}; {note}" if key in state.notes else note
    for name, one in zip(node.outputs, followed.outputs, strict=False):
        if name:
            state.add(replace(one.spec, name=name), one.value)


def _is_known(shape: tuple[Any, ...]) -> bool:
    return not any(isinstance(dimension, str) or dimension < 0 for dimension in shape)


def _with_selected(
    state: Propagation, node: Node, proto: onnx.NodeProto, outputs: list[TensorSpec]
) -> list[TensorSpec]:
    """The outputs, and of those that data decides as much as is taken; which ones is noted."""
    shapes = shapes_of_selected(proto, state.specs, state.values, state.binding.selected)
    if shapes:
        named = ", ".join(f"{node.op_type} {name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        note = "sizes that data decides, taken at " + (
            "most" if state.binding.selected is None else f"{state.binding.selected:g} of it"
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
    kind = _VALUES.get(attribute.name.removesuffix("s"))
    if kind is None:
        raise SourceError(f"{node} holds its value as {attribute.name!r}; graphmem plans dense tensors only")
    value = helper.get_attribute_value(attribute)
    values, shape = (list(value), [len(value)]) if attribute.name.endswith("s") else ([value], [])
    return helper.make_tensor(node.outputs[0], kind, shape, values)


#: The other attributes of a ``Constant`` that hold its value, each also as a list.
_VALUES = {
    "value_int": onnx.TensorProto.INT64,
    "value_float": onnx.TensorProto.FLOAT,
    "value_string": onnx.TensorProto.STRING,
}


def _infer(state: Propagation, node: Node, proto: onnx.NodeProto) -> tuple[list[TensorSpec], str]:
    """The outputs, and whose rules gave them where that is not ONNX."""
    wanted = [name for name in node.outputs if name]
    proto = _with_default(proto)
    if learned := learner_outputs(proto, state.types):
        return [_spec_of_type(node, name, learned.get(name)) for name in wanted], ""
    schema = _schema(state, node)
    if schema is None:
        return _without_schema(state, node, proto, wanted)
    types = {name: state.types[name] for name in node.inputs if name}
    data = {name: state.data[name] for name in types if name in state.values}
    try:
        inferred = shape_inference.infer_node_outputs(
            schema, proto, types, data, None, list(state.facts.model.opset_import), state.facts.model.ir_version
        )
    except Exception as error:  # whatever onnx's C++ throws: InferenceError, ValidationError, RuntimeError, ...
        raise ShapeError(f"{node}: {_reason(error)} (inputs: {_inputs_text(state.specs, node)})") from None
    return [_spec_of_type(node, name, inferred.get(name)) for name in wanted], ""


#: Attributes whose default the rules of onnx up to 1.23 take for another than the operator's.
_DEFAULTS = {"STFT": ("onesided", 1)}


def _with_default(proto: onnx.NodeProto) -> onnx.NodeProto:
    name, value = _DEFAULTS.get(proto.op_type, ("", 0))
    if not name or any(attribute.name == name for attribute in proto.attribute):
        return proto
    copy = onnx.NodeProto()
    copy.CopyFrom(proto)
    copy.attribute.append(helper.make_attribute(name, value))
    return copy


#: Functions of ONNX for which it has no rule of their own, and the operators whose rule is theirs too.
_SHAPED_LIKE = {"GreaterOrEqual": "Greater", "LessOrEqual": "Less"}


def _schema(state: Propagation, node: Node) -> onnx.defs.OpSchema | None:
    key, schemas = node.operator, state.facts.schemas
    if key not in schemas:
        if node.domain not in state.opsets:
            raise SourceError(f"{node}: the model imports no operator set for domain {node.domain!r}")
        try:
            schema = onnx.defs.get_schema(node.op_type, state.opsets[node.domain], node.domain)
        except Exception:  # onnx.defs.SchemaError, a plain Exception in some versions; an int beyond C++'s TypeError
            schema = None
        if schema is not None and not schema.has_type_and_shape_inference_function:
            like = _SHAPED_LIKE.get(node.op_type) if node.domain == "" else None
            schema = onnx.defs.get_schema(like, state.opsets[node.domain]) if like else None
        schemas[key] = schema
    return schemas[key]


#: The note on operators that ONNX has no rules of.
_UNKNOWN = "operators unknown to ONNX"


def _in_words(state: Propagation, node: Node) -> bool:
    """Whether the shapes of an operator that ONNX does not know are told by its names."""
    return any(all(name in told for name in node.outputs if name) for told in (state.hints, state.annotated))


def _without_schema(
    state: Propagation, node: Node, proto: onnx.NodeProto, wanted: list[str]
) -> tuple[list[TensorSpec], str]:
    if all(name in state.hints for name in wanted):
        return [state.hints[name] for name in wanted], "shapes by the rules of onnxruntime"
    if all(name in state.annotated for name in wanted):
        return [state.annotated[name] for name in wanted], "shapes taken from the file"
    data = {name: state.data[name] for name in node.inputs if name in state.values}
    found, source = state.foreign(state.facts.model, proto, state.types, data)
    if found:
        return [_spec_of_type(node, name, found[name]) for name in wanted], f"shapes by the rules of {source}"
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


def _check_sizes(specs: Mapping[str, TensorSpec], node: Node) -> None:
    """Refuse shapes that kernels refuse and ONNX's rules do not. Raises :class:`ShapeError`."""
    _check_elements(specs, node)
    if node.domain:
        return
    if node.op_type in ("LSTM", "GRU", "RNN"):
        _check_states(specs, node)
    elif node.op_type in _BROADCASTING:
        _check_broadcast(specs, node)
    elif node.op_type in _WINDOWED and node.outputs[0]:
        _check_window(specs, node)
        _check_channels(specs, node)


def _check_states(specs: Mapping[str, TensorSpec], node: Node) -> None:
    batch = specs[node.inputs[0]].shape[0 if node.attributes.get("layout") else 1]
    for name in filter(None, node.inputs[5:7]):
        spec = specs[name]
        if len(spec.shape) == 3 and spec.shape[0 if node.attributes.get("layout") else 1] != batch:
            raise ShapeError(f"{node}: its state {name} {spec} is not of the batch {batch} of its input")


def _check_broadcast(specs: Mapping[str, TensorSpec], node: Node) -> None:
    """Raise :class:`ShapeError` where sizes of the inputs do not broadcast. Before dimensions are bound it is not known
    whether they fit those of a weight."""
    shapes = [specs[name].shape for name in node.inputs if name]
    for sizes in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        if len({int(size) for size in sizes} - {1}) > 1:
            raise ShapeError(f"{node}: its inputs do not go together: {_inputs_text(specs, node)}")


def _check_channels(specs: Mapping[str, TensorSpec], node: Node) -> None:
    if node.op_type != "Conv":
        return
    image, weight = specs[node.inputs[0]], specs[node.inputs[1]]
    wanted = int(weight.shape[1]) * int(node.attributes.get("group", 1))
    if image.shape[1] != wanted:
        raise ShapeError(f"{node}: its kernel takes {wanted} channels; {node.inputs[0]} {image} has {image.shape[1]}")


def _check_window(specs: Mapping[str, TensorSpec], node: Node) -> None:
    """ONNX Runtime refuses a kernel that is larger than what it slides over."""
    source = specs[node.inputs[0]]
    weight = specs[node.inputs[1]].shape[2:] if node.op_type == "Conv" else ()
    kernel = tuple(map(int, weight or node.attributes.get("kernel_shape", ())))
    if node.attributes.get("auto_pad", "NOTSET") != "NOTSET" or len(kernel) != len(source.shape) - 2:
        return
    pads = node.attributes.get("pads", (0,) * 2 * len(kernel))
    spread = node.attributes.get("dilations", (1,) * len(kernel))
    rooms = [int(d) + pads[i] + pads[i + len(kernel)] for i, d in enumerate(source.shape[2:])]
    if source.elements and any((k - 1) * s + 1 > room for k, s, room in zip(kernel, spread, rooms, strict=True)):
        raise ShapeError(
            f"{node}: its kernel {'x'.join(map(str, kernel))} does not fit {source}; make its input larger"
        )


def _check_elements(specs: Mapping[str, TensorSpec], node: Node) -> None:
    """ONNX does not compare a fixed Reshape target with its input; a batch baked into the file shows here."""
    if node.domain or node.op_type not in _RESHAPING or not node.inputs or not node.inputs[0] or not node.outputs[0]:
        return
    source, target = specs[node.inputs[0]], specs[node.outputs[0]]
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


def _inputs_text(specs: Mapping[str, TensorSpec], node: Node) -> str:
    return ", ".join(f"{name} {specs[name]}" for name in node.inputs if name)
