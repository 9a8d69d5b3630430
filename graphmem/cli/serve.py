"""``graphmem serve``: how many requests an inference engine holds at once."""

from __future__ import annotations

import difflib
import re
from typing import Any

import click

from graphmem.cli.groups import GroupedCommand, grouped
from graphmem.cli.options import form_of, form_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish, working
from graphmem.errors import UsageError
from graphmem.units import parse_bytes

#: What vLLM multiplies a number by: ``vllm/engine/arg_utils.py``, ``human_readable_int`` (0.32).
_TIMES = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}


def _count(text: str) -> int:
    """A whole number, also as vLLM reads one: 8k is 8,000 and 8K 8,192."""
    found = re.fullmatch(r"([0-9]{1,15})([kmKM]?)", text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is no whole number; write for example 8192, 8k (8,000) or 8K (8,192)")
    return int(found[1]) * _TIMES.get(found[2], 1)


_ENGINE = (
    click.option(
        "--engine",
        metavar="NAME",
        help="vllm, llamacpp, sglang, tensorrtllm, tgi, onnxruntimegenai, hf (transformers' generate), a plug-in's. "
        "Default vllm; llamacpp for GGUF.",
    ),
    click.option("--engine-version", metavar="X.Y", help="Its version, 0.8 to 0.32. Default: the newest."),
    click.option("--entry", metavar="KIND", default="server", help="server (default) or llm, a program's LLM(...)."),
    click.option("--tp", "--tensor-parallel-size", "tp", type=int, default=1, metavar="N", help="Cards. Default 1."),
    click.option("--max-model-len", type=_count, metavar="N", help="Longest request. Default: the model's."),
    click.option("--max-num-seqs", type=_count, metavar="N", help="Requests of a batch. Default: by card."),
    click.option("--max-num-batched-tokens", type=_count, metavar="N", help="Tokens of a batch. Default: by card."),
    click.option("--gpu-memory-utilization", type=float, metavar="X", help="Default 0.92 (0.9 before 0.21)."),
    click.option("--kv-cache-dtype", default="auto", metavar="TYPE", help="auto, fp8, ... Default auto."),
    click.option("--quantization", metavar="NAME", help="awq, gptq, fp8, ... Default: the configuration's own."),
    click.option("--dtype", default="auto", metavar="TYPE", help="auto, half, bfloat16, float. Default auto."),
    click.option("--enforce-eager", is_flag=True, help="No torch.compile and no CUDA graphs."),
    click.option("--cold", is_flag=True, help="The first start on a machine, which compiles. Default: a later one."),
    click.option("--block-size", type=int, metavar="N", help="Tokens of a block. Default 16."),
    click.option("--alloc-conf", default="", metavar="CONF", help="PYTORCH_CUDA_ALLOC_CONF of the engine."),
    click.option("--engine-arg", multiple=True, metavar="NAME=VALUE", help="Another option, e.g. model_runner=v1."),
    click.option("--non-torch", default="0", metavar="SIZE", help="What CUDA loads while it profiles. Default 0."),
)
_CARD = (
    click.option("--gpu", metavar="NAME", help="The card; see 'graphmem gpus'."),
    click.option("--gpu-memory", metavar="SIZE", help="Memory of the card instead of its own, e.g. 24GiB."),
)
_LOAD = (
    click.option("--lengths", metavar="LIST", help="Lengths of requests, e.g. p50=800,p99=6000."),
    click.option("--load", type=float, metavar="N", help="Requests at once: which cards hold them?"),
    click.option("--find", metavar="WHAT", help="max-model-len, max-num-seqs or tp: the most (fewest) that does."),
    click.option("--advice/--no-advice", default=True, help="Look for options that bring more. Default: yes."),
)
_OVER_TIME = (
    click.option("--arrivals", metavar="RATE", help="e.g. 5/s, 20000/d; --lengths are those of prompts then."),
    click.option("--output-lengths", metavar="LIST", help="Lengths of answers, e.g. p50=200,p99=1000."),
    click.option("--duration", default="1h", metavar="TIME", help="How long requests arrive. Default 1h."),
    click.option("--trace", metavar="FILE", help="CSV instead: timestamp,prompt,output."),
    click.option("--step-time", metavar="TIME", help="Seconds of a step, not predicted. Default 30ms."),
    click.option("--tokens-per-second", type=float, metavar="N", help="Of long prompts. Default 10000."),
    click.option("--max-wait", default="10s", metavar="TIME", help="What 99 % of requests may wait. Default 10s."),
)


#: Options that the library knows in another way, or not at all; the others have the names of its parameters.
_READ_HERE = ("engine", "tp", "non_torch", "engine_arg", "form", "output")


@click.command(
    "serve",
    cls=GroupedCommand,
    short_help="How many requests an inference engine holds at once.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("model")
@grouped("Engine, by its own names", _ENGINE)
@grouped("Card", _CARD)
@grouped("Load", _LOAD)
@grouped("Load over time", _OVER_TIME)
@form_options
def serve_command(**options: Any) -> None:
    """What an inference engine leaves for the KV cache of MODEL on a card, and how many requests that holds at once.

    MODEL, which comes first, is a config.json, a folder with one, the name of a known model, or a GGUF file. Options
    that are not listed here are the engine's own, by its names. For example:

    \b
      graphmem serve Llama-3.1-70B --gpu H100 --tp 4 --max-model-len 8192
      graphmem serve ./model --gpu L40S --lengths p50=800,p99=6000 --load 64
      graphmem serve ./model --gpu RTX-4090 --find max-model-len
      graphmem serve ./model --engine hf --max-model-len 4096 \\
        --cache-implementation offloaded
      graphmem serve ./model --arrivals 5/s --lengths p50=800,p99=6000 \\
        --output-lengths p50=200,p99=1000

    Exit codes: 0 done, 1 error, 2 wrong options, 3 the engine does not start.
    """
    from graphmem.serving.answer import serve

    check_output(options["output"])
    with working() as progress:
        report = serve(
            **{name: value for name, value in options.items() if name not in _READ_HERE},
            engine=options["engine"] or ("llamacpp" if options["model"].lower().endswith(".gguf") else "vllm"),
            tensor_parallel_size=options["tp"],
            non_torch_bytes=parse_bytes(options["non_torch"]),
            arguments=(*(_named(text) for text in options["engine_arg"]), *_others(options["model"])),
            say=progress,
        )
    publish(report, form_of(options), options["output"])
    if not report.starts:
        click.get_current_context().exit(DOES_NOT_FIT)


def _others(model: str) -> list[tuple[str, str]]:
    """What click does not know: options of the engine with their values, ``true`` where there is none."""
    if model.startswith("-"):
        raise UsageError(f"MODEL comes before options: {model} is none")
    found: list[tuple[str, str]] = []
    words = iter(click.get_current_context().args)
    expected = False
    for word in words:
        name, equals, value = word.partition("=")
        if _is_option(word):
            _not_misspelled(name)
            found.append((name.lstrip("-"), value if equals else "true"))
            expected = not equals
        elif expected:
            found[-1] = (found[-1][0], word)
            expected = False
        else:
            raise UsageError(f"{word!r} is neither an option nor the value of one")
    return found


def _not_misspelled(name: str) -> None:
    """An option of an engine is not one of ours with a slip. Raises :class:`UsageError`."""
    ours = [flag for parameter in click.get_current_context().command.params for flag in parameter.opts]
    close = difflib.get_close_matches(name, ours, n=1, cutoff=0.85) if name.startswith("--") else []
    if close:
        raise UsageError(f"no option {name}; did you mean {close[0]}?")


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit()


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()
