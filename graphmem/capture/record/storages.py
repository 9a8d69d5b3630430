"""The storages of a run: their births and deaths as events of the trace, and their purposes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphmem.capture.kernels.parts.script import Step
from graphmem.capture.ports import DeviceMemory
from graphmem.capture.record.memory_pools import MemoryPools
from graphmem.capture.record.streams import Streams
from graphmem.capture.torch_internals import FakeTensor
from graphmem.capture.values.callers import clear_frames_below
from graphmem.capture.values.tensors import NOWHERE, SPARSE, sparse_parts
from graphmem.trace import Category, EventKind, Place, TraceBuilder


class StorageRef(weakref.ref):  # type: ignore[type-arg]
    """A weak reference that knows which storage of the trace it watches."""

    __slots__ = ("index", "key")
    index: int
    key: int


@dataclass(frozen=True)
class Refusal:
    """A request that the card could not serve: the storage, the operator that asked, PyTorch's message."""

    storage: int
    operator: int
    message: str


class Storages:
    """Every storage that is alive, by the address of its implementation.

    ``operator`` is the one that events belong to now, ``born_as`` the category of a storage of unknown purpose.
    """

    def __init__(self, builder: TraceBuilder) -> None:
        self.builder = builder
        self.operator = builder.operator("(start)")
        self.streams = Streams()
        self.pools = MemoryPools(self)
        self.live: dict[int, StorageRef] = {}
        self.born_as = Category.TEMPORARY
        self.memory: DeviceMemory | None = None
        self.refusals: list[Refusal] = []
        self.error: weakref.ref[BaseException] | None = None  # of the last refusal, until it is settled
        self.on_first: Callable[[], None] | None = None  # before the first storage on the card
        self.outgrown: set[int] = set()  # storages that ended because they were resized
        self._asleep: set[int] = set()  # storages that ended because their memory was given back for a while
        self._used_on: dict[int, set[int]] = {}  # stream -> storages of other streams that it used
        self.gathered: dict[int, list[int]] = {}  # storage -> others, without a tensor, that end with it
        self._purpose: tuple[Category, str] | None = None

    def of(self, tensor: torch.Tensor) -> StorageRef | None:
        """The reference to a tensor's storage, if it has been seen."""
        return self.live.get(tensor.untyped_storage()._cdata)

    # --- births and deaths --------------------------------------------------------------------------------------------

    def see(self, tensor: object, size: int | None = None, place: Place | None = None) -> None:
        """Record the birth of the tensor's storage, unless it is known."""
        if not isinstance(tensor, FakeTensor):
            return
        if tensor.layout in SPARSE:
            for part in sparse_parts(tensor):
                self.see(part)
            return
        if place is None:
            place = Place.DEVICE if tensor.fake_device.type == "cuda" else Place.HOST
            if place is Place.HOST and tensor.fake_device == NOWHERE:
                return
        self._see_storage(tensor.untyped_storage(), size, place)

    def see_lists(self, indices: Sequence[Any]) -> None:
        """A list in a subscript becomes a tensor of the subscripted tensor's device, made below the dispatcher
        (``sequenceToVariable``, torch/csrc/autograd/python_variable_indexing.cpp). It is the one kind that is not fake.
        """
        for index in indices:
            if index is not None and not isinstance(index, FakeTensor) and index.device.type == "meta":
                self._see_storage(index.untyped_storage(), None, Place.DEVICE)

    def _see_storage(self, storage: torch.UntypedStorage, size: int | None, place: Place) -> None:
        key = storage._cdata
        if key in self.live:
            return
        bytes_ = storage.nbytes() if size is None else size
        index = self.alloc(bytes_, *(self._purpose or (self.born_as, "")), place)
        ref = StorageRef(storage, self._died)
        ref.index = index
        ref.key = key
        self.live[key] = ref

    def adopt(self, tensor: torch.Tensor, index: int) -> None:
        """A tensor that was made aside shows storage ``index``, whose birth is in the trace."""
        storage = tensor.untyped_storage()
        ref = StorageRef(storage, self._died)
        ref.index, ref.key = index, storage._cdata
        self.live[ref.key] = ref

    def alloc(
        self,
        size: int,
        category: Category,
        label: str = "",
        place: Place = Place.DEVICE,
        stream: int | None = None,
    ) -> int:
        """A new storage, on the current stream unless another is named; its index.

        Raises ``torch.OutOfMemoryError`` where the card would.
        """
        if self.on_first is not None and place is Place.DEVICE:
            begin, self.on_first = self.on_first, None
            begin()
        stream = self.streams.current if stream is None else stream
        pool = self.pools.number_now(stream) if place is Place.DEVICE else 0
        index = self.builder.alloc(size, self.operator, category, stream=stream, place=place, label=label, pool=pool)
        return self._had(index) if place is Place.DEVICE else index

    def alloc_again(self, index: int) -> int:
        """Another storage like storage ``index``. Raises ``torch.OutOfMemoryError`` where the card would."""
        made = self.builder.alloc_again(index, self.operator)
        return self._had(made) if self.builder.places[made] is Place.DEVICE else made

    def take(self, step: Step) -> int:
        """A buffer inside an operator, on the current stream; its index. Raises ``torch.OutOfMemoryError`` too."""
        if not step.plans:
            return self.alloc(step.bytes or 0, Category.TEMPORARY, step.label)
        stream = self.streams.current
        pool, category = self.pools.number_now(stream), Category.TEMPORARY
        return self._had(
            self.builder.alloc_for_call(
                step.shape, step.plans, self.operator, category=category, stream=stream, label=step.label, pool=pool
            )
        )

    def _had(self, index: int) -> int:
        """The storage that was asked for, unless the card refuses it."""
        message = None if self.memory is None else self.memory.refusal(index)
        if message is not None:
            raise self._refused(index, message)
        return index

    def _refused(self, index: int, message: str) -> BaseException:
        """Storage ``index`` is not born after all."""
        self.builder.refuse(index)
        self.refusals.append(Refusal(index, self.operator, message))
        error: BaseException = torch.OutOfMemoryError(message)
        self.error = weakref.ref(error)
        return error

    def settle(self) -> None:
        """An error holds the frames that it came through, and they hold tensors. On a card those of operators are
        C++'s, gone when it is caught; here they are Python's, and are emptied now. The program's own stay as they are.
        """
        error = None if self.error is None else self.error()
        if error is None or clear_frames_below(error.__traceback__):
            self.error = None

    def unborn(self, first_row: int, kept: Iterable[int]) -> None:
        """Give back the storages of a failed operator since ``first_row``, but for those ``kept``."""
        rows = self.builder.rows[first_row:]
        gone = {row[1] for row in rows if row[0] == EventKind.FREE}.union(kept)
        lost = [row[1] for row in rows if row[0] == EventKind.ALLOC and row[1] not in gone]
        for ref in [ref for ref in self.live.values() if ref.index in lost]:
            del self.live[ref.key]
            ref.key = -1
        for index in reversed(lost):
            self.builder.free(index, self.operator)

    def take_and_give(self, size: int, category: Category, label: str) -> None:
        """A buffer that the current operator takes and gives back."""
        if size:
            self.builder.free(self.alloc(size, category, label), self.operator)

    @contextlib.contextmanager
    def births(self, category: Category, label: str) -> Iterator[None]:
        """Storages that are born in this context are for ``category``."""
        before, self._purpose = self._purpose, (category, label)
        try:
            yield
        finally:
            self._purpose = before

    def record_stream(self, tensor: object, stream: int) -> None:
        """The work of another stream uses the tensor's storage."""
        ref = self.of(tensor)
        if ref is not None and self.builder.places[ref.index] is Place.DEVICE:
            self.builder.event(EventKind.RECORD_STREAM, self.operator, ref.index, stream)
            if self.builder.streams[ref.index] != stream:
                self._used_on.setdefault(stream, set()).add(ref.index)

    def waited(self, stream: int, row: int) -> None:
        """The program has waited for what a stream did before a row of the trace."""
        used = self._used_on.get(stream)
        if used:
            self.settle()
            later = sum(kind == EventKind.FREE and subject in used for kind, subject, *_ in self.builder.rows[row:])
            self.builder.event(EventKind.SYNCHRONIZE, self.operator, later, stream)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage that grew or shrank in place is a new allocation: the old bytes go back after the copy."""
        ref = self.live.get(storage._cdata)
        if ref is None or self.builder.storage_bytes[ref.index] == storage.nbytes():
            return
        old, builder = ref.index, self.builder
        ref.index = self.alloc(storage.nbytes(), builder.categories[old], builder.labels[old], builder.places[old])
        builder.free(old, self.operator)
        self.outgrown.add(old)

    def renew(self, tensor: torch.Tensor, size: int) -> None:
        """A live tensor's bytes are copied into a new storage of ``size`` bytes, and the old one is given back."""
        ref = self.live[tensor.untyped_storage()._cdata]
        old, builder = ref.index, self.builder
        ref.index = self.alloc(size, builder.categories[old], builder.labels[old], builder.places[old])
        builder.free(old, self.operator)

    def sleep(self, pool: int) -> None:
        """Storages of a private pool lose their memory and live on without it. In the trace each ends, and another
        begins at :meth:`wake`: PyTorch counts such memory as allocated all the time, and the card has it for others."""
        for ref in self._in_pool(pool):
            self.builder.free(ref.index, self.operator)
            self._asleep.add(ref.index)

    def wake(self, pool: int) -> None:
        """Sleeping storages of a private pool get memory. Raises ``torch.OutOfMemoryError`` where the card would."""
        asleep = [ref for ref in self.live.values() if ref.index in self._asleep]
        for ref in sorted(asleep, key=lambda ref: ref.index):
            if self.builder.storage_pools[ref.index] == pool:
                self._asleep.discard(ref.index)
                ref.index = self.alloc_again(ref.index)

    def bytes_in_pool(self, pool: int) -> int:
        """Bytes of the storages of a private pool that have memory."""
        return sum(self.builder.storage_bytes[ref.index] for ref in self._in_pool(pool))

    def _in_pool(self, pool: int) -> list[StorageRef]:
        pools = self.builder.storage_pools
        return [one for one in self.live.values() if pools[one.index] == pool and one.index not in self._asleep]

    def _died(self, ref: StorageRef) -> None:
        if self.live.get(ref.key) is ref:
            del self.live[ref.key]
            if self._asleep and ref.index in self._asleep:
                return
            self.builder.rows.append((1, ref.index, self.operator, 0))
            for other in self.gathered.pop(ref.index, ()) if self.gathered else ():
                self.builder.rows.append((1, other, self.operator, 0))

    def forget(self) -> None:
        """Watch no storage any longer: a storage that dies from now on was alive at the end of the run."""
        for ref in self.live.values():
            ref.key = -1
        self.live = {}

    # --- what storages are for ----------------------------------------------------------------------------------------

    def label(self, tensor: object, category: Category, label: str = "") -> None:
        """Label a live tensor's storage (parameters, buffers, inputs, optimizer state, gradients); of a DTensor, that
        of its local part."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return
        ref = self.of(tensor)
        if ref is not None:
            self.builder.categories[ref.index] = category
            if label:
                self.builder.labels[ref.index] = label

    def place(self, tensor: object, place: Place) -> None:
        """Record where a live tensor's storage lies, if its device does not show it."""
        ref = self.of(tensor)
        if ref is not None:
            self.builder.places[ref.index] = place

    def name_storage(self, tensor: object, label: str) -> None:
        """Give a live tensor's storage a name for people, unless it has one."""
        if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
            ref = self.of(tensor)
            if ref is not None and not self.builder.labels[ref.index]:
                self.builder.labels[ref.index] = label

    def label_input(self, tensor: torch.Tensor) -> None:
        """A leaf given to the outermost module is an input, unless it is known to be something else."""
        if not isinstance(tensor, FakeTensor):
            return
        if tensor.layout in SPARSE:
            for part in sparse_parts(tensor):
                self.label_input(part)
            return
        ref = self.of(tensor)
        if ref is not None and self.builder.categories[ref.index] in (Category.TEMPORARY, Category.ACTIVATION):
            self.builder.categories[ref.index] = Category.INPUT
