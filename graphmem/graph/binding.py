"""Give every dimension of a graph's inputs a number: from the batch, the sequence length, named dimensions, shapes."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from graphmem.base.records import dataclass
from graphmem.errors import ShapeError, UsageError
from graphmem.graph.asked import Asked
from graphmem.graph.folding import Value, is_small
from graphmem.graph.model import TensorSpec
from graphmem.trace import MAX_STORAGE_BYTES

#: First dimensions of these names are the batch (compared in lower case): what exporters and tutorials write.
BATCH_NAMES = frozenset(
    ("batch", "batch_size", "batchsize", "batch_dim", "batch_axis", "n_batch", "num_batch", "nbatch", "bs", "b", "n")
)
ANONYMOUS = "?"  # a free dimension without a name
#: Words in the names of dimensions that are a sequence's length, and those of another one.
_SEQUENCE_WORDS = frozenset((
    "seq", "seqlen", "sequence", "len", "length", "time", "timesteps", "frames", "tokens", "token", "steps",
))  # fmt: skip
_FORMULA = re.compile(r"[-+*/]")
_OTHER_WORDS = frozenset(("past", "cache", "kv", "total", "max", "batch", "height", "width", "num", "context"))


@dataclass(frozen=True)
class Binding:
    """The bound inputs. ``rebatched`` is (old, new) when a batch fixed in the file was replaced."""

    inputs: tuple[TensorSpec, ...]
    symbols: Mapping[str, int]
    rebatched: tuple[int, int] | None = None
    reshaped: bool = False
    notes: tuple[tuple[str, str], ...] = ()
    selected: float | None = None  # the share of candidates that operators select whose data decides; None: all
    values: Mapping[str, Value] = field(default_factory=dict)  # of inputs whose elements are given
    trip_count: int | None = None  # how often loops run at most whose end data decides

    @property
    def keeps_annotations(self) -> bool:
        """Whether shapes written in the file for other tensors still hold."""
        return self.rebatched is None and not self.reshaped


@dataclass(frozen=True)
class Free:
    """A dimension that nothing binds: its name, or :data:`ANONYMOUS`, and the (input, position) where it stands."""

    name: str
    places: tuple[tuple[TensorSpec, int], ...]

    @property
    def is_first(self) -> bool:
        """Whether it may be the batch."""
        return any(not position and len(spec.shape) > 1 for spec, position in self.places)

    def __str__(self) -> str:
        spec, position = self.places[0]
        named = f"dimension {position}" if self.name == ANONYMOUS else self.name
        others = f" and of {len(self.places) - 1} more" if len(self.places) > 1 else ""
        return f"{named} of {spec.name} ({_shape_text(spec.shape)}){others}"


class UnboundError(ShapeError):
    """Dimensions that nothing binds, all of them, beside the inputs as far as they are bound."""

    def __init__(self, message: str, free: Sequence[Free], inputs: Sequence[TensorSpec]) -> None:
        super().__init__(message)
        self.free = tuple(free)
        self.inputs = tuple(inputs)


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
        """Put in what is bound, and what dimensions written as formulas (``past + seq``) are then."""
        for dims in self.shapes.values():
            for position, dimension in enumerate(dims):
                if not isinstance(dimension, str):
                    continue
                value = self.symbols.get(dimension)
                if value is None and dimension != ANONYMOUS:
                    value = evaluated(dimension, self.symbols)
                    if value is not None:
                        self.bind_symbol(dimension, value, "its parts")
                if value is not None:
                    dims[position] = value


def bind(declared: Sequence[TensorSpec], asked: Asked, shapeless: Sequence[str] = ()) -> Binding:
    """Bind all dimensions of ``declared``; ``shapeless`` names inputs of which only the rank-less type is known.

    A whole shape wins, then named dimensions, then the sequence length, then the batch. The batch is every first
    dimension with one of :data:`BATCH_NAMES`; failing that every free first dimension; failing that the first
    dimension fixed in the file, which is then replaced. Raises :class:`UnboundError` for dimensions that stay free,
    :class:`ShapeError` for one that is bound twice, :class:`UsageError` for a name or number that is not accepted.
    """
    binder = _Binder(declared, {spec.name: list(spec.shape) for spec in declared})
    _check_numbers(asked)
    _bind_shapes(binder, asked.input_shapes, shapeless)
    _bind_dims(binder, asked.dims)
    binder.substitute()
    if asked.seq_len is not None:
        _bind_sequence(binder, asked.seq_len)
    if asked.batch is not None:
        _bind_batch(binder, asked.batch)
    binder.substitute()
    inputs = tuple(TensorSpec(s.name, s.dtype, tuple(binder.shapes[s.name])) for s in declared)
    _check_bound(inputs)
    return Binding(
        inputs,
        dict(binder.symbols),
        binder.rebatched,
        binder.reshaped,
        (("bound dimensions", "; ".join(binder.notes)),) if binder.notes else (),
        asked.selected,
        {name: _value(inputs, name, elements) for name, elements in asked.input_values.items()},
        asked.trip_count,
    )


_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}


def evaluated(formula: str, symbols: Mapping[str, int]) -> int | None:
    """The number that ``past_sequence_length + sequence_length`` stands for; None where a part is unknown, or where it
    is no formula of ``+``, ``-``, ``*`` and ``/``."""
    if len(formula) > 200 or not _FORMULA.search(formula):
        return None
    try:
        return _evaluated(ast.parse(formula.strip(), mode="eval").body, symbols)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None


def _evaluated(tree: ast.expr, symbols: Mapping[str, int]) -> int:
    if isinstance(tree, ast.BinOp):
        return int(_ARITHMETIC[type(tree.op)](_evaluated(tree.left, symbols), _evaluated(tree.right, symbols)))
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return tree.value
    if isinstance(tree, ast.Name):
        return symbols[tree.id]
    raise ValueError(tree)


def _value(inputs: Sequence[TensorSpec], name: str, elements: Sequence[float]) -> Value:
    """The value of an input of a known shape. Raises :class:`UsageError`."""
    spec = next((spec for spec in inputs if spec.name == name), None)
    if spec is None:
        raise UsageError(f"the model has no input {name!r}; its inputs: {', '.join(s.name for s in inputs) or 'none'}")
    if not is_small(spec) or len(elements) not in (1, spec.elements):
        raise UsageError(
            f"--input-value {name}: {len(elements)} values for {spec}; give one for all of it, or all of a small one"
        )
    try:
        values = np.array(elements, dtype=np.dtype(spec.dtype))
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"--input-value {name}: {spec.dtype} cannot hold {', '.join(map(str, elements))}") from None
    shape = tuple(int(dimension) for dimension in spec.shape)
    return np.broadcast_to(values[0], shape) if len(elements) == 1 else values.reshape(shape)


def _check_numbers(asked: Asked) -> None:
    for option, value in (("--batch", asked.batch), ("--seq-len", asked.seq_len), ("--trip-count", asked.trip_count)):
        if value is not None and not 1 <= value <= MAX_STORAGE_BYTES:
            raise UsageError(f"{option} is {value}; accepted: 1 or more")
    for name, dimension in asked.dims.items():
        if not isinstance(dimension, int) or not 0 <= dimension <= MAX_STORAGE_BYTES:
            raise UsageError(f"--dim {name}={dimension}: a dimension is 0 or more")
    for name, shape in asked.input_shapes.items():
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


def _bind_dims(binder: _Binder, dims: Mapping[str, Any]) -> None:
    known = {d for spec in binder.declared for d in spec.shape if isinstance(d, str) and d != ANONYMOUS}
    for name, value in dims.items():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(f"no input has a dimension named {name!r}; named dimensions: {listed}")
        binder.bind_symbol(name, value, f"--dim {name}={value}")


def is_sequence(name: str) -> bool:
    """Whether a dimension of this name is the length of a sequence: ``seq_len``, ``encoder_sequence_length``, ``T``."""
    if name in ("T", "L", "S"):
        return True
    words = {word for word in re.split(r"[^a-z]+", name.lower()) if word}
    return not _FORMULA.search(name) and bool(words & _SEQUENCE_WORDS) and not words & _OTHER_WORDS


def _bind_sequence(binder: _Binder, length: int) -> None:
    """Free dimensions whose names are those of a sequence; failing that the second one of inputs of whole numbers,
    which are tokens."""
    reason = f"--seq-len {length}"
    free = [(spec, i) for spec in binder.declared for i, d in enumerate(binder.shapes[spec.name]) if isinstance(d, str)]
    named = {binder.shapes[spec.name][i] for spec, i in free if is_sequence(str(spec.shape[i]))}
    tokens = [(spec, i) for spec, i in free if i == 1 and len(spec.shape) == 2 and spec.dtype.startswith("int")]
    is_taken = any(is_sequence(name) and "--dim" in why for name, why in binder.reasons.items())
    if named:
        for symbol in sorted(map(str, named)):
            binder.bind_symbol(symbol, length, reason)
        return
    if tokens and not is_taken:
        first = str(tokens[0][0].shape[1])
        if first != ANONYMOUS:
            binder.bind_symbol(first, length, reason)
        for spec, i in tokens:
            if spec.shape[i] == first == ANONYMOUS:
                binder.shapes[spec.name][i] = length
                binder.notes.append(f"second dimension of {spec.name} = {length} by {reason}")
        return
    listed = ", ".join(dict.fromkeys(str(spec.shape[i]) for spec, i in free)) or "none"
    raise UsageError(
        f"the model has no sequence whose length --seq-len could set; drop it (its free dimensions: {listed}; name one "
        "with --dim NAME=VALUE)"
    )


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


def _check_bound(inputs: Sequence[TensorSpec]) -> None:
    free = tuple(_free(inputs))
    if free:
        count = f"{len(free)} dimensions are" if len(free) > 1 else "1 dimension is"
        raise UnboundError(f"{count} unbound: {'; '.join(map(str, free))}", free, inputs)


def _free(inputs: Sequence[TensorSpec]) -> Iterator[Free]:
    """Dimensions without a size: anonymous ones, and symbols that are not computed from others."""
    named: dict[str, list[tuple[TensorSpec, int]]] = {}
    for spec in inputs:
        for position, dimension in enumerate(spec.shape):
            if dimension == ANONYMOUS:
                yield Free(ANONYMOUS, ((spec, position),))
            elif isinstance(dimension, str):
                named.setdefault(dimension, []).append((spec, position))
    parts = {name: 1 for name in named if not _FORMULA.search(name)}
    for name, places in named.items():
        if evaluated(name, parts) is None:  # else it is bound by its parts
            yield Free(name, tuple(places))


def _shape_text(shape: Sequence[int | str]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
