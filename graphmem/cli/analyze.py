"""``graphmem analyze``: how much memory a model needs, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import click

from graphmem.base.options import option
from graphmem.base.records import public_value
from graphmem.cli.completion import models
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import INPUTS, RANKS, STEP, Output, Request
from graphmem.cli.output import check_output, emit, makes_page, show, working
from graphmem.errors import NotModelledError
from graphmem.estimate import Estimate
from graphmem.reports.document import Document


@public_value(frozen=True)
class Analysis(Request):
    """A question with the options of ``analyze`` alone."""

    shapes: str | None = option(
        None,
        "Runs of an ONNX session: 'batch=1;batch=16,seq=128'; of a jitted function of JAX: the name in its file of its "
        "arguments, or of a function that returns them.",
        metavar="RUNS",
        heading=INPUTS,
    )
    ranks: str | Sequence[int] | None = option(None, RANKS, heading=STEP)


@click.command("analyze", cls=GroupedCommand)
@click.argument("model", shell_complete=models)
@click.argument("more", nargs=-1, metavar="[MODEL.onnx]...")
@takes("request", Analysis)
@takes("output", Output, "Output")
def analyze_command(model: str, more: tuple[str, ...], request: Analysis, output: Output) -> None:
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
      jax:step.py:build      a function returning (step, arguments) of JAX, or
                             jax:step.py:step, jitted, with --shapes
      sft.yaml               a file of LLaMA-Factory, axolotl, TRL, torchtune,
                             torchtitan (TOML) or NeMo AutoModel

    Exit codes: 0 done, 1 error or a wrong value, 2 options that cannot be read, 3 does not fit (with --fail-on-oom).
    """
    check_output(output.output, output.html)
    with working() as progress:
        from graphmem.analyze import analyze

        try:
            models = [model, *more] if more else model
            estimate = analyze(models, **vars(request), top=output.top, progress=progress)
            page = _page(models, request, estimate, output, progress) if makes_page(output) else None
        except NotModelledError as error:
            if output.form.name == "json":
                known = {"provider": error.provider, "modelled": False, "known_bytes": error.known}
                emit(json.dumps(known) + "\n", output.output)
            raise
    show(estimate, output, page)


def _page(
    models: str | list[str], request: Analysis, estimate: Estimate, output: Output, say: Callable[[str], None]
) -> Document:
    """The whole report, with other sizes to choose among where a template is soon learnt."""
    from graphmem.planning.documents import with_sizes
    from graphmem.planning.other_sizes import other_sizes, too_long

    whole = estimate.document(details=True, budget_bytes=output.budget_bytes)
    return with_sizes(whole, other_sizes(models, vars(request), estimate, say), estimate, too_long(estimate))
