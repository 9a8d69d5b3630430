"""Cards for a load: the machines of a table of prices, the cheapest first; without one, servers' cards by memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from graphmem.devices import Device, all_devices, device_named
from graphmem.devices.capabilities import reaches
from graphmem.devices.prices import COUNTS, Rental
from graphmem.errors import GraphmemError
from graphmem.serving.base import Engine, Question, Served
from graphmem.serving.fleet import LoadReport
from graphmem.serving.throughput import Throughput

#: Choices that are named.
_NAMED = 3
#: The oldest cards that are looked at where no prices name them: models are published in bfloat16, which they have.
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class CardChoice:
    """Cards that hold the load: how many, and how many requests one engine on them holds at once. ``price``: dollars an
    hour of all, None without a table of prices; ``name``: whose machine; ``engines``: how many share the load.
    ``speed``: tokens a second that each of its requests is expected to get, None where that is not known, and of a
    load over time, whose requests come and go; ``cost``: dollars that a million tokens of answers then cost."""

    gpu: str
    cards: int
    memory_bytes: int
    concurrency: float
    price: float | None = None
    name: str = ""
    engines: int = 1
    speed: float | None = None
    cost: float | None = None


@dataclass(frozen=True)
class Offer:
    """Cards that one engine can have."""

    device: Device
    cards: int
    price: float | None = None
    name: str = ""

    @property
    def memory_bytes(self) -> int:
        """Of all of them."""
        return self.device.capacity_bytes * self.cards


def offers(asked: Device, first: Served, rentals: Sequence[Rental]) -> list[Offer]:
    """The machines that can be rented, by their price; without any, cards of servers and those of the card that is
    asked about, by their memory, of cards with one size the first of the table. Weights have room in all of them."""
    least = first.weights_bytes * first.cards  # weights are shared out, not multiplied
    if rentals:
        rented = [Offer(device_named(one.gpu), one.count, one.price, one.name) for one in rentals]
        return [offer for offer in rented if offer.memory_bytes > least]
    found: dict[tuple[object, ...], Offer] = {}
    for card in all_devices():
        fits = card.is_server and reaches(card.compute_capability, _LEAST_CAPABILITY)
        if card.vendor == "NVIDIA" and (fits or card.name == asked.name):
            for cards in COUNTS:
                offer = Offer(card, cards)
                if offer.memory_bytes > least:
                    found.setdefault((card.capacity_bytes >> 30, cards, card.compute_capability), offer)
    return sorted(found.values(), key=lambda offer: (offer.memory_bytes, offer.cards))


def holding(
    engine: Engine, question: Question, offered: Sequence[Offer], held: Callable[[Served], float], load: float,
    busy: Callable[[Question, Served], Throughput | None], has_eager: bool,
) -> Iterator[CardChoice]:  # fmt: skip
    """The first offers on which one engine holds so many requests at once. ``held``: how many it does; ``busy``: how
    fast it is with them."""
    named = 0
    for offer in offered:
        asked = question.with_(device=offer.device, tensor_parallel_size=offer.cards)
        eager = asked.with_(enforce_eager=has_eager or question.enforce_eager)
        try:  # without CUDA graphs first, which is quick and holds no less
            served = engine.serve(eager)
            if served.refusal is None and held(served) >= load and asked != eager:
                served = engine.serve(asked)
            if served.refusal is not None or held(served) < load:
                continue
        except GraphmemError:
            continue
        yield _choice(offer, held(served), busy(asked, served))
        named += 1
        if named == _NAMED:
            return


def _choice(offer: Offer, held: float, speed: Throughput | None, engines: int = 1) -> CardChoice:
    priced = None if speed is None else replace(speed, price=offer.price).answers_cost
    return CardChoice(
        offer.device.name, engines * offer.cards, engines * offer.memory_bytes, held,
        None if offer.price is None else engines * offer.price, offer.name, engines,
        None if speed is None else speed.each, None if priced is None else priced.expected,
    )  # fmt: skip


def carrying(
    engine: Engine, question: Question, offered: Sequence[Offer], held: Callable[[Served], float],
    busy: Callable[[Question, Served], Throughput | None], follow: Callable[[Question, Served], LoadReport | None],
) -> tuple[CardChoice, ...]:  # fmt: skip
    """The cheapest ways to carry a load over time at a predicted speed, each with as many engines as it needs."""
    found: list[CardChoice] = []
    for offer in offered:
        if len(found) >= _NAMED and (offer.price or 0.0) >= (found[_NAMED - 1].price or 0.0):
            break
        asked = question.with_(device=offer.device, tensor_parallel_size=offer.cards)
        try:
            served = engine.serve(asked)
            report = None if busy(asked, served) is None else follow(asked, served)
        except GraphmemError:
            continue
        if report is not None and report.copies is not None:
            found.append(_choice(offer, held(served), None, report.copies))
            found.sort(key=lambda choice: choice.price or 0.0)
    return tuple(found[:_NAMED])
