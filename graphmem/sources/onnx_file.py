"""An ``.onnx`` file as a bound :class:`~graphmem.graph.model.Graph`. Weights are not read and may be missing."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import onnx

from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.graph import onnx_import
from graphmem.graph.binding import Binding, bind
from graphmem.graph.model import Dimension, Graph, TensorSpec
from graphmem.graph.shapes import ModelFacts, Propagation, element_type, facts_of, propagate
from graphmem.runtimes.onnxruntime.optimizer import OptimizedModel, optimize
from graphmem.runtimes.onnxruntime.shapes import onnx_runtime_outputs
from graphmem.sources.base import OnnxModel

__all__ = ["OnnxFile", "load_onnx", "parse_dim", "parse_input_shape", "parse_shapes", "read_onnx"]


@dataclass(frozen=True)
class OnnxFile:
    """A read and optimized file, to be bound to as many shapes as wanted; ``optimized`` says what was optimized."""

    path: Path
    optimized: OptimizedModel | None
    model: onnx.ModelProto
    declared: tuple[TensorSpec, ...]
    shapeless: tuple[str, ...]

    def bind(
        self,
        *,
        batch: int | None = None,
        dims: Mapping[str, int] | None = None,
        input_shapes: Mapping[str, Sequence[int]] | None = None,
        selected: float | None = None,
    ) -> Graph:
        """The graph with every dimension bound; arguments and errors as :func:`load_onnx`. ``selected`` is the share of
        candidates that operators take whose data decides, None for all."""
        with _one_line_errors():
            binding = bind(
                self.declared,
                shapeless=self.shapeless,
                batch=batch,
                dims=dims,
                input_shapes=input_shapes,
                selected=selected,
            )
            return self._graph(binding)

    def model_of(
        self,
        batch: int | None,
        dims: Mapping[str, int] | None,
        input_shapes: Mapping[str, Sequence[int]] | None,
        shapes: str | None,
        selected: float | None = None,
    ) -> OnnxModel:
        """One session of this file: a single bound graph, or one for each run of ``shapes``."""
        graphs = []
        for run in parse_shapes(shapes) if shapes is not None else [RunShapes()]:
            run_batch = batch if run.batch is None else run.batch
            run_dims = {**(dims or {}), **run.dims}
            run_shapes = {**(input_shapes or {}), **run.input_shapes}
            graphs.append(self.bind(batch=run_batch, dims=run_dims, input_shapes=run_shapes, selected=selected))
        return OnnxModel(self.path.name, (tuple(graphs),))

    @cached_property
    def facts(self) -> ModelFacts:
        """What holds whatever the inputs are bound to."""
        return facts_of(self.model, self.path.parent)

    @cached_property
    def is_ordered(self) -> bool:
        """Whether the nodes stand in the order in which ONNX Runtime executes them."""
        return self.optimized is not None and _outputs(self.optimized.source) != _outputs(self.model)

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
        graph = _graph(self.path, self.facts, state, tuple(spec.name for spec in self.declared), notes)
        if self.optimized is None:
            return graph
        return replace(graph, symbolic=_checked_ranks(symbolic, graph), is_ordered=self.is_ordered)


def read_onnx(path: str | os.PathLike[str], level: str | None = None, provider: str = "cpu") -> OnnxFile:
    """Read the ONNX model at ``path`` without its weights, and let ONNX Runtime optimize it to ``level`` (None: keep
    it as it is in the file) for ``provider``. Raises as :func:`load_onnx`."""
    file = Path(path)
    if file.is_dir():
        raise SourceError(f"{file} is a directory; give the .onnx file in it")
    if not file.exists():
        raise SourceError(f"{file} does not exist")
    with _one_line_errors():
        model = onnx_import.read_model(file)
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
    return read_onnx(path, level).bind(batch=batch, dims=dims, input_shapes=input_shapes)


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


def _outputs(model: onnx.ModelProto) -> list[tuple[str, ...]]:
    """The outputs of the nodes in file order. ONNX Runtime writes a graph that it changed in the order in which it
    executes it, and leaves one that it did not change in the order of its file."""
    return [tuple(node.output) for node in model.graph.node if node.op_type != "Constant"]


def _checked_ranks(symbolic: Mapping[str, TensorSpec], graph: Graph) -> dict[str, tuple[Dimension, ...] | None]:
    """onnxruntime's Python API gives no shape for an unknown rank as it does for a scalar; the bound rank tells."""
    known = {name: spec.shape for name, spec in symbolic.items()}
    made = [name for node in graph.nodes for name in node.outputs if name]
    return {
        name: known[name] if name in known and len(known[name]) == len(graph.tensors[name].shape) else None
        for name in (*made, *graph.inputs)
    }


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


def _graph(
    path: Path, facts: ModelFacts, state: Propagation, inputs: tuple[str, ...], notes: tuple[tuple[str, str], ...]
) -> Graph:
    """The graph as a value; ``Constant`` nodes are initializers, as ONNX Runtime makes them."""
    for spec in state.specs.values():
        spec.nbytes  # noqa: B018 - raises for a tensor beyond 63 bits, while its name is at hand
    return Graph(
        name=path.name,
        nodes=tuple(node for node in facts.nodes if node.op_type != "Constant" or node.domain),
        tensors=dict(state.specs),
        inputs=inputs,
        outputs=tuple(dict.fromkeys(name for name, _ in facts.outputs)),
        initializers=tuple(dict.fromkeys(state.constants)),
        opsets=tuple(sorted(facts.opsets.items())),
        notes=notes,
        values=dict(state.values),
        constants=frozenset(node.outputs[0] for node in facts.nodes if node.op_type == "Constant" and not node.domain),
    )


@dataclass(frozen=True)
class RunShapes:
    """What one run of ``--shapes`` binds."""

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
