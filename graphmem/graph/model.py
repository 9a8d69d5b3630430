"""A frozen model graph: nodes, tensors with their shapes, and no weight anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from graphmem.base.records import dataclass
from graphmem.errors import ShapeError
from graphmem.trace import MAX_STORAGE_BYTES

#: Bits of one element. Sub-byte types are packed, the last byte padded (onnx.proto, ``TensorProto.raw_data``).
ELEMENT_BITS = {
    "bool": 8, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex64": 64, "complex128": 128,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8,
    "float6e2m3": 6, "float6e3m2": 6, "int4": 4, "uint4": 4, "float4e2m1": 4, "int2": 2, "uint2": 2,
    "string": 256,  # sizeof(std::string) of libstdc++ on a 64-bit machine; ONNX Runtime keeps strings on the host
}  # fmt: skip

Dimension = int | str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data. A dimension is an int, or the name of one that is not bound.

    ``items``, of a sequence, are the shapes of its tensors: it has no shape and no bytes of its own.
    """

    name: str
    dtype: str
    shape: tuple[Dimension, ...]
    items: tuple[tuple[Dimension, ...], ...] | None = None

    @property
    def elements(self) -> int:
        """How many elements. Raises :class:`ShapeError` for an unbound or negative dimension."""
        for dimension in self.shape:
            if isinstance(dimension, str):
                raise ShapeError(f"tensor {self.name!r} has the unbound dimension {dimension!r}")
            if dimension < 0:
                raise ShapeError(f"tensor {self.name!r} has the negative dimension {dimension}")
        return math.prod(int(dimension) for dimension in self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor. Raises :class:`ShapeError` when they do not fit 63 bits."""
        if self.items is not None:
            return 0
        count = -(-self.elements * ELEMENT_BITS[self.dtype] // 8)
        if count > MAX_STORAGE_BYTES:
            raise ShapeError(f"tensor {self.name!r} ({self}) has {count} bytes, more than any memory (2^63 - 1)")
        return count

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Node:
    """One operator. ``inputs`` and ``outputs`` are tensor names, ``""`` standing for an absent optional one.

    ``domain`` is ``""`` for ONNX's own operators. ``attributes`` hold numbers, strings and tuples of them only;
    ``implicit_inputs`` are the tensors that subgraphs of the node read from around it.
    """

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    implicit_inputs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The first output, which no other node of the graph has; the name of a node without outputs."""
        return next(filter(None, self.outputs), self.name)

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that the node needs, those of its subgraphs included."""
        return tuple(filter(None, (*self.inputs, *self.implicit_inputs)))

    @property
    def operator(self) -> str:
        """``domain.Operator``, the domain left out for ONNX's own."""
        return f"{self.domain}.{self.op_type}" if self.domain else self.op_type

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.operator})"


@dataclass(frozen=True)
class Body:
    """A subgraph of an ``If``, ``Loop`` or ``Scan`` and its runs during one run of the node.

    ``attribute`` is the name ONNX gives it: ``then_branch``, ``else_branch`` or ``body``. ``graphs`` are the shapes it
    runs with, equal ones once, and at least one also where it does not run; ``runs`` are pairs (index into ``graphs``,
    how often in a row).
    """

    attribute: str
    graphs: tuple[Graph, ...]
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Graph:
    """Nodes in file order, and the spec of every tensor by name. ``inputs`` do not include initializers.

    ``symbolic`` are the shapes as the runtime sees them before anything is bound: None for an unknown rank, ``""`` for
    a dimension without a name. A tensor that is not in it has the shape of its spec. ``is_ordered``: the nodes stand
    in the order in which the runtime executes them. ``values`` are the small tensors whose elements are known, as NumPy
    arrays; ``constants`` the initializers that the file writes as ``Constant`` nodes, which are no weights; ``bodies``
    the subgraphs of nodes, by :attr:`Node.key`; ``captured``, of a subgraph, the tensors that it reads from around it,
    which are in ``tensors`` too. ``contents`` are initializers with a token of their elements, equal for equal ones;
    those that are not in it are like no other.
    """

    name: str
    nodes: tuple[Node, ...]
    tensors: Mapping[str, TensorSpec]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    initializers: tuple[str, ...]
    opsets: tuple[tuple[str, int], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    symbolic: Mapping[str, tuple[Dimension, ...] | None] = field(default_factory=dict)
    is_ordered: bool = False
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    constants: frozenset[str] = frozenset()
    bodies: Mapping[str, tuple[Body, ...]] = field(default_factory=dict)
    captured: tuple[str, ...] = ()
    contents: Mapping[str, str] = field(default_factory=dict, repr=False)

    def symbolic_shape(self, name: str) -> tuple[Dimension, ...] | None:
        """The shape of a tensor before binding."""
        return self.symbolic[name] if name in self.symbolic else self.tensors[name].shape

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes of the tensors of these names."""
        return sum(self.tensors[name].nbytes for name in names)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the initializers, those of subgraphs included."""
        inner = sum(body.graphs[0].weight_bytes for bodies in self.bodies.values() for body in bodies)
        return self.bytes_of(self.initializers) + inner
