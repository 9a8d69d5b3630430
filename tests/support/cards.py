"""Cards as kernels see them, by their numbers."""

from __future__ import annotations

from typing import Any

from graphmem.capture.kernels.parts.script import Card
from graphmem.devices import described_device
from graphmem.units import GIB
from tests import places


def card_with(capability: tuple[int, int], sm_count: int, max_threads_per_sm: int, **used: Any) -> Card:
    """A card of 80 GiB under the PyTorch of the recordings; ``used`` are the other fields of :class:`Card`."""
    device = described_device("a card", capability, 80 * GIB, sm_count, max_threads_per_sm)
    return Card(device, **{"torch_version": places.PYTORCH_VERSION, **used})


HOPPER = card_with((9, 0), 132, 2048)
