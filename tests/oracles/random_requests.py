"""Random requests to an allocator, from a seed: for the recorders of TensorFlow's and of ONNX Runtime's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Profile:
    """Half of the requests are ``usual`` sizes, which meet at the edges of rounding and reuse freed chunks of the same
    size; the others lie between ``low`` and ``high``, drawn by their logarithm. All in bytes."""

    usual: tuple[int, ...]
    low: int
    high: int

    def draw(self, chance: random.Random) -> int:
        if chance.random() < 0.5:
            return chance.choice(self.usual)
        return round(self.low * (self.high / self.low) ** chance.random())


#: ``cnn``: outputs of ResNet-50's stages in float32 for one image and for sixteen.
PROFILES = {
    "small": Profile((1, 4, 100, 256, 257, 1000, 4096), 1, 64 << 10),
    "cnn": Profile((4, 64, 256, 802_816, 1_605_632, 3_211_264, 12_845_056), 4, 64 << 20),
    "big": Profile((4, 1 << 20, (1 << 20) + 1, 64 << 20, 256 << 20), 1 << 20, 600 << 20),
}


def random_requests(profile: str, seed: str, count: int, reserves: float = 0.0) -> list[list[Any]]:
    """``["a", ID, BYTES]`` and ``["f", ID]``, more of the former at first, then a plateau; sometimes all is freed.

    A share ``reserves`` of the requests is ``["R", ID, BYTES]``. One of a hundred asks for nothing.
    """
    chance = random.Random(seed)
    operations: list[list[Any]] = []
    live: list[int] = []
    for number in range(count):
        grows = 0.62 if number % 100 < 60 else 0.5
        if chance.random() < 0.015:
            operations += [["f", identifier] for identifier in live]
            live = []
        if not live or chance.random() < grows:
            size = 0 if chance.random() < 0.01 else PROFILES[profile].draw(chance)
            operations.append(["R" if chance.random() < reserves else "a", number, size])
            live.append(number)
        else:
            operations.append(["f", live.pop(chance.randrange(len(live)))])
    return operations + [["f", identifier] for identifier in live]
