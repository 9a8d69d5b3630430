"""The operators of process groups, answered for one rank without the others: done at once, on tensors that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from graphmem.base import versions
from graphmem.base.figures import Communicator
from graphmem.base.versions import Version
from graphmem.capture.torch_internals import OpOverload
from graphmem.capture.values.callers import called_for_reducer
from graphmem.capture.values.exchanged import Group
from graphmem.capture.values.tensors import tensors_in
from graphmem.torch_names import private
from graphmem.training.processes import Processes

_aten = torch.ops.aten
_INTEGERS = (torch.int32, torch.int64)
#: Operators that make the reducer's host tensors.
MAKES_HOST_VALUES = {_aten.empty.memory_format, _aten.zeros.default}


def _collectives() -> set[OpOverload]:
    names = (
        "allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "allreduce_",
        "allreduce_coalesced_", "alltoall_", "alltoall_base_", "barrier", "broadcast_", "gather_", "monitored_barrier_",
        "recv_", "recv_any_source_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "scatter_", "send",
    )  # fmt: skip
    return {getattr(torch.ops.c10d, name).default for name in names if hasattr(torch.ops.c10d, name)}


#: The operators of process groups.
COLLECTIVES = _collectives() if dist.is_available() else set()


def _waited_for(_: object, tensor: torch.Tensor) -> torch.Tensor:
    """Waiting makes no tensor (``wait_tensor``, torch/csrc/distributed/c10d/Functional.cpp); its meta kernel does."""
    return tensor


#: What runs in place of the fake kernels of functional collectives.
DECOMPOSITIONS = {torch.ops._c10d_functional.wait_tensor.default: _waited_for} if dist.is_available() else {}


#: Operators of two processes; their works have no result.
_MESSAGES = {getattr(torch.ops.c10d, name).default for name in ("send", "recv_", "recv_any_source_")} & COLLECTIVES


def collective(func: OpOverload, args: Sequence[object]) -> Any:
    """Answer a collective: its outputs are the tensors that were given, and its work is done.

    ``ProcessGroupNCCL`` keeps the tensors of a work until it is waited for (``TensorShelf``). Here the work of a
    collective has them as its result, for as long as somebody keeps it; that of a message has none, as the schedules of
    pipelines keep works long after they waited for them, and the tensors themselves until they do.
    """
    if not func._schema.returns:
        return None
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([] if func in _MESSAGES else list(tensors_in(args[0])))
    lost = "collectives have no handle that is waited for"
    work = private("torch._C._distributed_c10d._create_work_from_future", lost)(future).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def group_of(args: Sequence[object], known: dict[str, tuple[int, ...]]) -> Group:
    """The process group of a collective, of those ``known`` by name, and the reduction that it makes."""
    rank, ranks, reduction, name = 0, 1, "", ""
    for value in args:
        kind = str(value._type()) if isinstance(value, torch.ScriptObject) else ""
        if kind.endswith("ReduceOp"):
            reduction = _name_of_reduction(value)
        elif kind.endswith("ProcessGroup"):
            group = dist.ProcessGroup.unbox(value)
            rank, ranks, name = group.rank(), group.size(), str(group.group_name)
    return Group(rank, ranks, reduction, name, known.get(name, ()))


@dataclass
class _Used:
    """The traffic of a process group: peers of messages by their place in it, and collectives."""

    peers: set[int] = field(default_factory=set)
    gathers: bool = False
    reduced_bytes: int = 0


#: The stream that stands for NCCL's own: no program is given one of this number.
NCCL_STREAM = 1 << 16
#: Collectives that ``ProcessGroupNCCL`` waits for at once where nobody asked for a work.
_WAITED_FOR_AT_ONCE = ("_allgather_base_", "_reduce_scatter_base_")
_YES = ("1", "y", "yes", "t", "true")


def records_use(
    func: OpOverload, args: Sequence[object], torch_version: Version, environment: Mapping[str, str]
) -> bool:
    """True if ``ProcessGroupNCCL`` of this version has the allocator wait for NCCL's stream before it gives the tensors
    of a collective to others (``record_stream``), where newer ones keep them themselves."""
    if versions.STASHED_COLLECTIVES.holds(torch_version):
        return False
    if environment.get("TORCH_NCCL_AVOID_RECORD_STREAMS", "").lower() in _YES:
        return False
    if not str(func._schema.name).endswith(_WAITED_FOR_AT_ONCE):
        return True
    place = [argument.name for argument in func._schema.arguments].index("async_op")
    return len(args) <= place or bool(args[place])


class ProcessGroups:
    """The process groups of several on cards that this process is in, and their traffic: NCCL makes a
    communicator when a group is first used, connects it as its collectives ask, and two processes when they first
    exchange messages."""

    def __init__(self) -> None:
        self.ranks: dict[str, tuple[int, ...]] = {}  # of all processes, by the group's name
        self.rank = 0  # of this process
        self.alone: set[str] = set()  # groups that have this process alone
        self._used_alone: set[str] = set()
        self._used: dict[str, _Used] = {}

    def note(self, func: OpOverload, args: Sequence[object], group: Group) -> None:
        """An operator of ``c10d`` goes through the group."""
        if group.name in self.alone and not _is_of_host(args):
            self._used_alone.add(group.name)
        if group.name not in self.ranks or _is_of_host(args):
            return
        used = self._used.setdefault(group.name, _Used())
        name = func.__name__.partition(".")[0].strip("_")
        others = set(range(group.ranks)) - {group.rank}
        if name.startswith("alltoall"):
            used.peers |= others
        elif name in ("gather", "scatter"):  # NCCL has neither: they are messages (torch/csrc/cuda/nccl.cpp)
            root = next(value for value in args if type(value) is int)
            used.peers |= others if root == group.rank else {root}
        elif name in ("send", "recv"):
            used.peers.add(next(value for value in args if type(value) is int))
        elif name == "recv_any_source":
            used.peers |= others
        elif name.startswith("allreduce") or name.endswith("barrier"):  # a barrier reduces one element
            used.reduced_bytes = max(used.reduced_bytes, 1, _bytes_in(args[:1]))
        else:
            used.gathers = True

    def note_functional(self, func: OpOverload, args: Sequence[object]) -> bool:
        """An operator of ``_c10d_functional`` goes through the group that it names; whether it names one."""
        self._used_alone |= self.alone.intersection(name for name in args if isinstance(name, str))
        names = [name for name in args if isinstance(name, str) and name in self.ranks]
        for name in names:
            used = self._used.setdefault(name, _Used())
            if "all_to_all" in func.__name__:
                used.peers.update(set(range(len(self.ranks[name]))) - {self._place(name)})
            elif "all_reduce" in func.__name__:
                used.reduced_bytes = max(used.reduced_bytes, 1, _bytes_in(args[:1]))
            else:
                used.gathers = True
        return bool(names)

    def communicators(self, on_node: int | None) -> tuple[Communicator, ...]:
        """Those of the groups that were used; ``on_node`` processes are in a machine, None for the number in
        :class:`~graphmem.training.processes.Processes`."""
        alone = tuple(Communicator(1, 0, 0, 1, reduced_bytes=1) for _ in self._used_alone)
        if not self._used:
            return alone
        if on_node is None:
            on_node = Processes(max(map(len, self.ranks.values()))).on_node
        return (*(self._communicator(name, used, on_node) for name, used in self._used.items()), *alone)

    def _communicator(self, name: str, used: _Used, on_node: int) -> Communicator:
        members = self.ranks[name]
        near = [rank for rank in members if rank // on_node == self.rank // on_node]
        far = sum(members[peer] not in near for peer in used.peers)
        place = near.index(self.rank)
        return Communicator(len(members), len(used.peers), far, len(near), place, used.gathers, used.reduced_bytes)

    def _place(self, name: str) -> int:
        return self.ranks[name].index(self.rank)


def _is_of_host(args: Sequence[object]) -> bool:
    """True if a collective's tensors are all on the host, where another backend than NCCL takes them. A barrier has
    none, or an empty one."""
    tensors = [tensor for tensor in tensors_in(args) if tensor.numel()]
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)


def _bytes_in(args: Sequence[object]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(args))


def _name_of_reduction(op: torch.ScriptObject) -> str:
    try:
        return str(dist.ReduceOp.RedOpType(op.op()).name)
    except AttributeError:  # older versions (2.9) hide it from Python
        return "?"


def flat_copy_bytes(func: OpOverload, args: Sequence[object]) -> int:
    """Bytes of the flat copy that ``ProcessGroupNCCL`` takes for a collective on a list of lists (``newLikeFlat``), and
    gives back: only tensors that are all alike are laid out flat."""
    if not str(func).startswith(("c10d.allgather_.", "c10d.reduce_scatter_.")):
        return 0
    lists = [value for value in args[:2] if isinstance(value, (list, tuple)) and value]
    nested = next((value for value in lists if isinstance(value[0], (list, tuple))), None)
    tensors = list(nested[0]) if nested else []
    if len({(tuple(tensor.shape), tensor.dtype) for tensor in tensors}) != 1:
        return 0
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def is_bookkeeping(kwargs: Mapping[str, object]) -> bool:
    """True if one of :data:`MAKES_HOST_VALUES` makes a host tensor of indices or flags for the reducer, which reads and
    writes it itself."""
    if kwargs.get("dtype") not in _INTEGERS or kwargs.get("pin_memory"):
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    return called_for_reducer()
