"""The answer of a serving engine as text and as HTML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from html import escape

from graphmem.planning.serving import ServingReport
from graphmem.reports.text import clean
from graphmem.units import GIB, format_bytes

_BAR = 30
_WIDTH = 100
_STYLE = (
    "body { font: 15px/1.45 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; color: #222 } "
    "td, th { padding: .15em .9em .15em 0; text-align: left } td.n { text-align: right } "
    "td.bar div { background: #0072b2; height: .8em } .no { color: #b00020; font-weight: 600 }"
)


def render(report: ServingReport) -> str:
    """The text, ending in a newline."""
    return "\n".join(part for line in _lines(report) for part in _wrapped(line.rstrip())) + "\n"


def _wrapped(line: str) -> list[str]:
    """Sentences in at most 100 columns; figures stand as they are."""
    if len(line) <= _WIDTH or "     " in line:
        return [line]
    indent = "    " if line.startswith("  - ") else ""
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _lines(report: ServingReport) -> Iterator[str]:
    served, cache = report.served, report.served.kv_cache
    cards = f"{served.cards} x {served.gpu}" if served.cards > 1 else served.gpu
    yield f"{clean(served.model)} on {clean(cards)}, {served.engine} {served.version}"
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
    yield from _waterfall(report)
    yield ""
    yield "Besides, on each card before the engine looks: " + "; ".join(
        f"{figure.name} {format_bytes(figure.bytes)}" for figure in served.outside
    )
    if served.graphs_bytes:
        yield f"CUDA graphs really take {format_bytes(served.graphs_bytes)}, and what the driver keeps of them"
    yield (
        f"A block is {cache.block_size} tokens, {format_bytes(cache.block_bytes)}: "
        + ", ".join(f"{layers} layers of {kind}" for kind, layers in cache.groups)
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
        if report.concurrency_at_lengths > most:
            yield f"           (the scheduler runs {most:,} of them: --max-num-seqs)"
    yield f"longest    {cache.longest:,} tokens"


def _waterfall(report: ServingReport) -> Iterator[str]:
    served = report.served
    yield f"{'card':<26}{served.total_bytes / GIB:>9.3f} GiB"
    for part in served.parts:
        bar = "#" * min(_BAR, round(_BAR * max(0, part.bytes) / served.total_bytes))
        yield f"  - {part.name:<22}{part.bytes / GIB:>9.3f}      {bar:<{_BAR}} {part.note}"
    yield f"{'  = KV cache':<26}{served.kv_cache.available_bytes / GIB:>9.3f} GiB"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} up to {value[-1]}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def html(report: ServingReport) -> str:
    """One HTML file that needs nothing else; the JSON is inside, in the element ``graphmem-serving``."""
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
    title = escape(f"{clean(served.model)} on {served.cards} x {served.gpu}, {served.engine} {served.version}")
    head = escape(clean(served.refusal)) if served.refusal else "<br>".join(map(escape, _headline(report)))
    kind = "no" if served.refusal else "yes"
    data = json.dumps(report.to_dict()).replace("<", "\\u003c")
    notes = "".join(f"<li>{escape(clean(note))}</li>" for note in (*report.assumptions, *served.notes))
    changes = "".join(
        f"<li>{escape(change.option)}: {change.tokens:,} tokens ({change.gained_tokens:+,})</li>"
        for change in report.changes
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p class={kind}>{head}</p><table>{''.join(rows)}</table>"
        f"<h2>What would bring more tokens</h2><ul>{changes}</ul><h2>Assumed</h2><ul>{notes}</ul>"
        f"<script type='application/json' id=graphmem-serving>{data}</script></html>\n"
    )
