"""Random sequences of allocator events, the same from the same arguments.

An event is a list: ``["a", id, bytes, stream]`` allocate, ``["f", id]`` free, ``["r", id, stream]`` record_stream,
``["s"]`` synchronize, ``["e"]`` empty_cache, ``["p", fraction]`` set_per_process_memory_fraction, ``["c", text]``
other settings of the allocator.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from graphmem.units import KIB, MIB

Event = list[Any]
Block = tuple[int, int]  # id, bytes

#: Sizes about the allocator's boundaries.
EDGES = [
    *(1, 511, 512, 513, 1024, MIB - 512, MIB - 1, MIB, MIB + 1, MIB + 512, 2 * MIB - 512, 2 * MIB, 2 * MIB + 1),
    *(10 * MIB - 512, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 12 * MIB, 19 * MIB, 20 * MIB - 512, 20 * MIB),
    *(20 * MIB + 512, 21 * MIB, 22 * MIB, 64 * MIB, 127 * MIB, 128 * MIB, 128 * MIB + 512, 129 * MIB, 148 * MIB),
    *(149 * MIB, 200 * MIB, 256 * MIB, 300 * MIB),
]
RANGES = {
    "tiny": (1, 64 * KIB),
    "small": (64 * KIB, MIB),
    "mid": (MIB, 10 * MIB),
    "big": (10 * MIB, 200 * MIB),
    "huge": (200 * MIB, 1500 * MIB),
}
#: How often each kind of size is drawn: edge, then the ranges in order.
MIXES = {
    "net": (4, 26, 20, 28, 20, 2),
    "small": (6, 60, 30, 4, 0, 0),
    "large": (6, 4, 6, 30, 44, 10),
    "edge": (90, 4, 3, 2, 1, 0),
}


@dataclass(frozen=True)
class Wanted:
    """Arguments of a sequence. ``kind``: ``random``, ``net`` (training steps) or ``grow`` (growing buffers); ``cap``:
    the most MiB alive; ``empty``, ``record``, ``sync``, ``change``: chances of these events; ``settings``: the texts
    that a change takes in turn."""

    kind: str
    seed: int
    length: int
    cap: int
    mix: str = "net"
    streams: int = 1
    empty: float = 0.0
    record: float = 0.0
    sync: float = 0.0
    fraction: float | None = None
    change: float = 0.0
    settings: tuple[str, ...] = ()


def make(wanted: Wanted) -> list[Event]:
    """The events."""
    sequence = _Sequence(wanted)
    {"random": sequence.random, "net": sequence.net, "grow": sequence.grow}[wanted.kind]()
    return sequence.events[: wanted.length]


def peak_bytes(events: list[Event]) -> int:
    """Most bytes asked for at once."""
    live: dict[int, int] = {}
    total = peak = 0
    for event in events:
        if event[0] == "a":
            live[event[1]] = event[2]
            total += event[2]
            peak = max(peak, total)
        elif event[0] == "f":
            total -= live.pop(event[1])
    return peak


class _Sequence:
    """Draws in a fixed order: goldens were made from these draws, so nothing here may be drawn earlier or later."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        key = (wanted.kind, wanted.seed, wanted.length, wanted.cap, wanted.streams, wanted.mix)
        self.draw = random.Random("/".join(map(str, key)))
        self.cap = wanted.cap * MIB
        self.events: list[Event] = [] if wanted.fraction is None else [["p", wanted.fraction]]
        self.live: list[Block] = []  # in the order of allocation
        self.total = 0
        self.number = 0
        self.settings = cycle(wanted.settings)

    @property
    def more(self) -> bool:
        return len(self.events) < self.wanted.length

    def size(self, mix: str | None = None) -> int:
        kind = self.draw.choices(("edge", *RANGES), MIXES[mix or self.wanted.mix])[0]
        if kind == "edge":
            return self.draw.choice(EDGES)
        low, high = RANGES[kind]
        size = int(low * (high / low) ** self.draw.random())
        if self.draw.random() < 0.5:
            size = max(1, size // 4096 * 4096)
        return max(1, size)

    def alloc(self, size: int) -> Block:
        self.number += 1
        self.events.append(["a", self.number, size, self.draw.randrange(self.wanted.streams)])
        self.live.append((self.number, size))
        self.total += size
        return self.number, size

    def free(self, position: int) -> None:
        number, size = self.live.pop(position)
        self.total -= size
        if self.wanted.record and self.wanted.streams > 1 and self.draw.random() < self.wanted.record:
            for _ in range(self.draw.choice((1, 1, 2))):
                self.events.append(["r", number, self.draw.randrange(self.wanted.streams)])
        self.events.append(["f", number])

    def free_block(self, block: Block) -> None:
        self.free(self.live.index(block))

    def between(self, often: int = 1) -> None:
        if self.wanted.empty and self.draw.random() < self.wanted.empty * often:
            self.events.append(["e"])
        if self.wanted.sync and self.draw.random() < self.wanted.sync * often:
            self.events.append(["s"])
        if self.wanted.change and self.draw.random() < self.wanted.change * often:
            self.events.append(["c", next(self.settings)])

    def random(self) -> None:
        while self.more:
            chance = 0.62 if self.total < self.cap * 0.5 else 0.5
            if self.live and (self.total > self.cap or self.draw.random() > chance):
                self.free(self._victim())
            else:
                self.alloc(self.size())
            self.between()

    def _victim(self) -> int:
        which = self.draw.random()
        if which < 0.45:
            return len(self.live) - 1 - min(len(self.live) - 1, int(self.draw.expovariate(0.5)))
        return self.draw.randrange(len(self.live)) if which < 0.9 else 0

    def net(self) -> None:
        """Parameters, then steps: forward keeps activations, backward frees them in reverse and makes gradients."""
        layers = self.draw.randint(12, 60)
        menu = [self.size() for _ in range(self.draw.randint(6, 25))]
        parameters = [
            self.alloc(size)
            for size in (self.draw.choice(menu) for _ in range(layers))
            if self.total + size < self.cap * 0.25
        ]
        step = 0
        while self.more:
            step += 1
            scale = self.draw.choice((1, 1, 1, 0.5, 0.93, 1.1)) if step > 1 else 1  # sequence lengths vary
            gradients = self._backward(self._forward(layers, menu, scale), parameters, menu, scale)
            if step == 1:  # the optimizer's states
                for _, size in parameters:
                    for _ in range(2):
                        if self.total + size <= self.cap:
                            self.alloc(size)
            for _, size in parameters[:10]:
                if self.total + size <= self.cap:
                    self.free_block(self.alloc(size))
            for block in gradients:
                self.free_block(block)
            self.between(200)

    def _forward(self, layers: int, menu: list[int], scale: float) -> list[Block]:
        kept: list[Block] = []
        for _ in range(layers):
            passing: list[Block] = []
            for _ in range(self.draw.randint(1, 5)):
                size = max(1, int(self.draw.choice(menu) * scale))
                if self.total + size > self.cap * 0.8:
                    continue
                block = self.alloc(size)
                (kept if self.draw.random() < 0.6 else passing).append(block)
            if self.draw.random() < 0.3:
                self.draw.shuffle(passing)
            else:
                passing.reverse()
            for block in passing:
                self.free_block(block)
        return kept

    def _backward(self, kept: list[Block], parameters: list[Block], menu: list[int], scale: float) -> list[Block]:
        gradients: list[Block] = []
        for index, block in enumerate(reversed(kept)):
            passing: list[Block] = []
            for _ in range(self.draw.randint(0, 3)):
                size = max(1, int(self.draw.choice(menu) * scale))
                if self.total + size <= self.cap:
                    passing.append(self.alloc(size))
            if index < len(parameters) and self.total + parameters[-1 - index][1] <= self.cap:
                gradients.append(self.alloc(parameters[-1 - index][1]))
            self.free_block(block)
            for other in passing:
                self.free_block(other)
        return gradients

    def grow(self) -> None:
        """Buffers that grow step by step, as in generation."""
        count = self.draw.randint(3, 8)
        buffers: list[Block | None] = [None] * count
        sizes = [self.size() for _ in range(count)]
        while self.more:
            for index in range(count):
                sizes[index] = int(sizes[index] * (1 + self.draw.random() * 0.05)) + 512
                if sizes[index] * 2 > self.cap / count:
                    sizes[index] = self.size()
                block = self.alloc(sizes[index])
                before = buffers[index]
                if before is not None:
                    self.free_block(before)
                buffers[index] = block
                for _ in range(self.draw.randint(0, 3)):
                    self.alloc(self.size("small"))
                    self.free(len(self.live) - 1)
