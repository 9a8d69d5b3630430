"""``graphmem serve``: how many requests an inference engine holds at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from graphmem.base.options import Given, described, option
from graphmem.cli.completion import models
from graphmem.cli.fields import GroupedCommand, takes, values_of
from graphmem.cli.options import form_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish, working
from graphmem.errors import UsageError
from graphmem.reports import Format
from graphmem.serving.base import Question
from graphmem.serving.load_options import OverTime

if TYPE_CHECKING:
    from graphmem.serving.from_log import LogReport

_ENGINE, _CARD, _LOAD, _OVER_TIME, _LOG = (
    "Engine, by its own names", "Card", "Load", "Load over time", "A start that there was"
)  # fmt: skip
#: In a context's ``meta``: options are an engine's command line, whose names are not held against ours.
_AS_IT_STANDS = "graphmem.cli.serve.as_it_stands"


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def _engine(given: Given) -> object:
    return given["engine"] or ("llamacpp" if str(given["model"]).lower().endswith(".gguf") else "vllm")


def _fields_of(kind: type, heading: str = "") -> Any:
    """The options that are fields of another class: those that are given, by name."""
    return option(None, described("", parts=(kind,), make=partial(values_of, kind), heading=heading))


@dataclass(frozen=True)
class ServeOptions:
    """A question about an engine, as :func:`graphmem.serve` names it."""

    engine: str = option(
        "vllm",
        "vllm, llamacpp, sglang, tensorrtllm, tgi, onnxruntimegenai, hf (transformers' generate), a plug-in's. "
        "Default vllm; llamacpp for GGUF.",
        metavar="NAME",
        make=_engine,
        heading=_ENGINE,
    )
    engine_version: str | None = option(
        None, "Its version: vLLM's from 0.6 on. Default: the newest followed.", metavar="X.Y"
    )
    question: Mapping[str, object] = _fields_of(Question)
    arguments: tuple[tuple[str, str], ...] = option(
        (),
        "Another option, e.g. model_runner=v1.",
        flags="--engine-arg",
        repeated=True,
        make=lambda given: _arguments(given),
    )
    gpu: str | None = option(None, "The card; see 'graphmem gpus'.", metavar="NAME", heading=_CARD)
    gpu_memory: str | None = option(None, "Memory of the card instead of its own, e.g. 24GiB.", metavar="SIZE")
    lengths: str | None = option(None, "Lengths of requests, e.g. p50=800,p99=6000.", metavar="LIST", heading=_LOAD)
    load: float | None = option(None, "Requests at once: which cards hold them?")
    prices: str | None = option(
        None, "Machines to rent, a CSV file: gpu,count,price; the cheapest that hold the load.", metavar="FILE"
    )
    price: float | None = option(None, "Dollars an hour of all cards of one engine (of --tp 4: of four).")
    find: str | None = option(None, "max-model-len, max-num-seqs or tp: the most (fewest) that does.", metavar="WHAT")
    advice: bool = option(True, "Look for options that bring more. Default: yes.")
    over_time: Mapping[str, object] = _fields_of(OverTime, _OVER_TIME)
    from_log: str | None = option(
        None, "An engine's log: what it printed beside the prediction.", metavar="FILE", heading=_LOG
    )


class ServeCommand(GroupedCommand):
    """The command, which also takes the engine's own command line after ``--``, and a file that has one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from graphmem.serving import commands

        if "--" in args:
            at = args.index("--")
            args = [*self._engines_own(ctx, commands.asked_by(args[at + 1 :])), *args[:at]]
        elif files := [one for one in args if one.lower().endswith(commands.SUFFIXES) and one[:1] != "-"]:
            at = args.index(files[0])
            args = [*self._engines_own(ctx, commands.asked_in(Path(files[0]))), *args[:at], *args[at + 1 :]]
        return super().parse_args(ctx, [commands.spelled(one) for one in args])

    def _engines_own(self, ctx: click.Context, words: list[str]) -> list[str]:
        """The words, none of which is an option of graphmem's alone: a file does not say where answers are written.
        Raises :class:`UsageError`."""
        ctx.meta[_AS_IT_STANDS] = True
        ours = {flag for one in self.params if getattr(one, "heading", "") != _ENGINE for flag in one.opts}
        for word in words:
            name = word.partition("=")[0]
            if name in ours or (name[:2] in ours and name[:2] != "--"):
                raise UsageError(f"{name} is no option of the engine's; give it outside of its command line")
        return words


@click.command(
    "serve",
    cls=ServeCommand,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("model", required=False, shell_complete=models)
@takes("options", ServeOptions)
@form_options
def serve_command(model: str | None, options: ServeOptions, form: Format, output: str | None) -> None:
    """The memory that an inference engine leaves for the KV cache of MODEL on a card, and the requests that it holds.

    MODEL, which comes first, is a config.json, a folder with one, the name of a known model, a GGUF file, or a docker
    compose file, manifest or chart's values that start a server. Options that are not listed here are the engine's own,
    by its names; its own command line follows --. An installed vLLM answers by its own code, in half a minute or more;
    --basis retold is graphmem's account of it, at once. For example:

    \b
      graphmem serve Llama-3.1-70B --gpu H100 --tp 4 --max-model-len 8192
      graphmem serve ./model --gpu L40S --lengths p50=800,p99=6000 --load 64
      graphmem serve ./model --gpu RTX-4090 --find max-model-len
      graphmem serve ./model --engine hf --max-model-len 4096 \\
        --cache-implementation offloaded
      graphmem serve ./model --arrivals 5/s --lengths p50=800,p99=6000 \\
        --output-lengths p50=200,p99=1000
      graphmem serve --gpu H100 -- vllm serve Qwen/Qwen3-32B -tp 2
      graphmem serve --from-log engine.log

    Exit codes: 0 done, 1 error or a wrong value, 2 options that cannot be read, 3 the engine does not start, or does
    not hold --load on the card that is named.
    """
    check_output(output)
    if options.from_log is not None:
        publish(_of_log(model, options), form, output)
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    from graphmem.serving.answer import serve

    with working() as progress:
        report = serve(model, **_given(options), say=progress)
    publish(report, form, output)
    named = options.gpu is not None or options.gpu_memory is not None
    if not report.starts or (named and not report.holds):
        click.get_current_context().exit(DOES_NOT_FIT)


def _given(options: ServeOptions) -> dict[str, Any]:
    """The values that are not as they are by default, as :func:`graphmem.serve` names them."""
    usual = {one.name: one.default for one in fields(options)}
    given = {name: value for name, value in vars(options).items() if value != usual[name]}
    return {**given.pop("question"), **given.pop("over_time"), **given}


def _of_log(model: str | None, options: ServeOptions) -> LogReport:
    """The comparison of a log; options that are given are stronger than what it says."""
    from graphmem.serving.from_log import compared

    given = _given(options)
    path = given.pop("from_log")
    if (model or "").lower().endswith(".gguf"):
        given.pop("engine", None)
    return compared(path, model, **given)


def _arguments(given: Given) -> object:
    """Options of the engine as pairs of text."""
    return (*map(_pair, cast("Iterable[str]", given["engine_arg"])), *_others(str(given["model"] or "")))


def _others(model: str) -> list[tuple[str, str]]:
    """The words that click does not know: options of the engine with their values, ``true`` where there is none."""
    if model.startswith("-"):
        raise UsageError(f"MODEL comes before options: {model} is none")
    from graphmem.serving.commands import pairs_in

    pairs = pairs_in(click.get_current_context().args)
    for name, text in pairs:
        if not name:
            raise UsageError(f"{text!r} is neither an option nor the value of one")
        _not_misspelled(name)
    return [(name.lstrip("-"), text) for name, text in pairs]


def _not_misspelled(name: str) -> None:
    """An option of an engine is not one of ours with a slip. Raises :class:`UsageError`."""
    if click.get_current_context().meta.get(_AS_IT_STANDS):
        return
    ours = [flag for parameter in click.get_current_context().command.params for flag in parameter.opts]
    close = difflib.get_close_matches(name, ours, n=1, cutoff=0.85) if name.startswith("--") else []
    if close:
        raise UsageError(f"no option {name}; did you mean {close[0]}?")
