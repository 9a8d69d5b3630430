"""What a program saved, without its data: the rest of an object pickled, and of every storage bytes and device."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from graphmem.errors import CaptureError


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as it was saved; ``data`` holds those of real host tensors."""

    storage: int
    device: str
    storage_elements: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_parameter: bool
    data: torch.Tensor | None


@dataclass
class Saved:
    """What one call has saved: the pickled rest, and the tensors in it."""

    pickled: bytes = b""
    tensors: list[SavedTensor | str] = field(default_factory=list)  # of those that cannot be loaded, the type's name

    @classmethod
    def of(cls, obj: Any) -> Saved:
        """Pickle ``obj``. Raises what pickling it raises."""
        saved, file = cls(), io.BytesIO()
        Pickler(file, saved).dump(obj)
        saved.pickled = file.getvalue()
        return saved

    @property
    def bytes(self) -> int:
        """About the size of the file."""
        plain = [tensor for tensor in self.tensors if isinstance(tensor, SavedTensor)]
        storages = {tensor.storage: tensor.storage_elements * tensor.dtype.itemsize for tensor in plain}
        size: int = len(self.pickled) + sum(storages.values())
        return size


class Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, saved: Saved) -> None:
        super().__init__(file, protocol=2)
        self._saved = saved
        self._kept: list[Any] = []  # storages live until the end, so that their addresses tell them apart

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return None
        is_plain = obj.layout is torch.strided and type(obj) in (FakeTensor, torch.Tensor, torch.nn.Parameter)
        self._saved.tensors.append(self._noted(obj) if is_plain else type(obj).__name__)
        return len(self._saved.tensors) - 1

    def _noted(self, tensor: torch.Tensor) -> SavedTensor:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        data = None
        if not isinstance(tensor, FakeTensor):
            with unset_fake_temporarily():
                data = tensor.detach().clone()
        return SavedTensor(
            storage._cdata,
            tensor.device.type,
            storage.nbytes() // tensor.element_size(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
            data,
        )


class Unpickler(pickle.Unpickler):
    def __init__(self, saved: Saved, place: Callable[[str], str]) -> None:
        super().__init__(io.BytesIO(saved.pickled))
        self._saved, self._place = saved, place
        self._storages: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return loaded(self._saved.tensors[pid], self._place, self._storages)


def loaded(saved: SavedTensor | str, place: Callable[[str], str], storages: dict[int, torch.Tensor]) -> torch.Tensor:
    if isinstance(saved, str):
        raise CaptureError(f"a {saved} was saved, and loading one is not followed; leave it out of the checkpoint")
    device = place(saved.device)
    with torch.no_grad():
        if saved.data is not None:
            tensor = saved.data.clone().to(device)
        else:
            whole = storages.get(saved.storage)
            if whole is None:
                whole = torch.empty(saved.storage_elements, dtype=saved.dtype, device=device)
                storages[saved.storage] = whole
            if whole.dtype is not saved.dtype:
                whole = whole.view(saved.dtype)
            tensor = whole.as_strided(saved.shape, saved.stride, saved.offset).detach()
    if saved.is_parameter:
        return torch.nn.Parameter(tensor, saved.requires_grad)
    return tensor.requires_grad_(saved.requires_grad)


class _Probe:
    """A storage that a ``map_location`` function is asked about."""

    def __init__(self, device: str) -> None:
        self.device = device

    def cuda(self, *_: Any, **__: Any) -> _Probe:
        return _Probe("cuda")

    def cpu(self) -> _Probe:
        return _Probe("cpu")


def placing(map_location: Any) -> Callable[[str], str]:
    """Where a storage that was on a device goes (``_get_restore_location``)."""
    if map_location is None:
        return lambda device: device
    if isinstance(map_location, dict):
        named = {torch.device(key).type: torch.device(value).type for key, value in map_location.items()}
        return lambda device: named.get(device, device)
    if isinstance(map_location, (str, torch.device)):
        return lambda _: torch.device(map_location).type

    def asked(device: str) -> str:
        location = "cuda:0" if device == "cuda" else device
        answer = map_location(_Probe("cpu"), location)
        return device if answer is None else str(answer.device)

    return asked
