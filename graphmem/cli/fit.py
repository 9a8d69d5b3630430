"""``graphmem fit``: the largest batch or sequence length that fits a card."""

from __future__ import annotations

from dataclasses import dataclass

import click

from graphmem.base.options import option
from graphmem.cli.completion import models
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import Limits, Request, form_options
from graphmem.cli.output import check_output, show_largest, working
from graphmem.errors import UsageError
from graphmem.reports import Format

#: Sizes of which a page shows what the memory is made of.
_GRID = 24


@dataclass(frozen=True)
class Search:
    """The size that is enlarged."""

    size: str = option(
        "batch",
        "What to enlarge: batch, seq-len, or dim:NAME of an ONNX file.",
        flags="--find",
        metavar="SIZE",
        read=lambda text: text.replace("seq-len", "seq_len"),
    )


@click.command("fit", cls=GroupedCommand)
@click.argument("model", shell_complete=models)
@takes("request", Request)
@takes("search", Search, "Search")
@takes("limits", Limits, "Search")
@form_options
def fit_command(model: str, request: Request, search: Search, limits: Limits, form: Format, output: str | None) -> None:
    """The largest batch (or --find another size) of MODEL that fits the card of --gpu or --gpu-memory.

    MODEL and the options are those of 'graphmem analyze'. Each size tried is analysed in full: ten to forty of them.
    For example, the longest sequence in steps of 128:

    \b
      graphmem fit hf:gpt2 -b 4 --find seq-len --multiple-of 128 --gpu RTX-4090

    Of a whole program: graphmem run --largest --gpu RTX-4090 train.py --batch-size {}

    Exit codes: 0 done, 1 error or a wrong value, 2 options that cannot be read, 3 not even the smallest size fits; with
    --margin, 3 where no size is safe at that margin.
    """
    check_output(output)
    if request.device is None:
        raise UsageError("which card? give --gpu NAME or --gpu-memory SIZE")
    with working() as progress:
        from graphmem.planning.fit import fit

        grid = _GRID if form.name == "html" else 0
        found = fit(model, say=progress, grid=grid, **vars(search), **vars(limits), **vars(request))
    show_largest(found, form, output, margin=request.margin)
