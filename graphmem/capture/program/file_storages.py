"""Storages on their way into a file and out of one: size and device are true, the bytes there only if they are known.

A fake tensor is pickled as the tensor that it stands for, with a :class:`FileStorage` in place of its storage. PyTorch
then writes it, or reads it and puts it where ``map_location`` says. On the device a storage is allocated when it is
moved there, once, as a real one (``persistent_load`` and ``restore_location``, torch/serialization.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch.utils.hooks import warn_if_has_hooks

from graphmem.capture.device.own_attributes import own_attributes
from graphmem.capture.patches import Patches
from graphmem.capture.program.torch_archives import IN_FULL, is_plain_file, write_zeros
from graphmem.capture.torch_internals import FakeTensor, disable_current_modes, unset_fake_temporarily
from graphmem.capture.values.known_values import INTEGER_LIMIT, KnownValues
from graphmem.torch_names import private

_LOST = "files of tensors cannot be followed"

#: Floats are read from a file in storages up to so many bytes: steps and scales, and no weights.
SMALL = 1 << 16
_CPU = torch.device("cpu")


@dataclass
class Books:
    """The values that the storages of one capture share. ``left``: zeros that may yet be pickled in memory; then
    ``omitted``."""

    values: KnownValues
    left: int = IN_FULL
    omitted: int = 0

    def has_room(self, size: int) -> bool:
        if size > self.left:
            self.omitted += size
            return False
        self.left -= size
        return True


class FileStorage(torch.UntypedStorage):  # type: ignore[misc]
    """A storage of ``size`` bytes on the device ``place``.

    ``read`` gives its bytes, None where they are unknown. ``live`` is a tensor of the program that lies in it. One that
    ``is_late`` learns its bytes from the file after its tensors are made (:meth:`_set_from_file`).
    """

    size_: int
    place: torch.device

    def __new__(cls, *_: object, **__: object) -> FileStorage:
        made: FileStorage = super().__new__(cls, 0)
        return made

    def __init__(
        self,
        books: Books,
        size: int,
        place: torch.device = _CPU,
        read: Callable[[], Any] | None = None,
        live: torch.Tensor | None = None,
        is_late: bool = False,
    ) -> None:
        self.books, self.size_, self.place, self._live, self._is_late = books, size, place, live, is_late
        self.read = read
        self.is_hollow_next: Callable[[], bool] = lambda: False
        self._flat: torch.Tensor | None = None  # of all its bytes

    @classmethod
    def of(cls, tensor: torch.Tensor, books: Books) -> FileStorage:
        """That of a fake tensor of the program."""
        values = books.values
        known = None if values.drawn((tensor,)) else values.of(tensor)
        read = None if known is None else (lambda: bytes_of(known.untyped_storage()))
        return cls(books, tensor.untyped_storage().nbytes(), tensor.device, read, tensor)

    # --- what PyTorch asks of a storage -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def is_cuda(self) -> bool:
        return bool(self.place.type == "cuda")

    @property
    def _cdata(self) -> object:
        """Tells storages apart; of one without values a name that says so (in files of the older format)."""
        live = self._live
        number = id(self) if live is None else live.untyped_storage()._cdata
        return f"{HOLLOW_KEY}{number:012x}" if self.read is None else number

    def nbytes(self) -> int:
        return self.size_

    size = __len__ = nbytes

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        if self._live is not None:
            return int(self._live.untyped_storage().data_ptr())
        return id(self) if self.size_ else 0

    def _typed_storage(self) -> torch.storage.TypedStorage:
        return torch.storage.TypedStorage(wrap_storage=self, dtype=torch.uint8, _internal=True)

    def byteswap(self, dtype: torch.dtype) -> None:
        """Values of machines with another order of bytes are unknown."""
        self.read = None

    def cpu(self) -> FileStorage:
        return self.to(device=_CPU)

    def cuda(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> FileStorage:
        return self.to(device=torch.device("cuda", device) if type(device) is int else device or "cuda")

    def to(self, *, device: torch.device | str | int | None, non_blocking: bool = False) -> FileStorage:
        """A copy on a device, allocated now; itself if it is there."""
        place = torch.device(device)
        if place.type == self.place.type:
            return self
        moved = FileStorage(self.books, self.size_, place, self.read, is_late=self._is_late)
        moved.is_hollow_next = self.is_hollow_next
        if place.type != "cpu":
            moved._unknown()
        return moved

    #: ``_legacy_load`` says it, and means that a copy to the device need not be made.
    _torch_load_uninitialized = property(lambda self: False, lambda self, _: None)

    def _write_file(self, file: BinaryIO, is_real_file: bool, save_size: bool, element_size: int) -> None:
        """In the older format: its elements, as eight bytes, and its data. Without the data the number is negative."""
        content = None if self.read is None else self.read()
        has_data = content is not None or is_plain_file(file) or self.books.has_room(self.size_)
        count = self.size_ // element_size
        if save_size:
            file.write((count if has_data else -count).to_bytes(8, "little", signed=True))
        if content is not None:
            file.write(content)
        elif has_data:
            write_zeros(file, self.size_)
        if is_real_file:
            file.flush()  # a real storage that follows is written past Python's buffer

    def _set_from_file(self, file: BinaryIO, offset: int | None, is_real_file: bool, element_size: int) -> None:
        """Read :meth:`_write_file`'s. Raises :class:`RuntimeError` for another number of bytes."""
        if offset is not None:
            file.seek(offset)
        count = int.from_bytes(file.read(8), "little", signed=True)
        if abs(count) * element_size != self.size_:
            raise RuntimeError(f"storage has wrong byte size: expected {self.size_} got {abs(count) * element_size}")
        is_hollow = self.is_hollow_next() or count < 0
        content = file.read(self.size_) if not is_hollow and self.size_ <= self.books.values.budget.one else None
        if content is None and count > 0:
            file.seek(self.size_, 1)
        self._is_late, self.read = False, None if content is None else (lambda: content)
        self._learn_late(content)

    # --- its tensors --------------------------------------------------------------------------------------------------

    def tensor(self, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> torch.Tensor:
        """The tensor of this geometry, as ``Tensor.set_`` gives it."""
        if self._live is not None:
            live = self._live.detach()
            flat = live.as_strided((self.size_ // live.element_size(),), (1,), 0)
        else:
            flat = self._known(dtype) if self._flat is None else self._flat
            if self.place.type != "cpu":
                self._learn(flat, dtype)
        with torch.no_grad():
            elements = flat[: self.size_ // dtype.itemsize * dtype.itemsize] if flat.dtype is torch.uint8 else flat
            return (elements if dtype is flat.dtype else elements.view(dtype)).as_strided(size, stride, offset).detach()

    def _known(self, dtype: torch.dtype) -> torch.Tensor:
        """On the host: a real tensor if the values are known, or will be."""
        if self.place.type != "cpu" or not (self.read or self._is_late) or not self._is_wanted(dtype):
            return self._unknown()
        content = bytes(self.size_) if self.read is None else self.read()
        with disable_current_modes(), unset_fake_temporarily():
            flat = torch.empty(self.size_, dtype=torch.uint8, device="cpu")
            if self.size_:
                flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self._flat = flat
        return flat

    def _unknown(self) -> torch.Tensor:
        with torch.no_grad():
            self._flat = torch.empty(self.size_, dtype=torch.uint8, device=self.place)
        self.books.values.forget(self._flat)
        return self._flat

    def _is_wanted(self, dtype: torch.dtype) -> bool:
        if dtype.is_floating_point or dtype.is_complex:
            return self.size_ <= SMALL
        return bool(self.size_ <= min(INTEGER_LIMIT * dtype.itemsize, self.books.values.budget.one))

    def _learn(self, flat: torch.Tensor, dtype: torch.dtype) -> None:
        if self.read is not None and isinstance(flat, FakeTensor) and self.size_ and self._is_wanted(dtype):
            with disable_current_modes(), unset_fake_temporarily():
                value = torch.frombuffer(bytearray(self.read()), dtype=torch.uint8)
            self.books.values.learn(flat, value)

    def _learn_late(self, content: bytes | None) -> None:
        flat = self._flat
        if flat is None:
            return
        if content is None:
            self.books.values.forget(flat)
        elif self.size_ and not isinstance(flat, FakeTensor):
            with disable_current_modes(), unset_fake_temporarily():
                flat.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        elif self.size_ <= SMALL:
            self._learn(flat, torch.uint8)


#: Begins the keys of storages without values in the older format, which has no place for a mark: as long as an address.
HOLLOW_KEY = "h-"


class _UntypedInFile(torch.storage.TypedStorage):  # type: ignore[misc]
    """Is pickled as an ``UntypedStorage``, which tensors of newer types are stored in."""

    def __new__(cls, *_: object) -> _UntypedInFile:
        return object.__new__(cls)

    def __init__(self, storage: FileStorage) -> None:
        self._untyped_storage, self.dtype = storage, torch.uint8

    def _pickle_storage_type(self) -> str:
        return "UntypedStorage"


def bytes_of(storage: torch.UntypedStorage) -> object:
    """The bytes of a real host storage, as memory."""
    with disable_current_modes(), unset_fake_temporarily():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy().data


# --- pickling ---------------------------------------------------------------------------------------------------------


def patch_pickling(patches: Patches, books: Books) -> None:
    """Let fake tensors be pickled as what they stand for, and be made again of their storages in files."""
    of_parameter = torch.nn.Parameter.__reduce_ex__

    def reduced(self: Any, protocol: object) -> object:
        is_parameter, state = isinstance(self, torch.nn.Parameter), own_attributes(self)
        if is_parameter:
            data: Any = (self.data, self.requires_grad, OrderedDict())
            if not state:
                return private("torch._utils._rebuild_parameter", _LOST), data
            return private("torch._utils._rebuild_parameter_with_state", _LOST), (*data, state)
        function, args = _rebuilding(self, protocol, books)
        kind = _kind(self)
        if kind is torch.Tensor and not state:
            return function, args
        return private("torch._tensor._rebuild_from_type_v2", _LOST), (function, kind, args, state)

    def parameter_reduced(self: Any, protocol: object) -> object:
        return (reduced if isinstance(self, FakeTensor) else of_parameter)(self, protocol)

    patches.set(FakeTensor, "__reduce_ex__", reduced)
    patches.set(torch.nn.Parameter, "__reduce_ex__", parameter_reduced)
    _patch_rebuilding(patches)


def _rebuilding(tensor: torch.Tensor, protocol: object, books: Books) -> tuple[Any, tuple[Any, ...]]:
    """The function and arguments that make a tensor again (``Tensor._reduce_ex_internal``, torch/_tensor.py, 2.13)."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.is_nested:
        rebuilding: tuple[Any, tuple[Any, ...]] = tensor._reduce_ex_internal(protocol)
        return rebuilding
    warn_if_has_hooks(tensor)
    storage, dtype = FileStorage.of(tensor, books), tensor.dtype
    geometry: Any = (
        tensor.storage_offset(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.requires_grad,
        OrderedDict(),
    )
    metadata = private("torch._utils.get_tensor_metadata", _LOST)(tensor)
    last = (metadata,) if metadata else ()
    if dtype in private("torch.storage._new_dtypes", _LOST)():
        return private("torch._utils._rebuild_tensor_v3", _LOST), (_UntypedInFile(storage), *geometry, dtype, *last)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
    return private("torch._utils._rebuild_tensor_v2", _LOST), (typed, *geometry, *last)


def _kind(tensor: torch.Tensor) -> object:
    """The class of a fake tensor, to all appearance."""
    return torch.Tensor if type(tensor) is FakeTensor else type(tensor).__bases__[0]


def _rebuilding_quantized(quantized: Callable[..., object]) -> Callable[..., object]:
    def rebuild_quantized(storage: Any, *args: object) -> object:
        """A real one: quantised tensors have no fake form. Of hollow storages the values count as unknown."""
        stored = getattr(storage, "_untyped_storage", None)
        if not isinstance(stored, FileStorage):
            return quantized(storage, *args)
        with disable_current_modes(), unset_fake_temporarily():
            content = bytearray(stored.size_ if stored.read is None else stored.read())
            data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            made = torch.storage.TypedStorage(wrap_storage=data.untyped_storage(), dtype=storage.dtype, _internal=True)
            tensor = quantized(made, *args)
        if stored.read is None:
            stored.books.values.forget(tensor)
        return tensor

    return rebuild_quantized


def _patch_rebuilding(patches: Patches) -> None:
    utils, unpickler = private("torch._utils", _LOST), private("torch._weights_only_unpickler", _LOST)
    from_storage, newer = utils._rebuild_tensor, utils._rebuild_tensor_v3
    of_type, allowed = private("torch._tensor._rebuild_from_type_v2", _LOST), unpickler._get_allowed_globals

    def rebuild(storage: Any, offset: int, size: Sequence[int], stride: Sequence[int]) -> object:
        stored = getattr(storage, "_untyped_storage", None)
        if not isinstance(stored, FileStorage):  # of a real tensor that is copied
            with disable_current_modes(), unset_fake_temporarily():
                return from_storage(storage, offset, size, stride)
        return stored.tensor(storage.dtype, offset, size, stride)

    def rebuild_newer(storage: Any, *args: Any) -> object:
        stored = getattr(storage, "_untyped_storage", None)
        if not isinstance(stored, FileStorage):
            with disable_current_modes(), unset_fake_temporarily():
                return newer(storage, *args)
        offset, size, stride, grad, _, dtype, *metadata = args
        made = stored.tensor(dtype, offset, size, stride).requires_grad_(grad)
        if any(metadata):
            utils.set_tensor_metadata(made, *metadata)
        return made

    def rebuild_of_type(function: Any, kind: Any, args: Any, state: Any) -> object:
        made = function(*args)
        if isinstance(made, FakeTensor):
            if not isinstance(made, kind):
                made = private("torch.Tensor._make_subclass", _LOST)(kind, made, made.requires_grad)
            kind = type(made)
        return of_type(lambda: made, kind, (), state)

    replaced: dict[tuple[Any, str], Any] = {
        (utils, "_rebuild_tensor"): rebuild,
        (utils, "_rebuild_tensor_v3"): rebuild_newer,
        (utils, "_rebuild_qtensor"): _rebuilding_quantized(utils._rebuild_qtensor),
        (private("torch._tensor", _LOST), "_rebuild_from_type_v2"): rebuild_of_type,
    }
    now = {}
    for (module, name), function in replaced.items():
        function.__module__ = module.__name__  # it is pickled by this name
        patches.set(module, name, function)
        now[f"{module.__name__}.{name}"] = getattr(module, name)
    patches.set(
        unpickler, "_get_allowed_globals", lambda: {name: now.get(name, value) for name, value in allowed().items()}
    )
