"""The questions that the service answers: commands of graphmem, of each the options that read names and data alone.

A question is a JSON object with the model and options by their names on the command line, ``{"model": "zoo:gpt2",
"batch": 4, "gpu": "T4"}``; it becomes that command line, so that answers are those of the command. No option here reads
a file of the machine or imports code; files are those that were uploaded, as ``file:NUMBER``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from pydantic import BaseModel, ConfigDict, Field, create_model

from graphmem.base.spellings import meant
from graphmem.cli.main import COMMANDS
from graphmem.errors import UsageError

_SIZES = ("batch", "seq_len", "dim", "input_shape", "input_value", "trip_count", "iterations")
_STEP = (
    "training", "optimizer", "optimizer_arg", "dtype", "amp", "checkpoint_activations", "grad_accum", "clip_grad_norm",
    "ddp", "world_size", "data_dependent", "loop", "lr_scheduler", "seq_lens", "last_batch", "eval_batches", "rank",
    "fsdp", "fsdp_shard", "fsdp_offload", "zero", "attention_mask", "tp", "ep", "pp", "schedule", "micro_batches", "cp",
    "sp", "prefetch", "weights", "generate", "num_beams", "num_return_sequences", "cache_implementation",
)  # fmt: skip
_CARD = (
    "gpu", "gpu_memory", "gpu_like", "capability", "already_used", "cuda", "runtime", "alloc_conf", "torch_version",
    "margin",
)  # fmt: skip
_ASKED = (*_SIZES, *_STEP, *_CARD)
_ENGINE = (
    "engine", "engine_version", "entry", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "gpu_memory_utilization", "kv_cache_dtype", "quantization", "dtype", "enforce_eager", "cold", "block_size", "tp",
    "gpu", "gpu_memory", "lengths", "load", "find", "advice", "arrivals", "output_lengths", "duration", "step_time",
    "tokens_per_second", "max_wait", "price",
)  # fmt: skip
_LAYOUTS = (
    "gpus", "nodes", "links", "global_batch", "seq_len", "optimizer", "dtype", "amp", "clip_grad_norm", "loop",
    "torch_version", "margin", "frameworks", "confirm",
)  # fmt: skip
#: command -> its arguments, and the options that may be asked.
ASKED: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "analyze": (("model",), _ASKED),
    "fit": (("model",), (*_ASKED, "find", "multiple_of", "spare", "at_most")),
    "sweep": (("model",), (*_ASKED, "vary")),
    "advise": (("model",), _ASKED),
    "serve": (("model",), _ENGINE),
    "plan": (("model",), _LAYOUTS),
    "replay": (("snapshot",), (*_CARD, "batch", "snapshot_device")),
    "compare": (("before", "after"), ()),
}
#: Sources whose rest is a name; a name is words with dots, dashes and at most one slash.
_SOURCES = ("hf", "timm", "torchvision", "zoo")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
#: Options whose value may name a class of a package to import.
_IMPORTS = ("optimizer", "lr_scheduler")
_LONGEST = 300

Uploaded = Callable[[str], str]


def parameters_of(command: str) -> dict[str, click.Parameter]:
    """The parameters of a command that may be asked, by name."""
    arguments, options = ASKED[command]
    known = {one.name: one for one in COMMANDS.named(command).params}
    return {name: known[name] for name in (*arguments, *options) if name in known}


def question_model(command: str) -> type[BaseModel]:
    """The questions of a command as a pydantic model, for validation and for the OpenAPI page."""
    fields: dict[str, Any] = {}
    for name, parameter in parameters_of(command).items():
        if isinstance(parameter, click.Argument):
            words = "a name (zoo:gpt2, hf:NAME, timm:NAME, ...) or an uploaded file (file:NUMBER)"
            fields[name] = (str, Field(max_length=_LONGEST, description=words))
        else:
            described = Field(None, description=getattr(parameter, "help", "") or "")
            fields[name] = (_type(parameter), described)
    return create_model(f"{command.title()}Question", __config__=ConfigDict(extra="forbid"), **fields)


def _type(parameter: click.Parameter) -> Any:
    if getattr(parameter, "multiple", False):
        return list[str] | None
    if getattr(parameter, "is_flag", False):
        return bool | None
    if isinstance(parameter.type, click.types.IntParamType):
        return int | None
    if isinstance(parameter.type, click.types.FloatParamType):
        return float | None
    return str | int | float | None


#: pydantic's kinds of errors -> what the value should be.
_WANTED = {
    "int": "a whole number", "float": "a number", "string": "text", "bool": "true or false", "list": "a list of texts",
    "model": "a JSON object", "dict": "a JSON object",
}  # fmt: skip
_EXAMPLE = 'send {"model": "zoo:gpt2", "gpu": "T4"} as application/json'


def wrong(error: Mapping[str, Any], command: str) -> str:
    """One of pydantic's errors about a question of a command, in words: what, where, and what to do."""
    kind, place = str(error["type"]), [str(part) for part in error["loc"][1:] if part not in _TYPES]
    name = ".".join(place)
    if kind == "json_invalid":
        return f"the question is no JSON ({error['ctx']['error']} at character {error['loc'][-1]}); {_EXAMPLE}"
    if not name:
        return f"the question is no JSON object; {_EXAMPLE}"
    if kind == "missing":
        return f"{name} is missing; give it: see /docs"
    if kind == "extra_forbidden":
        near = meant(name.replace("-", "_"), parameters_of(command), most=1)
        return f"no option {name!r}{near}; /docs lists those that there are"
    wanted = next((words for start, words in _WANTED.items() if kind.startswith(start)), "")
    if kind == "string_too_long" or not wanted:
        return f"{name}: {error['msg']}; see /docs"
    return f"{name} is {wanted}, not {json.dumps(error['input'])[:80]}"


#: Parts of pydantic's places that are types of a field of several, and no names.
_TYPES = ("str", "int", "float", "bool", "list[str]")


def check_once(body: bytes) -> None:
    """Raise :class:`UsageError` for an option that a question gives twice, of which JSON would take the last."""

    def read(pairs: list[tuple[str, Any]]) -> None:
        twice = next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None)
        if twice is not None:
            raise UsageError(f"{twice} is given more than once; give it once")

    json.loads(body, object_pairs_hook=read)


def words_of(command: str, values: Mapping[str, Any], uploaded: Uploaded) -> list[str]:
    """The command line of a question; ``uploaded`` gives the name of a file by its number. Raises
    :class:`UsageError` for a model that is neither a name nor an uploaded file."""
    arguments: list[str] = []
    options: list[str] = []
    for name, parameter in parameters_of(command).items():
        value = values.get(name)
        if value is None:
            continue
        if isinstance(parameter, click.Argument):
            arguments.append(_model(command, str(value), uploaded))
        else:
            options += _option(name, parameter, value)
    return [command, *options, "--", *arguments] if command != "serve" else [command, *arguments, *options]


def _option(name: str, parameter: click.Parameter, value: object) -> Sequence[str]:
    flag = max(parameter.opts, key=len)
    if isinstance(value, bool):
        if parameter.secondary_opts:
            return [flag if value else parameter.secondary_opts[0]]
        return [flag] if value else []
    texts = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if any(len(text) > _LONGEST for text in texts):
        raise UsageError(f"{name} is longer than {_LONGEST} characters")
    imported = next(filter(None, (_imported(name, text) for text in texts)), "")
    if imported:
        raise UsageError(f"{imported} is a name here; code is analysed on your own machine")
    return [f"{flag}={text}" for text in texts]


def _imported(name: str, text: str) -> str:
    """The option whose value names something to import; "" where none does. ``--vary`` gives options of their own."""
    if name == "vary":
        name, _, text = text.partition("=")
    name = name.strip().replace("-", "_")
    return name if name in _IMPORTS and (":" in text or "/" in text) else ""


def _model(command: str, text: str, uploaded: Uploaded) -> str:
    """The model as the command takes it."""
    source, _, rest = text.partition(":")
    if source == "file":
        name = uploaded(rest)
        return f"hf:{name}" if name.endswith(".json") and command not in ("compare", "replay", "serve") else name
    if command in ("compare", "replay"):
        raise UsageError(f"{text} is no uploaded file; send it to /v1/files first")
    name = rest if source in _SOURCES else text
    if (source in _SOURCES or command == "serve") and _NAME.fullmatch(name) and ".." not in name:
        return text
    raise UsageError(
        f"{text!r} is no model here: give zoo:NAME, hf:NAME, timm:NAME or torchvision:NAME, or send a file to "
        "/v1/files and give file:NUMBER; programs are analysed on your own machine"
    )
