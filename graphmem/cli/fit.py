"""``graphmem fit``: the largest batch or sequence length that fits a card."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from graphmem.cli.groups import GroupedCommand, grouped
from graphmem.cli.options import model_options, plan_output_options, request_of, target_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, emit, working
from graphmem.cli.tables import plain_table, verdict_words, wrapped
from graphmem.errors import UsageError
from graphmem.reports.text import clean
from graphmem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from graphmem.estimate import Fit
    from graphmem.planning.fit import Largest

_SEARCH = (
    click.option(
        "--find",
        default="batch",
        metavar="SIZE",
        help="What to enlarge: batch (default), seq-len, or dim:NAME of an ONNX file.",
    ),
    click.option("--multiple-of", type=click.IntRange(min=1), default=1, metavar="N", help="Try only multiples of N."),
    click.option("--spare", metavar="SIZE", help="Leave at least this much of the card, e.g. 1GiB. Default: anything."),
    click.option("--at-most", type=click.IntRange(min=1), metavar="N", help="Try nothing larger. Default 1048576."),
)


@click.command("fit", cls=GroupedCommand, short_help="The largest batch or sequence length that fits a card.")
@model_options
@grouped("Search", _SEARCH)
@target_options
@plan_output_options("table", "json")
def fit_command(**options: Any) -> None:
    """The largest batch (or --find another size) of MODEL that fits the card of --gpu or --gpu-memory.

    MODEL and the options are those of 'graphmem analyze'. Each size tried is analysed in full, about ten of them.
    For example, the longest sequence in steps of 128:

    \b
      graphmem fit hf:gpt2 -b 4 --find seq-len --multiple-of 128 --gpu RTX-4090

    Exit codes: 0 done, 1 error, 2 wrong options, 3 not even the smallest size fits; with --margin, 3 where no size is
    safe at that margin.
    """
    check_output(options["output"])
    request = request_of(options)
    if request["device"] is None:
        raise UsageError("which card? give --gpu NAME or --gpu-memory SIZE")
    size = options["find"].replace("seq-len", "seq_len")
    bounds: dict[str, Any] = {"multiple_of": options["multiple_of"]}
    if options["at_most"]:
        bounds["at_most"] = options["at_most"]
    if options["spare"]:
        bounds["spare_bytes"] = parse_bytes(options["spare"])
    with working() as progress:
        from graphmem.planning.fit import fit

        found = fit(options["model"], size=size, say=progress, **bounds, **request)
    if options["form"] == "json":
        emit(json.dumps(found.to_dict(), indent=2) + "\n", options["output"])
    else:
        emit(_table(found, options["find"]), options["output"])
    if not (found.value if options["margin"] is None else found.safe_value):
        click.get_current_context().exit(DOES_NOT_FIT)


def _table(found: Largest, name: str) -> str:
    """The answer in one line, the two sizes that prove it, and what else was tried."""
    shown = found.estimate or found.above
    assert shown is not None
    assert shown.fit is not None
    gpu, capacity = shown.fit.gpu, shown.fit.capacity_bytes
    lines = [f"model    {shown.model}", f"step     {shown.step}", f"gpu      {gpu}, {format_bytes(capacity)}", ""]
    if found.value:
        lines.append(f"The largest {name} that fits is {found.value:,}.")
        lines.extend(wrapped(_margin(found, name), ""))
    else:
        lines.append(f"DOES NOT FIT: not even {name} {found.above_value:,} fits.")
    if found.above is None:
        lines.append(f"The search ended there: {found.stopped_by}.")
    shown_rows = {found.safe_value: found.safe, found.value: found.estimate, found.above_value: found.above}
    rows = [
        (f"{value:,}", format_bytes(estimate.fit.device_bytes), *_verdict(estimate.fit, estimate is found.above))
        for value, estimate in shown_rows.items()
        if estimate is not None and estimate.fit is not None
    ]
    table = plain_table((f"{name}>", "device memory>", "of the card>", ""), rows)
    tried = ", ".join(f"{value:,}" for value, _ in found.tried)
    assumed = [part for line in shown.assumptions for part in wrapped(clean(line), "  - ", "    ")]
    lines += ["", table, *wrapped(f"analysed: {tried}", "")]
    return "\n".join([*lines, *(["", "Assumed", *assumed] if assumed else [])]) + "\n"


def _margin(found: Largest, name: str) -> str:
    """What the largest size leaves of the card, how far that is known, and the size that is safe."""
    assert found.estimate is not None
    assert found.estimate.fit is not None
    fit, doubts = found.estimate.fit, found.estimate.doubts
    spare = f"It leaves {format_bytes(fit.margin_bytes)}"
    if not doubts.about("device"):
        return f"{spare}."
    words = "safe" if fit.margin is None else f"safe at p{100 * fit.margin:g}"
    less, more = doubts.most("device"), doubts.least("device")
    if less is None:
        causes = ", ".join(cause.name for cause in doubts.causes if cause.spread("device").above)
        return f"{spare}; which {name} is {words} cannot be told, as nothing bounds: {causes}."
    known = f"{spare}, known to within {format_bytes(less)} less"
    known += " and any more" if more is None else f" and {format_bytes(-more)} more"
    if found.safe_value == found.value:
        return f"{known}: it is {words}."
    return f"{known}: {name} {found.safe_value:,} is {words}." if found.safe else f"{known}: no {name} is {words}."


def _verdict(fit: Fit, is_above: bool) -> tuple[str, str]:
    """(what is spare or missing, whether it fits) of one row: the two never contradict each other."""
    spare = f"{format_bytes(abs(fit.margin_bytes))} {'spare' if fit.margin_bytes >= 0 else 'missing'}"
    words = verdict_words(fit)
    if fit.needs_cache_flush:
        words += " (cached segments given back)"
    if is_above and fit.fits:
        words = "leaves less than --spare"
    return spare, words
