"""The number of requests that a model serves at once: an engine's answer, and conclusions from several.

Every figure is an answer of its own: longer contexts, other cards and changed options are asked for, not scaled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from graphmem.answering.runs import Progress, silent
from graphmem.base.searching import largest
from graphmem.devices import DEFAULT_DEVICE, Device, custom_device, device_named
from graphmem.devices.prices import COUNTS, Rental, price_of, rentals_in
from graphmem.errors import UsageError
from graphmem.reports import Answer
from graphmem.reports.document import Document
from graphmem.serving import engine_named, loads
from graphmem.serving.base import Engine, Question, Served, for_searches
from graphmem.serving.choosing import CardChoice, carrying, holding, offers
from graphmem.serving.configurations import model_named
from graphmem.serving.document import of_serving
from graphmem.serving.fleet import LoadReport, Wanted, loaded, unscheduled
from graphmem.serving.over_time import Speed, predicted
from graphmem.serving.throughput import Throughput, line_of, throughput
from graphmem.units import parse_bytes

#: The engine that is captured, by analyses of its own: it stands above the others.
CAPTURED = "hf"
#: What ``find`` looks for.
FOUND = ("max-model-len", "max-num-seqs", "tp")
#: How many requests a distribution of lengths is looked at by.
_SAMPLES = 200
#: Tokens of the shortest requests that are looked at, of which doubles follow.
_SHORTEST = 256
#: Changes that bring less than this part of the tokens are not worth a line.
_LEAST_GAIN = 0.01
_MOST_SEQS = 1 << 16


@dataclass(frozen=True)
class Change:
    """An option that would change the number of tokens, and by how much."""

    option: str
    tokens: int
    gained_tokens: int


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
    arrivals: float | str | None = None,
    output_lengths: Mapping[float, int] | str | None = None,
    duration: float | str = "1h",
    trace: str | Path | None = None,
    shared_prefix: int = 0,
    step_time: float | str | None = None,
    tokens_per_second: float | None = None,
    max_wait: float | str = "10s",
    max_tpot: float | str | None = None,
    disaggregated: bool = False,
    autoscale: float | str | None = None,
    startup: float | str = "5min",
    kv_links: str = "50,32",
    prices: str | Path | None = None,
    price: float | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> ServingReport:
    """The memory that an inference engine leaves for the KV cache of ``model`` on a card, and the requests it holds.

    ``model``: a ``config.json``, a folder with one, a known name, or a GGUF file. ``options`` are those of
    :class:`graphmem.serving.base.Question`, by vLLM's names (``tensor_parallel_size``, ``max_model_len``, …); those
    that only another ``engine`` has are pairs of text: ``arguments=(("n_gpu_layers", "20"),)``.
    ``lengths``: quantiles of requests' lengths in tokens, ``{50: 800, 99: 6000}`` or ``"p50=800,p99=6000"``. ``load``:
    so many requests at once, for which cards are looked for. ``find``: the largest ``max-model-len`` or
    ``max-num-seqs``, or the fewest cards (``tp``), and the answer there. ``advice``: whether changes are looked for.

    A load over time (:attr:`ServingReport.over_time`): ``arrivals`` a second, as a number or ``"300/min"``, over
    ``duration`` seconds or ``"1h"``; ``lengths`` are then those of prompts, and ``output_lengths`` of answers. Or
    ``trace``, a CSV file or Mooncake's JSON lines (:func:`graphmem.serving.loads.read`). ``shared_prefix``: tokens that
    all prompts begin with. A step takes ``step_time`` (seconds or ``"30ms"``), or its tokens at ``tokens_per_second``
    where that is longer; with neither, what the roofline says. ``max_wait`` and ``max_tpot``: what waiting, and what
    seconds a token, the 99th percentile of requests bears, by which copies are counted. ``disaggregated``: engines that
    only prefill beside others that only decode. ``autoscale``: an interval after which the number of copies may change,
    each started ``startup`` before. ``kv_links``: GB/s of a card to other engines and to its host. ``say`` is told how
    far it is.

    ``prices``: a CSV file of machines that can be rented, with columns gpu, count and price (dollars an hour), or a
    TOML file of cards' prices; cards for a load are these, the cheapest first. ``price``: dollars an hour of this
    answer's cards. With one of them tokens have a price (:attr:`ServingReport.throughput`).

    Raises :class:`graphmem.errors.GraphmemError` for what cannot be answered; an engine that would refuse to start for
    want of memory is an answer (:attr:`ServingReport.starts`).
    """
    report = say or silent
    chosen = _engine(engine, report)
    assumptions: list[str] = []
    card = _card_asked(gpu, device, gpu_memory, assumptions)
    is_unnamed = bool(assumptions)
    wanted = _wanted(max_wait, max_tpot, disaggregated, autoscale, startup, kv_links)
    asked = _Asked(
        chosen, report, _quantiles(lengths), load, price, _speed(step_time, tokens_per_second), wanted,
        loads.asked(
            arrivals, _quantiles(lengths), _quantiles(output_lengths), duration, None if trace is None else Path(trace),
            shared_prefix,
        ),
    )  # fmt: skip
    if asked.over_time is None and wanted != Wanted():
        raise UsageError(
            "--max-wait, --max-tpot, --disaggregated, --autoscale, --startup and --kv-links are of a load over time: "
            "give --arrivals, for example 5/s, or --trace"
        )
    for name, given in (("lengths", lengths), ("output-lengths", output_lengths)):
        if len(_quantiles(given)) == 1:
            assumptions.append(f"every request is taken for as long as --{name} says: a second quantile spreads them")
    rentals = rentals_in(Path(prices)) if prices is not None else ()
    if price is not None and not 0 < price < math.inf:
        raise UsageError(f"--price {price:g}; accepted: a number above 0")
    if asked.over_time is not None and getattr(chosen, "searches", False):  # before it is captured
        raise UsageError(unscheduled(chosen.title))
    question = _question(model, card, engine_version or _installed(chosen, assumptions), options)
    is_search = find is not None or load is not None or bool(rentals)
    searched = for_searches(chosen, question) if is_search else question
    found = None
    if find is not None:
        question, found = _search(chosen, searched, find, asked.quantiles, load)
        searched = question
    first = chosen.serve(searched) if load is not None or rentals else None
    choices = () if first is None else _choices(asked, searched, first, rentals)
    if is_unnamed and rentals and choices and find is None:  # the answer is about the machine to rent
        best = choices[0]
        question = question.with_(device=device_named(best.gpu), tensor_parallel_size=best.cards // best.engines)
        assumptions[0] = f"no GPU was named: the cheapest of {prices} that does, {best.cards} x {best.gpu}"
    elif rentals and asked.over_time is not None and load is None and not choices:
        at_speed = ", at a given speed" if asked.speed else ""
        assumptions.append(f"no machine of {prices} is known to carry this load{at_speed}")
    waits_for: Callable[[Question], str | None] | None = getattr(chosen, "waits_for", None)
    if waits_for is not None and (what := waits_for(question)) is not None:
        report(what)
    served = first if first is not None and question == searched else chosen.serve(question)
    if price is None and rentals:
        asked.price = price_of(rentals, question.device.name, served.cards)
        if asked.price is None:
            assumptions.append(f"{prices} has no price of {served.cards} x {question.device.name}")
    longest = int(served.settings["max_model_len"])
    if any(length > longest for _, length in asked.quantiles):
        assumptions.append(f"at once, requests of more than {longest:,} tokens, which are refused, count as so long")
    beside = _beside(chosen, question, served) if advice else None
    assumptions = [one for one in assumptions if served.basis != "engine" or not one.startswith(chosen.title)]
    if beside is not None and beside[1] is not served:
        assumptions.append(_cross_check(served, beside[1]))
    return ServingReport(
        served=served,
        lengths=asked.quantiles,
        concurrency_at_lengths=served.concurrency_at(_sampled(asked.quantiles, served)) if asked.quantiles else None,
        load=load,
        choices=choices,
        changes=() if beside is None else _changes(chosen, *beside),
        found=found,
        assumptions=tuple(assumptions),
        over_time=asked.follow(question, served),
        throughput=asked.busy(question, served),
    )


@dataclass
class _Asked:
    """What is asked of each answer of the engine: how fast it is, and how it bears the load over time."""

    engine: Engine
    say: Progress
    quantiles: Quantiles
    load: float | None
    price: float | None
    speed: Speed | None
    wanted: Wanted
    over_time: loads.Load | None

    def busy(self, question: Question, served: Served) -> Throughput | None:
        """The speed of the engine with as many requests as are asked about."""
        line = line_of(self.engine, question, served)
        at_once = _at_once(served, self.quantiles, self.load)
        return None if line is None else throughput(line, served, *at_once, self.price)

    def follow(self, question: Question, served: Served, hour: bool = False) -> LoadReport | None:
        """The load on the engine, or its busiest ``hour`` on one kind of engine; None where it does not start, which is
        the answer."""
        if self.over_time is None or served.refusal is not None:
            return None
        line = line_of(self.engine, question, served)
        speed = self.speed or (Speed() if line is None else predicted(line))
        requests, seconds = self.over_time.up_to(int(served.settings["max_model_len"])), self.over_time.seconds
        wanted = replace(self.wanted, apart=False, interval=None) if hour else self.wanted
        if hour and seconds > loads.HOUR:
            requests, seconds = loads.busiest(requests), loads.HOUR
        return loaded(served, requests, seconds, speed, wanted, self.over_time.described, self.say, self.price)


def _engine(name: str, say: Progress) -> Engine:
    """The engine of this name. Raises :class:`UsageError`."""
    if name.strip().lower() == CAPTURED:
        from graphmem.serving import generating

        return generating.Transformers(say)
    return engine_named(name, (CAPTURED,))


def _speed(step_time: float | str | None, tokens_per_second: float | None) -> Speed | None:
    """The speed that is given, None where none is. Raises :class:`UsageError`."""
    default = Speed()
    if step_time is None and tokens_per_second is None:
        return None
    seconds = None if step_time is None else loads.seconds_of(step_time, "--step-time")
    speed = Speed(
        default.step_seconds if seconds is None else seconds,
        default.tokens_per_second if tokens_per_second is None else tokens_per_second,
        assumed=False,
    )
    for option, value in (("--step-time", speed.step_seconds), ("--tokens-per-second", speed.tokens_per_second)):
        if not 0 < value < math.inf:
            raise UsageError(f"{option} {value:g}; accepted: a number above 0")
    return speed


def _wanted(
    max_wait: float | str, max_tpot: float | str | None, apart: bool, autoscale: float | str | None,
    startup: float | str, links: str,
) -> Wanted:  # fmt: skip
    """Raises :class:`UsageError`."""
    tpot = None if max_tpot is None else loads.seconds_of(max_tpot, "--max-tpot", bare=False)
    interval = None if autoscale is None else loads.seconds_of(autoscale, "--autoscale")
    wanted = Wanted(
        loads.seconds_of(max_wait, "--max-wait"),
        tpot,
        apart,
        interval,
        loads.seconds_of(startup, "--startup", bare=False),
    )
    if interval is not None and interval < wanted.startup:
        raise UsageError(
            f"--autoscale {autoscale} is shorter than --startup {startup}: a copy would not have started by then"
        )
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?),(\d{1,6}(?:\.\d{1,6})?)", links.replace(" ", ""))
    if match is None or not float(match[1]) or not float(match[2]):
        raise UsageError(f"--kv-links {links!r}; write GB/s of a card to other engines and to its host: 50,32")
    return replace(wanted, network=float(match[1]) * 1e9, host=float(match[2]) * 1e9)


def _card_asked(
    gpu: str | Device | None, device: str | Device | None, memory: int | str | None, assumptions: list[str]
) -> Device:
    if gpu is not None and device is not None:
        raise UsageError("gpu and device mean the same; give one of them")
    card = device if gpu is None else gpu
    if isinstance(card, Device):
        return card
    if card is None and memory is None:
        assumptions.append(f"no GPU was named: {DEFAULT_DEVICE}")
    return _card(card, memory)


def _card(gpu: str | None, gpu_memory: int | str | None) -> Device:
    if gpu_memory is None:
        return device_named(gpu or DEFAULT_DEVICE)
    size = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    return custom_device(size, like=gpu)


def _question(model: str, card: Device, version: str | None, options: Mapping[str, Any]) -> Question:
    known = set(Question.__dataclass_fields__) - {"model", "device", "version"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(f"unknown option {unknown[0]!r}; accepted: {', '.join(sorted(known))}")
    return Question(model_named(model), card, version=_version(version), **options)


def _installed(engine: Engine, assumptions: list[str]) -> str | None:
    """The engine's version in this environment, where it is installed and followed; None: the newest."""
    try:
        found = metadata.version(engine.name)
    except metadata.PackageNotFoundError:
        return None
    numbers = [int(part) for part in found.split(".")[:2] if part.isdigit()]
    newest = [int(part) for part in engine.newest.split(".")]
    if len(numbers) < 2 or numbers > newest:
        assumptions.append(f"{engine.title} {found} is installed, and followed as {engine.newest}")
        return None
    assumptions.append(f"{engine.title} {found} is installed: followed as that")
    return found


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    numbers = text.removeprefix("v").split(".")
    if len(numbers) < 2 or not all(number.isdigit() and len(number) < 5 for number in numbers[:2]):
        raise UsageError(f"--engine-version {text!r} is no version; write for example 0.32")
    return int(numbers[0]), int(numbers[1])


# --- lengths ----------------------------------------------------------------------------------------------------------


Quantiles = tuple[tuple[float, int], ...]


def _quantiles(given: Mapping[float, int] | str | None) -> tuple[tuple[float, int], ...]:
    """(percent, length), rising. Raises :class:`UsageError`."""
    if not given:
        return ()
    pairs = _read_lengths(given) if isinstance(given, str) else [(float(key), value) for key, value in given.items()]
    pairs.sort()
    for (quantile, length), before in zip(pairs, [(0.0, 0), *pairs], strict=False):
        if not 0 < quantile < 100 or length < 1:
            raise UsageError(
                f"lengths: p{quantile:g}={length}; accepted: percents between 0 and 100, lengths from 1 on"
            )
        if quantile == before[0] or length < before[1]:
            raise UsageError(f"lengths: p{quantile:g}={length} comes after p{before[0]:g}={before[1]}; they must rise")
    return tuple(pairs)


def _read_lengths(text: str) -> list[tuple[float, int]]:
    pairs = []
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            pairs.append((float(name.lower().removeprefix("p")), int(value)))
        except ValueError:
            raise UsageError(
                f"--lengths {part.strip()!r} is not read; write whole numbers of tokens, for example p50=800,p99=6000"
            ) from None
    return pairs


def _sampled(quantiles: Sequence[tuple[float, int]], served: Served) -> list[int]:
    """Lengths at evenly spaced quantiles (:func:`graphmem.serving.loads.length_at`)."""
    longest = int(served.settings["max_model_len"])
    if len(quantiles) == 1:
        return [min(longest, quantiles[0][1])]
    at = loads.length_at(quantiles)
    return [max(1, min(longest, round(at((index + 0.5) / _SAMPLES)))) for index in range(_SAMPLES)]


# --- searches ---------------------------------------------------------------------------------------------------------


def _search(
    engine: Engine, question: Question, find: str, quantiles: Sequence[tuple[float, int]], load: float | None
) -> tuple[Question, tuple[str, int]]:
    """The question with what was looked for, and (its name, its value). Raises :class:`UsageError` if nothing does."""
    if find not in FOUND:
        raise UsageError(f"--find {find!r}; accepted: {', '.join(FOUND)}")
    if find == "tp":
        return _fewest_cards(engine, question, quantiles, load)
    name, tokens = find.replace("-", "_"), question.max_num_batched_tokens
    if getattr(engine, "searches", False):
        return _searched(engine, question, find, name)
    by_length = find == "max-model-len"
    top = int(engine.serve(question).settings[name]) if by_length else _MOST_SEQS if tokens is None else tokens

    def does(value: int) -> bool:
        wide = tokens if by_length or value <= 1024 else max(value, tokens or 0)
        answer = engine.serve(question.with_(**{name: value}, max_num_batched_tokens=wide))
        return answer.refusal is None and (by_length or _held(answer, quantiles) >= value)

    value = largest(does, top)
    if not value:
        raise UsageError(f"no {find} does: {engine.serve(question.with_(**{name: 1})).refusal or 'not even 1'}")
    return question.with_(**{name: value}), (find, value)


def _searched(engine: Engine, question: Question, find: str, name: str) -> tuple[Question, tuple[str, int]]:
    """The same of an engine whose answer looks for what is not given."""
    asked = question.with_(**{name: None})
    if name == "max_model_len" and asked.max_num_seqs is None:
        asked = asked.with_(max_num_seqs=1)
    served = engine.serve(asked)
    if served.refusal is not None:
        raise UsageError(f"no {find} does: {served.refusal}")
    value = int(served.settings[name])
    return asked.with_(**{name: value}), (find, value)


def _fewest_cards(
    engine: Engine, question: Question, quantiles: Sequence[tuple[float, int]], load: float | None
) -> tuple[Question, tuple[str, int]]:
    said = ""
    for cards in COUNTS:
        asked = question.with_(tensor_parallel_size=cards)
        try:
            answer = engine.serve(asked)
        except UsageError as error:
            said = str(error)
            continue
        if answer.refusal is None and (load is None or _held(answer, quantiles) >= load):
            return asked, ("tp", cards)
        said = answer.refusal or f"{cards} cards hold {_held(answer, quantiles):.1f} requests at once"
    raise UsageError(f"no tensor-parallel size up to {COUNTS[-1]} does: {said}")


def _held(served: Served, quantiles: Sequence[tuple[float, int]]) -> float:
    return served.concurrency_at(_sampled(quantiles, served)) if quantiles else served.kv_cache.concurrency


def _at_once(served: Served, quantiles: Sequence[tuple[float, int]], load: float | None) -> tuple[int, int]:
    """Requests that the engine answers at once, those of the load or as many as it has room for, and their tokens."""
    lengths = _sampled(quantiles, served) if quantiles else [int(served.settings["max_model_len"])]
    most = served.settings["max_num_seqs"] or _MOST_SEQS
    room = min(most, max(1, int(_held(served, quantiles))))
    return room if load is None else min(room, max(1, round(load))), round(sum(lengths) / len(lengths))


def _choices(asked: _Asked, question: Question, first: Served, rentals: Sequence[Rental]) -> tuple[CardChoice, ...]:
    """Cards that hold the load at once, or, of machines that can be rented, those that carry it over time at a speed
    that is not given."""
    engine, load = asked.engine, asked.load
    held = partial(_held, quantiles=asked.quantiles)
    if load is not None:
        if getattr(engine, "searches", False):  # whether so many run, not how many do
            question = question.with_(max_num_seqs=math.ceil(load), max_model_len=int(first.settings["max_model_len"]))
        offered = offers(question.device, first, rentals)
        return tuple(holding(engine, question, offered, held, load, asked.busy, "enforce_eager" in first.settings))
    if asked.speed is not None or not rentals:
        return ()
    offered = offers(question.device, first, rentals)
    return carrying(engine, question, offered, held, asked.busy, partial(asked.follow, hour=True))


def _fewer_items(question: Question, limits: Mapping[str, int]) -> list[tuple[str, dict[str, object]]]:
    """Options of a model that takes more than text: each other modality left out, and all."""
    named = [(one[0].replace("-", "_") == "limit_mm_per_prompt", one) for one in question.arguments]
    others = tuple(one for limits_it, one in named if not limits_it)
    own: dict[str, Any] = next((json.loads(one[1]) for limits_it, one in named if limits_it), {})
    allowed = [name for name, limit in limits.items() if limit]
    tried: list[tuple[str, dict[str, Any]]] = []
    for name in allowed if len(allowed) > 1 else ():
        value = json.dumps({**own, name: 0})
        tried.append((f"--limit-mm-per-prompt '{value}'", {"arguments": (*others, ("limit_mm_per_prompt", value))}))
    if allowed:
        tried.append(("--language-model-only", {"arguments": (*others, ("language_model_only", "true"))}))
    return tried


def _beside(engine: Engine, question: Question, served: Served) -> tuple[Question, Served] | None:
    """The answer to which changes are held, with its question: this one, or a quick one where each change would be a
    start of the engine; None where there is no quick one."""
    if served.basis != "engine":
        return question, served
    quick = for_searches(engine, question)
    answer = served if quick == question else engine.serve(quick)
    return None if answer.basis in ("engine", "captures") else (quick, answer)


def _cross_check(served: Served, other: Served) -> str:
    """What our account says beside the engine's own answer."""
    blocks, difference = other.kv_cache.blocks, other.kv_cache.blocks - served.kv_cache.blocks
    differs = f"{blocks:,} blocks ({difference:+,})" if difference else "the same number of blocks"
    return f"graphmem's own account of the engine's code, by which advice is told, has {differs}"


def _changes(engine: Engine, question: Question, served: Served) -> tuple[Change, ...]:
    """Options that bring tokens, the most first."""
    tried: list[tuple[str, dict[str, Any]]] = []
    settings = served.settings
    if question.kv_cache_dtype == "auto":
        tried.append(("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}))
    if settings.get("max_num_batched_tokens") is not None and settings["max_num_seqs"] > 256:
        tried.append(("--max-num-seqs 256", {"max_num_seqs": 256}))
    if (settings.get("max_num_batched_tokens") or 0) > 2048 >= settings["max_num_seqs"]:
        tried.append(("--max-num-batched-tokens 2048", {"max_num_batched_tokens": 2048}))
    if settings.get("enforce_eager") is False:
        tried.append(("--enforce-eager", {"enforce_eager": True}))
    if settings.get("gpu_memory_utilization", 1) < 0.95:
        tried.append(("--gpu-memory-utilization 0.95", {"gpu_memory_utilization": 0.95}))
    tried.append((f"--tp {2 * served.cards}", {"tensor_parallel_size": 2 * served.cards}))
    tried += _fewer_items(question, settings.get("limit_mm_per_prompt") or {})
    changes = []
    for option, values in tried:
        try:
            answer = engine.serve(question.with_(**values))
        except UsageError:
            continue
        gained = answer.kv_cache.tokens - served.kv_cache.tokens
        if answer.refusal is None and gained > _LEAST_GAIN * max(1, served.kv_cache.tokens):
            changes.append(Change(option, answer.kv_cache.tokens, gained))
    return tuple(sorted(changes, key=lambda change: -change.gained_tokens))
