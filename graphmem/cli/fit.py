"""``graphmem fit``: the largest batch or sequence length that fits a card."""

from __future__ import annotations

from typing import Any

import click

from graphmem.cli.groups import GroupedCommand, grouped
from graphmem.cli.options import form_of, form_options, model_options, request_of, target_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish, working
from graphmem.errors import UsageError
from graphmem.units import parse_bytes

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
@form_options
def fit_command(**options: Any) -> None:
    """The largest batch (or --find another size) of MODEL that fits the card of --gpu or --gpu-memory.

    MODEL and the options are those of 'graphmem analyze'. Each size tried is analysed in full: ten to forty of them.
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
    publish(found, form_of(options), options["output"])
    if not (found.value if options["margin"] is None else found.safe_value):
        click.get_current_context().exit(DOES_NOT_FIT)
