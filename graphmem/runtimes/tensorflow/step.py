"""A step as TensorFlow prepared it: the nodes of the graph that Grappler left, with shapes, and the variables.

:mod:`graphmem.sources.tensorflow_program` writes the document; nothing here needs TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graphmem.errors import SourceError
from graphmem.trace import Category

_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "qint8": 1, "quint8": 1, "int16": 2, "uint16": 2, "half": 2, "float16": 2,
    "bfloat16": 2, "int32": 4, "uint32": 4, "qint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
    "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "int4": 1, "uint4": 1,
}  # fmt: skip


_WITH_BODIES = frozenset((
    "While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall",
    "StatefulPartitionedCall", "MapDefun",
))  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """``dtype`` by TensorFlow's name; ``shape`` None where it depends on data."""

    dtype: str
    shape: tuple[int, ...] | None

    @cached_property
    def elements(self) -> int:
        """0 for one of an unknown shape."""
        return math.prod(self.shape) if self.shape is not None else 0

    @cached_property
    def bytes(self) -> int:
        """0 for what has no bytes on a card: resources, variants, strings."""
        return self.elements * _BYTES.get(self.dtype, 0)


@dataclass(frozen=True)
class Node:
    """One operator. ``inputs`` are (node, output) pairs, ``after`` the nodes it waits for besides; ``host_inputs`` and
    ``host_outputs`` are positions that its kernel keeps on the host. ``value``: of a short constant."""

    op: str
    name: str
    on_card: bool
    inputs: tuple[tuple[str, int], ...]
    after: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]
    host_inputs: frozenset[int] = frozenset()
    host_outputs: frozenset[int] = frozenset()
    value: Any = None


@dataclass(frozen=True)
class Made:
    """One moment of an initializer: it makes ``tensor``, or gives another name to what is at ``shares``, or lets go of
    what is at ``place``."""

    place: int
    tensor: Tensor | None = None
    shares: int | None = None


@dataclass(frozen=True)
class Variable:
    """``made`` is what its initializer does on the card; what it makes last is the value."""

    name: str
    tensor: Tensor
    category: Category
    made: tuple[Made, ...] = ()


@dataclass(frozen=True)
class Step:
    """A training step, or one of inference. ``resources`` name the nodes that stand for variables, ``data`` those that
    stand for the batch; ``fetched`` are (node, output) pairs."""

    variables: tuple[Variable, ...]
    nodes: tuple[Node, ...]
    resources: Mapping[str, int]
    data: Mapping[str, Tensor]
    fetched: tuple[tuple[str, int], ...]
    training: bool
    jit: bool
    eager: bool
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def unfollowed(self) -> frozenset[str]:
        """Operators that run graphs of their own, which are not followed."""
        return frozenset(node.op for node in self.nodes if node.op in _WITH_BODIES)


def read_step(document: Mapping[str, Any]) -> Step:
    """The step of a document. Raises :class:`SourceError` with the text of one that says why there is none."""
    if "error" in document:
        raise SourceError(document["error"])
    slots = set(document["optimizer"])
    order = {row["handle"]: index for index, row in enumerate(document["variables"])}
    return Step(
        variables=tuple(_variable(row, row["handle"] in slots) for row in document["variables"]),
        nodes=tuple(map(_node, document["nodes"])),
        resources={name: order[handle] for name, handle in document["captured"].items() if handle in order},
        data={name: Tensor(dtype, tuple(shape)) for dtype, shape, name in document["data"]},
        fetched=tuple(_output(row["inputs"][0]) for row in document["nodes"] if row["op"] == "_Retval"),
        training=document["training"],
        jit=document["jit"],
        eager=document["eager"],
        versions={name: document[name] for name in ("tensorflow", "keras")},
    )


def _variable(row: Mapping[str, Any], is_slot: bool) -> Variable:
    category = Category.PARAMETER if row["trainable"] else Category.BUFFER
    made = tuple(map(_made, row["steps"]))
    tensor = Tensor(row["dtype"], tuple(row["shape"]))
    return Variable(row["name"], tensor, Category.OPTIMIZER_STATE if is_slot else category, made)


def _made(row: Sequence[Any]) -> Made:
    match row:
        case ["+", place, dtype, shape]:
            return Made(place, _tensor((dtype, shape)))
        case ["=", place, of]:
            return Made(place, shares=of)
    return Made(row[1])


def _node(row: Mapping[str, Any]) -> Node:
    inputs = [one for one in row["inputs"] if not one.startswith("^")]
    return Node(
        row["op"],
        row["name"],
        row["device"] == "gpu",
        tuple(map(_output, inputs)),
        tuple(one[1:] for one in row["inputs"] if one.startswith("^")),
        tuple(map(_tensor, row["outputs"])),
        row["attributes"],
        frozenset(row["host"][0]),
        frozenset(row["host"][1]),
        row.get("value"),
    )


def _tensor(row: Sequence[Any]) -> Tensor:
    dtype, shape = row
    known = shape is not None and None not in shape
    return Tensor(dtype, tuple(shape) if known else None)


def _output(text: str) -> tuple[str, int]:
    name, _, position = text.partition(":")
    return name, int(position or 0)
