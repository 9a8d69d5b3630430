"""An ``.onnx`` file as a bound :class:`~graphmem.graph.model.Graph`. Weights are not read and may be missing."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from graphmem.base.records import dataclass
from graphmem.errors import GraphmemError, ShapeError, SourceError, UsageError
from graphmem.graph import control_flow, onnx_import
from graphmem.graph.asked import Asked
from graphmem.graph.binding import Binding, UnboundError, bind
from graphmem.graph.contents import contents_of
from graphmem.graph.model import Body, Dimension, Graph, TensorSpec
from graphmem.graph.shapes import ModelFacts, Propagation, element_type, facts_of, propagate, scope_of
from graphmem.graph.suggestions import first_of_each_first, options_of, suggested
from graphmem.runtimes.onnxruntime.optimizer import OptimizedModel, optimize
from graphmem.runtimes.onnxruntime.shapes import onnx_runtime_outputs
from graphmem.sources.base import OnnxModel
from graphmem.sources.training_artefacts import refuse_training_artefact

__all__ = ["OnnxFile", "load_onnx", "parse_dim", "parse_input_shape", "parse_shapes", "read_onnx"]

#: Runs of each end of a range: from the second on a session has its memory pattern.
RANGE_RUNS = 2

#: Trips of a loop in the command that a message gives as an example.
EXAMPLE_TRIPS = 10


@dataclass(frozen=True)
class OnnxFile:
    """A read and optimized file, to be bound to as many shapes as wanted; ``optimized`` says what was optimized."""

    path: Path
    optimized: OptimizedModel | None
    model: onnx.ModelProto
    declared: tuple[TensorSpec, ...]
    shapeless: tuple[str, ...]

    def bind(self, asked: Asked | None = None, **sizes: Any) -> Graph:
        """The graph with every dimension bound by ``asked``, or by an :class:`Asked` of ``sizes``; errors as
        :func:`load_onnx`."""
        wanted = asked or Asked(**sizes)
        with _one_line_errors():
            try:
                return self._graph(bind(self.declared, wanted, self.shapeless))
            except ShapeError as error:
                raise self._explained(error, wanted) from None

    def _explained(self, error: ShapeError, asked: Asked) -> ShapeError:
        """The error with what would be answered, where that can be found."""
        likely: Asked | None = None
        for wanted in first_of_each_first([self._completions(wanted) for wanted in self._alternatives(error, asked)]):
            if self._answers(wanted):
                return _suggesting(error, wanted, asked, is_sure=True)
            likely = likely or wanted
        if isinstance(error, UnboundError) and likely is not None:
            return _suggesting(error, likely, asked, is_sure=False)
        return error

    def _alternatives(self, error: ShapeError, asked: Asked) -> Iterator[Asked]:
        """Questions that could be asked instead: loops bounded, or the batch of the file; still without dimensions."""
        may_loop = asked.trip_count is None and "Loop" in self.facts.operators()
        lacks_batch = isinstance(error, UnboundError) and any(free.is_first for free in error.free)
        for batch in dict.fromkeys((asked.batch or (1 if lacks_batch else None), asked.batch and 1)):
            yield replace(asked, batch=batch)
            if may_loop:
                yield replace(asked, batch=batch, trip_count=EXAMPLE_TRIPS)

    def _completions(self, asked: Asked) -> Iterator[Asked]:
        """``asked`` with all dimensions bound, the likeliest numbers first."""
        try:
            bind(self.declared, asked, self.shapeless)
        except UnboundError as unbound:
            metadata = {entry.key: entry.value for entry in self.model.metadata_props}
            loops = "Loop" in self.facts.operators()
            yield from suggested(unbound, asked, metadata, self.facts.implied(), loops=loops)
        except GraphmemError:
            return
        else:
            yield asked

    def _answers(self, asked: Asked) -> bool:
        try:
            self._graph(bind(self.declared, asked, self.shapeless))
        except GraphmemError:
            return False
        return True

    def model_of(self, asked: Asked, shapes: str | None = None) -> OnnxModel:
        """One session of this file: a single bound graph, or one for each run of ``shapes``, or two for both ends of
        ranges, the smaller first."""
        if shapes is None:
            ends = asked.ends()
            if len(ends) == 1:
                return OnnxModel(self.path.name, ((self.bind(asked),),))
            ranges = ", ".join(f"{name} {v[0]}..{v[1]}" for name, v in asked.dims.items() if isinstance(v, tuple))
            note = ("ranges", f"{ranges}: the smallest sizes run first, then the largest, in one session")
            bound = [replace(graph, notes=(*graph.notes, note)) for graph in map(self.bind, ends)]
            return OnnxModel(self.path.name, (tuple(graph for graph in bound for _ in range(RANGE_RUNS)),))
        graphs = []
        for run in parse_shapes(shapes):
            batch = asked.batch if run.batch is None else run.batch
            dims, whole = {**asked.dims, **run.dims}, {**asked.input_shapes, **run.input_shapes}
            graphs.append(self.bind(replace(asked, batch=batch, dims=dims, input_shapes=whole)))
        return OnnxModel(self.path.name, (tuple(graphs),))

    @cached_property
    def facts(self) -> ModelFacts:
        """Facts that hold whatever the inputs are bound to."""
        return facts_of(self.model, self.path.parent)

    @cached_property
    def ordered(self) -> frozenset[str]:
        """The scopes, ``""`` for the graph itself, whose nodes stand in the order in which ONNX Runtime executes them:
        it writes a graph that it changed so, and leaves one that it did not change in the order of its file."""
        if self.optimized is None:
            return frozenset()
        before, after = (dict(_outputs(model.graph)) for model in (self.optimized.source, self.model))
        return frozenset(scope for scope, outputs in after.items() if before.get(scope) != outputs)

    @cached_property
    def contents(self) -> Mapping[str, str]:
        """Tokens of the constants of the file, equal for equal ones."""
        return contents_of((self.model if self.optimized is None else self.optimized.source).graph)

    def _graph(self, binding: Binding) -> Graph:
        if self.optimized is None or binding.keeps_annotations:
            return self._bound(binding)
        # the shapes in the file are others than those asked for
        again = optimize(_rebound(self.optimized.source, binding), self.optimized.level, self.optimized.provider)
        return replace(self, optimized=again, model=again.model)._bound(binding)

    def _bound(self, binding: Binding) -> Graph:
        symbolic: Mapping[str, TensorSpec] = self.optimized.symbolic if self.optimized else {}
        state = propagate(self.facts, binding, symbolic, onnx_runtime_outputs)
        notes = (*binding.notes, *state.notes.items(), *_level_notes(self.optimized))
        return replace(_graph(self.path.name, state, self), notes=notes)


def read_onnx(path: str | os.PathLike[str], level: str | None = None, provider: str = "cpu") -> OnnxFile:
    """Read the ONNX model at ``path`` without its weights, and let ONNX Runtime optimize it to ``level`` (None: keep
    it as it is in the file) for ``provider``. Raises as :func:`load_onnx`."""
    file = Path(path)
    if file.is_dir():
        raise SourceError(f"{file} is a directory; give the .onnx file in it")
    if not file.exists():
        raise SourceError(f"{file} does not exist")
    with _one_line_errors():
        return _file_of(onnx_import.read_model(file), file, level, provider)


def read_proto(model: onnx.ModelProto, name: str) -> OnnxFile:
    """A model in memory, by this name in errors, as a file that is read already; it is left as it is. Errors as of
    :func:`load_onnx`."""
    path = Path(name)
    with _one_line_errors():
        return _file_of(onnx_import.checked_model(model, path), path, None, "cpu")


def _file_of(model: onnx.ModelProto, file: Path, level: str | None, provider: str) -> OnnxFile:
    refuse_training_artefact(model, file.name)
    constants = {tensor.name for tensor in model.graph.initializer}
    declared, shapeless = _declared([value for value in model.graph.input if value.name not in constants])
    optimized = optimize(model, level, provider) if level else None
    return OnnxFile(file, optimized, optimized.model if optimized else model, tuple(declared), tuple(shapeless))


def load_onnx(
    path: str | os.PathLike[str],
    *,
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    level: str | None = None,
) -> Graph:
    """Load the ONNX model at ``path`` and find the shape of every tensor; neither torch nor a weight is needed.

    ``batch`` binds the batch dimension, ``dims`` named dimensions, ``input_shapes`` whole inputs; ``level`` is a level
    of :data:`graphmem.runtimes.onnxruntime.levels.LEVELS`. Raises :class:`~graphmem.errors.SourceError` for a file that
    is missing, a directory, truncated or no ONNX model, or that graphmem cannot plan;
    :class:`~graphmem.errors.ShapeError` for a dimension that is not bound or a shape that cannot be inferred;
    :class:`~graphmem.errors.UsageError` for a name that the model does not have.
    """
    return read_onnx(path, level).bind(batch=batch, dims=dims or {}, input_shapes=input_shapes or {})


def _suggesting(error: ShapeError, wanted: Asked, asked: Asked, *, is_sure: bool) -> ShapeError:
    dropped = () if asked.batch in (None, wanted.batch) else ("--batch",)
    return ShapeError(str(error), options=options_of(wanted, asked), dropped=dropped, is_sure=is_sure)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """A name of the file may hold a line break; messages stay one line."""
    try:
        yield
    except GraphmemError as error:
        if str(error).isprintable():
            raise
        raise type(error)("".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))) from None


def _rebound(model: onnx.ModelProto, binding: Binding) -> onnx.ModelProto:
    """``model`` with the bound shapes written over those of its inputs, and none for other tensors."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    bound = {spec.name: spec.shape for spec in binding.inputs}
    for value in copy.graph.input:
        if value.name in bound:
            shape = value.type.tensor_type.shape
            del shape.dim[:]
            for dimension in bound[value.name]:
                shape.dim.add(dim_value=int(dimension))
    copy.graph.ClearField("value_info")
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    return copy


def _level_notes(optimized: OptimizedModel | None) -> tuple[tuple[str, str], ...]:
    if optimized is None:
        return ()
    done = f"level {optimized.level}"
    if optimized.reason:
        return (("graph optimization", f"{done}, the graph as in the file: {optimized.reason}"),)
    by = f"onnxruntime {optimized.runtime_version}"
    other = ", less what it does for the CPU alone" if optimized.provider != "cpu" else ""
    if not optimized.is_folded:
        other += "; constants are not folded, since that would compute with or make more than 1 GiB of them"
    return (("graph optimization", f"{done}, as {by} does for its CPU provider{other}"),)


def _outputs(graph: onnx.GraphProto, scope: str = "") -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """The outputs of the nodes in file order, of the graph and of every subgraph by its scope."""
    yield scope, [tuple(node.output) for node in graph.node if node.op_type != "Constant"]
    for node in graph.node:
        for attribute, body in onnx_import.subgraphs(node).items():
            yield from _outputs(body, scope + scope_of(next(filter(None, node.output), node.name), attribute))


def _checked_ranks(
    symbolic: Mapping[str, TensorSpec | None], state: Propagation
) -> dict[str, tuple[Dimension, ...] | None]:
    """onnxruntime's Python API gives no shape for an unknown rank as it does for a scalar; the bound rank tells."""
    checked: dict[str, tuple[Dimension, ...] | None] = {}
    for name, spec in symbolic.items():
        known = state.specs.get(name)
        is_right = spec is not None and known is not None and len(spec.shape) == len(known.shape)
        if spec is not None or not state.is_constant(name):
            checked[name] = spec.shape if is_right and spec is not None else None
    return checked


def _declared(values: Sequence[onnx.ValueInfoProto]) -> tuple[list[TensorSpec], list[str]]:
    """The inputs as declared, and the names of those without a shape."""
    specs, shapeless = [], []
    for value in values:
        spec = onnx_import.spec_of_value(value)
        if spec is None:
            dtype = onnx_import.dtype_name(value.type.tensor_type.elem_type, value.name)
            spec = TensorSpec(value.name, dtype, ())
            shapeless.append(value.name)
        element_type(spec.dtype)
        specs.append(spec)
    if len({spec.name for spec in specs}) != len(specs):
        raise SourceError("two inputs of the graph have the same name")
    return specs, shapeless


def _graph(name: str, state: Propagation, file: OnnxFile) -> Graph:
    """A followed graph or subgraph as a value; ``Constant`` nodes are initializers, as ONNX Runtime makes them."""
    facts = state.facts
    for spec in state.own_specs.values():
        spec.nbytes  # noqa: B018 - raises for a tensor beyond 63 bits, while its name is at hand
    nodes = tuple(node for node in facts.nodes if node.op_type != "Constant" or node.domain)
    made = dict.fromkeys((*facts.inputs, *(name for node in nodes for name in node.outputs if name)))
    captured = tuple(control_flow.inner_reads({name: facts}))
    tensors = {n: TensorSpec(n, "float32", ()) for n in made} | state.own_specs | {n: state.specs[n] for n in captured}
    is_symbolic = file.optimized is not None and bool(file.optimized.symbolic)
    known = {n: state.symbolic_spec(n) for n in (*made, *captured)} if is_symbolic else {}
    return Graph(
        name=name,
        nodes=nodes,
        tensors=tensors,
        inputs=facts.inputs,
        outputs=tuple(dict.fromkeys(name for name, _ in facts.outputs)),
        initializers=tuple(dict.fromkeys(state.constants)),
        opsets=tuple(sorted(facts.opsets.items())),
        values=dict(state.values),
        constants=frozenset(node.outputs[0] for node in facts.nodes if node.op_type == "Constant" and not node.domain),
        symbolic=_checked_ranks(known, state),
        is_ordered=state.scope in file.ordered,
        captured=captured,
        contents={name: file.contents[name] for name in state.constants if name in file.contents},
        bodies={
            key: tuple(
                Body(attribute, tuple(_graph(attribute, one, file) for one in body.states), body.runs)
                for attribute, body in bodies.items()
            )
            for key, bodies in ((n.key, state.bodies[n.key]) for n in nodes if n.key in state.bodies)
        },
    )


@dataclass(frozen=True)
class RunShapes:
    """The sizes that one run of ``--shapes`` binds."""

    batch: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    input_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)


def parse_shapes(text: str) -> list[RunShapes]:
    """Read ``--shapes``: runs separated by ``;``, each with ``batch=N``, ``NAME=N`` or ``INPUT:1x3x224x224`` between
    commas. Raises :class:`~graphmem.errors.UsageError`."""
    runs = []
    for part in text.split(";"):
        batch, dims, shapes = None, {}, {}
        for entry in filter(None, (entry.strip() for entry in part.split(","))):
            if "=" not in entry:
                name, shape = parse_input_shape(entry)
                shapes[name] = shape
            elif entry.startswith("batch="):
                batch = parse_dim(entry)[1]
            else:
                name, value = parse_dim(entry)
                dims[name] = value
        if batch is None and not dims and not shapes:
            raise UsageError(f"cannot read the run {part!r} of --shapes; write for example 'batch=1;batch=16,seq=128'")
        runs.append(RunShapes(batch, dims, shapes))
    return runs


#: A dimension: of 63 bits.
_NUMBER = re.compile("[0-9]{1,18}")


def parse_dim(text: str) -> tuple[str, int]:
    """Read the value of ``--dim``: ``"seq=128"``. Raises :class:`~graphmem.errors.UsageError`."""
    name, separator, value = text.rpartition("=")
    if not separator or not name or not _NUMBER.fullmatch(value):
        raise UsageError(f"cannot read {text!r}; write --dim NAME=VALUE, for example --dim seq=128")
    return name, int(value)


def parse_input_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read the value of ``--input-shape``: ``"x:1x3x224x224"``; ``"x:"`` is a scalar.

    The last colon separates, since tensor names may hold colons. Raises :class:`~graphmem.errors.UsageError`.
    """
    name, separator, dims = text.rpartition(":")
    parts = dims.split("x") if dims else []
    if not separator or not name or not all(map(_NUMBER.fullmatch, parts)):
        raise UsageError(
            f"cannot read {text!r}; write --input-shape NAME:DIMS, for example --input-shape x:1x3x224x224"
        )
    return name, tuple(int(part) for part in parts)
