"""Which buffer every tensor of a graph gets: ONNX Runtime's ``AllocationPlanner``, the part that knows no sizes.

Read in ``core/framework/allocation_planner.cc`` (``ComputeReuseCount``, ``FindReusableInput``, ``FindReusableTensor``,
``ComputeSingleStreamReusePlan``, ``GenerateDeallocationPlan``) and checked against recorded runs of 1.31.1 on the CPU.
The plan depends on names, element types and symbolic shapes only, so one plan serves every batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from enum import Enum

from graphmem.base.records import dataclass
from graphmem.graph.model import ELEMENT_BITS, Dimension, Node
from graphmem.runtimes.onnxruntime.kernels.tables import KernelTable

#: A tensor's shape as the planner sees it: None where even the rank is unknown, ``""`` for a dimension without a name.
SymbolicShape = tuple[Dimension, ...] | None


class AllocKind(Enum):
    """``AllocKind`` of ``core/framework/alloc_kind.h``, under its own names."""

    kAllocate = "kAllocate"  # noqa: N815
    kReuse = "kReuse"  # noqa: N815
    kAllocateOutput = "kAllocateOutput"  # noqa: N815
    kPreExisting = "kPreExisting"  # noqa: N815
    kShare = "kShare"  # noqa: N815
    kAllocateStatically = "kAllocateStatically"  # noqa: N815


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as the planner sees it. ``location`` is the memory it lies in; only tensors of one share a buffer."""

    dtype: str
    shape: SymbolicShape
    location: int = 0


@dataclass(frozen=True)
class ReusePlan:
    """``kind`` and ``buffer`` (the tensor whose memory it uses) by tensor name, and ``releases``: the buffers that are
    given back after each step of ``order``. Buffers of kind ``kAllocate`` that no step releases live to the end."""

    order: tuple[int, ...]
    kind: Mapping[str, AllocKind]
    buffer: Mapping[str, str]
    releases: tuple[tuple[str, ...], ...]


def same_size(first: Value, second: Value) -> bool:
    """``SameSize``: equal element sizes, no strings, and every dimension the same number or the same name."""
    if first.shape is None or second.shape is None or "string" in (first.dtype, second.dtype):
        return False
    if element_size(first.dtype) != element_size(second.dtype) or len(first.shape) != len(second.shape):
        return False
    return all(a == b and a != "" for a, b in zip(first.shape, second.shape, strict=True))


def element_size(dtype: str) -> int:
    """Bytes of one element as C++ sees its type; sub-byte types are pairs in one byte (``Int4x2``)."""
    return max(1, ELEMENT_BITS[dtype] // 8)


@dataclass
class _Planner:
    nodes: Sequence[Node]
    values: Mapping[str, Value]
    outputs: frozenset[str]
    table: KernelTable
    reuse_enabled: bool
    shared: frozenset[str] = frozenset()
    kind: dict[str, AllocKind] = field(default_factory=dict)
    buffer: dict[str, str] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    free: list[str] = field(default_factory=list)  # the newest last

    def define(self, name: str, kind: AllocKind) -> None:
        self.kind[name], self.buffer[name] = kind, name
        self.uses[name] = self.uses.get(name, 0)

    def reuse(self, reused: str, name: str) -> None:
        """``Reuse``: ``name`` lives in the buffer under ``reused`` and lends it its use count."""
        original = self.buffer[reused]
        self.buffer[name] = original
        self.uses[original] += self.uses[name]
        self.kind[name] = AllocKind.kReuse

    def plan_output(self, node: Node, position: int, name: str) -> None:
        if name in self.outputs:
            self.kind[name] = AllocKind.kAllocateOutput
            if node.op_type == "Identity" and not node.domain and node.inputs[0] in self.shared:
                self.kind[name], self.buffer[name] = AllocKind.kShare, node.inputs[0]
            return
        self.kind[name] = AllocKind.kAllocate
        reused = self.reusable_input(node, position, name) or self.reusable_tensor(name)
        if reused is not None:
            self.reuse(reused, name)

    def reusable_input(self, node: Node, position: int, name: str) -> str | None:
        """``FindReusableInput``: an alias must share; an in-place input may if this is its buffer's last use."""
        shared = self.table.shared_buffers(node)
        for source, target in shared.alias:
            if target == position and source < len(node.inputs) and node.inputs[source]:
                return node.inputs[source]
        for source, target in shared.in_place:
            if target != position or source >= len(node.inputs) or not node.inputs[source]:
                continue
            given = node.inputs[source]
            if self.uses[self.buffer[given]] == 1 and same_size(self.values[given], self.values[name]):
                return given
        return None

    def reusable_tensor(self, name: str) -> str | None:
        """``FindReusableTensor``: the buffer freed last that has the same place, element size and symbolic shape."""
        wanted = self.values[name]
        if not self.reuse_enabled or not wanted.shape:
            return None
        for index in range(len(self.free) - 1, -1, -1):
            found = self.values[self.free[index]]
            if found.location == wanted.location and same_size(found, wanted):
                return self.free.pop(index)
        return None

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            original = self.buffer[name]
            self.uses[original] -= 1
            if self.uses[original] == 0:
                self.free.append(original)


def reuse_plan(
    nodes: Sequence[Node],
    order: Sequence[int],
    values: Mapping[str, Value],
    *,
    inputs: Sequence[str],
    initializers: Sequence[str],
    outputs: Sequence[str],
    table: KernelTable,
    enable_mem_reuse: bool = True,
    shared: Sequence[str] = (),
) -> ReusePlan:
    """Plan the buffers of one graph executed on one stream. Outputs that are ``Identity`` of one of the ``shared``
    inputs are that input: what a loop carries and does not change."""
    planner = _Planner(nodes, values, frozenset(outputs), table, enable_mem_reuse, frozenset(shared))
    for names, kind in ((inputs, AllocKind.kPreExisting), (initializers, AllocKind.kAllocateStatically)):
        for name in dict.fromkeys(names):
            planner.define(name, kind)
            planner.uses[name] += 1  # the caller and the session keep theirs
    for node in nodes:
        for name in filter(None, node.outputs):
            planner.define(name, AllocKind.kAllocate)
            planner.uses[name] += 1
    for name in (*(name for node in nodes for name in node.reads), *outputs):
        planner.uses[name] += 1
    for index in order:
        node = nodes[index]
        for position, name in enumerate(node.outputs):
            if name:
                planner.plan_output(node, position, name)
        planner.release(node.reads)
        for name in filter(None, node.outputs):
            planner.uses[planner.buffer[name]] -= 1  # what nobody reads is not lent either (1.32.0, measured)
    return ReusePlan(tuple(order), planner.kind, planner.buffer, _releases(planner, order))


def _releases(planner: _Planner, order: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """``GenerateDeallocationPlan``: a buffer goes after its last reader in the order, lower value indices first."""
    last: dict[str, int] = {}
    for step, index in enumerate(order):
        for name in planner.nodes[index].reads:
            last[planner.buffer[name]] = step
    steps: list[list[str]] = [[] for _ in order]
    for name, kind in planner.kind.items():  # defined in the order of ONNX Runtime's value indices
        if kind is AllocKind.kAllocate and name in last:
            steps[last[name]].append(name)
    return tuple(map(tuple, steps))
