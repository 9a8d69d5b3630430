"""The document of a serving engine's answer: the parts of the card's memory, and the requests that the rest holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from graphmem.reports.document import (
    Block,
    Curve,
    Curves,
    Document,
    Facts,
    Items,
    Section,
    Shares,
    Table,
    Text,
    Value,
    section,
    table,
)
from graphmem.serving.base import BASES
from graphmem.serving.loads import HOUR
from graphmem.serving.roofline import FAST, HELD, SLOW
from graphmem.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from graphmem.serving.answer import ServingReport
    from graphmem.serving.fleet import Apart, LoadReport, Scaling
    from graphmem.serving.over_time import LoadAnswer
    from graphmem.serving.throughput import Interval, Throughput

#: Columns of the text: the parts of the card have notes.
_WIDTH = 110
#: Rows of a table of copies by the time.
_MOST_ROWS = 24


def of_serving(report: ServingReport) -> Document:
    """The whole answer."""
    served = report.served
    title = f"{served.model} on {_cards(report)}, {served.engine} {served.version}"
    return Document("serving", title, tuple(_sections(report)), report.to_dict, width=_WIDTH)


def _cards(report: ServingReport) -> str:
    served = report.served
    return f"{served.cards} x {served.gpu}" if served.cards > 1 else served.gpu


def _sections(report: ServingReport) -> Iterator[Section]:
    served, cache = report.served, report.served.kv_cache
    about = [
        ("model", served.model),
        ("cards", _cards(report)),
        ("engine", f"{served.engine} {served.version}, from {BASES[served.basis]}"),
    ]
    if report.found is not None:
        name, value = report.found
        about.append(("found", f"--{name} {value:,}"))
    yield section("", Facts(about))
    if served.refusal is not None:
        yield section("", Text([f"DOES NOT START: {served.refusal}"], "no"))
    else:
        held, words = _holds(report)
        load = report.over_time
        carried = [] if load is None else [_carried(load)]
        is_enough = held and (load is None or load.copies is not None)
        yield section("", Text([*carried, words], "yes" if is_enough else "no"), Facts(tuple(_headline(report))))
    parts = [(part.name, part.bytes, part.note) for part in served.parts]
    left = "free" if cache.keeps_nothing else "KV cache"
    parts.append((left, cache.available_bytes, "what is left of it"))
    yield section("What the memory of a card is for", Shares(parts, ("card", served.total_bytes), as_bars=True))
    if report.by_length:
        yield section("Requests at once, by their length", _users(report))
    yield from _loads(report)
    if report.throughput is not None:
        yield section("Speed", Facts(tuple(_speed(report.throughput, served.settings.get("enforce_eager") is True))))
    if report.over_time is not None:
        yield from _overformat_seconds(report.over_time)
    if report.changes:
        rows = [(change.option, change.tokens, f"{change.gained_tokens:+,}") for change in report.changes]
        yield section(
            "What would bring more tokens",
            table({"change": "", "tokens": "count", "more": "figure"}, rows, titled=True),
        )
    yield section("", Text(tuple(_besides(report))))
    if served.notes or report.assumptions:
        yield section("Assumed", Items((*report.assumptions, *served.notes)))


def _holds(report: ServingReport) -> tuple[bool, str]:
    """Whether the cards hold the load at once, in a sentence; without a load, that the engine starts there."""
    served, length = report.served, f"{report.served.settings['max_model_len']:,} tokens"
    fits, most = report.concurrency, served.settings["max_num_seqs"]
    requests = f"requests of {length}" if report.concurrency_at_lengths is None else "requests of these lengths"
    place = "a batch" if served.kv_cache.keeps_nothing else "the KV cache"
    room = f"{place} has room for {fits:.2f} {requests}"
    shorter = "" if report.lengths else "; of shorter ones for more (--lengths p50=800,p99=6000)"
    if report.load is None:
        return True, f"STARTS on {_cards(report)}: {room}{shorter}."
    limit = f", and the engine runs at most {most:,} at once" if most is not None and most < report.load else ""
    verdict = "HOLDS" if report.holds else "DOES NOT HOLD"
    return report.holds, f"{verdict} {report.load:g} requests at once on {_cards(report)}: {room}{limit}{shorter}."


def _headline(report: ServingReport) -> Iterator[tuple[str, str]]:
    cache, settings = report.served.kv_cache, report.served.settings
    size = format_bytes(cache.available_bytes)
    if cache.keeps_nothing:
        yield "KV cache", f"none, as the model keeps nothing of what it has read; {size} on each card stay free"
        if "max_num_batched_tokens" in settings:
            yield (
                "at once",
                f"{settings['max_num_batched_tokens']:,} tokens of up to {settings['max_num_seqs']:,} texts",
            )
        return
    yield "KV cache", f"{size} on each card: {cache.blocks:,} blocks, {cache.tokens:,} tokens"
    yield "at once", f"{cache.concurrency:.2f} requests of {settings['max_model_len']:,} tokens"
    if report.concurrency_at_lengths is not None:
        named = ", ".join(f"p{quantile:g}={value:,}" for quantile, value in report.lengths)
        yield "", f"{report.concurrency_at_lengths:.1f} requests of {named}"
        most = settings["max_num_seqs"]
        if most is not None and report.concurrency_at_lengths > most:
            yield "", f"(the engine runs at most {most:,} of them)"
    most = settings["max_model_len"]
    more = f"; in the cache there is room for one of {cache.longest:,}" if cache.longest > most else ""
    yield "alone", f"one request of up to {min(cache.longest, most):,} tokens{more}"


def _besides(report: ServingReport) -> Iterator[str]:
    served, cache = report.served, report.served.kv_cache
    if served.outside:
        parts = "; ".join(f"{figure.name} {format_bytes(figure.bytes)}" for figure in served.outside)
        yield f"Besides, on each card before the engine looks: {parts}"
    if served.graphs_bytes:
        yield f"CUDA graphs really take {format_bytes(served.graphs_bytes)}, and what the driver keeps of them"
    if not cache.keeps_nothing:
        groups = ", ".join(_grouped(cache.groups))
        yield f"A block is {_counted(cache.block_size, 'token')}, {format_bytes(cache.block_bytes)}: {groups}"
    settings = (f"{name} {_shown(value)}" for name, value in served.settings.items() if value not in (None, []))
    yield f"Settings: {', '.join(settings)}"


def _users(report: ServingReport) -> Curves:
    """The requests that the cache holds over their length, against what the engine runs at most."""
    lengths, requests = zip(*report.by_length, strict=True)
    most = report.served.settings["max_num_seqs"]
    limit = None if most is None else (float(most), "the engine runs at most")
    curve = Curve("requests in the KV cache at once", requests)
    over = (lengths, "tokens of each request, prompt and answer")
    return Curves([curve], "", "", "figure", limit=limit, over=over, doubling=True)


def _grouped(groups: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Layers by kind; groups of one kind, which share a pool of blocks, in one phrase."""
    for kind in dict.fromkeys(kind for kind, _ in groups):
        sizes = [layers for one, layers in groups if one == kind]
        yield f"{sum(sizes)} layers of {kind}" + (f" in {len(sizes)} groups" if len(sizes) > 1 else "")


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} up to {value[-1]}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _loads(report: ServingReport) -> Iterator[Section]:
    """The cards that hold a load, or carry it over time."""
    what = "carry this load" if report.load is None else f"hold {report.load:g} requests at once"
    if report.load is None and report.over_time is not None and report.over_time.answer.seconds > HOUR:
        what += " in its busiest hour"
    if report.choices:
        priced = report.choices[0].price is not None
        columns = {"cards": "", "requests": "figure", "tokens/s each": "count", "an hour": "dollars"}
        columns |= {"a million tokens of answers": "dollars", "": ""}
        rows = [
            (
                f"{one.cards} x {one.gpu}" + (f", {one.engines} engines" if one.engines > 1 else ""),
                f"{one.concurrency:.1f}", None if one.speed is None else round(one.speed),
                one.price, one.cost, one.name,
            )
            for one in report.choices
        ]  # fmt: skip
        yield section(
            f"{'Cheapest cards' if priced else 'Cards with the least memory'} that {what}", _filled(columns, rows)
        )
    elif report.load is not None:
        yield section(
            "", Text([f"No card that was looked at, up to 8 of them, holds {report.load:g} requests at once."])
        )


def _filled(columns: dict[str, str], rows: Sequence[Sequence[Value]]) -> Table:
    """The table without columns that are empty."""
    kept = [index for index in range(len(columns)) if any(row[index] not in (None, "") for row in rows)]
    names = list(columns.items())
    return table(dict(names[index] for index in kept), [[row[index] for index in kept] for row in rows], titled=True)


def _speed(busy: Throughput, eager: bool) -> Iterator[tuple[str, str]]:
    at_once = f"{_counted(busy.requests, 'request')} of {busy.context:,} tokens at once, {busy.each:,.0f} each"
    yield "answers", f"{_between(busy.answers)} tokens a second: {at_once}"
    yield "prompts", f"{_between(busy.prompts)} tokens a second while prompts are read"
    if busy.answers_cost is not None and busy.prompts_cost is not None:
        yield "cost", f"${busy.price:,.2f} an hour; a million tokens of answers ${_between(busy.answers_cost, 2)}"
        yield "", f"and of prompts ${_between(busy.prompts_cost, 2)}: an engine that is always so busy"
    yield "stands on", f"a roofline, not measured; {_INTERVAL}"
    if eager:
        yield "", "with CUDA graphs, which this engine has not: it may be slower"


#: What an interval of speeds is.
_INTERVAL = f"{HELD} public benchmarks kept back for it ran at {SLOW:g} to {FAST:g} times such a speed"


def _between(interval: Interval, digits: int = 0) -> str:
    low, high = sorted((interval.slow, interval.fast))
    return f"{interval.expected:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


# --- over time --------------------------------------------------------------------------------------------------------


def _overformat_seconds(load: LoadReport) -> Iterator[Section]:
    answer, speed = load.answer, load.speed
    given = "by default" if speed.assumed else "as given"
    assumed = (
        f"speed is not predicted; {given}, a step takes {speed.step_seconds * 1000:g} ms, or its tokens at "
        f"{speed.tokens_per_second:,.0f} a second where that is longer: all times follow from this"
    )
    if speed.roofline is not None:
        assumed = f"speed by a roofline, not measured; {_INTERVAL}: all times follow from this"
    facts = (*_course(answer, load), *_cost(load), ("assumed", assumed), ("assumed", load.rules))
    blocks: tuple[Block, ...] = (_curves(answer), Facts(facts))
    yield section(f"Over time: {load.described}", *blocks)
    yield section("Engines that the load is dealt out to", _copies(load))
    if load.wanted.disaggregated:
        yield _apart(load)
    if load.scaling is not None:
        yield _scaling(load, load.scaling)


def _apart(load: LoadReport) -> Section:
    """Engines that prefill and others that decode, beside as many that do both as are enough."""
    apart = load.apart
    if apart is None:
        return section("Prefill and decode apart", Text(["No number of engines up to 1,024 of each kind is enough."]))
    both = [one for one in load.tried if one.copies == load.copies]
    rows: list[Sequence[Value]] = [
        (words, one.cards, one.ttft_p99, one.tpot_p99, price)
        for words, one, price in (
            (f"{apart.prefill:,} prefill, {apart.decode:,} decode", apart, apart.price_of_all),
            *((f"{one.copies:,} do both", one, load.price_of_all) for one in both),
        )
    ]
    columns = {"engines": "", "cards": "count", "first token": "time", "each token": "time", "an hour": "dollars"}
    moved = (
        f"Times are the 99th percentile. A request moves {format_bytes(round(apart.moved_bytes))} on average, at "
        f"{load.wanted.kv_links[0] / 1e9:g} GB/s a card (--kv-links); blocks are held at both ends meanwhile."
    )
    return section("Prefill and decode apart", _filled(columns, rows), Text([_fewer_cards(load, apart), moved]))


def _fewer_cards(load: LoadReport, apart: Apart) -> str:
    """Which of the two layouts takes fewer cards, in a sentence."""
    limit = load.wanted.max_tpot
    bound = "no limit to the time of a token" if limit is None else f"a token every {format_seconds(limit)}"
    other = f" With another --max-tpot {'it' if load.cards else 'that'} may be the other way round."
    if load.cards is None:
        return f"With {bound} engines that do both are never enough, and apart they are.{other}"
    if apart.cards == load.cards:
        return f"With {bound} both ways take {_counted(apart.cards, 'card')}.{other}"
    fewer, way = abs(apart.cards - load.cards), "apart" if apart.cards < load.cards else "together"
    return f"With {bound} prefill and decode {way} take {_counted(fewer, 'card')} fewer.{other}"


def _scaling(load: LoadReport, scaling: Scaling) -> Section:
    """Copies by the time, and what that saves."""
    rows: list[tuple[str, str, str]] = []
    groups = [list(group) for _, group in groupby(scaling.intervals, lambda one: one.copies)]
    for group in groups[:_MOST_ROWS]:
        seconds = min(len(group) * scaling.interval, load.answer.seconds - group[0].seconds)
        rate = sum(one.requests for one in group) / seconds
        until = group[0].seconds + seconds
        copies = "more than 1,024" if group[0].copies is None else f"{group[0].copies:,}"
        rows.append((f"{_clock(group[0].seconds)} to {_clock(until)}", f"{rate:,.2f}", copies))
    saved = scaling.fixed_hours - scaling.copy_hours
    words = [
        f"{scaling.copy_hours:,.1f} hours of copies instead of {scaling.fixed_hours:,.1f} of {scaling.fixed:,} all the "
        f"time"
        + (f", {saved / scaling.fixed_hours:.0%} less" if saved > 0 else ": nothing is saved")
        + ("" if scaling.cost is None else f": ${scaling.cost:,.2f} instead of ${scaling.fixed_cost:,.2f}")
        + f". Each copy is started {format_seconds(scaling.startup)} before it is needed (--startup), by one who knows "
        "the load."
    ]
    if len(groups) > _MOST_ROWS:
        words.append(f"{len(groups) - _MOST_ROWS:,} more changes are in the JSON.")
    columns = {"time": "", "requests a second": "figure", "copies": "figure"}
    return section(f"Copies every {format_seconds(scaling.interval)}", table(columns, rows, titled=True), Text(words))


def _clock(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}" + (f":{left:02}" if left else "")


def _curves(answer: LoadAnswer) -> Curves:
    """The cache and those that wait, as far as the load was followed."""
    end = answer.seconds if answer.given_up_at is None else answer.given_up_at
    followed = [point for point in answer.timeline if point.seconds <= end] or list(answer.timeline)
    most = max(1, *(point.waiting for point in followed))
    curves = (
        Curve("held of the cache", [point.used for point in followed]),
        Curve(f"waiting requests, of {most:,}", [point.waiting / most for point in followed]),
    )
    marks = [index for index, point in enumerate(followed) if point.preemptions]
    return Curves(curves, "0", format_seconds(end), "share", marks=marks, marked="somebody is preempted", brief=True)


def _course(answer: LoadAnswer, load: LoadReport) -> Iterator[tuple[str, str]]:
    yield "cache", f"{answer.most_used:.0%} held at most, {answer.mean_used:.0%} on average"
    yield "at once", f"{answer.most_running:,} running at most, {answer.most_waiting:,} waiting"
    if answer.first_preemption is None:
        yield "preempted", "none"
    else:
        yield (
            "preempted",
            f"{answer.preemptions:,} times, {answer.preempted_requests:,} of {answer.requests:,} requests, first after "
            f"{format_seconds(answer.first_preemption)}; {answer.tokens_computed_again:,} of "
            f"{answer.tokens_computed:,} tokens computed again",
        )
    if answer.given_up_at is not None:
        yield (
            "given up",
            f"after {format_seconds(answer.given_up_at)}: more than 1 % of all requests had waited longer than "
            f"{format_seconds(load.wanted.max_wait)}; figures are of that time",
        )
    yield "waiting", _times(answer.wait_p50, answer.wait_p99, "for the first step")
    yield "first token", _times(answer.ttft_p50, answer.ttft_p99, "after a request arrives")
    yield "each token", _times(answer.tpot_p50, answer.tpot_p99, "behind the first")
    if answer.found_tokens or answer.loaded_tokens:
        asked, host = max(1, answer.asked_tokens), load.wanted.kv_links[1] / 1e9
        more = f", {answer.loaded_tokens / asked:.0%} more on the host, at {host:g} GB/s a card (--kv-links)"
        found = f"{answer.found_tokens / asked:.0%} of {asked:,} tokens found on the card"
        yield "prefix cache", found + more * bool(answer.loaded_tokens)
    if answer.left_waiting:
        yield "", f"{_counted(answer.left_waiting, 'request')} had not begun at the end"
    if answer.refused:
        yield "refused", f"{_counted(answer.refused, 'request')} that this engine could never run"


def _times(median: float, most: float, what: str) -> str:
    return f"{format_seconds(median)} (median), {format_seconds(most)} (99 %) {what}"


def _carried(load: LoadReport) -> str:
    """How many engines carry the load, and what that costs."""
    wanted = f"99 % of requests wait at most {format_seconds(load.wanted.max_wait)}"
    if load.wanted.max_tpot is not None:
        wanted += f", and get a token every {format_seconds(load.wanted.max_tpot)}"
    answer = load.answer
    if answer.refuses_many:
        return (
            f"NO number of engines like this carries the load: {answer.refused:,} of {answer.requests:,} requests are "
            "longer than max_model_len, or than the cache, and are refused."
        )
    if load.copies is None:
        return f"The load is too much for 1,024 engines like this: {wanted} was asked for."
    engines, cards = _counted(load.copies, "engine"), _counted(load.cards or 0, "card")
    slow = (
        f" (of {load.slow_copies:,} at the slow end of the speed)"
        if load.slow_copies not in (None, load.copies)
        else ""
    )
    cost = "" if load.price_of_all is None else f"; ${load.price_of_all:,.2f} an hour"
    return f"The load takes {engines} like this, {cards}{slow}: {wanted}{cost}."


def _copies(load: LoadReport) -> Table:
    """Every number of engines that was tried; of the first of them, the 99th percentiles of times."""
    columns = {"engines": "count", "cards": "count", "cache": "share", "preempted": "count", "wait": "time",
               "first token": "time", "each token": "time", "found": "share", "given up": "time", "an hour": "dollars",
               "1M tokens": "dollars", "": ""}  # fmt: skip
    rows = [
        (
            one.copies, one.cards, one.most_used, one.preemptions, one.wait_p99, one.ttft_p99, one.tpot_p99,
            one.found or None, one.followed, *load.costs_of(one.copies), "enough" if one.enough else "too few",
        )
        for one in load.tried
    ]  # fmt: skip
    return _filled(columns, rows)


def _cost(load: LoadReport) -> Iterator[tuple[str, str]]:
    if load.price_of_all is not None:
        cost = f"${load.price_of_all:,.2f} an hour for all, ${load.answers_cost:,.2f} a million tokens of answers"
        yield "cost", f"{cost}: this load's, with its prompts and the time that they are idle"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
