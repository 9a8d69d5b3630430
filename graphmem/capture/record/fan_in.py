"""Which additions of gradients the autograd engine makes in place.

A tensor used several times gets several gradients, and the engine adds them up. It writes into the first one when it
holds the last reference to it and its storage and the pass is not recorded for another one (``create_graph``), except
under a dispatch mode, which every capture is (``torch/csrc/autograd/input_buffer.cpp``, ``accumulate`` and
``can_accumulate_inplace``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphmem.capture.kernels.parts.layout import is_dense
from graphmem.capture.torch_internals import FakeTensor, storage_use_count
from graphmem.capture.values.callers import called_by_engine


class FanIn:
    """Finds by reference counts whether nobody else holds the first gradient.

    The counts of that case, seen from a dispatch mode, are the same for every fan-in of one build of PyTorch.
    """

    def __init__(self) -> None:
        self.calibrating = False
        self.counts: list[tuple[int, int, int]] = []

    def calibrate(self) -> None:
        """Learn the counts from a fan-in whose gradients nobody holds; its mode must be active."""
        self.calibrating = True
        leaf = torch.empty(2, device="cuda", requires_grad=True)
        shared = leaf * 1.0
        (shared * 2.0 + shared * 3.0).sum().backward()
        del leaf, shared
        self.calibrating = False

    def adds_in_place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if eager mode would have written this engine addition into its first argument.

        References are counted: whoever calls this must hold as many as when the counts were learnt.
        """
        if kwargs or len(args) != 2 or torch.is_grad_enabled() or not called_by_engine():
            return False
        old, new = args
        if type(old) is not FakeTensor or not isinstance(new, FakeTensor) or old.shape != new.shape:
            return False
        if old.layout is not torch.strided or new.layout is not torch.strided:
            return False
        # Not a function of its own: the references that a Python call holds depend on whether it is inlined,
        # which it no longer is once torch.compile has set a frame evaluator. The same in ``written_views``.
        in_storage = storage_use_count(old.untyped_storage()._cdata)
        counts = (old._use_count(), in_storage, sys.getrefcount(old))
        if self.calibrating:
            self.counts.append(counts)
            return False
        if not self.counts or old.dtype != new.dtype:
            return False
        return counts == self.counts[0] and is_dense(old)
