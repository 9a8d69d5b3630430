"""The stages of an answer in a row: the run of a question, replayed on its card, judged and summed up."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from graphmem.allocators.base import SegmentView
from graphmem.answering import remarks
from graphmem.answering.causes import (
    Outcome,
    cause_of_cudnn,
    cause_of_orders,
    cause_of_real_card,
    cause_of_version,
    causes_of_context,
    causes_of_trace,
    neighbours,
    together,
)
from graphmem.answering.least import least_that_fits
from graphmem.answering.question import Answered, Question
from graphmem.answering.refusals import refusals_of
from graphmem.answering.runs import Progress, RunCache, could_go_on, labelled, silent
from graphmem.answering.summarize import fits_card, summarize
from graphmem.answering.verdict import holding, loads_of, probability
from graphmem.base.figures import Cause, Loads
from graphmem.base.versions import Version, words
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError, GraphmemError, TraceError
from graphmem.estimate import Estimate, Findings, Peak, found_later
from graphmem.replay import Replay
from graphmem.run import SMALL_OUTPUT, Run
from graphmem.runtimes.base import Runs, Runtime, Setting, Taken, doubts_of
from graphmem.sources import TorchModel
from graphmem.trace import Trace
from graphmem.training import Inference, Training, other_loop
from graphmem.units import format_bytes


def estimate_of(
    question: Question,
    cache: RunCache | None = None,
    say: Progress = silent,
    *,
    figures_only: bool = False,
) -> Estimate:
    """The answer to a question: its model is loaded and run, the run replayed and summed up.

    ``cache`` has the run of the question before, and takes this one. With ``figures_only`` no further analyses are made
    to know how sure the figures are. Where tokens are drafted and the question leaves open how many are right, all and
    none are tried, and the answer is the one that needs more. Raises :class:`GraphmemError`.
    """
    step = question.step
    if not isinstance(step, Inference) or step.generate is None or not step.generate.is_open:
        return _within_its_card(question, cache, say, figures_only)
    shared = cache or RunCache()
    none_right = replace(question, training=replace(step, generate=replace(step.generate, accepted=0)))
    say("drafted tokens: all are right, then none")
    all_right, in_vain = (_within_its_card(one, shared, say, figures_only) for one in (question, none_right))
    more = max((all_right, in_vain), key=lambda estimate: estimate.device)
    remark = (
        f"how many drafted tokens are right is data: {format_bytes(all_right.reserved)} are reserved if all are, "
        f"{format_bytes(in_vain.reserved)} if none is; the larger one is shown (--accepted N: so many of a round)"
    )
    return replace(more, assumptions=(remark, *more.assumptions))


def _within_its_card(question: Question, cache: RunCache | None, say: Progress, figures_only: bool) -> Estimate:
    """The estimate. A program that does not fit its card is run once more within it, as it may catch the error."""
    runs = cache or RunCache()
    estimate, may_go_on = _once(question, runs, say, figures_only)
    if may_go_on and (estimate.fit is None or not estimate.fit.fits):
        runs.forget()
        estimate, _ = _once(question, runs, say, figures_only)
    return estimate


#: A difference of a larger share of the reserved bytes is shown.
_SHOWN_DIFFERENCE = 1 / 100


def beside_other_loop(
    estimate: Estimate,
    question: Question,
    say: Progress = silent,
    cache: RunCache | None = None,
) -> Estimate:
    """The estimate with the figures of the other loop in ``details["loop"]``, where the two differ by more than 1 %.

    One holds the model's output in a variable and one drops it (:data:`graphmem.training.LOOPS`). The run in ``cache``,
    which answered the question, mostly gives both; else the other is a run of its own. Raises :class:`GraphmemError`.
    """
    step = question.step
    if not isinstance(step, Training):
        return estimate
    loop = estimate.details.get("loop")
    if loop is None or loop["output_bytes"] < SMALL_OUTPUT * estimate.reserved:
        return estimate
    other = other_loop(step.loop)
    question = replace(question, training=replace(step, loop=other), top=0)
    theirs = estimate_of(question, cache, labelled(say, f"with --loop {other}"), figures_only=True)
    levels = ("allocated", "reserved", "device")
    if all(abs(getattr(theirs, n) - getattr(estimate, n)) <= _SHOWN_DIFFERENCE * getattr(estimate, n) for n in levels):
        return estimate
    figures = {f"other_{level}_bytes": getattr(theirs, level) for level in levels}
    return estimate.with_details(loop={**loop, "other": other, **figures})


def _once(question: Question, cache: RunCache, say: Progress, figures_only: bool) -> tuple[Estimate, bool]:
    """The estimate, and whether the program, run within the card of the question, may do otherwise."""
    run = cache.run(question, say)
    beside: dict[Version, Peak] | None = None
    tried: dict[str, Outcome] = {}
    orders: list[Peak] = []
    if run.planned is None and not figures_only:
        beside = _of_neighbours(question, say)
        orders = _of_other_orders(question, say)
        if question.bounds:
            tried = _of_other_values(question, run.decided, say)
    say("replaying")
    estimate = replay_on(question, run, beside, tried, orders, figures_only=figures_only)
    return estimate, could_go_on(question, run)


def _of_neighbours(question: Question, say: Progress) -> dict[Version, Peak]:
    """The peak under the rules of the recorded versions beside one that was not, each an analysis of its own. Those
    that cannot be analysed are left out."""
    peaks = {}
    for version in neighbours(question.setting.torch_version):
        with contextlib.suppress(GraphmemError):
            other = replace(question, torch_version=words(version), top=0)
            heard = labelled(say, f"with PyTorch {words(version)}")
            peaks[version] = estimate_of(other, say=heard, figures_only=True).peak
    return peaks


def _of_other_orders(question: Question, say: Progress) -> list[Peak]:
    """The peaks with the lengths of batches in other orders, each an analysis of its own: longer ones first, last, and
    those given backwards."""
    step = question.step
    if not isinstance(step, Training):
        return []
    lengths = step.seq_lens
    orders = {tuple(sorted(lengths)), tuple(sorted(lengths, reverse=True)), tuple(reversed(lengths))} - {lengths}
    peaks = []
    for order in sorted(orders):
        other = replace(question, training=replace(step, seq_lens=order), bounds=False, top=0)
        heard = labelled(say, f"lengths {', '.join(map(str, order))}")
        peaks.append(estimate_of(other, say=heard, figures_only=True).peak)
    return peaks


#: Analyses with other values than those that were assumed, at most.
_MOST_TRIED = 8


def _of_other_values(question: Question, decided: Collection[Diagnostic], say: Progress) -> dict[str, Outcome]:
    """The outcomes of other values than those assumed, by the line that reads them, each an analysis of its own. A line
    is left out whose values have no known ends, where an analysis fails, and where it assumes values of other lines."""
    from graphmem.capture.values.assumed_values import alternatives  # only captures assume values

    found: dict[str, Outcome] = {}
    for place, values in alternatives(decided).items():
        if not values or sum(len(one.peaks) for one in found.values()) + len(values) > _MOST_TRIED:
            continue
        with contextlib.suppress(GraphmemError):
            peaks = []
            for value in values:
                step = replace(question.step, assume=(*question.step.assume, (place, value)))
                other = replace(question, training=step, bounds=False, top=0)
                theirs = estimate_of(other, say=labelled(say, f"{place} read as {value:g}"), figures_only=True)
                failed = theirs.details.get("program", {}).get("code")
                if failed or _lines_assumed(theirs.diagnostics) - _lines_assumed(decided):
                    raise CaptureError("it fails, or other lines decide then")
                peaks.append(theirs.peak)
            found[place] = Outcome(" and ".join(f"{value:g}" for value in values), tuple(peaks))
    return found


def _lines_assumed(diagnostics: Iterable[Diagnostic]) -> set[str]:
    return {one.place for one in diagnostics if one.kind == "assumed"}


# --- replay -----------------------------------------------------------------------------------------------------------


def replay_recorded(trace: Trace, question: Question, *, died: bool = False) -> Estimate:
    """A trace that comes from elsewhere; it replays under its own settings unless others are asked for. ``died``: its
    run ended with its last request, so that the figures are the least that it needs."""
    notes = dict(trace.notes)
    if question.alloc_conf is None:
        runtime = question.runtime_by_default(TorchModel.runtime)
        question = replace(question, alloc_conf=runtime.recorded_options(notes))
    peak = notes.get(_RECORDED_PEAK)
    figures = {} if peak is None else {"reserved_bytes": _recorded_bytes(peak)}
    sentences = tuple(f"{key}: {value}" for key, value in trace.notes if key != _RECORDED_PEAK and value)
    cut = (Code.RECORDING_ENDS.about(),) if died else ()
    taken = Taken(trace, sentences, cut, proven="the recording itself")
    run = Run(trace, trace.source, TorchModel.runtime, "recorded run", planned=taken, recorded=figures)
    return replay_on(question, run)


#: The note of a trace with the reserved bytes that were recorded.
_RECORDED_PEAK = "recorded peak reserved"


def _recorded_bytes(text: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", text):
        raise TraceError(f"the note {_RECORDED_PEAK!r} of the trace is {text!r}, not a number of bytes")
    return int(text)


def replay_on(
    question: Question,
    run: Run,
    beside: Mapping[Version, Peak] | None = None,
    tried: Mapping[str, Outcome] | None = None,
    orders: Sequence[Peak] = (),
    *,
    figures_only: bool = False,
) -> Estimate:
    """The run in its runtime's allocator on the card of the question, with all that a process loads for it.

    ``beside``: peaks under the rules of recorded versions, by which one that was not is judged, None where it is not;
    ``tried``: outcomes of other values than those that were assumed; ``orders``: peaks with batches of several lengths
    in other orders. With ``figures_only`` nobody asks how sure they are.
    """
    runtime = question.runtime_by_default(run.runtime)
    options = runtime.parse(question.alloc_conf, question.setting)
    taken = run.planned if run.planned is not None else runtime.take(run.trace)
    rules = None if beside or tried or orders else runtime.told_apart(taken.trace, options)
    known = question.kept.get((rules, figures_only))
    if rules is None or known is None or known.run is not run:
        playing = _Playing(runtime, options)
        answer = _replayed(question, run, taken, playing, beside, tried, orders, figures_only=figures_only)
        known = Answered(run, answer)
        if rules is not None and playing.is_free:
            question.kept[rules, figures_only] = known
    return replace(known.estimate, allocator=runtime.describe(options, question.setting))


class _Playing:
    """A runtime's runs of traces under some options; ``is_free``: whether no limit of a card played a part in them, nor
    a storage that is neither empty nor the first trace's."""

    def __init__(self, runtime: Runtime[object], options: object) -> None:
        self.runtime, self.options = runtime, options
        self.is_free = True
        self._first: Trace | None = None

    def run(self, trace: Trace, setting: Setting) -> Runs:
        """As :meth:`Runtime.run`."""
        runs = self.runtime.run(trace, self.options, setting)
        self._first = self._first or trace
        self.is_free &= runs.limited is None and runs.find_doubts is tuple and _is_part(trace, self._first)
        return runs


def _is_part(trace: Trace, whole: Trace) -> bool:
    """Whether storages are the same, or empty."""
    sizes = trace.columns.bytes
    return trace is whole or bool(((sizes == 0) | (sizes == whole.columns.bytes)).all())


def _replayed(
    question: Question, run: Run, taken: Taken, playing: _Playing,
    beside: Mapping[Version, Peak] | None, tried: Mapping[str, Outcome] | None, orders: Sequence[Peak], *,
    figures_only: bool,
) -> Estimate:  # fmt: skip
    """The same, but for what is said of the allocator."""
    runtime, options = playing.runtime, playing.options
    trace, loads = taken.trace, loads_of(run, question.setting)
    if trace.refused:  # on a card that had loaded nothing yet: else it would be judged by another limit
        loads = Loads(cuda=loads.cuda, eager=loads.eager)
    context = (*question.setting.device.outside(loads), *taken.outside)
    setting = holding(question.setting, sum(figure.bytes for figure in context))
    runs = playing.run(trace, setting)
    refusals = refusals_of(trace, runs.main) if run.recorded is None else None  # whose program is not asked again
    known = (*remarks.diagnostics(question, run, taken), *remarks.of_end(run, runs, refusals))
    assumptions = (*remarks.device_notes(question, context), *remarks.assumptions(question, run, taken))
    details: Mapping[str, Any] = {**remarks.details(question, run, runs.main), **runs.details}
    diagnostics: Sequence[Diagnostic] = (*known, *remarks.of_replay(run, trace, runs))
    finds = [] if taken.findings is None else [partial(taken.findings, options)]
    served = runtime.take(run.with_room.trace).trace if run.with_room is not None else trace
    is_refused = refusals is None and runs.limited is not None and not fits_card(runs, setting.device)
    if run.with_room is not None or is_refused:
        finds.append(partial(least_that_fits, partial(runtime.run, served, options), setting))
    if finds:
        late, details = found_later(diagnostics, details, partial(_all_found, finds))
        diagnostics = diagnostics if taken.findings is None else late  # the least that fits has no remarks
    doubts, share = None, None
    if not figures_only:
        run_again = partial(playing.run, setting=setting)
        doubts = together(
            _doubts_of_trace(question, trace, known, runs, run_again, beside, tried),
            _doubts_of_card(question, run, runs),
            cause_of_orders(_peak(runs.main), orders),
            doubts_of(runtime, taken),
            (*runs.doubts, *runs.find_doubts()),
            causes_of_context(context),
        )
        beside_context = lambda size: playing.run(trace, holding(setting, size))  # noqa: E731
        share = probability(trace, runs, doubts, beside_context, setting, refusals)
    estimate = summarize(
        trace,
        runs,
        setting.device,
        model=run.model,
        runtime=runtime.name,
        allocator="",
        step=run.step,
        refusals=refusals,
        top=question.top,
        assumptions=assumptions,
        diagnostics=diagnostics,
        details=details,
        context=context,
        loads=loads,
        doubts=doubts,
        probability=share,
        margin=question.margin_share,
        levels=_levels(runtime, setting.device),
    )
    if run.ending is not None and run.ending.failed and estimate.fit is not None and estimate.fit.fits:
        estimate = replace(estimate, fit=None)  # what came after is not known
    again = partial(runtime.run, options=options, setting=setting)
    segments_at = runs.segments_at or partial(_segments_at, again, trace)
    estimate = replace(estimate, find_segments=partial(segments_at, estimate.moment.event))
    return _beside_formulas(estimate, run)


def _levels(runtime: Runtime[Any], device: Device) -> Sequence[tuple[str, str]]:
    """The runtime's levels in words; nvidia-smi shows no card of another maker."""
    if device.vendor == "NVIDIA":
        return runtime.levels
    return tuple((name, _ON_OTHERS if name == "device" else words) for name, words in runtime.levels)


_ON_OTHERS = "all of the process on the card: reserved plus context"


def _segments_at(runs: Callable[[Trace], Runs], trace: Trace, event: int) -> Sequence[SegmentView]:
    return runs(trace.until(event)).on_card.segments


def _all_found(finds: Sequence[Callable[[], Findings]]) -> Findings:
    found = [find() for find in finds]
    merged = {name: value for one in found for name, value in one.details.items()}
    return Findings(tuple(remark for one in found for remark in one.diagnostics), merged)


#: The largest storages that no formula counts, named beside it.
_NAMED = 3
_UNCOUNTED = ("TEMPORARY", "COMMUNICATION", "WORKSPACE", "KV_CACHE", "HELD", "UNKNOWN")


def _beside_formulas(estimate: Estimate, run: Run) -> Estimate:
    """The estimate with the usual formulas in ``details["formulas"]``, where the model is shared out."""
    if run.sharded is None:
        return estimate
    from graphmem.base.textbook import compared

    peaks = {"allocated_bytes": estimate.allocated, "reserved_bytes": estimate.reserved}
    uncounted = [one for one in estimate.top if one.category in _UNCOUNTED][:_NAMED]
    formulas = compared(run.sharded, run.optimizer, estimate.breakdown, peaks, uncounted)
    return estimate.with_details(formulas=formulas)


def _doubts_of_trace(
    question: Question, trace: Trace, known: tuple[Diagnostic, ...], runs: Runs, rerun: Callable[[Trace], Runs],
    beside: Mapping[Version, Peak] | None, tried: Mapping[str, Outcome] | None,
) -> list[Cause]:  # fmt: skip
    """Why the figures of a trace may be others; ``rerun`` runs it with other sizes."""
    peak, setting = _peak(runs.on_card), question.setting
    found = causes_of_trace(trace, peak, known, lambda other: _peak(rerun(other).on_card), setting.device, tried)
    version = None if beside is None else cause_of_version(setting.torch_version, peak, beside.get)
    return [*found, *([] if version is None else [version])]


def _doubts_of_card(question: Question, run: Run, runs: Runs) -> list[Cause]:
    """Why a captured step may take other memory on the card, and with the cuDNN, that the question means."""
    if run.planned is not None:
        return []
    peak, setting = _peak(runs.main), question.setting
    asked = "" if run.cudnn is None else run.cudnn.details().get("version", "")
    cudnn = cause_of_cudnn(asked, setting.torch_version, peak, setting.device)
    card = None if question.device is None else cause_of_real_card(run.trace, peak)
    return [cause for cause in (cudnn, card) if cause is not None]


def _peak(replay: Replay) -> Peak:
    """The levels of a replay without the context."""
    reserved = replay.peak_reserved_bytes
    return Peak(replay.peak_requested_bytes, replay.peak_allocated_bytes, reserved, reserved)
