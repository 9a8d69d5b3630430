"""The estimate as plain text for a terminal: readable in 80 columns and without colour.

Every figure names its unit and its level (requested, allocated, reserved, device). No arithmetic happens here beyond
sums and shares of figures the estimate already holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graphmem.errors import UsageError
from graphmem.estimate import LEVELS, CardUse, Diagnostic, Estimate, HeldBytes, LiveStorage, Moment, PhasePeak, PoolUse
from graphmem.reports import certainty, flight, post_mortem, tables
from graphmem.runtimes import runtime_named
from graphmem.trace import Phase
from graphmem.units import format_bytes

DEFAULT_WIDTH = 80
MINIMUM_WIDTH = 60

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
    "UNKNOWN": "not told by the recording",
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


def render(
    estimate: Estimate,
    details: bool = False,
    top: int = 5,
    width: int = DEFAULT_WIDTH,
    budget_bytes: int | None = None,
) -> str:
    """The report as text ending in a newline, lines at most ``width`` columns (at least 60).

    ``details`` adds every phase, every storage the estimate kept and its further details; otherwise ``top`` storages
    are shown. An estimate above ``budget_bytes`` of device memory says so first.
    """
    over = over_budget(estimate, budget_bytes)
    return _printed([*([Text(over)] if over else []), *_blocks(estimate, details, top)], width)


#: What :func:`screen` says of the rest.
_MORE = "The whole report: graphmem.reports.text.render(estimate)"


def screen(estimate: Estimate, width: int = DEFAULT_WIDTH) -> str:
    """The part of the report that fits a screen, as text ending in a newline: verdict, levels, what they are made of,
    when the peak happens, and how many remarks the whole report has."""
    blocks = [_title(estimate), _verdict(estimate), *_decided(estimate), _levels(estimate), _breakdown(estimate)]
    blocks.append(_section("When the peak happens", Text(_where(estimate.moment))))
    told = [(title.split(":")[0].lower(), _kinds(estimate, kind)) for kind, title in _DIAGNOSTIC_TITLES]
    counts = [f"{len(estimate.assumptions)} assumed", *(f"{count} {title}" for title, count in told if count)]
    blocks.append(Text(f"Remarks: {', '.join(counts)}. {_MORE}"))
    return _printed(blocks, width)


def _kinds(estimate: Estimate, kind: str) -> int:
    return sum(found.kind == kind for found in estimate.diagnostics)


def _printed(blocks: Sequence[RenderableType], width: int) -> str:
    """The blocks with an empty line between them, no trailing blanks."""
    buffer = StringIO()
    console = Console(
        file=buffer,
        width=max(width, MINIMUM_WIDTH),
        height=tables.HEIGHT,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
    spaced = [part for block in blocks for part in (block, Text(""))]
    console.print(Group(*spaced[:-1]))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def over_budget(estimate: Estimate, budget_bytes: int | None) -> str:
    """By how much the estimate is over the budget, in words; empty where it is not, or there is none."""
    if budget_bytes is None or estimate.device <= budget_bytes:
        return ""
    over, allowed = format_bytes(estimate.device - budget_bytes), format_bytes(budget_bytes)
    return f"OVER THE BUDGET of {allowed} by {over} of device memory."


def levels_of(runtime: str) -> Sequence[tuple[str, str]]:
    """Rows (level, its meaning) in the words of a runtime, in general ones for one that is not installed."""
    from graphmem.runtimes.base import LEVELS as GENERAL

    try:
        return runtime_named(runtime).levels
    except UsageError:
        return GENERAL


def clean(text: object) -> str:
    """Text of users and files made safe for a terminal: everything not printable becomes ``?``."""
    return "".join(char if char.isprintable() else "?" for char in str(text))


def _blocks(estimate: Estimate, details: bool, top: int) -> Iterator[RenderableType]:
    yield _title(estimate)
    yield _verdict(estimate)
    if "out_of_memory" in estimate.details:
        yield from _death(estimate.details["out_of_memory"])
    yield from _decided(estimate)
    yield _levels(estimate)
    other = other_loop(estimate)
    if other is not None:
        yield _section(other[0], Text(other[1]))
    if estimate.card is not None:
        yield _card(estimate, estimate.card)
    if "ranks" in estimate.details:
        yield _ranks(estimate.details["ranks"])
    yield _breakdown(estimate)
    if "formulas" in estimate.details:
        yield _formulas(estimate.details["formulas"])
    yield _moment(estimate, len(estimate.top) if details else top)
    if estimate.phases:
        yield _phases(estimate, details)
    if estimate.host_bytes or estimate.pinned_bytes or estimate.managed_bytes:
        yield _host(estimate)
    if "sandbox" in estimate.details:
        yield _flight(estimate.details["sandbox"], details)
    yield from _remarks(estimate)
    if details and estimate.doubts.causes:
        yield _section(SURE, _sure(estimate))
    if details and estimate.details.keys() - set(_SHOWN_ABOVE):
        yield _details(estimate.details)


def _title(estimate: Estimate) -> RenderableType:
    rows = (
        ("model", estimate.model),
        ("step", estimate.step),
        ("runtime", f"{estimate.runtime}, allocator {estimate.allocator}"),
        ("gpu", estimate.gpu),
    )
    table = _table("", "")
    for name, value in rows:
        table.add_row(name, clean(value))
    return table


def _verdict(estimate: Estimate) -> RenderableType:
    return Text("\n".join([*verdict(estimate), *headlines(estimate)]))


def headlines(estimate: Estimate) -> Sequence[str]:
    """The sentences beside the verdict that limit every figure, such as the assumption of a card."""
    return [f"{clean(_diagnostic(one))}." for one in estimate.diagnostics if one.kind == "headline"]


def verdict(estimate: Estimate) -> Sequence[str]:
    """Whether it fits the card, in sentences; the first begins with FITS, DOES NOT FIT, or LIKELY and one of them, or
    with RAN OUT OF MEMORY for a recorded run that did, where no other card is asked for. The last one says how sure."""
    fit, dead = estimate.fit, estimate.details.get("out_of_memory")
    if dead is not None and dead["in_its_room"]:
        return [clean(line) for line in post_mortem.sentences(dead)]
    if fit is None:
        return (f"Needs {format_bytes(estimate.device)} of device memory. No GPU was named to compare with.",)
    likely, gpu = "" if fit.is_sure else "LIKELY ", clean(fit.gpu)
    gpu += f" ({fit.chance})" if fit.chance else ""
    taken = f", of which others hold {format_bytes(fit.others_bytes)}" if fit.others_bytes else ""
    card = f"the card has {format_bytes(fit.capacity_bytes)}{taken}"
    need, spare = format_bytes(fit.device_bytes), format_bytes(abs(fit.margin_bytes))
    lines = []
    if fit.needs_cache_flush:
        free = format_bytes(fit.unlimited_bytes)
        lines.append(
            f"{likely}FITS {gpu}: holds {need} of device memory there, {card}, {spare} spare. Only because the "
            f"allocator gives cached segments back to the driver and tries again: without a limit it would hold {free}."
        )
    elif fit.fits:
        lines.append(f"{likely}FITS {gpu}: needs {need} of device memory, {card}, {spare} spare.")
    elif fit.margin_bytes < 0:
        lines.append(f"{likely}DOES NOT FIT {gpu}: needs {need} of device memory, {card}, {spare} missing.")
    else:
        why = "but the allocator's own limit or fragmentation stops it."
        lines.append(f"{likely}DOES NOT FIT {gpu}: needs {need} of device memory, {card}, {why}")
    if fit.failed_at:
        lines.append(f"Runs out of memory in {_where(fit.failed_at)}.")
    sure = certainty.sentence(estimate)
    return [*lines, clean(sure)] if sure else lines


def _death(dead: post_mortem.Dead) -> Iterator[RenderableType]:
    """How the memory lay, who held it, and what settings would have done."""
    for title, columns, rows in (
        (post_mortem.HEAP, ("", ">", ""), post_mortem.heap_rows(dead)),
        (post_mortem.HOLDERS, (">", ">", ""), post_mortem.holder_rows(dead)),
        (post_mortem.ATTEMPTS, ("", ""), post_mortem.attempt_rows(dead)),
    ):
        table = _table(*columns)
        for row in rows:
            table.add_row(*map(clean, row))
        yield _section(title, table)


def _card(estimate: Estimate, card: CardUse) -> RenderableType:
    table = _table("", ">", "")
    for name, size, words in card_rows(estimate, card):
        table.add_row(name, format_bytes(size), words)
    return _section("What nvidia-smi shows", table)


def card_rows(estimate: Estimate, card: CardUse) -> list[tuple[str, int, str]]:
    """Rows (name, bytes, certainty) of the memory on the card, from the process to the whole card."""
    known = certainty.interval(estimate, "device")
    rows = [("this process", card.process_bytes, f"{known}: reserved plus")]
    for figure in card.context:
        known = "as measured"
        if figure.least_bytes != figure.most_bytes:
            known = f"{format_bytes(figure.least_bytes)} to {format_bytes(figure.most_bytes)}"
        rows.append((f"  {clean(figure.name)}", figure.bytes, known))
    if card.others_bytes:
        rows.append(("others", card.others_bytes, "as you said"))
    if card.driver_bytes is not None:
        rows.append(("the driver", card.driver_bytes, "in no process; NVML's first memory query calls it used"))
    if len(rows) > 1 + len(card.context):
        rows.append(("the whole card", card.whole_bytes, ""))
    return rows


def _levels(estimate: Estimate) -> RenderableType:
    recorded = estimate.details.get("recorded") or {}
    table = _table("", ">", *([">"] if recorded else []), "")
    table.add_row("", "predicted", *(["recorded"] if recorded else []), "")
    for name, meaning in levels_of(estimate.runtime):
        figures = [format_bytes(getattr(estimate, name))]
        if recorded:
            value = recorded.get(f"{name}_bytes")
            figures.append(format_bytes(value) if isinstance(value, int) else "not known")
        table.add_row(name, *figures, meaning)
    ideal = [format_bytes(estimate.ideal_bytes), *([""] if recorded else [])]
    table.add_row("ideal", *ideal, "lower bound: live bytes, no rounding, no gaps")
    return _section("Peak memory, each level's own maximum over the run", table)


#: What becomes of the model's output, by the name of the loop.
_LOOPS = {
    "hold": "a variable holds the model's output through the backward pass and the next forward",
    "drop": "the model's output is dropped before the backward pass",
}


def other_loop(estimate: Estimate) -> tuple[str, str] | None:
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


def _breakdown(estimate: Estimate) -> RenderableType:
    total = sum(estimate.breakdown.values())
    table = _table("", ">", ">", ">")
    for category, count in estimate.breakdown.items():
        if count:
            table.add_row(WORDS.get(category, clean(category)), *_figures(count, total))
    table.add_row("sum = device bytes at this moment", *_figures(total, total))
    parts: list[RenderableType] = [table]
    if estimate.pools:
        parts.append(Text("Of that, reserved in private pools, where only the pool's own requests are served:"))
        parts.append(_pools(estimate.pools))
    if estimate.held:
        parts.append(Text("Held by the program from step to step, by the line that made it:"))
        parts.append(_held(estimate.held))
    if total != estimate.device:
        later = format_bytes(estimate.device)
        parts.append(Text(f"The device level's own maximum, {later}, is reached at another moment of the run."))
    return _section("What it is made of at the peak (device level)", *parts)


#: Lines that are shown; the JSON has all.
_LINES = 5


def _held(held: Sequence[HeldBytes]) -> Table:
    table = _table(">", "")
    for one in held[:_LINES]:
        table.add_row(format_bytes(one.bytes), clean(one.source))
    if len(held) > _LINES:
        rest = sum(one.bytes for one in held[_LINES:])
        table.add_row(format_bytes(rest), f"{len(held) - _LINES} more lines")
    return table


def _pools(pools: Iterable[PoolUse]) -> Table:
    table = _table("", ">", "")
    for pool in pools:
        label = clean(pool.label) if pool.count == 1 else f"{clean(pool.label)} ({pool.count})"
        table.add_row(label, format_bytes(pool.reserved_bytes), f"{format_bytes(pool.requested_bytes)} in use")
    return table


def _moment(estimate: Estimate, top: int) -> RenderableType:
    parts: list[RenderableType] = [Text(_where(estimate.moment))]
    growth = estimate.last_growth
    if growth is not None and _where(growth) != _where(estimate.moment):
        parts.append(Text(f"reserved memory grew for the last time in {_where(growth)}"))
    shown = estimate.top[:top]
    if shown:
        parts.append(Text(f"largest of the storages alive then (requested bytes, {len(shown)} shown):"))
        parts.append(_storages(shown))
    return _section("When the peak happens", *parts)


#: Storages that the model names: what copied them to the card tells the reader nothing.
_NAMED_BY_MODEL = ("PARAMETER", "BUFFER")


def _storages(storages: Iterable[LiveStorage]) -> Table:
    table = _table(">", "", "")
    for storage in storages:
        made = " ".join(clean(part) for part in (storage.operator, _inside(storage.module), storage.source) if part)
        text = clean(storage.label) or made or "-"
        if storage.label and made and storage.category not in _NAMED_BY_MODEL:
            text = f"{text} ({made})"
        table.add_row(format_bytes(storage.bytes), WORDS.get(storage.category, clean(storage.category)), text)
    return table


def _phases(estimate: Estimate, details: bool) -> RenderableType:
    shown = estimate.phases if details else _telling(estimate.phases, estimate.moment.phase)
    table = _table("", ">", ">", ">", ">")
    table.add_row("", *LEVELS)
    for phase in shown:
        peak = phase.peak
        figures = (peak.requested_bytes, peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
        name = _phase_name(phase)
        mark = " *" if name == estimate.moment.phase else ""
        table.add_row(clean(name) + mark, *(format_bytes(count) for count in figures))
    hidden = len(estimate.phases) - len(shown)
    parts: list[RenderableType] = [table]
    if hidden:
        parts.append(Text(f"{hidden} more with --details"))
    return _section("Peak by phase (* holds the peak)", *parts)


def _telling(phases: Sequence[PhasePeak], peak_phase: str) -> list[PhasePeak]:
    """The phases to show: before the iterations, of the first and the last (the steady state), and of the peak."""
    last = max(phase.iteration for phase in phases)
    return [p for p in phases if p.iteration in (0, 1, last) or _phase_name(p) == peak_phase]


#: Differences from a formula that are shown, the largest of them.
_DIFFERENCES = 4


def _formulas(told: Mapping[str, Any]) -> RenderableType:
    states, simulated = told["model_states"], told["simulated"]
    lines = [
        f"{clean(told['framework'])} with {clean(told['optimizer'] or 'Adam')}, model states {states['formula']}: "
        f"{format_bytes(states['bytes'])}; simulated: {format_bytes(simulated['allocated_bytes'])} allocated, "
        f"{format_bytes(simulated['reserved_bytes'])} reserved, because at the peak"
    ]
    table = _table("", ">")
    differences = sorted(told["difference"].items(), key=lambda item: -abs(item[1]))
    for name, size in differences[:_DIFFERENCES]:
        label = "model states, other than the formula's" if name == "MODEL_STATES" else WORDS.get(name, name.lower())
        table.add_row(label, f"{'+' if size >= 0 else '-'} {format_bytes(abs(size))}")
    parts: list[RenderableType] = [Text(lines[0]), table]
    for one in told["beyond"]:
        sized = f" ({clean(one['option'])})" if one["option"] else ""
        parts.append(Text(f"{format_bytes(one['bytes'])} of it made at {clean(one['source'])}{sized}"))
    kept = told.get("activations")
    if kept is not None:
        parts.append(
            Text(
                f"activations {kept['formula']}: {format_bytes(kept['bytes'])} in 16 bits; simulated at the peak: "
                f"{format_bytes(kept['simulated_bytes'])}, with the loss and what is no layer"
            )
        )
    return _section("Beside the usual formulas (ZeRO; Korthikanti et al.)", *parts)


def _ranks(told: Mapping[str, Any]) -> RenderableType:
    table = _table("", ">", ">", ">", ">")
    table.add_row("", *LEVELS)
    for kind in told["kinds"]:
        mark = " *" if told["fullest"] in kind["ranks"] else ""
        figures = (format_bytes(kind[f"{level}_bytes"]) for level in LEVELS)
        table.add_row(f"rank {', '.join(map(str, kind['ranks']))}{mark}", *figures)
    parts: list[RenderableType] = [table]
    others = told["world_size"] - len(told["analysed"])
    if others and told["complete"]:
        parts.append(Text(f"{others} more lie between processes that are alike, event by event, or were not asked for"))
    return _section(
        f"Processes of {told['world_size']} that were analysed (* the fullest, of which all else is)", *parts
    )


def _host(estimate: Estimate) -> RenderableType:
    lines = [f"{format_bytes(estimate.host_bytes)} pageable, {format_bytes(estimate.pinned_bytes)} pinned"]
    if estimate.managed_bytes:
        managed = format_bytes(estimate.managed_bytes)
        lines.append(f"{managed} managed: on the GPU where it has room, beside the figures above; else on the host")
    each = estimate.details.get("processes", {}).get("nproc_per_node", 1)
    if each > 1:
        host, pinned = format_bytes(each * estimate.host_bytes), format_bytes(each * estimate.pinned_bytes)
        lines.append(f"{each} processes a node, as this one: {host} pageable, {pinned} pinned")
    return _section("Host memory of the step (not on the GPU)", Text("\n".join(lines)))


def _flight(told: Mapping[str, Any], details: bool) -> RenderableType:
    parts: list[RenderableType] = [Text(clean(line)) for line in flight.lines(told)]
    table = _table(">", "", "")
    for row in flight.rows(told, details):
        table.add_row(*map(clean, row))
    return _section(flight.TITLE, parts[0], *([table] if table.row_count else []), *parts[1:])


def _remarks(estimate: Estimate) -> Iterator[RenderableType]:
    if estimate.assumptions:
        yield _section("Assumed", *_bullets(estimate.assumptions))
    for kind, title in _DIAGNOSTIC_TITLES:
        found = [_diagnostic(d) for d in estimate.diagnostics if d.kind == kind]
        if found:
            yield _section(title, *_bullets(found))


#: Above the causes of doubt.
SURE = "Why figures may be others (of device memory)"


def _sure(estimate: Estimate) -> Table:
    table = _table("", "", "")
    for row in certainty.rows(estimate):
        table.add_row(*map(clean, row))
    return table


def _decided(estimate: Estimate) -> Iterator[RenderableType]:
    """Before the figures that depend on it: what was assumed of data that decides a size or a branch."""
    found = [_diagnostic(d) for d in estimate.diagnostics if d.kind == "assumed"]
    if found:
        yield _section(DECIDED, *_bullets(found))


def _diagnostic(diagnostic: Diagnostic) -> str:
    return diagnostic.message + (f" ({diagnostic.count} times)" if diagnostic.count > 1 else "")


#: Details that have a section of their own.
_SHOWN_ABOVE = ("formulas", "late_events", "loop", "out_of_memory", "processes", "ranks", "sandbox")


def _details(details: Mapping[str, Any]) -> RenderableType:
    table = _table("", "")
    for name, value in details.items():
        if name in _SHOWN_ABOVE:
            continue
        if name.endswith("_bytes") and isinstance(value, int):
            value = format_bytes(value)
        elif isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            value = ", ".join(str(item) for item in value)
        table.add_row(clean(name), clean(value))
    return _section("Details", table)


def _where(moment: Moment) -> str:
    """``iteration 2 backward: aten.mm in layers.3 at model.py:33``."""
    parts = (moment.operator, _inside(moment.module), f"at {moment.source}" if moment.source else "")
    what = " ".join(clean(part) for part in parts if part)
    return f"{clean(moment.phase)}: {what}" if what else clean(moment.phase)


def _inside(module: str) -> str:
    return f"in {module}" if module else ""


def _phase_name(phase: PhasePeak) -> str:
    return str(Phase(phase.iteration, phase.name))


def _figures(count: int, total: int) -> tuple[str, str, str]:
    share = f"{100 * count / total:.1f} %" if total else "-"
    return format_bytes(count), f"{count:,} B", share


def _table(*columns: str) -> Table:
    """A table without lines; ``>`` makes a column of figures, which is never wrapped."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        figures = column == ">"
        table.add_column(justify="right" if figures else "left", no_wrap=figures, overflow="fold")
    return table


def _bullets(lines: Iterable[str]) -> list[RenderableType]:
    table = _table("", "")
    for line in lines:
        table.add_row("-", clean(line))
    return [table]


def _section(title: str, *parts: RenderableType) -> RenderableType:
    return Group(Text(title), *(Padding(part, (0, 0, 0, 2)) for part in parts))
