"""The document of an estimate: what a run needs, what for, whether it fits, and how sure that is.

Every figure names its unit and its level (requested, allocated, reserved, device).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from graphmem.diagnostics import Code
from graphmem.reports import certainty, flight, moments, post_mortem, tree
from graphmem.reports.document import Column, Document, Facts, Items, Moments, Shares, Table, Text, section, table
from graphmem.units import format_alike, format_bytes, format_enough

if TYPE_CHECKING:
    from graphmem.estimate import CardUse, Diagnostic, Estimate, LiveStorage, Moment, Refusals
    from graphmem.reports.document import Block, Section

#: category -> the words of the breakdown
WORDS = {
    "PARAMETER": "parameters",
    "BUFFER": "buffers",
    "GRADIENT": "gradients",
    "OPTIMIZER_STATE": "optimizer state",
    "ACTIVATION": "activations",
    "INPUT": "inputs",
    "TEMPORARY": "temporaries",
    "WORKSPACE": "library workspaces",
    "COMMUNICATION": "communication buffers",
    "KV_CACHE": "KV cache",
    "HELD": "held by the program",
    "UNKNOWN": "recorded",
    "ROUNDING": "rounding (allocated - requested)",
    "FRAGMENTATION": "fragmentation (reserved - allocated)",
    "CONTEXT": "context (device - reserved)",
}

#: Over assumed values that decide sizes or branches.
DECIDED = "Assumed: your data decides here (--assume FILE:LINE=VALUE)"

_DIAGNOSTIC_TITLES = (
    ("unknown", "Unknown: counted, not modelled"),
    ("warning", "Warnings"),
    ("note", "Notes"),
)


#: Lines of what is held that are shown, and differences from a formula, the largest of them; the JSON has all.
_LINES, _DIFFERENCES = 5, 4
_CARD = {"part": "", "": "bytes", "certainty": ""}
_LEVELS = ("requested", "allocated", "reserved", "device")


def document(estimate: Estimate, budget_bytes: int | None) -> Document:
    """The whole report. What comes first is whether the device memory is within ``budget_bytes``. Its first screen is
    :mod:`graphmem.reports.screen`."""
    over = budget_bytes is not None and estimate.device > budget_bytes
    budget = [section("", Text([line], "no" if over else "yes")) for line in budget_lines(estimate, budget_bytes)]
    title = f"GPU memory of {estimate.model}"
    sections = [*budget, *_sections(estimate)]
    return Document("estimate", title, sections, estimate.to_dict, about=about(estimate))


def about(estimate: Estimate) -> Table:
    """A row that says of what the tables of a spreadsheet are."""
    values = {"model": estimate.model, "step": estimate.step, "runtime": estimate.runtime, "gpu": estimate.gpu}
    values["fits"] = "" if estimate.fit is None else estimate.fit.verdict
    return Table([Column(name) for name in values], [tuple(values.values())])


def budget_lines(estimate: Estimate, budget_bytes: int | None) -> Iterator[str]:
    """Whether the estimate is within the budget, where there is one."""
    if budget_bytes is None:
        return
    allowed, left = format_bytes(budget_bytes), budget_bytes - estimate.device
    if left < 0:
        yield f"OVER THE BUDGET of {allowed} by {format_bytes(-left)} of device memory."
    else:
        yield f"Within the budget of {allowed}: {format_bytes(left)} of device memory left."


def _sections(estimate: Estimate) -> Iterator[Section]:
    yield from _head(estimate)
    if "out_of_memory" in estimate.details:
        yield from post_mortem.sections(estimate.details["out_of_memory"])
    found = decided(estimate)
    if found:  # before the figures that depend on it
        yield section(DECIDED, Items(found))
    yield _levels(estimate)
    other = _other_loop(estimate)
    if other is not None:
        yield section(other[0], Text([other[1]]))
    yield _breakdown(estimate)
    yield from events(estimate, "Over the events of the run")
    if estimate.card is not None:
        yield section("What the card holds", table(_CARD, _card_rows(estimate, estimate.card)))
    if "ranks" in estimate.details:
        yield _ranks(estimate.details["ranks"])
    if "runs" in estimate.details:
        yield _runs(estimate.details["runs"])
    if "followed" in estimate.details:
        yield _followed(estimate.details["followed"])
    if "formulas" in estimate.details:
        yield _formulas(estimate.details["formulas"])
    yield _moment(estimate)
    if estimate.trace is not None:
        yield tree.section_of(estimate)
    if estimate.phases:
        yield _phases(estimate)
    yield from _beside_the_peak(estimate)


def events(estimate: Estimate, title: str = "") -> Iterator[Section]:
    """The run over its events, where they are kept."""
    if estimate.trace is not None and estimate.timeline is not None and len(estimate.trace):
        yield section(title, Moments(partial(moments.tables, estimate)))


def _beside_the_peak(estimate: Estimate) -> Iterator[Section]:
    if estimate.host_bytes or estimate.pinned_bytes or estimate.managed_bytes:
        yield _host(estimate)
    if "sandbox" in estimate.details:
        yield flight.section_of(estimate.details["sandbox"])
    yield from _remarks(estimate)
    if estimate.doubts.causes:
        yield section(
            "Why figures may be others (of device memory)",
            table({"cause": "", "off by": "", "source": ""}, tuple(certainty.rows(estimate))),
        )
    if estimate.details.keys() - set(_SHOWN_ABOVE):
        yield section("Details", Facts(tuple(_details(estimate.details))))


def _head(estimate: Estimate) -> Iterator[Section]:
    rows = (
        ("model", estimate.model),
        ("step", estimate.step),
        ("runtime", f"{estimate.runtime}, allocator {estimate.allocator}"),
        ("gpu", f"{estimate.gpu}, assumed: no --gpu was given" if estimate.card_assumed else estimate.gpu),
    )
    yield section("", Text([*head_lines(estimate), *remedy(estimate)], "yes" if runs(estimate) else "no"))
    yield section("", Facts(rows))


def runs(estimate: Estimate) -> bool:
    """Whether the step runs, as far as is known: on its card, where one is known."""
    return not estimate.failure and (estimate.fit is None or estimate.fit.is_expected)


def head_lines(estimate: Estimate) -> Sequence[str]:
    """The verdict, and what limits every figure; that the step itself would fail comes before both."""
    fails = [f"FAILS BEFORE MEMORY MATTERS: {estimate.failure}."] if estimate.failure else []
    return [*fails, *verdict(estimate), *headlines(estimate)]


def headlines(estimate: Estimate) -> Sequence[str]:
    """The sentences beside the verdict that limit every figure, such as the assumption of a card."""
    found = (one for one in estimate.diagnostics if one.kind == "headline" and one.code is not Code.STEP_FAILS)
    return [f"{_diagnostic(one)}." for one in found]


def verdict(estimate: Estimate) -> Sequence[str]:
    """Whether it fits the card, in sentences; the first begins with FITS, DOES NOT FIT, or LIKELY and one of them, or
    with RAN OUT OF MEMORY for a recorded run that did, where no other card is asked for. Of a step that fails all the
    same, it says that its memory would fit. The last one says how sure."""
    fit, dead = estimate.fit, estimate.details.get("out_of_memory")
    if dead is not None and dead["in_its_room"]:
        return post_mortem.sentences(dead)
    if fit is None:
        if estimate.gpu:
            needs = f"Needs at least {format_bytes(estimate.device)} of device memory on {estimate.gpu}"
            return (f"{needs}, what it took so far; whether it fits is not known.",)
        return (f"Needs {format_bytes(estimate.device)} of device memory. No GPU was named to compare with.",)
    likely, gpu = "" if fit.is_sure else "LIKELY ", fit.gpu
    fits = f"{likely}{'FITS' if fit.is_expected else 'DOES NOT FIT'}"
    if estimate.failure and fit.is_expected:
        fits = f"Its memory alone {'would' if fit.is_sure else 'may'} fit"
    unlike = ", less than the figures may be off" if fit.fits != fit.is_expected else ""
    gpu += f" ({fit.chance})" if fit.chance else ""
    gpu += " with less than it asks for" if fit.fits and fit.refusals is not None else ""
    taken = f", of which others hold {format_bytes(fit.others_bytes)}" if fit.others_bytes else ""
    card = f"the card has {format_bytes(fit.capacity_bytes)}{taken}"
    need, spare = format_bytes(fit.device_bytes), format_bytes(abs(fit.margin_bytes))
    need = f"at least {need}" if estimate.ends_early else need
    lines = []
    if fit.needs_cache_flush:
        free = format_bytes(fit.unlimited_bytes)
        lines.append(
            f"{fits} {gpu}: holds {need} of device memory there, {card}, {spare} spare{unlike}. Only because the "
            f"allocator gives cached segments back to the driver and tries again: without a limit it would hold {free}."
        )
    elif fit.fits:
        why = unlike or _without_bound(estimate)
        lines.append(f"{fits} {gpu}: needs {need} of device memory, {card}, {spare} spare{why}.")
    elif fit.margin_bytes < 0:
        lines.append(f"{fits} {gpu}: needs {need} of device memory, {card}, {spare} missing{unlike}.")
    else:
        why = "but the allocator's own limit or fragmentation stops it."
        lines.append(f"{fits} {gpu}: needs {need} of device memory, {card}, {why}")
    if fit.failed_at:
        lines.append(f"Runs out of memory in {where(fit.failed_at)}{_held_then(estimate)}.")
    least = estimate.details.get("least")
    if fit.refusals is not None:
        lines.append(_refused(fit.refusals))
        needed = format_enough(fit.refusals.needed_bytes + estimate.device - estimate.reserved)
        lines += [] if least is not None else [f"All that it asks for takes {needed} or more."]
    lines += [] if least is None else [_least(least, fit.device_bytes)]
    sure = certainty.sentence(estimate)
    return [*lines, sure] if sure else lines


def _without_bound(estimate: Estimate) -> str:
    """Why it is only likely to fit, however much is spare."""
    if estimate.fit is None or estimate.fit.is_sure or estimate.doubts.most("device") is not None:
        return ""
    return ", enough unless a doubt without bound takes more"


def _held_then(estimate: Estimate) -> str:
    """The memory that a run holds which ends for want of more, where the tables are of one that does not."""
    card = estimate.card
    if card is None or card.process_bytes >= estimate.device:
        return ""
    held = format_bytes(card.process_bytes)
    return f", holding {held}. What follows is of a run on a larger card"


def _least(least: Mapping[str, Any], needed_bytes: int) -> str:
    """The least memory that would do, where that is not what the verdict says (``needed_bytes``), and what giving
    cached segments back on the way saves of it."""
    free, flushed = least["bytes"], least["flushed_bytes"]
    if flushed is not None:
        fewer = format_bytes(free - flushed)
        enough = format_enough(flushed)
        return f"{enough} would do with cached segments given back to the driver on the way, {fewer} less than without."
    enough = "No less" if free <= needed_bytes else f"{format_enough(free)}"
    return f"{enough} would do: giving cached segments back to the driver saves nothing here."


#: What takes less of the memory of a program, by category.
_TAKES_LESS = {
    "PARAMETER": "a smaller type such as bf16, quantised weights or a smaller model takes less",
    "GRADIENT": "training fewer parameters (LoRA, frozen layers) takes less",
    "OPTIMIZER_STATE": "an optimizer with less state, in 8 bits or factored, or training fewer parameters takes less",
    "ACTIVATION": "a smaller batch or shorter inputs take less, and graphmem advise tries what else would",
    "INPUT": "a smaller batch or shorter inputs take less",
    "TEMPORARY": "a smaller batch or shorter inputs take less",
    "KV_CACHE": "a smaller batch or shorter generations take less",
    "FRAGMENTATION": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (--alloc-conf) may take less",
}


#: The least part of a whole that is worth a change.
_WORTH = 0.1


def remedy(estimate: Estimate) -> Iterator[str]:
    """What takes less of that of which there is most, where it is worth it; of a dead run the verdict says what would
    have saved it."""
    breakdown = estimate.breakdown
    if "out_of_memory" in estimate.details:
        return
    first = "To use less" if runs(estimate) else "What to change first"
    not_donated = [one.message for one in estimate.diagnostics if one.code is Code.NOT_DONATED]
    if not_donated:
        yield f"{first}: {not_donated[0]}."
        return
    grows = "caching allocator" in estimate.allocator  # what others have between segments, no setting closes
    known = [category for category in _TAKES_LESS if category != "FRAGMENTATION" or grows]
    most = max(known, key=lambda category: breakdown.get(category, 0))
    if breakdown.get(most, 0) > _WORTH * sum(breakdown.values()):
        words = WORDS.get(most, most).partition(" (")[0]
        yield f"{first}: most is {words}, {format_bytes(breakdown[most])}; {_TAKES_LESS[most]}."


def _refused(refusals: Refusals) -> str:
    """The requests that a program was refused, and what it did then."""
    times = "once," if refusals.count == 1 else f"{refusals.count} times, first"
    what = f"refused memory {times} {format_bytes(refusals.first_bytes)} for {refusals.place}"
    if not refusals.went_on:
        return f"It is {what}, and gives up."
    later = f"with {format_bytes(refusals.later_bytes)} there" if refusals.later_bytes else "without"
    return f"DOES NOT FIT as it begins: {what}; it went on {later}."


def _card_rows(estimate: Estimate, card: CardUse) -> list[tuple[str, int, str]]:
    """Rows (name, bytes, certainty) of the memory on the card, from the process to the whole card."""
    known = certainty.interval(estimate, "device")
    if card.process_bytes < estimate.device:
        known = "until it runs out of memory"
    rows = [("this process", card.process_bytes, f"{known}: reserved plus")]
    for figure in card.context:
        known = "as measured"
        if figure.least_bytes != figure.most_bytes:
            known = " to ".join(format_alike(figure.least_bytes, figure.most_bytes))
        rows.append((f"  {figure.name}", figure.bytes, known))
    if card.others_bytes:
        rows.append(("others", card.others_bytes, "as you said"))
    if card.driver_bytes is not None:
        rows.append(("the driver", card.driver_bytes, "in no process; NVML's first memory query calls it used"))
    if len(rows) > 1 + len(card.context):
        rows.append(("the whole card", card.whole_bytes, ""))
    return rows


def _levels(estimate: Estimate) -> Section:
    recorded = estimate.details.get("recorded") or {}
    rows: list[tuple[str | int, ...]] = []
    for name, meaning in estimate.levels:
        row: tuple[str | int, ...] = (name, getattr(estimate, name))
        if recorded:
            value = recorded.get(f"{name}_bytes")
            row = (*row, value if isinstance(value, int) else "not known")
        rows.append((*row, meaning))
    words = "lower bound: live bytes, no rounding, no gaps"
    rows.append(("ideal", estimate.ideal_bytes, "", words) if recorded else ("ideal", estimate.ideal_bytes, words))
    figures = [Column(name, "bytes") for name in ("predicted", *(["recorded"] if recorded else []))]
    columns = (Column(name="level"), *figures, Column(name="meaning"))
    return section("Peak memory, each level's own maximum over the run", Table(columns, rows))


#: What becomes of the model's output, by the name of the loop.
_LOOPS = {
    "hold": "a variable holds the model's output through the backward pass and the next forward",
    "drop": "the model's output is dropped before the backward pass",
}


def _other_loop(estimate: Estimate) -> tuple[str, str] | None:
    """Title and figures of the other loop (hold or drop the output), where they are reported."""
    loop = estimate.details.get("loop") or {}
    other = loop.get("other")
    if other not in _LOOPS:
        return None
    figures = []
    for level in ("allocated", "reserved", "device"):
        bytes_, ours = loop[f"other_{level}_bytes"], getattr(estimate, level)
        figures.append(f"{format_bytes(bytes_)} {level} ({100 * (bytes_ - ours) / ours:+.1f} %)")
    return f"With the other loop (--loop {other})", f"{', '.join(figures)}: {_LOOPS[other]}"


def edge(estimate: Estimate) -> tuple[str, int] | None:
    """The name of the card, and the bytes that a process can have there; None where no card is known."""
    fit = estimate.fit
    return None if fit is None else (fit.gpu, fit.capacity_bytes - fit.others_bytes)


def _breakdown(estimate: Estimate) -> Section:
    total = sum(estimate.breakdown.values())
    lines, recorded = _lines(estimate), "UNKNOWN" in estimate.breakdown
    blocks: list[Block] = [Shares(parts(estimate), ("together", total), edge(estimate))]
    if estimate.pools:
        labels = [pool.label if pool.count == 1 else f"{pool.label} ({pool.count})" for pool in estimate.pools]
        rows = [
            (label, pool.reserved_bytes, f"{format_bytes(pool.requested_bytes)} in use")
            for label, pool in zip(labels, estimate.pools, strict=True)
        ]
        blocks.append(Text(["Of that, reserved in private pools, where only the pool's own requests are served:"]))
        blocks.append(table({"pool": "", "reserved": "bytes", "in use": ""}, rows))
    if lines and not recorded:
        blocks.append(Text(["Held by the program from step to step, by the line that made it:"]))
        blocks.append(table({"held": "bytes", "source": ""}, lines))
    if total != estimate.device:
        later = format_bytes(estimate.device)
        blocks.append(Text([f"The device level's own maximum, {later}, is reached at another moment of the run."]))
    return section("What it is made of at the peak (device level)", *blocks)


def parts(estimate: Estimate) -> list[tuple[str, int, str]]:
    """(name, bytes, "") of what the peak is made of: of a recording, which has no categories, the source lines."""
    known = [(WORDS.get(name, name), size, "") for name, size in estimate.breakdown.items()]
    if "UNKNOWN" not in estimate.breakdown:
        return known
    lines = [(source, size, "") for size, source in _lines(estimate)]
    return [*lines, *(part for part in known if part[0] != WORDS["UNKNOWN"])]


def _lines(estimate: Estimate) -> list[tuple[int, str]]:
    """(bytes, source line) of what is held, or recorded, the largest first and the rest together."""
    lines = [(one.bytes, one.source) for one in estimate.held[:_LINES]]
    if len(estimate.held) > _LINES:
        rest = sum(one.bytes for one in estimate.held[_LINES:])
        lines.append((rest, f"{len(estimate.held) - _LINES} more lines"))
    return lines


def _moment(estimate: Estimate) -> Section:
    blocks: list[Block] = [Text([where(estimate.moment)])]
    growth = estimate.last_growth
    if growth is not None and where(growth) != where(estimate.moment):
        blocks.append(Text([f"reserved memory grew for the last time in {where(growth)}"]))
    if estimate.top:
        rows = [(one.bytes, WORDS.get(one.category, one.category), _storage(one)) for one in estimate.top]
        blocks.append(Text([f"largest of the storages alive then (requested bytes, {len(rows)} shown):"]))
        blocks.append(table({"requested": "bytes", "for": "", "storage": ""}, rows))
    return section("When the peak happens", *blocks)


#: Storages that the model names: what copied them to the card tells the reader nothing.
_NAMED_BY_MODEL = ("PARAMETER", "BUFFER")


def _storage(storage: LiveStorage) -> str:
    """The name of a storage, or what made it, and when."""
    made = " ".join(part for part in (storage.operator, _inside(storage.module), storage.source) if part)
    text = storage.label or made or "-"
    if storage.label and made and storage.category not in _NAMED_BY_MODEL:
        text = f"{text} ({made})"
    return f"{text}, {storage.phase}" if storage.phase else text


def _phases(estimate: Estimate) -> Section:
    rows = []
    for phase in estimate.phases:
        name, peak = str(phase), phase.peak
        figures = (peak.requested_bytes, peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
        rows.append((name + (" *" if name == estimate.moment.phase else ""), *figures))
    return section("Peak by phase (* holds the peak)", Table(_by_level("phase"), rows))


def _by_level(name: str) -> list[Column]:
    return [Column(name=name), *(Column(level, "bytes") for level in _LEVELS)]


def _formulas(formulas: Mapping[str, Any]) -> Section:
    """The section that puts the textbook's formulas beside what was simulated, with the largest differences."""
    states, simulated = formulas["model_states"], formulas["simulated"]
    first = (
        f"{formulas['framework']} with {formulas['optimizer'] or 'Adam'}, model states {states['formula']}: "
        f"{format_bytes(states['bytes'])}; simulated: {format_bytes(simulated['allocated_bytes'])} allocated, "
        f"{format_bytes(simulated['reserved_bytes'])} reserved, because at the peak"
    )
    differences = sorted(formulas["difference"].items(), key=lambda item: -abs(item[1]))[:_DIFFERENCES]
    rows = [
        (
            "model states, other than the formula's" if name == "MODEL_STATES" else WORDS.get(name, name.lower()),
            f"{'+' if size >= 0 else '-'} {format_bytes(abs(size))}",
        )
        for name, size in differences
    ]
    after = []
    for one in formulas["beyond"]:
        sized = f" ({one['option']})" if one["option"] else ""
        after.append(f"{format_bytes(one['bytes'])} of it made at {one['source']}{sized}")
    kept = formulas.get("activations")
    if kept is not None:
        after.append(
            f"activations {kept['formula']}: {format_bytes(kept['bytes'])} in 16 bits; simulated at the peak: "
            f"{format_bytes(kept['simulated_bytes'])}, with the loss and what is no layer"
        )
    blocks = (Text([first]), table({"part": "", "difference": "figure"}, rows), Text(after))
    return section("Beside the usual formulas (ZeRO; Korthikanti et al.)", *blocks)


def _ranks(ranks: Mapping[str, Any]) -> Section:
    rows = []
    for kind in ranks["kinds"]:
        mark = " *" if ranks["fullest"] in kind["ranks"] else ""
        rows.append((f"rank {', '.join(map(str, kind['ranks']))}{mark}", *(kind[f"{one}_bytes"] for one in _LEVELS)))
    blocks: list[Block] = [Table(_by_level("rank"), rows)]
    if ranks["world_size"] > len(ranks["analysed"]) and ranks["complete"]:
        others = ranks["world_size"] - len(ranks["analysed"])
        words = "more lie between processes that are alike, event by event, or were not asked for"
        blocks.append(Text([f"{others} {words}"]))
    title = f"Processes of {ranks['world_size']} that were analysed (* the fullest, of which all else is)"
    return section(title, *blocks)


def _runs(runs: Sequence[Mapping[str, Any]]) -> Section:
    rows = [(f"{run['where']}  {run['item']}", run["allocated_bytes"], run["reserved_bytes"]) for run in runs]
    columns = (Column("run"), Column("allocated", "bytes"), Column("reserved", "bytes"))
    return section("Runs of the program's loops", Table(columns, rows))


def _followed(followed: Mapping[str, Any]) -> Section:
    rows = [
        (f"{one['words']}{' *' * (at == followed['fullest'])}", *(one[f"{level}_bytes"] for level in _LEVELS))
        for at, one in enumerate(followed["processes"])
    ]
    title = "Processes of the command that used the card (* the fullest, of which all else is)"
    return section(title, Table(_by_level("process"), rows))


def _host(estimate: Estimate) -> Section:
    lines = [f"{format_bytes(estimate.host_bytes)} pageable, {format_bytes(estimate.pinned_bytes)} pinned"]
    if estimate.managed_bytes:
        managed = format_bytes(estimate.managed_bytes)
        lines.append(f"{managed} managed: on the GPU where it has room, beside the figures above; else on the host")
    each = estimate.details.get("processes", {}).get("nproc_per_node", 1)
    if each > 1:
        host, pinned = format_bytes(each * estimate.host_bytes), format_bytes(each * estimate.pinned_bytes)
        lines.append(f"{each} processes a node, as this one: {host} pageable, {pinned} pinned")
    return section("Host memory of the step (not on the GPU)", Text(lines))


def _remarks(estimate: Estimate) -> Iterator[Section]:
    if estimate.assumptions:
        yield section("Assumed", Items(estimate.assumptions))
    for kind, title in _DIAGNOSTIC_TITLES:
        found = [_diagnostic(d) for d in estimate.diagnostics if d.kind == kind]
        if found:
            yield section(title, Items(found))


def decided(estimate: Estimate) -> Sequence[str]:
    """What was assumed of data that decides a size or a branch."""
    return [_diagnostic(one) for one in estimate.diagnostics if one.kind == "assumed"]


def _diagnostic(diagnostic: Diagnostic) -> str:
    return diagnostic.message + (f" ({diagnostic.count} times)" if diagnostic.count > 1 else "")


#: Details that have a section of their own.
_SHOWN_ABOVE = ("followed", "formulas", "loop", "out_of_memory", "processes", "ranks", "runs", "sandbox")


def _details(details: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in details.items():
        if name in _SHOWN_ABOVE:
            continue
        if name.endswith("_bytes") and isinstance(value, int):
            value = format_bytes(value)
        elif isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            value = ", ".join(str(item) for item in value)
        yield name, str(value)


def where(moment: Moment) -> str:
    """``iteration 2 backward: aten.mm in layers.3 at model.py:33``."""
    parts = (moment.operator, _inside(moment.module), f"at {moment.source}" if moment.source else "")
    what = " ".join(filter(None, parts))
    return f"{moment.phase}: {what}" if what else moment.phase


def _inside(module: str) -> str:
    return f"in {module}" if module else ""
