"""The tensors that a loop collects on the host, where not all of its iterations are run.

``features.append(model(x).cpu())`` keeps nothing on the device, so such a loop may be left early. As long as the
collection stays on the host, nothing is lost; ``torch.cat(features).cuda()`` would be too small, and nothing would show
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphmem.capture.record.storages import Storages
from graphmem.capture.torch_internals import FakeTensor
from graphmem.capture.values.tensors import tensors_in
from graphmem.trace import Place


class Collected:
    """Host storages that hold a part of a loop's whole collection. ``reached_device``: whether one was copied to the
    device."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.storages: set[int] = set()  # indices of the trace
        self.reached_device = False

    def begin(self, first: int) -> None:
        """A loop whose first storage is ``first`` was left early: its tensors on the host are a part."""
        places = self._storages.builder.places
        alive = (ref.index for ref in self._storages.live.values())
        self.storages.update(index for index in alive if index >= first and places[index] is Place.HOST)

    def follow(self, args: Sequence[object], out: object) -> None:
        """An operator has returned ``out``: a result made of a part is one."""
        if self.reached_device or not any(self._index(tensor) in self.storages for tensor in tensors_in(args)):
            return
        for tensor in tensors_in((out,)):
            index = self._index(tensor)
            if index is None:
                continue
            if self._storages.builder.places[index] is Place.HOST:
                self.storages.add(index)
            else:
                self.reached_device = True

    def _index(self, tensor: torch.Tensor) -> int | None:
        ref = self._storages.of(tensor) if isinstance(tensor, FakeTensor) else None
        return None if ref is None else ref.index
