"""The estimate as one HTML file that needs nothing else: no script, no font, no picture from anywhere.

The curves show the three levels over the events of the run; of the events behind one point of the plot the largest is
drawn, so no peak is lost. The JSON report is inside, in the element ``graphmem-estimate``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from graphmem.estimate import CardUse, Diagnostic, Estimate, Moment, Timeline
from graphmem.reports import certainty, pages, post_mortem
from graphmem.reports.text import (
    DECIDED,
    SURE,
    WORDS,
    card_rows,
    clean,
    headlines,
    levels_of,
    other_loop,
    over_budget,
    verdict,
)
from graphmem.trace import Phase
from graphmem.units import format_bytes

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 960, 300, 80, 24, 12
_POINTS = 960

#: Level -> colour of its curve; told apart by readers who see no red or green too.
_CURVES = {"reserved": "#999999", "allocated": "#0072b2", "requested": "#e69f00"}

#: Level -> width of its curve: where two are equal the one below is seen on both sides.
_WIDTHS = {"reserved": 1.5, "allocated": 4, "requested": 1.2}
#: Up to so many times the highest point of the curves the end of the card is drawn.
_IN_SIGHT = 2

_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#f0e442", "#d55e00", "#7f3c8d", "#11a579",
            "#332288", "#a5aa99", "#666666", "#bbbbbb", "#999999", "#444444")  # fmt: skip

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222 }
.wide { overflow-x: auto } h1 { overflow-wrap: anywhere } p, li { overflow-wrap: break-word }
table { border-collapse: collapse; margin: .5em 0 1em } td, th { padding: .15em .9em .15em 0; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
h2 { font-size: 1.1em; margin: 1.6em 0 .3em } .no { color: #b00020; font-weight: 600 } .yes { font-weight: 600 }
.swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em } svg { max-width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: #555 }
@media (max-width: 640px) { body { margin: 1em auto } td, th { padding-right: .5em } td.exact { display: none }
svg { overflow: visible; margin-top: .6em } svg text { font-size: 28px }
svg text.level { text-anchor: start; transform: translate(10px, -10px) } }
""".strip()


def render(estimate: Estimate, budget_bytes: int | None = None) -> str:
    """The whole document, ending in a newline; it begins with a warning for device memory above ``budget_bytes``."""
    title = f"GPU memory of {clean(estimate.model)}"
    over = over_budget(estimate, budget_bytes)
    body = "\n".join(part for part in (over and f'<p class="no">{escape(over)}</p>', *_sections(estimate)) if part)
    data = estimate.to_json().replace("<", "\\u003c")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n"
        f'<script type="application/json" id="graphmem-estimate">\n{data}\n</script>\n</body>\n</html>\n'
    )


def _sections(estimate: Estimate) -> Iterator[str]:
    about = (("step", estimate.step), ("runtime", estimate.runtime), ("allocator", estimate.allocator))
    yield rows_of((), [*about, ("gpu", estimate.gpu)])
    yield _verdict(estimate)
    if "out_of_memory" in estimate.details:
        yield from _death(estimate.details["out_of_memory"])
    decided = [_said(one) for one in estimate.diagnostics if one.kind == "assumed"]
    if decided:
        yield _heading(DECIDED) + _list(decided)
    yield _heading("Peak memory, each level's own maximum over the run") + _levels(estimate)
    other = other_loop(estimate)
    if other is not None:
        yield _heading(other[0]) + f"<p>{escape(other[1])}</p>"
    if estimate.timeline is not None and len(estimate.timeline.reserved_bytes):
        yield _heading("Over the events of the run") + _timeline(estimate, estimate.timeline)
    if estimate.card is not None:
        yield _heading("What nvidia-smi shows") + _card(estimate, estimate.card)
    yield _heading("What it is made of at the peak (device level)") + _breakdown(estimate)
    yield _heading("When the peak happens") + f"<p>{_where(estimate.moment)}</p>" + _top(estimate)
    if estimate.phases:
        yield _heading("Peak by phase") + _phases(estimate)
    if estimate.doubts.causes:
        yield _heading(SURE) + rows_of(("", "", ""), [tuple(map(clean, row)) for row in certainty.rows(estimate)])
    if estimate.assumptions:
        yield _heading("Assumed") + _list(estimate.assumptions)
    for kind, heading in (("unknown", "Unknown: counted, not modelled"), ("warning", "Warnings"), ("note", "Notes")):
        found = [_said(one) for one in estimate.diagnostics if one.kind == kind]
        if found:
            yield _heading(heading) + _list(found)


def table(estimate: Estimate) -> str:
    """The verdict, the levels and the breakdown, for a notebook."""
    return pages.notebook(f"{_verdict(estimate)}\n{_levels(estimate)}\n{_breakdown(estimate)}")


def _verdict(estimate: Estimate) -> str:
    fits = estimate.fit is None or estimate.fit.fits
    kind = "yes" if fits else "no"
    return "\n".join(f'<p class="{kind}">{escape(line)}</p>' for line in [*verdict(estimate), *headlines(estimate)])


def _death(dead: post_mortem.Dead) -> Iterator[str]:
    yield _heading(post_mortem.HEAP) + rows_of(("", ">", ""), post_mortem.heap_rows(dead))
    yield _heading(post_mortem.HOLDERS) + rows_of((">", ">", ""), list(post_mortem.holder_rows(dead)))
    yield _heading(post_mortem.ATTEMPTS) + rows_of(("", ""), list(post_mortem.attempt_rows(dead)))


def _card(estimate: Estimate, card: CardUse) -> str:
    rows = [(_indented(name), format_bytes(size), words) for name, size, words in card_rows(estimate, card)]
    return rows_of(("", ">", ""), rows)


def _indented(name: str) -> str:
    """A name that stands further in, as it is written, where it is a part of what is above."""
    inner = name.lstrip()
    return _Markup(f"&emsp;{escape(clean(inner))}") if inner != name else name


def _levels(estimate: Estimate) -> str:
    rows = [(name, format_bytes(getattr(estimate, name)), words) for name, words in levels_of(estimate.runtime)]
    rows.append(("ideal", format_bytes(estimate.ideal_bytes), "lower bound: live bytes, no rounding, no gaps"))
    return rows_of(("", ">", ""), rows)


def _timeline(estimate: Estimate, timeline: Timeline) -> str:
    """Curves over the number of the event; a line where the card's memory for them ends, if it is in sight."""
    levels = {name: getattr(timeline, f"{name}_bytes") for name in _CURVES}
    count = len(timeline.reserved_bytes)
    highest = max(1, *(int(values.max()) for values in levels.values()))
    end = _end_of_card(estimate)
    in_sight = end is not None and end <= _IN_SIGHT * highest
    if in_sight:
        assert end is not None
        highest = max(highest, end)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory over the events of the run">']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(highest * share, highest)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        label = format_bytes(int(highest * share))
        parts.append(f'<text class="level" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{label}</text>')
    for name, colour in _CURVES.items():
        points = _points(levels[name], highest)
        width = _WIDTHS[name]
        parts.append(f'<polyline id="{name}" fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>')
    at = _x(max(0, estimate.moment.event), count)
    parts.append(f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#b00" stroke-dasharray="4"/>')
    if in_sight:
        assert end is not None
        y = _y(end, highest)
        parts.append(f'<line id="capacity" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#b00"/>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">event 0</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">event {count - 1:,}</text></svg>')
    legend = " ".join(f"<span>{_swatch(colour)}{name}</span>" for name, colour in _CURVES.items())
    return "".join(parts) + f"<p>{legend}; dashed: the peak{_about_end(end, in_sight)}</p>"


def _end_of_card(estimate: Estimate) -> int | None:
    """Bytes that the card has for reserved memory, None without a card."""
    fit = estimate.fit
    if fit is None:
        return None
    return max(0, fit.capacity_bytes - fit.others_bytes - (estimate.device - estimate.reserved))


def _about_end(end: int | None, in_sight: bool) -> str:
    if end is None:
        return ""
    if in_sight:
        return f"; red: where the card ends for them, {format_bytes(end)}"
    return f"; the card has {format_bytes(end)} for them, far above"


def _points(values: npt.NDArray[np.int64], highest: int) -> str:
    count = len(values)
    starts = np.unique(np.linspace(0, count, min(count, _POINTS), endpoint=False, dtype=np.int64))
    largest = np.maximum.reduceat(values, starts)
    rows = zip(starts.tolist(), largest.tolist(), strict=True)
    return " ".join(f"{_x(start, count)},{_y(value, highest)}" for start, value in rows)


def _x(event: int, count: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT) * event / max(1, count - 1), 1)


def _y(value: float, highest: int) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / highest, 1)


def _breakdown(estimate: Estimate) -> str:
    total = sum(estimate.breakdown.values())
    colours = dict(zip(WORDS, _COLOURS, strict=True))
    rows, bar, left = [], [], 0.0
    for category, count in estimate.breakdown.items():
        if not count:
            continue
        share, colour = 100 * count / total, colours.get(category, "#000000")
        bar.append(f'<rect x="{left:.3f}" y="0" width="{share:.3f}" height="6" fill="{colour}"/>')
        left += share
        name = f"{_swatch(colour)}{escape(WORDS.get(category, clean(category)))}"
        rows.append((_Markup(name), format_bytes(count), _Exact(f"{count:,} B"), f"{share:.1f} %"))
    rows.append((_Markup("sum"), format_bytes(total), _Exact(f"{total:,} B"), "100.0 %" if total else "-"))
    svg = f'<svg viewBox="0 0 100 6" width="960" role="img" aria-label="shares">{"".join(bar)}</svg>'
    return svg + rows_of(("", ">", ">", ">"), rows)


def _top(estimate: Estimate) -> str:
    rows = [
        (
            format_bytes(one.bytes),
            WORDS.get(one.category, one.category),
            one.label,
            one.operator,
            one.module,
            one.source,
            one.phase,
        )
        for one in estimate.top
    ]
    return rows_of((">requested", "for", "name", "operator", "module", "source", "made in"), rows)


def _phases(estimate: Estimate) -> str:
    rows = []
    for phase in estimate.phases:
        name = str(Phase(phase.iteration, phase.name))
        peak = phase.peak
        figures = (peak.requested_bytes, peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes)
        rows.append((name, *map(format_bytes, figures)))
    return rows_of(("", ">requested", ">allocated", ">reserved", ">device"), rows)


class _Markup(str):
    """Text that is HTML already."""


class _Exact(str):
    """A figure that stands there in a shorter way too, for which a phone has no room."""


def rows_of(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table, of which a title that begins with ``>`` stands over figures."""
    classes = [' class="n"' if title.startswith(">") else "" for title in titles]
    head = ""
    if any(title.strip(">") for title in titles):
        cells = zip(titles, classes, strict=True)
        head = "<tr>" + "".join(f"<th{kind}>{title.lstrip('>')}</th>" for title, kind in cells) + "</tr>\n"
    body = []
    for row in rows:
        kinds = classes or [""] * len(row)
        body.append("<tr>" + "".join(map(_cell, row, kinds)) + "</tr>\n")
    return f'<div class="wide"><table>\n{head}{"".join(body)}</table></div>'


def _cell(value: object, kind: str) -> str:
    if isinstance(value, _Exact):
        kind = ' class="n exact"'
    return f"<td{kind}>{value if isinstance(value, _Markup) else escape(clean(value))}</td>"


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>'


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>\n"


def _list(lines: Iterable[str]) -> str:
    return "<ul>\n" + "".join(f"<li>{escape(clean(line))}</li>\n" for line in lines) + "</ul>"


def _said(diagnostic: Diagnostic) -> str:
    return diagnostic.message + (f" ({diagnostic.count} times)" if diagnostic.count > 1 else "")


def _where(moment: Moment) -> str:
    inside = f" in {moment.module}" if moment.module else ""
    source = f" at {moment.source}" if moment.source else ""
    return escape(clean(f"{moment.phase}: {moment.operator}{inside}{source}"))
