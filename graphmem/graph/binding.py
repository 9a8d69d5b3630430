"""Give every dimension of a graph's inputs a number: from the batch, from named dimensions, from whole shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphmem.errors import ShapeError, UsageError
from graphmem.graph.model import TensorSpec
from graphmem.trace import MAX_STORAGE_BYTES

#: First dimensions of these names are the batch (compared in lower case): what exporters and tutorials write.
BATCH_NAMES = frozenset(
    ("batch", "batch_size", "batchsize", "batch_dim", "batch_axis", "n_batch", "num_batch", "nbatch", "bs", "b", "n")
)
ANONYMOUS = "?"  # a free dimension without a name


@dataclass(frozen=True)
class Binding:
    """The bound inputs. ``rebatched`` is (old, new) when a batch fixed in the file was replaced."""

    inputs: tuple[TensorSpec, ...]
    symbols: Mapping[str, int]
    rebatched: tuple[int, int] | None = None
    reshaped: bool = False
    notes: tuple[tuple[str, str], ...] = ()
    selected: float | None = None  # the share of candidates that operators select whose data decides; None: all

    @property
    def keeps_annotations(self) -> bool:
        """Whether shapes written in the file for other tensors still hold."""
        return self.rebatched is None and not self.reshaped


@dataclass
class _Binder:
    declared: Sequence[TensorSpec]
    shapes: dict[str, list[int | str]] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rebatched: tuple[int, int] | None = None
    reshaped: bool = False

    def bind_symbol(self, symbol: str, value: int, reason: str) -> None:
        if self.symbols.get(symbol, value) != value:
            raise ShapeError(
                f"dimension {symbol!r} is bound twice: to {self.symbols[symbol]} by {self.reasons[symbol]} "
                f"and to {value} by {reason}"
            )
        if symbol not in self.symbols:
            self.notes.append(f"{symbol} = {value} by {reason}")
        self.symbols[symbol] = value
        self.reasons.setdefault(symbol, reason)

    def substitute(self) -> None:
        for dims in self.shapes.values():
            dims[:] = [self.symbols.get(d, d) if isinstance(d, str) else d for d in dims]


def bind(
    declared: Sequence[TensorSpec],
    *,
    shapeless: Sequence[str] = (),
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    selected: float | None = None,
) -> Binding:
    """Bind all dimensions of ``declared``; ``shapeless`` names inputs of which only the rank-less type is known.

    A whole shape (``input_shapes``) wins, then named dimensions (``dims``), then the batch. The batch is every first
    dimension with one of :data:`BATCH_NAMES`; failing that every free first dimension; failing that the first
    dimension fixed in the file, which is then replaced. Raises :class:`ShapeError` for a dimension that stays free or
    is bound twice, :class:`UsageError` for a name or number that is not accepted.
    """
    binder = _Binder(declared, {spec.name: list(spec.shape) for spec in declared})
    _check_numbers(batch, dims or {}, input_shapes or {})
    _bind_shapes(binder, input_shapes or {}, shapeless)
    _bind_dims(binder, dims or {})
    binder.substitute()
    if batch is not None:
        _bind_batch(binder, batch)
    binder.substitute()
    for spec in declared:
        _check_bound(spec, binder.shapes[spec.name])
    inputs = tuple(TensorSpec(s.name, s.dtype, tuple(binder.shapes[s.name])) for s in declared)
    notes = (("bound dimensions", "; ".join(binder.notes)),) if binder.notes else ()
    return Binding(inputs, dict(binder.symbols), binder.rebatched, binder.reshaped, notes, selected)


def _check_numbers(batch: int | None, dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> None:
    if batch is not None and not 1 <= batch <= MAX_STORAGE_BYTES:
        raise UsageError(f"--batch is {batch}; accepted: 1 or more")
    for name, value in dims.items():
        if not 0 <= value <= MAX_STORAGE_BYTES:
            raise UsageError(f"--dim {name}={value}: a dimension is 0 or more")
    for name, shape in shapes.items():
        if not all(0 <= value <= MAX_STORAGE_BYTES for value in shape):
            raise UsageError(f"--input-shape {name}:{'x'.join(map(str, shape))}: a dimension is 0 or more")


def _bind_shapes(binder: _Binder, shapes: Mapping[str, Sequence[int]], shapeless: Sequence[str]) -> None:
    for name, shape in shapes.items():
        if name not in binder.shapes:
            raise UsageError(f"the model has no input {name!r}; its inputs: {', '.join(binder.shapes) or 'none'}")
        known = binder.shapes[name]
        text = f"--input-shape {name}:{'x'.join(map(str, shape))}"
        if name in shapeless:
            binder.shapes[name] = list(shape)
            continue
        if len(known) != len(shape):
            raise ShapeError(f"{text} has {len(shape)} dimensions; the input has {len(known)}: {_shape_text(known)}")
        for old, new in zip(known, shape, strict=True):
            if isinstance(old, str) and old != ANONYMOUS:
                binder.bind_symbol(old, new, text)
            elif isinstance(old, int) and old != new:
                binder.reshaped = True
                binder.notes.append(f"{name}: {old} in the file, {new} by {text}")
        binder.shapes[name] = list(shape)
    for name in shapeless:
        if name not in shapes:
            raise ShapeError(
                f"the shape of input {name!r} is not in the file; give it with --input-shape {name}:1x3x224"
            )


def _bind_dims(binder: _Binder, dims: Mapping[str, int]) -> None:
    known = {d for spec in binder.declared for d in spec.shape if isinstance(d, str) and d != ANONYMOUS}
    for name, value in dims.items():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(f"no input has a dimension named {name!r}; named dimensions: {listed}")
        binder.bind_symbol(name, value, f"--dim {name}={value}")


def _bind_batch(binder: _Binder, batch: int) -> None:
    reason = f"--batch {batch}"
    firsts = [(spec, spec.shape[0]) for spec in binder.declared if spec.shape]
    named = {d for _, d in firsts if isinstance(d, str) and d.lower() in BATCH_NAMES}
    free = {d for spec, d in firsts if isinstance(binder.shapes[spec.name][0], str)}
    if named:
        for symbol in sorted(map(str, named)):
            binder.bind_symbol(symbol, batch, reason)
        return
    if free:
        for symbol in sorted(map(str, free - {ANONYMOUS})):
            binder.bind_symbol(symbol, batch, reason)
        for spec, first in firsts:
            if first == ANONYMOUS and isinstance(binder.shapes[spec.name][0], str):
                binder.shapes[spec.name][0] = batch
                binder.notes.append(f"first dimension of {spec.name} = {batch} by {reason}")
        return
    _replace_batch(binder, batch)


def _replace_batch(binder: _Binder, batch: int) -> None:
    """The file fixes every first dimension: take the first input's as the batch and replace it wherever it is first."""
    firsts = [(name, int(shape[0])) for name, shape in binder.shapes.items() if shape]
    if not firsts:
        raise ShapeError(f"--batch {batch}: no input has a dimension that could be the batch")
    old = firsts[0][1]
    if old == batch:
        return
    replaced = [name for name, first in firsts if first == old]
    for name in replaced:
        binder.shapes[name][0] = batch
    binder.rebatched = (old, batch)
    binder.notes.append(f"first dimension of {', '.join(replaced)} = {batch} by --batch, {old} in the file")


def _check_bound(spec: TensorSpec, shape: Sequence[int | str]) -> None:
    for position, dimension in enumerate(shape):
        if isinstance(dimension, str):
            ways = [] if dimension == ANONYMOUS else [f"--dim {dimension}=VALUE"]
            if position == 0:
                ways.insert(0, "--batch N")
            example = "x".join(str(d) if isinstance(d, int) else "1" for d in shape)
            ways.append(f"--input-shape {spec.name}:{example}")
            name = f"dimension {position}" if dimension == ANONYMOUS else f"dimension {dimension!r}"
            raise ShapeError(
                f"{name} of input {spec.name!r} ({_shape_text(shape)}) is unbound; "
                f"bind it with {', '.join(ways[:-1])}{' or ' if len(ways) > 1 else ''}{ways[-1]}"
            )


def _shape_text(shape: Sequence[int | str]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
