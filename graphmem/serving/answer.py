"""The number of requests that a model serves at once: an engine's answer, and conclusions from several.

Every figure is an answer of its own: longer contexts, other cards and changed options are asked for, not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from graphmem.answering.runs import Progress, silent
from graphmem.devices import DEFAULT_DEVICE, Device, custom_device, device_named
from graphmem.devices.prices import Rental, price_of, rentals_in
from graphmem.errors import UsageError
from graphmem.reports import Answer
from graphmem.reports.document import Document
from graphmem.serving import engine_named
from graphmem.serving.base import Engine, Question, Served, for_searches
from graphmem.serving.changes import Change, beside, changes_of, cross_check
from graphmem.serving.choosing import CardChoice, carrying, holding, offers
from graphmem.serving.configurations import model_named
from graphmem.serving.document import of_serving
from graphmem.serving.finding import found
from graphmem.serving.fleet import LoadReport, loaded, unscheduled
from graphmem.serving.lengths import Quantiles, at_once, held, quantiles_of
from graphmem.serving.load_options import OverTime
from graphmem.serving.loads import HOUR, Load, busiest
from graphmem.serving.over_time import Speed, predicted
from graphmem.serving.throughput import Throughput, line_of, throughput
from graphmem.units import parse_bytes

#: The engine that is captured, by analyses of its own: it stands above the others.
CAPTURED = "hf"
#: Tokens of the shortest requests that are looked at, of which doubles follow.
_SHORTEST = 256


@dataclass(frozen=True)
class ServingReport(Answer):
    """An engine's answer with the question. ``lengths`` are quantiles of requests' lengths in tokens."""

    served: Served
    lengths: tuple[tuple[float, int], ...] = ()
    concurrency_at_lengths: float | None = None
    load: float | None = None
    choices: tuple[CardChoice, ...] = ()
    changes: tuple[Change, ...] = ()
    found: tuple[str, int] | None = None
    assumptions: tuple[str, ...] = field(default=())
    over_time: LoadReport | None = None
    throughput: Throughput | None = None

    def document(self, *, details: bool = False) -> Document:
        """The answer of ``graphmem serve``."""
        return of_serving(self)

    def __repr__(self) -> str:
        return (
            f"<ServingReport of {self.served.model}: {self.served.kv_cache.blocks:,} blocks on each {self.served.gpu}>"
        )

    @property
    def starts(self) -> bool:
        """True if the engine starts."""
        return self.served.refusal is None

    @property
    def holds(self) -> bool:
        """True if the engine starts and runs all requests of ``load`` at once; without a load, if it starts."""
        most = self.served.settings["max_num_seqs"]
        asked = self.load or 0
        return self.starts and self.concurrency >= asked and (most is None or most >= asked)

    @property
    def concurrency(self) -> float:
        """Requests in the cache at once: at the lengths asked about, else at the full one."""
        at_lengths = self.concurrency_at_lengths
        return self.served.kv_cache.concurrency if at_lengths is None else at_lengths

    @property
    def by_length(self) -> tuple[tuple[int, float], ...]:
        """(tokens of a request, such requests in the cache at once), of lengths that double up to the longest that it
        holds; empty where the engine does not start, or gives every request as much."""
        served, longest = self.served, min(self.served.kv_cache.longest, int(self.served.settings["max_model_len"]))
        if served.refusal is not None or longest <= _SHORTEST:
            return ()
        lengths = [_SHORTEST << power for power in range(longest.bit_length()) if _SHORTEST << power < longest]
        found = tuple((length, served.concurrency_at([length])) for length in (*lengths, longest))
        return found if len({requests for _, requests in found}) > 1 else ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Sizes are bytes."""
        served = self.served
        return {
            "schema": "graphmem.serving/1",
            "engine": served.engine,
            "engine_version": served.version,
            "basis": served.basis,
            "model": served.model,
            "gpu": served.gpu,
            "cards": served.cards,
            "starts": self.starts,
            "refusal": served.refusal,
            "settings": dict(served.settings),
            "total_bytes": served.total_bytes,
            "requested_bytes": served.requested_bytes,
            "weights_bytes": served.weights_bytes,
            "waterfall": [asdict(part) for part in served.parts],
            "kv_cache": asdict(served.kv_cache),
            "cuda_graphs_bytes": served.graphs_bytes,
            "fragmentation_bytes": served.fragmentation_bytes,
            "outside": [asdict(figure) for figure in served.outside],
            "lengths": {f"p{quantile:g}": length for quantile, length in self.lengths},
            "concurrency_at_lengths": self.concurrency_at_lengths,
            "by_length": [{"tokens": length, "requests": requests} for length, requests in self.by_length],
            "load": self.load,
            "cards_for_load": [asdict(choice) for choice in self.choices],
            "changes": [asdict(change) for change in self.changes],
            "found": None if self.found is None else {self.found[0]: self.found[1]},
            "notes": list(served.notes),
            "assumptions": list(self.assumptions),
            "over_time": None if self.over_time is None else self.over_time.to_dict(),
            "throughput": None if self.throughput is None else self.throughput.to_dict(),
        }


def serve(
    model: str,
    *,
    gpu: str | Device | None = None,
    gpu_memory: int | str | None = None,
    device: str | Device | None = None,
    engine: str = "vllm",
    engine_version: str | None = None,
    lengths: Mapping[float, int] | str | None = None,
    load: float | None = None,
    find: str | None = None,
    advice: bool = True,
    prices: str | Path | None = None,
    price: float | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> ServingReport:
    """The memory that an inference engine leaves for the KV cache of ``model`` on a card, and the requests it holds.

    ``model``: a ``config.json``, a folder with one, a known name, or a GGUF file. ``options`` are fields of
    :class:`graphmem.serving.base.Question`, by vLLM's names (``tensor_parallel_size``, ``max_model_len``, …), and of
    :class:`graphmem.serving.load_options.OverTime`, for a load over time (``arrivals="5/s"``, ``trace``, …:
    :attr:`ServingReport.over_time`); those that only another ``engine`` has are pairs of text:
    ``arguments=(("n_gpu_layers", "20"),)``. docs/OPTIONS.md describes all of them.

    ``lengths``: quantiles of requests' lengths in tokens, ``{50: 800, 99: 6000}`` or ``"p50=800,p99=6000"``; of a load
    over time those of prompts. ``load``: so many requests at once, for which cards are looked for. ``find``: the
    largest ``max-model-len`` or ``max-num-seqs``, or the fewest cards (``tp``), and the answer there. ``advice``:
    whether changes are looked for. ``say`` is told how far it is.

    ``prices``: a CSV file of machines that can be rented, with columns gpu, count and price (dollars an hour), or a
    TOML file of cards' prices; cards for a load are these, the cheapest first. ``price``: dollars an hour of this
    answer's cards. With one of them tokens have a price (:attr:`ServingReport.throughput`).

    Raises :class:`graphmem.errors.GraphmemError` for what cannot be answered; an engine that would refuse to start for
    want of memory is an answer (:attr:`ServingReport.starts`).
    """
    of_a_load = {one.name: options.pop(one.name) for one in fields(OverTime) if one.name in options}
    wanted, quantiles = OverTime(**of_a_load), quantiles_of("lengths", lengths)
    if price is not None and not 0 < price < math.inf:
        raise UsageError(f"--price {price:g}; accepted: a number above 0")
    query = _Query(
        _engine(engine, say or silent), say or silent, quantiles, load, price, prices,
        () if prices is None else rentals_in(Path(prices)), wanted, wanted.load(quantiles),
    )  # fmt: skip
    if query.over_time is not None and getattr(query.engine, "searches", False):
        raise UsageError(unscheduled(query.engine.title))
    card = query.card(gpu, device, gpu_memory)
    version = _version(engine_version) if engine_version else query.installed_version()
    return query.report(_question(model, card, version, options), find, advice)


def _engine(name: str, say: Progress) -> Engine:
    """The engine of this name. Raises :class:`UsageError`."""
    if name.strip().lower() == CAPTURED:
        from graphmem.serving import generating

        return generating.Transformers(say)
    return engine_named(name, (CAPTURED,))


def _question(model: str, card: Device, version: tuple[int, int] | None, options: Mapping[str, Any]) -> Question:
    known = {one.name for one in fields(Question)} - {"model", "device", "version"}
    unknown = sorted(set(options) - known)
    if unknown:
        accepted = sorted((*known, *(one.name for one in fields(OverTime))))
        raise UsageError(f"unknown option {unknown[0]!r}; accepted: {', '.join(accepted)}")
    return Question(model_named(model), card, version=version, **options)


def _version(text: str) -> tuple[int, int]:
    numbers = text.removeprefix("v").split(".")
    if len(numbers) < 2 or not all(number.isdigit() and len(number) < 5 for number in numbers[:2]):
        raise UsageError(f"--engine-version {text!r} is no version; write for example 0.32")
    return int(numbers[0]), int(numbers[1])


@dataclass
class _Query:
    """What is asked of each answer of the engine besides, and what is assumed on the way to it. ``wanted`` and
    ``over_time`` are the load over time; ``rentals`` the machines of the file ``prices``."""

    engine: Engine
    say: Progress
    lengths: Quantiles
    load: float | None
    price: float | None
    prices: str | Path | None
    rentals: Sequence[Rental]
    wanted: OverTime
    over_time: Load | None
    is_any_card: bool = False
    assumptions: list[str] = field(default_factory=list)

    def card(self, gpu: str | Device | None, device: str | Device | None, memory: int | str | None) -> Device:
        """The card that is named, or has so much memory; the usual one where there is neither."""
        if gpu is not None and device is not None:
            raise UsageError("gpu and device mean the same; give one of them")
        card = device if gpu is None else gpu
        if isinstance(card, Device):
            return card
        if memory is not None:
            return custom_device(parse_bytes(memory) if isinstance(memory, str) else memory, like=card)
        if card is None:
            self.is_any_card = True
            self.assumptions.append(f"no GPU was named: {DEFAULT_DEVICE}")
        return device_named(card or DEFAULT_DEVICE)

    def installed_version(self) -> tuple[int, int] | None:
        """The engine's version in this environment, where it is installed and followed; None: the newest."""
        title = self.engine.title
        try:
            found = metadata.version(self.engine.name)
        except metadata.PackageNotFoundError:
            return None
        numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
        if len(numbers) < 2 or numbers > _version(self.engine.newest):
            self.assumptions.append(f"{title} {found} is installed, and followed as {self.engine.newest}")
            return None
        self.assumptions.append(f"{title} {found} is installed: followed as that")
        return numbers[0], numbers[1]

    def report(self, question: Question, find: str | None, advice: bool) -> ServingReport:
        """The answer to the question, to what is found of it, or about the machine to rent."""
        chooses = self.load is not None or bool(self.rentals)
        searched = for_searches(self.engine, question) if chooses or find is not None else question
        named = None
        if find is not None:
            question, named = found(self.engine, searched, find, self.lengths, self.load)
            searched = question
        first = self.engine.serve(searched) if chooses else None
        choices = () if first is None else self._choices(searched, first)
        if self.is_any_card and self.rentals and choices and find is None:
            question = self._on_the_cheapest(question, choices[0])
        served = first if first is not None and question == searched else self._served(question)
        self._look_up_price(question.device, served.cards)
        other = beside(self.engine, question, served) if advice else None
        self._note(served, choices, None if other is None else other[1])
        return ServingReport(
            served=served,
            lengths=self.lengths,
            concurrency_at_lengths=held(served, self.lengths) if self.lengths else None,
            load=self.load,
            choices=choices,
            changes=() if other is None else changes_of(self.engine, *other),
            found=named,
            assumptions=tuple(self.assumptions),
            over_time=self._follow(question, served),
            throughput=self._busy(question, served),
        )

    def _choices(self, question: Question, first: Served) -> tuple[CardChoice, ...]:
        """Cards that hold the load at once, or, of machines that can be rented, those that carry it over time at a
        speed that is not given."""
        at_once = partial(held, quantiles=self.lengths)
        offered = offers(question.device, first, self.rentals)
        if self.load is not None:
            if getattr(self.engine, "searches", False):  # whether so many run, not how many do
                length = int(first.settings["max_model_len"])
                question = question.with_(max_num_seqs=math.ceil(self.load), max_model_len=length)
            has_eager = "enforce_eager" in first.settings
            return tuple(holding(self.engine, question, offered, at_once, self.load, self._busy, has_eager))
        if self.wanted.speed is not None or not self.rentals:
            return ()
        return carrying(self.engine, question, offered, at_once, self._busy, partial(self._follow, hour=True))

    def _on_the_cheapest(self, question: Question, best: CardChoice) -> Question:
        """The question about the machine to rent, which no card that was named stands for."""
        self.assumptions[0] = f"no GPU was named: the cheapest of {self.prices} that does, {best.cards} x {best.gpu}"
        return question.with_(device=device_named(best.gpu), tensor_parallel_size=best.cards // best.engines)

    def _served(self, question: Question) -> Served:
        """The engine's answer; whoever waits for it is told."""
        waits_for: Callable[[Question], str | None] = getattr(self.engine, "waits_for", lambda question: None)
        if (what := waits_for(question)) is not None:
            self.say(what)
        return self.engine.serve(question)

    def _look_up_price(self, device: Device, cards: int) -> None:
        """The price of these cards, where only the file has it."""
        if self.price is None and self.rentals:
            self.price = price_of(self.rentals, device.name, cards)
            if self.price is None:
                self.assumptions.append(f"{self.prices} has no price of {cards} x {device.name}")

    def _note(self, served: Served, choices: Sequence[CardChoice], other: Served | None) -> None:
        """What is assumed for this answer, beside which an ``other`` one has the advice."""
        given = (("lengths", self.lengths), ("output-lengths", self.wanted.output_lengths))
        self.assumptions += [
            f"every request is taken for as long as --{name} says: a second quantile spreads them"
            for name, quantiles in given
            if len(quantiles) == 1
        ]
        if self.rentals and self.over_time is not None and self.load is None and not choices:
            at_speed = ", at a given speed" if self.wanted.speed else ""
            self.assumptions.append(f"no machine of {self.prices} is known to carry this load{at_speed}")
        longest = int(served.settings["max_model_len"])
        if any(length > longest for _, length in self.lengths):
            self.assumptions.append(
                f"at once, requests of more than {longest:,} tokens, which are refused, count as so long"
            )
        if served.basis == "engine":  # which is the installed one, whatever is followed
            self.assumptions = [one for one in self.assumptions if not one.startswith(self.engine.title)]
        if other is not None and other is not served:
            self.assumptions.append(cross_check(served, other))

    def _busy(self, question: Question, served: Served) -> Throughput | None:
        """The speed of the engine with as many requests as are asked about."""
        line = line_of(self.engine, question, served)
        return None if line is None else throughput(line, served, *at_once(served, self.lengths, self.load), self.price)

    def _follow(self, question: Question, served: Served, hour: bool = False) -> LoadReport | None:
        """The load on the engine, or its busiest ``hour`` on one kind of engine; None where it does not start, which is
        the answer."""
        if self.over_time is None or served.refusal is not None:
            return None
        line = line_of(self.engine, question, served)
        speed = self.wanted.speed or (Speed() if line is None else predicted(line))
        requests, seconds = self.over_time.requests(int(served.settings["max_model_len"])), self.over_time.seconds
        wanted = replace(self.wanted, disaggregated=False, autoscale=None) if hour else self.wanted
        if hour and seconds > HOUR:
            requests, seconds = busiest(requests), HOUR
        return loaded(served, requests, seconds, speed, wanted, self.over_time.described, self.say, self.price)
