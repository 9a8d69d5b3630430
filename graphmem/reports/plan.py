"""A plan as text, HTML and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from html import escape

from graphmem.planning.layouts.search import TIGHT, Candidate
from graphmem.planning.plan import Plan, statuses
from graphmem.reports.lines import columns, folded
from graphmem.reports.pages import notebook, page
from graphmem.reports.text import clean
from graphmem.units import format_bytes

WIDTH = 110
#: Layouts that were not captured, listed at most.
_MOST_OPEN = 5
#: Of several.
_STATUSES = {
    "fits": "fit", "does not fit": "do not fit", "refused by its bound": "refused by their bounds",
    "refused by a capture": "refused by a capture of a smaller one",
    "fits when cached segments are given back": "tight",
    "smaller than one that fits": "smaller than ones that fit",
}  # fmt: skip


def render(plan: Plan, width: int = WIDTH) -> str:
    """The text, ending in a newline, sentences in at most ``width`` columns."""
    return "\n".join(part for line in _lines(plan, width) for part in folded(line, width)) + "\n"


def _lines(plan: Plan, width: int) -> Iterator[str]:
    job = plan.job
    capacity = job.cluster.card.capacity_bytes
    yield f"model    {clean(job.shape.name)}, {_count(job.shape.parameters)} parameters"
    yield f"cards    {job.cluster.describe()}, {format_bytes(capacity)} each"
    length = f" of {job.seq_len:,} tokens" if job.seq_len else ""
    yield f"step     {job.step.describe()}; {job.sequences:,} sequences{length}"
    yield ""
    yield from _verdict(plan)
    if plan.fitting:
        yield ""
        yield "Layouts that fit, each captured; the cheapest first (s: seconds of a step)"
        yield from columns([_TITLES, *_rows(plan)], width, words=1)
    yield ""
    yield from _why_not(plan)
    if plan.advice:
        yield ""
        yield "In the first one, each a capture"
        for one in plan.advice:
            yield f"  {one.change} ({one.option}): {_saved(one.saved_bytes) or clean(one.reason)}"
    if plan.files and plan.best is not None:
        yield ""
        yield f"Its configuration (--write FOLDER): {', '.join(one.name for one in plan.files)}"
        yield f"Its figure: graphmem analyze {clean(_name(plan))} {plan.best.layout.options()}{_told(plan)}"
    for title, lines in (("Assumed", plan.assumptions), ("Notes", plan.notes)):
        if lines:
            yield ""
            yield title
            for text in lines:
                yield f"  - {clean(text)}"


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.2f} million"


def _name(plan: Plan) -> str:
    return plan.job.shape.name.partition(" ")[0]


def _told(plan: Plan) -> str:
    step, length = plan.job.step, plan.job.seq_len
    assert plan.best is not None
    words = [f"-s {length}"] if length else []
    words += [f"--amp {step.amp}"] if step.amp else []
    words += [f"--dtype {step.dtype}"] if step.dtype != "fp32" else []
    words += [f"--optimizer {step.optimizer}"] if step.optimizer != "adamw" else []
    words += [f"--loop {step.loop}"] if step.loop != "hold" else []
    words += [f"--alloc-conf {plan.best.alloc_conf}"] if plan.best.alloc_conf else []
    return "".join(f" {word}" for word in (*words, f"--gpu {plan.job.cluster.card.name}"))


def _saved(count: int | None) -> str:
    if count is None:
        return ""
    return f"saves {format_bytes(count)}" if count > 0 else f"costs {format_bytes(-count)}" if count else "no change"


def _verdict(plan: Plan) -> Iterator[str]:
    best = plan.best
    if best is not None and best.estimate is not None and best.estimate.fit is not None:
        fit = best.estimate.fit
        with_conf = f", with {best.alloc_conf}" if best.alloc_conf else ""
        yield f"BEST     {best.layout.words()}{with_conf}"
        yield (
            f"         {format_bytes(fit.device_bytes)} of {format_bytes(fit.capacity_bytes)} on each card, "
            f"{format_bytes(fit.margin_bytes)} spare{f' ({best.status})' if best.status == TIGHT else ''}"
        )
        if best.layout.recompute:
            yield from _without_recomputing(plan)
        return
    closest = plan.closest
    if closest is not None and closest.estimate is not None:
        yield f"NOTHING FITS of {plan.captured} layouts that were captured."
        yield f"         closest: {closest.layout.words()}, {closest.reason}"
    else:
        yield "NOTHING FITS."
    left = len(plan.open())
    if left:
        yield f"         {left} more may fit by their bounds: --confirm {plan.captured + min(left, 16)} captures more"


def _without_recomputing(plan: Plan) -> Iterator[str]:
    for number, one in enumerate(plan.fitting, 1):
        if not one.layout.recompute:
            yield f"         the first without recomputation is no. {number}: {one.layout.words()}"
            return


_TITLES = ("", "layout", "a card", "spare", "sent near", "far", "host", "s sent", "s again", "s waits", "")


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    rows = []
    for number, one in enumerate(plan.fitting, 1):
        assert one.estimate is not None
        assert one.estimate.fit is not None
        fit, cost = one.estimate.fit, one.cost
        remark = "segments that grow" if one.alloc_conf else "tight" if one.status == TIGHT else ""
        if not remark and fit.verdict != "yes":
            remark = f"likely ({fit.chance})" if fit.chance else "likely"
        rows.append(
            (
                str(number), one.layout.words(), format_bytes(fit.device_bytes), format_bytes(fit.margin_bytes),
                *(_decimal(size) for size in (cost.sent.near, cost.sent.far, cost.sent.host)),
                f"{cost.sending:.2f}", f"{cost.recomputing:.2f}", f"{cost.waiting:.2f}", remark,
            )
        )  # fmt: skip
    return rows


def _decimal(size: int) -> str:
    """Links are counted in decimal units."""
    return f"{size / 1e9:,.1f} GB" if size else "-"


def _why_not(plan: Plan) -> Iterator[str]:
    counts = statuses(plan)
    told = ", ".join(f"{count} {_STATUSES.get(status, status)}" for status, count in counts.most_common())
    yield f"{sum(counts.values())} layouts: {told}"
    for kind, count, reason in plan.reasons():
        yield f"  {kind} ({count}): {clean(reason)}"
    left = plan.open()
    if left and plan.fitting:
        yield "Not captured, the cheapest first; what they need at least is a bound, not a figure:"
        for one in left[:_MOST_OPEN]:
            yield f"  at least {format_bytes(one.bound.bytes)}: {one.layout.words()}, {one.cost.seconds:.2f} s"
        if len(left) > _MOST_OPEN:
            yield f"  and {len(left) - _MOST_OPEN} more"


def as_csv(plan: Plan) -> str:
    """One line a layout, memory in bytes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        ("layout", "options", "status", "device_bytes", "margin_bytes", "bound_bytes", "sent_near_bytes",
         "sent_far_bytes", "sent_host_bytes", "sending_seconds", "recomputing_seconds", "reason")
    )  # fmt: skip
    for one in (*plan.fitting, *plan.others):
        writer.writerow(_csv_row(one))
    return buffer.getvalue()


def _csv_row(one: Candidate) -> tuple[object, ...]:
    fit = one.estimate.fit if one.estimate is not None else None
    sent = one.cost.sent
    return (
        one.layout.words(), one.layout.options(), one.status, one.estimate.device if one.estimate is not None else "",
        fit.margin_bytes if fit is not None else "", one.bound.bytes, sent.near, sent.far, sent.host,
        f"{one.cost.sending:.6f}", f"{one.cost.recomputing:.6f}", one.reason,
    )  # fmt: skip


def html(plan: Plan) -> str:
    """One HTML file that needs nothing else; the JSON is inside, in the element ``graphmem-plan``."""
    title = escape(f"{clean(plan.job.shape.name)} on {plan.job.cluster.describe()}")
    return page(title, _body(plan), "graphmem-plan", plan.to_dict())


def for_notebook(plan: Plan) -> str:
    """The same among other cells."""
    return notebook(_body(plan))


def _body(plan: Plan) -> str:
    head = "<br>".join(escape(clean(line.strip())) for line in _verdict(plan))
    titles = "".join(f"<th>{escape(name)}</th>" for name in _TITLES)
    rows = "".join(
        "<tr>" + "".join(f"<td{'' if column == 1 else ' class=n'}>{escape(cell)}</td>" for column, cell in
                         enumerate(row)) + "</tr>"
        for row in _rows(plan)
    )  # fmt: skip
    reasons = "".join(
        f"<tr><td>{escape(kind)}</td><td class=n>{count}</td><td>{escape(clean(reason))}</td></tr>"
        for kind, count, reason in plan.reasons()
    )
    advice = "".join(
        f"<li>{escape(one.change)} ({escape(one.option)}): {escape(_saved(one.saved_bytes) or clean(one.reason))}</li>"
        for one in plan.advice
    )
    files = "".join(f"<h3>{escape(one.name)}</h3><pre>{escape(one.text)}</pre>" for one in plan.files)
    notes = "".join(f"<li>{escape(clean(note))}</li>" for note in (*plan.assumptions, *plan.notes))
    return (
        f"<p class={'yes' if plan.fitting else 'no'}>{head}</p>"
        f"<h2>Layouts that fit</h2><div class=wide><table><tr>{titles}</tr>{rows}</table></div>"
        f"<h2>Why others are not among them</h2><div class=wide><table>{reasons}</table></div>"
        f"<h2>In the first one</h2><ul>{advice}</ul>{files}<h2>Assumed</h2><ul>{notes}</ul>"
    )
