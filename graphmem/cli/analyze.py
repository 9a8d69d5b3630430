"""``graphmem analyze``: how much memory a model needs, and whether it fits."""

from __future__ import annotations

import json
from typing import Any

import click

from graphmem.cli.groups import GroupedCommand, grouped
from graphmem.cli.options import (
    RANKS_OPTION,
    model_options,
    output_of,
    output_options,
    ranks_of,
    request_of,
    target_options,
)
from graphmem.cli.output import check_output, emit, show, working
from graphmem.errors import NotModelledError

_RUNS = (click.option("--shapes", metavar="RUNS", help="Runs of an ONNX session: 'batch=1;batch=16,seq=128'."),)
_RANKS = (RANKS_OPTION,)

#: Storages kept in the estimate for --details and JSON.
KEPT = 25


@click.command("analyze", cls=GroupedCommand, short_help="How much memory a model needs, and whether it fits.")
@model_options
@click.argument("more", nargs=-1, metavar="[MODEL.onnx]...")
@grouped("Sizes and inputs", _RUNS)
@grouped("Step", _RANKS)
@target_options
@output_options
def analyze_command(**options: Any) -> None:
    """How much GPU memory MODEL needs for one step, what it is made of, and whether it fits.

    \b
    MODEL is one of:
      model.onnx             an ONNX file; several are sessions on one card. With
                             --training or --runtime pytorch its operators are
                             run as PyTorch's
      model.pt2              a saved torch.export program
      train.py:build         a function returning (model, example inputs)
      package.module:build   the same in an importable module
      hf:config.json         a Hugging Face configuration, or hf:gpt2
      timm:resnet50          a timm model
      torchvision:resnet50   a torchvision model
      keras:model.py:build   a function returning a Keras 3 model

    Exit codes: 0 done, 1 error, 2 wrong options, 3 does not fit (with --fail-on-oom).
    """
    output = output_of(options)
    check_output(output.output)
    request = {**request_of(options), "shapes": options["shapes"], "ranks": ranks_of(options)}
    model = [options["model"], *options["more"]] if options["more"] else options["model"]
    with working() as progress:
        from graphmem.analyze import analyze

        try:
            estimate = analyze(model, **request, top=max(output.top, KEPT), progress=progress)
        except NotModelledError as error:
            if output.form.name == "json":
                known = {"provider": error.provider, "modelled": False, "known_bytes": error.known}
                emit(json.dumps(known) + "\n", output.output)
            raise
    show(estimate, output)
