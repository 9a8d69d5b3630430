"""Work spaces of cuDNN on the card: asked of an installed cuDNN, else estimated."""

from __future__ import annotations

from functools import cache
from math import prod

from graphmem.cudnn.library import Cudnn
from graphmem.cudnn.plans import ITEM_BYTES, Convolution
from graphmem.cudnn.predicted.recurrent import reserve_bytes, workspace_bytes
from graphmem.cudnn.recurrent import Network
from graphmem.devices import Device


class CudnnSpaces:
    """Workspaces by question, each asked once. ``estimated``: how many were not asked of cuDNN."""

    def __init__(self, card: Device, cudnn: Cudnn | None) -> None:
        self._card, self._cudnn = card, cudnn
        self.estimated = 0
        self.convolution, self.recurrent = cache(self.convolution), cache(self.recurrent)  # type: ignore[method-assign]

    def convolution(self, asked: Convolution, *, fused: bool = False) -> tuple[int, ...]:
        """Workspaces of the plans that are tried out, in their order. ``fused``: with bias and activation. Without
        cuDNN: copies of all three tensors, which plans make whose kernels want another layout or a narrower type (see
        ``docs/modeling/convolutions.md``)."""
        answer = self._cudnn.tried_out(asked, fused=fused) if self._cudnn is not None else ()
        if answer:
            return answer
        self.estimated += 1
        copies = sum(prod(shape) for shape in (asked.input, asked.filter, asked.output)) * ITEM_BYTES[asked.dtype]
        return 0 if asked.channels_last else copies, copies

    def recurrent(self, network: Network, training: bool) -> tuple[int, int]:
        """Work and reserve space."""
        answer = self._cudnn.recurrent_spaces(network, training) if self._cudnn is not None else None
        if answer is not None:
            return answer
        self.estimated += 1
        capability = self._card.compute_capability or (9, 0)
        return workspace_bytes(network, capability, training=training), reserve_bytes(network)
