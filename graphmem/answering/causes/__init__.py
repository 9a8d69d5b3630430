"""The causes for which the figures of one analysis may be wrong, each with its source.

Nothing is guessed: a cause has the bounds of its source, or errors that recordings showed (``measured.json`` beside
this file, which ``python -m tests.recorded.spreads`` makes of recordings that are committed), or no bound. Nothing
certain is a cause: plans that cuDNN itself returned, operators that are modelled or proven, versions of PyTorch that
were recorded. :mod:`graphmem.base.figures` describes how causes add up, and adds them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from graphmem.base.figures import (
    BOUNDS,
    EXACT,
    MEASURED,
    MOST_TIMES,
    TRACE_LEVELS,
    UNKNOWN,
    Cause,
    Doubts,
    Figure,
    Record,
    Spread,
    bounded,
    cause_of,
    down_to,
    seen,
    unknown,
)
from graphmem.base.numbers import round_up
from graphmem.base.records import dataclass
from graphmem.base.versions import NEWEST, RECORDED, Version, cudnn_words, wheel_cudnn, words
from graphmem.devices import DEFAULT_DEVICE, Device, device_named
from graphmem.diagnostics import CUT_SHORT, INSIDE, MEANINGS, OPERATORS, REMEDIES, VALUES, Code, Diagnostic, Effect
from graphmem.estimate import Peak
from graphmem.labels import CUDNN_ESTIMATE, CUFFT, TIMING, TIMING_ESTIMATE
from graphmem.trace import Trace
from graphmem.units import MIB

#: Small blocks lie in segments of so many bytes (``c10/core/AllocatorConfig.h``), larger ones mostly in multiples.
_SEGMENT = 2 * MIB
#: Sources of the causes that diagnostics share, where they are not the diagnostics themselves.
_SOURCES = {
    OPERATORS: "{kinds} kinds, of which nobody recorded what they take",
    INSIDE: "of {kinds} kinds, whose library tells it on a card alone",
    CUT_SHORT: "what it would have done after",
}
#: Whether figures may be less, and more, by the effect of a diagnostic.
_OPEN = {
    Effect.AT_MOST: Spread(below=True),
    Effect.MORE: Spread(above=True),
    Effect.UNBOUNDED: Spread(below=True, above=True),
}
#: The causes that the meanings of diagnostics name, in their order.
_NAMED = tuple(dict.fromkeys(meaning.cause for meaning in MEANINGS.values() if meaning.effect in _OPEN))


def causes_of_context(context: Sequence[Figure]) -> list[Cause]:
    """The causes that concern the memory a process holds outside its allocator."""
    return [cause for figure in context if (cause := cause_of(figure)) is not None]


def causes_of_trace(
    trace: Trace,
    peak: Peak,
    diagnostics: Sequence[Diagnostic],
    rerun: Callable[[Trace], Peak],
    device: Device,
    tried: Mapping[str, Outcome] | None = None,
) -> list[Cause]:
    """The uncertain parts of a trace: plans that were predicted or are timed on the card, work areas, operators,
    values. ``rerun`` gives the peak of the trace with storages of other sizes; ``device``: the card it was predicted
    for; ``tried``: the outcomes, with other values, of the lines that read assumed values."""
    sized = [_of_sizes(trace, peak, rerun, area) for area in _areas(trace)]
    of_codes = (
        *_of_shortened(diagnostics, peak),
        *_of_garbage(trace),
        *_of_diagnostics(diagnostics, peak, tried or {}),
    )
    return [*_of_plans(trace, peak, rerun, device), *filter(None, sized), *of_codes]


@dataclass(frozen=True)
class _Area:
    """Storages whose sizes are known to bounds: their indices, and for each the least and the most bytes."""

    name: str
    source: str
    storages: tuple[int, ...]
    least: Callable[[int], int]
    most: Callable[[int], int]


def _areas(trace: Trace) -> Iterator[_Area]:
    labelled = trace.labelled
    timing = [i for label in (TIMING, TIMING_ESTIMATE) for i in labelled.get(label, ())]
    timed = labelled.get(CUDNN_ESTIMATE, ())
    if timing and timed:
        largest = int(trace.columns.bytes[timing].max())
        words = (
            "the fastest plan runs, which only a card can tell: between none and the largest workspace of those timed"
        )
        yield _Area("cudnn.benchmark", words, timed, lambda _: 0, lambda size: max(size, largest))
    work = labelled.get(CUFFT, ())
    if work:
        words = "cuFFT's guide: between one and eight times the complex elements of a batch"
        yield _Area("cuFFT's work areas", words, work, lambda size: size, lambda size: _CUFFT_MOST * size)


#: cuFFT's guide: work areas take between one and eight times the complex elements of a batch.
_CUFFT_MOST = 8


def _of_sizes(trace: Trace, peak: Peak, rerun: Callable[[Trace], Peak], area: _Area) -> Cause | None:
    """The trace once more with all of these at their least, and at their most."""
    peaks = [rerun(_resized(trace, area.storages, size)) for size in (area.least, area.most)]
    spreads = {level: _between(peak, peaks, level) for level in TRACE_LEVELS}
    return Cause(area.name, BOUNDS, area.source, spreads) if any(s != EXACT for s in spreads.values()) else None


def _resized(trace: Trace, storages: Sequence[int], size: Callable[[int], int]) -> Trace:
    chosen, sizes = list(storages), trace.columns.bytes.copy()
    sizes[chosen] = [size(one) for one in sizes[chosen].tolist()]
    return trace.resized(sizes, {}, plans=())


def _of_plans(trace: Trace, peak: Peak, rerun: Callable[[Trace], Peak], device: Device) -> Iterator[Cause]:
    """As parts of their peaks, how those of networks that no tree was grown from change once cuDNN is asked: workspaces
    move the peak, and memory reserved for them is used by others later, so that a small one may move much. Down to the
    trace without the workspaces that are predicted, as plans may need none."""
    if trace.predicted_plans:
        cause = _as_networks("cuDNN's plans", f"of {trace.predicted_plans} shapes predicted", peak, device)
        without = rerun(_without_predicted(trace)) if CUDNN_ESTIMATE in trace.labelled else peak
        spreads = {
            level: down_to(spread, _between(peak, [without], level).points[0][1])
            for level, spread in cause.spreads.items()
        }
        yield replace(cause, spreads=spreads, remedy="--cudnn PATH asks a cuDNN")


def _without_predicted(trace: Trace) -> Trace:
    """The trace without the workspaces of plans that were predicted."""
    if "without predicted plans" not in trace.kept:
        predicted = trace.labelled[CUDNN_ESTIMATE]
        trace.kept["without predicted plans"] = _resized(trace, predicted, lambda _: 0)
    found: Trace = trace.kept["without predicted plans"]
    return found


def _as_networks(name: str, source: str, peak: Peak, device: Device) -> Cause:
    card = device if device.compute_capability is not None else device_named(DEFAULT_DEVICE)  # as it was captured
    ((_, count, *columns),) = (row for row in _measured()["networks"] if row[0] == card.limits.cudnn_trees)
    changed = (
        f"{source}: {count} random networks, on cards of this kind, changed so once cuDNN was asked, as a library of "
        "it can be (--cudnn)"
    )
    return _as_measured(name, changed, peak, list(zip(*columns, strict=True)), count)


def cause_of_cudnn(asked: str, version: Version, peak: Peak, device: Device) -> Cause | None:
    """The uncertainty of plans that another cuDNN was ``asked`` for than the one in PyTorch's wheel, such as 9.20.0:
    each chooses its own, and those of two versions are taken to be as far from each other as predicted ones are."""
    own = cudnn_words(wheel_cudnn(version))
    if not asked or asked == own:
        return None
    source = f"cuDNN {asked} was asked, and PyTorch {words(version)} comes with {own}, whose plans are others"
    cause = _as_networks("another cuDNN", source, peak, device)
    return replace(cause, remedy="--cudnn PATH asks that of the run")


#: Operators of a language model: rows of words, and attention, by any of its ways.
_WORDS, _ATTENTION = "aten.embedding.default", ("aten._scaled_dot_product", "aten._softmax")


def cause_of_real_card(trace: Trace, peak: Peak) -> Cause | None:
    """How far language models that others measured on real cards, and published, were from their predictions, whatever
    is certain on the stub driver: the driver's addresses decide which block is taken, and versions are of their day."""
    if not _has_words_and_attention(trace):
        return None
    return _as_on_real_cards(peak.allocated_bytes, peak.reserved_bytes)


@lru_cache(maxsize=256)
def _as_on_real_cards(allocated_bytes: int, reserved_bytes: int) -> Cause:
    """The same of peaks in bytes: many settings have the same."""
    rows = _measured_on_cards()
    source = f"{sum(map(len, rows.values()))} peaks of language models, measured by others on NVIDIA cards, were off so"
    allocated = seen(int(allocated_bytes * change) for change in rows["allocated"])
    reserved = seen(_in_segments(reserved_bytes * change) for change in rows["reserved"])
    spreads = {"requested": allocated, "allocated": allocated, "reserved": reserved, "device": reserved}
    count = min(map(len, rows.values()))
    remedy = "graphmem verify measures it on a card"
    inside = round((count - 1) / (count + 1), 4)
    return Cause("real cards", MEASURED, source, spreads, inside=inside, count=count, remedy=remedy)


def _has_words_and_attention(trace: Trace) -> bool:
    if "is of language" not in trace.kept_of_events:
        names = trace.operator_names
        found = _WORDS in names and any(name.startswith(_ATTENTION) for name in names)
        trace.kept_of_events["is of language"] = found
    return bool(trace.kept_of_events["is of language"])


def _of_shortened(diagnostics: Sequence[Diagnostic], peak: Peak) -> Iterator[Cause]:
    """As recorded programs were off that were predicted in a few steps of several runs, or of batches of many sizes."""
    if any(one.code is Code.SHORTENED for one in diagnostics):
        rows = _measured()["shortened"]
        source = f"{len(rows)} programs, recorded to their end, were off so (--iterations follows more steps)"
        yield _as_measured("steps left out", source, peak, [row[1:] for row in rows])


def _of_garbage(trace: Trace) -> Iterator[Cause]:
    """What one look for cycles gives back may have died before the peak, or as much more may live at it."""
    if size := trace.garbage_bytes:
        segments = round_up(size, _SEGMENT)
        blocks, reserved = bounded(-size, size), bounded(-segments, segments)
        spreads = {"requested": blocks, "allocated": blocks, "reserved": reserved, "device": reserved}
        source = "tensors in cycles die when Python looks for them: one look earlier or later than here"
        yield Cause("cycles of garbage", BOUNDS, source, spreads, remedy="gc.collect() in the program settles it")


def _of_diagnostics(diagnostics: Sequence[Diagnostic], peak: Peak, tried: Mapping[str, Outcome]) -> Iterator[Cause]:
    """A cause for all diagnostics whose meaning names the same one, in the order of :data:`MEANINGS`."""
    for name in _NAMED:
        found = [one for one in diagnostics if one.meaning.cause == name]
        if name == VALUES:
            yield from _of_values(found, peak, tried)
        elif found:
            source = _SOURCES.get(name, "{messages}")
            yield _open(name, source.format(kinds=len(found), messages="; ".join(one.message for one in found)), found)


def _open(name: str, source: str, found: Sequence[Diagnostic]) -> Cause:
    """A cause with an end that nothing bounds. Much room is enough, and less where its record is long; but none for
    diagnostics of any size of which too few programs were recorded."""
    effects = {one.effect for one in found}
    spread = Spread(below=any(_OPEN[one].below for one in effects), above=any(_OPEN[one].above for one in effects))
    codes = {one.code.name.lower() for one in found}
    records = {code: Record(_changes({code})) for code in codes}
    of_any_size = {one.code.name.lower() for one in found if one.meaning.any_size}
    is_any = any(len(records[code].changes) < _ENOUGH for code in of_any_size)
    times = None if is_any else max(map(_times, records.values()))
    record = Record(_changes(codes)) if all(one.changes for one in records.values()) else None
    spreads = dict.fromkeys(TRACE_LEVELS, spread)
    return Cause(name, UNKNOWN, source, spreads, times=times, record=record, remedy=REMEDIES.get(name, ""))


#: Recorded programs from which on a record shows of which size a cause is; room is enough for as many times the most
#: that any of those took.
_ENOUGH, _BEYOND = 10, 10


def _times(record: Record) -> int:
    """How many times the reserved peak are room enough for a diagnostic with this record."""
    if len(record.changes) < _ENOUGH:
        return MOST_TIMES
    return min(MOST_TIMES, math.ceil(_BEYOND * (1 + max(0.0, *record.changes))))


def _changes(codes: set[str]) -> tuple[float, ...]:
    """Of every recorded program with one of these diagnostics, the part that its peak was more than predicted."""
    return tuple(change for _, change, *found in _measured()["programs"] if not codes.isdisjoint(found))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a line for values other than the assumed: ``values`` as displayed, and their peaks."""

    values: str
    peaks: tuple[Peak, ...]


def _of_values(decided: Sequence[Diagnostic], peak: Peak, tried: Mapping[str, Outcome]) -> Iterator[Cause]:
    """A cause for every line whose other values were analysed, and one for all others."""
    places = dict.fromkeys(one.place for one in decided)
    for place in [one for one in places if one in tried]:
        found = tried[place]
        spreads = {level: _between(peak, found.peaks, level) for level in TRACE_LEVELS}
        if any(spread != EXACT for spread in spreads.values()):
            yield Cause(f"value read at {place}", BOUNDS, f"analysed with {found.values} too", spreads)
    left = len(places) - len(tried)
    if left:
        lines = f"{left} {'line that decides' if left == 1 else 'lines that decide'} a size or a branch"
        told = "until --assume says what is read there" + ("" if tried else ", or --bounds analyses other values")
        others = [one for one in decided if one.place not in tried]
        yield _open(VALUES, f"{lines}, which nothing bounds {told}", others)


# --- versions of PyTorch ----------------------------------------------------------------------------------------------


def neighbours(version: Version) -> tuple[Version, ...]:
    """The recorded versions before and after one that was not recorded, the one after where it is older than all; none
    for those that were, or are newer than all."""
    if version in RECORDED or version > NEWEST:
        return ()
    before, after = [one for one in RECORDED if one < version], [one for one in RECORDED if one > version]
    return (*before[-1:], after[0])


def cause_of_version(version: Version, peak: Peak, beside: Callable[[Version], Peak | None]) -> Cause | None:
    """The uncertainty of a version that was not recorded.

    Between two that were, each rule that changed is that of one or of the other: ``beside`` gives the peak under all
    rules of a version, None where it cannot be predicted. After the newest one, peaks may change as the same steps'
    did from one recorded version to the next.
    """
    if version > NEWEST:
        rows = _measured()["versions"]
        source = f"newer than {words(NEWEST)}, the newest known; {len(rows)} steps changed so from one to the next"
        return _as_measured(f"PyTorch {words(version)}", source, peak, [row[3:5] for row in rows])
    if not (between := neighbours(version)):
        return None
    name, both = f"PyTorch {words(version)}", " and ".join(map(words, between))
    peaks = [found for one in between if (found := beside(one)) is not None]
    if len(peaks) < len(between):
        return unknown(name, f"not recorded, and not to be predicted as {both}", below=True)
    source = f"not recorded: between what {both} would take"
    spreads = {level: _between(peak, peaks, level) for level in TRACE_LEVELS}
    return Cause(name, BOUNDS, source, spreads) if any(spread != EXACT for spread in spreads.values()) else None


def cause_of_orders(peak: Peak, others: Sequence[Peak]) -> list[Cause]:
    """The uncertainty of the order of batches of several lengths, which a loader shuffles: what is cached of one is cut
    up for the next. ``others``: the peaks with other orders, if there are any; none where they are equal."""
    spreads = {level: _between(peak, others, level) for level in TRACE_LEVELS} if others else {}
    source = f"{len(others)} other orders of the lengths were analysed; a loader that shuffles has any"
    moved = any(spread != EXACT for spread in spreads.values())
    return [Cause("the order of lengths", BOUNDS, source, spreads)] if moved else []


def _between(peak: Peak, others: Sequence[Peak], level: str) -> Spread:
    name = f"{'reserved' if level == 'device' else level}_bytes"
    offsets = [getattr(other, name) - getattr(peak, name) for other in others]
    return bounded(min(0, *offsets), max(0, *offsets))


# --- what was measured ------------------------------------------------------------------------------------------------


def _as_measured(name: str, source: str, peak: Peak, rows: Sequence[Sequence[float]], runs: int | None = None) -> Cause:
    """A cause that changed the allocated and the reserved peaks of runs by these parts of them; ``runs``: of how many
    the rows are quantiles."""
    allocated = seen(int(peak.allocated_bytes * row[0]) for row in rows)
    reserved = seen(_in_segments(peak.reserved_bytes * row[1]) for row in rows)
    spreads = {"requested": allocated, "allocated": allocated, "reserved": reserved, "device": reserved}
    count = len(rows)
    return Cause(name, MEASURED, source, spreads, inside=round((count - 1) / (count + 1), 4), count=runs or count)


def _in_segments(change: float) -> int:
    """A change of reserved bytes, which come and go in whole segments: away from zero to the next of them."""
    return int(math.copysign(round_up(math.ceil(abs(change)), _SEGMENT), change))


@cache
def _measured() -> dict[str, Any]:
    """``networks``: rows of (family of trees, networks, changes of the allocated peak, of the reserved peak), changes
    as quantiles at equal steps;
    ``versions``: rows of (step, older, newer, change of the allocated peak, of the reserved peak); ``programs``: rows
    of (recorded program, change of its peak against the prediction, codes of diagnostics that nothing bounds);
    ``cards``: rows of (language model of others, level, change of its measured peak against the prediction);
    ``shortened``: rows of (program, change of the allocated peak, of the reserved peak)."""
    found: dict[str, Any] = json.loads(files(__name__).joinpath("measured.json").read_text(encoding="utf-8"))
    return found


@cache
def _measured_on_cards() -> dict[str, list[float]]:
    """The changes of ``cards`` by their level."""
    rows = _measured()["cards"]
    return {level: [change for _, at, change in rows if at == level] for level in ("allocated", "reserved")}


def together(*parts: Sequence[Cause]) -> Doubts:
    """All of them."""
    return Doubts(tuple(cause for part in parts for cause in part))
