"""The answer of a serving engine as text and as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from html import escape

from graphmem.planning.load import LoadAnswer, LoadReport
from graphmem.planning.serving import ServingReport
from graphmem.reports.lines import folded
from graphmem.reports.pages import notebook, page
from graphmem.reports.text import clean
from graphmem.serving.base import BASES
from graphmem.units import GIB, format_bytes

#: Of a line of the waterfall: its bar, at least and at most, and what else stands there but its note.
_LEAST_BAR, _BAR, _BESIDE_BAR = 10, 30, 42
WIDTH = 110
#: Width and height of the plot, and where it begins.
_PLOT, _HEIGHT, _LEFT = 860, 180, 44


def render(report: ServingReport, width: int = WIDTH) -> str:
    """The text, ending in a newline, sentences in at most ``width`` columns."""
    return "\n".join(part for line in _lines(report, width) for part in folded(line, width)) + "\n"


def _grouped(groups: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Layers by kind; groups of one kind, which share a pool of blocks, in one phrase."""
    for kind in dict.fromkeys(kind for kind, _ in groups):
        sizes = [layers for one, layers in groups if one == kind]
        yield f"{sum(sizes)} layers of {kind}" + (f" in {len(sizes)} groups" if len(sizes) > 1 else "")


def _lines(report: ServingReport, width: int) -> Iterator[str]:
    served, cache = report.served, report.served.kv_cache
    cards = f"{served.cards} x {served.gpu}" if served.cards > 1 else served.gpu
    yield f"{clean(served.model)} on {clean(cards)}, {served.engine} {served.version}"
    yield f"from {BASES[served.basis]}"
    yield ""
    if report.found is not None:
        name, value = report.found
        yield f"--{name} {value:,}"
        yield ""
    if served.refusal is not None:
        yield f"DOES NOT START: {clean(served.refusal)}"
    else:
        yield from _headline(report)
    yield ""
    yield from _waterfall(report, width)
    yield ""
    if served.outside:
        yield "Besides, on each card before the engine looks: " + "; ".join(
            f"{figure.name} {format_bytes(figure.bytes)}" for figure in served.outside
        )
    if served.graphs_bytes:
        yield f"CUDA graphs really take {format_bytes(served.graphs_bytes)}, and what the driver keeps of them"
    yield (
        f"A block is {_counted(cache.block_size, 'token')}, {format_bytes(cache.block_bytes)}: "
        + ", ".join(_grouped(cache.groups))
    )
    yield "Settings: " + ", ".join(
        f"{name} {_shown(value)}" for name, value in served.settings.items() if value not in (None, [])
    )
    if report.choices:
        yield ""
        yield f"Cards with the least memory that hold {report.load:g} requests at once:"
        for choice in report.choices:
            yield f"  {choice.cards} x {choice.gpu}: {choice.concurrency:.1f}"
    elif report.load is not None:
        yield f"No card of the table, up to 8 of them, holds {report.load:g} requests at once."
    if report.over_time is not None:
        yield ""
        yield from _over_time(report.over_time)
    if report.changes:
        yield ""
        yield "What would bring more tokens:"
        for change in report.changes:
            yield f"  {change.option}: {change.tokens:,} ({change.gained_tokens:+,})"
    if served.notes or report.assumptions:
        yield ""
        yield "Assumed"
        for line in (*report.assumptions, *served.notes):
            yield f"  - {clean(line)}"


def _headline(report: ServingReport) -> Iterator[str]:
    cache, settings = report.served.kv_cache, report.served.settings
    length = settings["max_model_len"]
    size = format_bytes(cache.available_bytes)
    yield f"KV cache   {size} on each card: {cache.blocks:,} blocks, {cache.tokens:,} tokens"
    yield f"at once    {cache.concurrency:.2f} requests of {length:,} tokens"
    if report.concurrency_at_lengths is not None:
        named = ", ".join(f"p{quantile:g}={value:,}" for quantile, value in report.lengths)
        yield f"           {report.concurrency_at_lengths:.1f} requests of {named}"
        most = settings["max_num_seqs"]
        if most is not None and report.concurrency_at_lengths > most:
            yield f"           (the engine runs at most {most:,} of them)"
    yield f"longest    {cache.longest:,} tokens"


def _waterfall(report: ServingReport, width: int) -> Iterator[str]:
    """Bars where there is room for them beside the notes, which are folded where there is not."""
    served = report.served
    room = width - _BESIDE_BAR - max((len(part.note) for part in served.parts), default=0)
    size = min(_BAR, room) if room >= _LEAST_BAR else 0
    yield f"{'card':<26}{served.total_bytes / GIB:>9.3f} GiB"
    for part in served.parts:
        bar = "#" * min(size, round(size * max(0, part.bytes) / served.total_bytes))
        begin = f"  - {part.name:<22}{part.bytes / GIB:>9.3f}      {bar:<{size}}{' ' * bool(size)}"
        first, *others = textwrap.wrap(part.note, width - len(begin), break_on_hyphens=False) or [""]
        yield begin + first
        yield from (" " * len(begin) + other for other in others)
    yield f"{'  = KV cache':<26}{served.kv_cache.available_bytes / GIB:>9.3f} GiB"


def _over_time(load: LoadReport) -> Iterator[str]:
    answer, speed = load.answer, load.speed
    yield f"Over time: {clean(load.described)}"
    yield f"  cache      {answer.most_used:.0%} held at most, {answer.mean_used:.0%} on average"
    yield f"             {_marks(answer)}"
    preempted = "; X: somebody is preempted" if answer.preemptions else ""
    yield f"             from 0 to {_time(answer.seconds)}, tenths of the cache from blank to @{preempted}"
    yield f"  at once    {answer.most_running:,} running at most, {answer.most_waiting:,} waiting"
    if answer.first_preemption is None:
        yield "  preempted  none"
    else:
        yield (
            f"  preempted  {answer.preemptions:,} times, {answer.preempted_requests:,} of {answer.requests:,} "
            f"requests, first after {_time(answer.first_preemption)}; {answer.tokens_computed_again:,} of "
            f"{answer.tokens_computed:,} tokens computed again"
        )
    if answer.given_up_at is not None:
        yield (
            f"  given up   after {_time(answer.given_up_at)}: more than 1 % of all requests had waited longer than "
            f"{_time(load.max_wait)}; figures are of that time"
        )
    yield f"  waiting    {_time(answer.wait_p50)} (median), {_time(answer.wait_p99)} (99 %) for the first step"
    if answer.left_waiting:
        yield f"             {_counted(answer.left_waiting, 'request')} had not begun at the end"
    if answer.refused:
        yield f"  refused    {_counted(answer.refused, 'request')} that this engine could never run"
    if load.copies is None:
        yield f"  copies     no number up to 1,024 keeps 99 % of requests within {_time(load.max_wait)}"
    else:
        yield (
            f"  copies     {_counted(load.copies, 'engine')} like this ({_counted(load.cards or 0, 'card')}): 99 % of "
            f"requests wait at most "
            f"{_time(load.max_wait)}"
        )
    for one in load.tried:
        yield (
            f"             with {one.copies:,}: cache {one.most_used:.0%}, {one.preemptions:,} preemptions each, wait "
            f"{_time(one.wait_p99)}{'' if one.followed is None else f' in the first {_time(one.followed)}'}"
        )
    given = "by default" if speed.assumed else "as given"
    yield (
        f"  assumed    speed is not predicted; {given}, a step takes {speed.step_seconds * 1000:g} ms, or its tokens "
        f"at {speed.tokens_per_second:,.0f} a second where that is longer: all times follow from this"
    )
    yield f"  assumed    {load.rules}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _marks(answer: LoadAnswer) -> str:
    """The timeline in one line of text: tenths of the cache, ``X`` where somebody was preempted, ``?`` for what was not
    followed."""
    width = 60
    per = len(answer.timeline) // width
    marks = []
    for index in range(width):
        part = answer.timeline[index * per : (index + 1) * per]
        most = max(point.used for point in part)
        if answer.given_up_at is not None and part[0].seconds > answer.given_up_at:
            marks.append("?")
            continue
        marks.append("X" if any(point.preemptions for point in part) else " .:-=+*#%@"[min(9, int(most * 10))])
    return "[" + "".join(marks) + "]"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} up to {value[-1]}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def html(report: ServingReport) -> str:
    """One HTML file that needs nothing else; the JSON is inside, in the element ``graphmem-serving``."""
    served = report.served
    title = escape(f"{clean(served.model)} on {served.cards} x {served.gpu}, {served.engine} {served.version}")
    return page(title, _body(report), "graphmem-serving", report.to_dict())


def for_notebook(report: ServingReport) -> str:
    """The same among other cells."""
    return notebook(_body(report))


def _body(report: ServingReport) -> str:
    served = report.served
    total = max(1, served.total_bytes)
    rows = [
        f"<tr><td>{escape(part.name)}</td><td class=n>{format_bytes(part.bytes)}</td>"
        f"<td class=bar><div style='width:{max(0, part.bytes) * 300 // total}px'></div></td>"
        f"<td>{escape(part.note)}</td></tr>"
        for part in served.parts
    ]
    rows.append(
        f"<tr><th>KV cache</th><td class=n>{format_bytes(served.kv_cache.available_bytes)}</td>"
        f"<td class=bar><div style='width:{max(0, served.kv_cache.available_bytes) * 300 // total}px'></div></td></tr>"
    )
    head = escape(clean(served.refusal)) if served.refusal else "<br>".join(map(escape, _headline(report)))
    kind = "no" if served.refusal else "yes"
    notes = "".join(f"<li>{escape(clean(note))}</li>" for note in (*report.assumptions, *served.notes))
    changes = "".join(
        f"<li>{escape(change.option)}: {change.tokens:,} tokens ({change.gained_tokens:+,})</li>"
        for change in report.changes
    )
    return (
        f"<p>from {escape(BASES[served.basis])}</p>"
        f"<p class={kind}>{head}</p><div class=wide><table>{''.join(rows)}</table></div>"
        f"{_over_time_html(report.over_time)}"
        f"<h2>What would bring more tokens</h2><ul>{changes}</ul><h2>Assumed</h2><ul>{notes}</ul>"
    )


def _over_time_html(load: LoadReport | None) -> str:
    if load is None:
        return ""
    timeline = load.answer.timeline
    most = max(1, max(point.waiting for point in timeline))
    lines = []
    for name, colour, values in (
        ("held", "#0072b2", [point.used for point in timeline]),
        ("waiting", "#d55e00", [point.waiting / most for point in timeline]),
    ):
        points = " ".join(
            f"{_LEFT + index * (_PLOT - _LEFT) / len(values):.1f},{_HEIGHT - value * (_HEIGHT - 10):.1f}"
            for index, value in enumerate(values)
        )
        lines.append(f"<polyline id='{name}' fill='none' stroke='{colour}' stroke-width='1.5' points='{points}'/>")
    for index, point in enumerate(timeline):
        if point.preemptions:
            x = _LEFT + index * (_PLOT - _LEFT) / len(timeline)
            lines.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{_HEIGHT}' y2='{_HEIGHT + 8}' stroke='#b00020'/>")
    for share in (0, 0.5, 1):
        y = _HEIGHT - share * (_HEIGHT - 10)
        lines.append(f"<line x1='{_LEFT}' x2='{_PLOT}' y1='{y}' y2='{y}' stroke='#ddd'/>")
        lines.append(f"<text x='{_LEFT - 6}' y='{y + 4}' text-anchor='end'>{share:.0%}</text>")
    lines.append(f"<text x='{_PLOT}' y='{_HEIGHT + 22}' text-anchor='end'>{_time(load.answer.seconds)}</text>")
    text = "<br>".join(escape(line.strip()) for line in _over_time(load) if "[" not in line)
    return (
        f"<h2>Over time</h2><svg viewBox='0 0 {_PLOT} {_HEIGHT + 28}' role='img' aria-label='the cache over time'>"
        f"{''.join(lines)}</svg><p>blue: cache held; orange: waiting requests, of {most:,}; red marks below: "
        f"preemptions</p><p>{text}</p>"
    )
