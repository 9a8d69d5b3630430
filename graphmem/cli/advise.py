"""``graphmem advise``: what would save memory, each suggestion analysed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from graphmem.cli.groups import GroupedCommand
from graphmem.cli.options import model_options, plan_output_options, request_of, target_options
from graphmem.cli.output import check_output, emit, working
from graphmem.cli.tables import assumed_card, verdict_words, wrapped
from graphmem.reports.text import clean
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from graphmem.planning.advise import Advice, Advised


@click.command("advise", cls=GroupedCommand, short_help="What would save memory, each suggestion analysed.")
@model_options
@target_options
@plan_output_options("table", "json")
def advise_command(**options: Any) -> None:
    """What would save memory in MODEL's step: each suggestion is analysed in full, none is a rule of thumb.

    MODEL and the options are those of 'graphmem analyze'. Lower precision and 8-bit optimizers change the results of
    training, the other suggestions do not.
    """
    check_output(options["output"])
    with working() as progress:
        from graphmem.planning.advise import advise

        advised = advise(options["model"], say=progress, **request_of(options))
    shown = json.dumps(advised.to_dict(), indent=2) + "\n" if options["form"] == "json" else _text(advised)
    emit(shown, options["output"])


def _text(advised: Advised) -> str:
    base = advised.base
    fit = base.fit
    verdict = "" if fit is None else f", {verdict_words(fit).replace('does not fit', 'DOES NOT FIT')} {fit.gpu}"
    lines = [f"model    {base.model}", f"step     {base.step}"]
    lines += [f"as it is {format_bytes(base.device)} of device memory{verdict}", ""]
    saving = [one for one in advised.advice if one.estimate is not None and one.saved_bytes > 0]
    for one in saving:
        lines += _lines(one)
    if not saving:
        lines.append("No change that was tried saves memory.")
    useless = [one.change for one in advised.advice if one.estimate is not None and one.saved_bytes <= 0]
    if useless:
        lines += ["", *wrapped(f"saves nothing: {', '.join(useless)}", "")]
    impossible = [
        line
        for one in advised.advice
        if one.estimate is None
        for line in wrapped(f"not possible: {one.change}: {clean(one.reason)}", "")
    ]
    notes = [*impossible, *assumed_card(base)]
    return "\n".join([*lines, *(["", *notes] if notes else [])]) + "\n"


def _lines(one: Advice) -> list[str]:
    assert one.estimate is not None
    fit = one.estimate.fit
    verdict = "" if fit is None else f", {verdict_words(fit)}"
    figures = f"saves {format_bytes(one.saved_bytes)} (needs {format_bytes(one.estimate.device)}{verdict})"
    return [*wrapped(f"{figures}: {one.change}", ""), *wrapped(one.options, "    ")]
