"""Python objects that processes exchange (``all_gather_object``, ``broadcast_object_list`` and their relatives).

PyTorch's own code runs: it pickles an object into a tensor of bytes, which goes through the same collectives as any
tensor. Two of its helpers are replaced: the legacy constructor by which it wraps the pickle would ask for the storage's
C++ device, and a pickle that is too large for its values to be followed must be found again. Tensors in an object have
no data to be pickled and go beside it: the tensor of bytes is smaller by theirs.
"""

from __future__ import annotations

import io
import pickle

import torch
import torch.distributed as dist

from graphmem.capture.patches import Patches
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import unset_fake_temporarily

_UNHEARD = "an object that another process sends is None: what it sends is not known"


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self._tensors.append(obj)
        return len(self._tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number].detach().clone()


def patch_objects(patches: Patches, book: Recorder) -> None:
    """Objects become tensors of bytes on the pretended device, and objects again where the bytes are known."""
    values = book.values
    tensors: list[torch.Tensor] = []
    large: dict[int, bytes] = {}  # the last pickle of that many bytes, where it is too large to be followed

    def object_to_tensor(obj: object, device: object, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = io.BytesIO()
        _Pickler(buffer, tensors).dump(obj)
        data = bytearray(buffer.getvalue())
        with unset_fake_temporarily():
            on_host = torch.frombuffer(data, dtype=torch.uint8).clone()  # a buffer could not be resized
        on_device = on_host.to(device)
        if values.of(on_device) is None:
            large[len(data)] = bytes(data)
        return on_device, torch.tensor([len(data)], dtype=torch.int64).to(device)

    def tensor_to_object(tensor: torch.Tensor, tensor_size: torch.Tensor, _: object) -> object:
        on_host, size = tensor.cpu(), int(tensor_size)
        known = values.of(on_host)
        if known is None:
            data = large.get(size)
        else:
            with unset_fake_temporarily():
                data = known.numpy().tobytes()[:size]
        if data is None:
            book.note_once(_UNHEARD)
            return None
        return _Unpickler(io.BytesIO(data), tensors).load()

    functions = {"_object_to_tensor": object_to_tensor, "_tensor_to_object": tensor_to_object}
    patches.table(dist.distributed_c10d, functions)
