"""Addresses: every storage that holds bytes has one of its own, as on a card, though there is nothing at it.

Frameworks compare addresses (is this parameter still a view of the flat one, do two weights share memory) and look
whether they are aligned; the caching allocator's are multiples of 512 bytes (``kMinBlockSize``,
c10/cuda/CUDACachingAllocator.h). A storage that is made to hold another number of bytes gets another address, one
without bytes has 0. C++ code that asks for the memory of a fake tensor is refused as before.
"""

from __future__ import annotations

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import FakeTensor

_ALIGNMENT = 512
#: Where the first storage lies: no program has memory of its own there.
_FIRST = 1 << 46


def patch_addresses(patches: Patches) -> None:
    """Give the storages of fake tensors addresses."""
    storage_address, tensor_address = torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr
    given: dict[int, tuple[int, int]] = {}  # a storage's implementation -> its bytes, its address
    end = _FIRST

    def of_storage(self: torch.UntypedStorage) -> int:
        nonlocal end
        if self.device.type != "meta":
            address: int = storage_address(self)
            return address
        bytes_ = self.nbytes()
        if not bytes_:
            return 0
        known = given.get(self._cdata)
        if known is None or known[0] != bytes_:
            known = given[self._cdata] = bytes_, end
            end += -(-bytes_ // _ALIGNMENT) * _ALIGNMENT
        return known[1]

    def of_tensor(self: torch.Tensor) -> int:
        if not isinstance(self, FakeTensor):
            address: int = tensor_address(self)
            return address
        if not self.numel() or self.is_meta:
            return 0
        offset: int = self.storage_offset() * self.element_size()
        return of_storage(self.untyped_storage()) + offset

    patches.set(torch.UntypedStorage, "data_ptr", of_storage)
    patches.set(torch.Tensor, "data_ptr", of_tensor)
