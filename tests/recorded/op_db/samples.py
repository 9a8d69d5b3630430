"""Arguments of an operator as JSON, so that a recording names what it ran and a capture needs no generator.

Tensors keep their shape, strides, dtype, place in their storage and whether they require a gradient; their values are
not kept. Two arguments that share a storage share it again. All of them live on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Json = Any


class NotJson(TypeError):
    """An argument that cannot be written down: a function, a generator, a sparse or nested tensor."""


class Encoder:
    """Writes the arguments of one call down."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        self._tensors: dict[int, Json] = {}
        self._kept: list[torch.Tensor] = []

    def encode(self, value: Any) -> Json:
        """JSON of ``value``. Raises :class:`NotJson`."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        for kind, name, parts in _CONTAINERS:
            if isinstance(value, kind):
                return {name: [self.encode(part) for part in parts(value)]}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": "cuda"}
        if value is Ellipsis:
            return {"ellipsis": 0}
        raise NotJson(f"an argument of type {type(value).__name__}")

    def _tensor(self, tensor: torch.Tensor) -> Json:
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)]
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise NotJson("a tensor that is not strided")
        storage = tensor.untyped_storage()
        number = self._storages.setdefault(storage._cdata, len(self._storages))
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = [number, storage.nbytes() // tensor.element_size(), tensor.storage_offset()]
        document = {"tensor": len(self._tensors), "shape": list(tensor.shape), "dtype": dtype}
        if not tensor.is_contiguous() or place[1] != tensor.numel():
            document["stride"] = list(tensor.stride())
        if place != [number, tensor.numel(), 0] or number != len(self._storages) - 1:
            document["storage"] = place
        if tensor.requires_grad:
            document["grad"] = True
        self._tensors[id(tensor)] = {"same": len(self._tensors)}
        self._kept.append(tensor)
        return document


#: type, its name, its parts. Sizes are tuples.
_CONTAINERS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (tuple, "tuple", lambda value: value),
    (list, "list", lambda value: value),
    (dict, "dict", lambda value: [part for item in value.items() for part in item]),
    (slice, "slice", lambda value: (value.start, value.stop, value.step)),
)


class Decoder:
    """Makes the arguments of one call on the device, of values that nobody knows.

    On the stub driver all that is read back is zero: every mask selects nothing. A capture is told to take the same.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}
        self._tensors: list[torch.Tensor] = []

    def decode(self, document: Json) -> Any:
        """The value that ``document`` was made from, with new tensors on the device."""
        if not isinstance(document, dict):
            return document
        if "tensor" in document:
            return self._tensor(document)
        ((kind, content),) = document.items()
        if kind == "same":
            return self._tensors[content]
        if kind in ("tuple", "list", "dict", "slice"):
            parts = [self.decode(part) for part in content]
            if kind == "dict":
                return dict(zip(parts[::2], parts[1::2], strict=True))
            return parts if kind == "list" else tuple(parts) if kind == "tuple" else slice(*parts)
        if kind == "complex":
            return complex(*content)
        if kind == "torch":
            return getattr(torch, content)
        return {"device": torch.device("cuda"), "ellipsis": ...}[kind]

    def _tensor(self, document: Json) -> torch.Tensor:
        shape, dtype = document["shape"], getattr(torch, document["dtype"])
        elements = 1
        for size in shape:
            elements *= size
        number, length, offset = document.get("storage", (len(self._storages), elements, 0))
        if number not in self._storages:
            self._storages[number] = torch.empty(length, dtype=dtype, device="cuda")
        flat = self._storages[number]
        if flat.dtype != dtype:
            flat = flat.view(dtype)
        if "stride" in document:
            tensor = flat.as_strided(shape, document["stride"], offset)
        else:
            tensor = flat[offset : offset + elements].view(shape)
        tensor = tensor.detach()
        if document.get("grad"):
            tensor.requires_grad_()
        self._tensors.append(tensor)
        return tensor


def tensors_of(document: Json) -> Iterator[Json]:
    """The documents of the tensors in one of arguments."""
    if isinstance(document, dict):
        if "tensor" in document:
            yield document
        else:
            document = list(document.values())
    if isinstance(document, list):
        for part in document:
            yield from tensors_of(part)


def bytes_of(document: Json) -> int:
    """Bytes of the tensors in a document of arguments."""
    total = 0
    for tensor in tensors_of(document):
        size = getattr(torch, tensor["dtype"]).itemsize
        for length in tensor["shape"]:
            size *= length
        total += size
    return total


def stretched(document: Json, factor: int) -> Json:
    """The same arguments with every dimension of every tensor that is longer than 1 longer by ``factor``."""
    if isinstance(document, list):
        return [stretched(part, factor) for part in document]
    if not isinstance(document, dict):
        return document
    if "tensor" in document:
        return document | {"shape": [size * factor if size > 1 else size for size in document["shape"]]}
    return {key: stretched(value, factor) for key, value in document.items()}
