"""Command lines and files that start a server, as they stand: what ``graphmem serve`` is asked by them.

A command line is the engine's own (``vllm serve MODEL ...``, ``python -m sglang.launch_server ...``), with variables
before it, or inside ``docker run``; a file is a docker compose file, a manifest of Kubernetes, or the values of a Helm
chart. Nothing is run: words are read, and files are data.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from graphmem.base.documents import shown
from graphmem.errors import SourceError, UsageError
from graphmem.serving import flexible

#: The ends of files that hold a server.
SUFFIXES = (".yaml", ".yml")
_DEEPEST = 40
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
#: Programs that do other things too, by the word behind them.
_PROGRAM = re.compile(r"(.*/)?(vllm|sglang)")
#: The words that start a server.
_ACCEPTED = (
    "vllm serve MODEL, python -m vllm.entrypoints.openai.api_server, python -m sglang.launch_server, trtllm-serve, "
    "text-generation-launcher, llama-server, docker run with the image of one, or docker compose -f FILE up"
)


@dataclass(frozen=True)
class _Server:
    """An engine's server: a word that starts it, a part of its image's name, the options that name the model (empty:
    the first word that is no option), and the variables that are options too, whose names begin so."""

    engine: str
    starts: re.Pattern[str]
    image: re.Pattern[str]
    model: tuple[str, ...]
    variables: re.Pattern[str] = re.compile("(?!)")


def _server(engine: str, starts: str, image: str, *model: str, variables: str = "(?!)") -> _Server:
    return _Server(engine, re.compile(starts), re.compile(image), model, re.compile(variables))


_SERVERS = (
    _server("vllm", r"(.*/)?vllm|vllm\.entrypoints\.(openai\.)?api_server", r"vllm", "--model"),
    _server("sglang", r"(.*/)?sglang(\.launch_server)?", r"sglang", "--model-path", "--model"),
    _server("tensorrtllm", r"(.*/)?trtllm-serve", r"tensorrt-llm|tensorrt_llm", "--model"),
    _server(
        "tgi", r"(.*/)?text-generation-launcher", r"text-generation-inference", "--model-id",
        variables=r"(MODEL_ID|NUM_SHARD|QUANTIZE|DTYPE|MAX_[A-Z_]+|KV_CACHE_DTYPE|CUDA_MEMORY_FRACTION)",
    ),
    _server("llamacpp", r"(.*/)?llama-server", r"llama\.cpp", "-m", "--model", variables="LLAMA_ARG_([A-Z_]+)"),
)  # fmt: skip
#: Variables that decide what vLLM's memory is -> option. ``VLLM_USE_V2_MODEL_RUNNER`` is a number.
_OF_VLLM = {
    "PYTORCH_CUDA_ALLOC_CONF": "--alloc-conf", "PYTORCH_ALLOC_CONF": "--alloc-conf", "VLLM_USE_V1": "--use-v1",
    "VLLM_ATTENTION_BACKEND": "--attention-backend", "VLLM_USE_FLASHINFER_SAMPLER": "--use-flashinfer-sampler",
}  # fmt: skip
#: Engines' options with one hyphen, which the command line would take for an option of one letter and its value.
_ONE_HYPHEN = {
    "-tp": "--tp", "-q": "--quantization", "-pp": "--pp", "-dp": "--dp", "-dcp": "--dcp", "-ep": "--ep",
    "-ot": "--override-tensor",
}  # fmt: skip
#: Keys of Helm charts' ``vllmConfig`` (production-stack) -> options.
_VALUES = {
    "tensorParallelSize": "--tp", "maxModelLen": "--max-model-len", "dtype": "--dtype", "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
}  # fmt: skip


def asked_by(words: Sequence[str], variables: Mapping[str, str] | None = None) -> list[str]:
    """The words of ``graphmem serve`` for a server's command line, and the ``variables`` of its environment. Raises
    :class:`UsageError`."""
    if composed := _composed(words):
        return asked_in(composed)
    found = _server_in(words)
    if found is None:
        raise UsageError(f"{shown(' '.join(words))} starts no server that is known; accepted: {_ACCEPTED}")
    server, before, rest = found
    rest = flexible.as_options(rest) if server.engine == "vllm" else rest
    given = {**(variables or {}), **_variables_in(before)}
    model, options = _model_of(server, [*rest, *_options_of(server, given, rest)])
    if model is None and any(word.partition("=")[0] in _FROM_THE_HUB for word in options):
        raise UsageError(
            "llama-server would fetch that file from the Hub, which is not asked; give the file itself: -m FILE.gguf"
        )
    if model is None:
        raise UsageError(f"{shown(' '.join(words))} names no model ({' or '.join(server.model)})")
    return [model, "--engine", server.engine, *map(spelled, options)]


def _composed(words: Sequence[str]) -> Path | None:
    """The file of ``docker compose -f FILE up``, which is the folder's own where none is named. Raises
    :class:`UsageError` for several, which Docker merges."""
    if words[:1] != ["docker-compose"] and words[:2] != ["docker", "compose"]:
        return None
    named = [after for word, after in pairwise(words) if word in ("-f", "--file")]
    named += [word.removeprefix("--file=") for word in words if word.startswith("--file=")]
    if len(named) > 1:
        raise UsageError("several compose files are not merged here: docker compose ... config > one.yaml does it")
    usual = [Path(stem + end) for stem in ("compose", "docker-compose") for end in (".yaml", ".yml")]
    return Path(named[0]) if named else next((one for one in usual if one.is_file()), usual[0])


#: llama.cpp's options that name a file elsewhere.
_FROM_THE_HUB = ("-hf", "-hfr", "--hf-repo", "-mu", "--model-url")


def spelled(word: str) -> str:
    """A word of a command line, an engine's option with one hyphen as the command line knows it."""
    name, equals, value = word.partition("=")
    return f"{_ONE_HYPHEN.get(name, name)}{equals}{value}"


def _server_in(words: Sequence[str]) -> tuple[_Server, Sequence[str], list[str]] | None:
    """(the server that is started, the words before it, those after it)."""
    for number, word in enumerate(words):
        if _VARIABLE.match(word):
            continue
        for server in _SERVERS:
            if server.starts.fullmatch(word):
                rest = list(words[number + 1 :])
                if rest[:1] == ["serve"]:
                    return server, words[:number], rest[1:]
                return None if _PROGRAM.fullmatch(word) else (server, words[:number], rest)
    return _image_in(words) if words and words[0] in ("docker", "podman", "nerdctl") else None


def _image_in(words: Sequence[str]) -> tuple[_Server, Sequence[str], list[str]] | None:
    for number, word in enumerate(words):
        server = _by_image(word)
        if server is not None:
            return server, words[:number], list(words[number + 1 :])
    return None


def _by_image(name: str) -> _Server | None:
    """The server of an image; a path or an option is none."""
    if name.startswith(("-", "/", ".", "~")) or "=" in name or not re.search(r"[/:]", name):
        return None
    return next((server for server in _SERVERS if server.image.search(name)), None)


def _variables_in(words: Sequence[str]) -> dict[str, str]:
    """The variables that are set before a command, or by ``docker run -e``."""
    found = (_VARIABLE.fullmatch(re.sub(r"^(--env=|-e=?)", "", word)) for word in words)
    return {match[1]: match[2] for match in found if match is not None}


def _options_of(server: _Server, variables: Mapping[str, str], given: Sequence[str]) -> Iterator[str]:
    """The options that variables stand for; those that are ``given`` are stronger."""
    said = {word.partition("=")[0].lstrip("-").replace("_", "-") for word in given}
    for name, value in variables.items():
        option = _OF_VLLM.get(name, "") if server.engine == "vllm" else ""
        if match := server.variables.fullmatch(name):
            option = f"--{match[1].lower().replace('_', '-')}"
        if server.engine == "vllm" and name == "VLLM_USE_V2_MODEL_RUNNER":
            option, value = "--model-runner", "v2" if value == "1" else "v1"
        if option and option.lstrip("-") not in said:
            yield from (option, value)


def _model_of(server: _Server, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the model, the other words). One that no option names is the first word, or a second one behind an option."""
    rest: list[str] = []
    model: str | None = None
    waiting, taken = False, False
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        if waiting:
            model, waiting = word, False
        elif name in server.model:
            model, waiting = (value, False) if equals else (model, True)
        elif not is_option and model is None and (number == 0 or taken):
            model = word
        else:
            taken = not is_option or bool(equals)
            rest.append(word)
    return model, rest


def pairs_in(words: Iterable[str]) -> list[tuple[str, str]]:
    """``--name value``, ``--name=value`` and ``--name``, which is a switch, as pairs of text; a word that is neither an
    option nor the value of one has no name. Numbers below 0 are values."""
    pairs: list[tuple[str, str]] = []
    is_expected = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-") and not word.lstrip("-").replace(".", "", 1).isdigit():
            pairs.append((name, value if equals else "true"))
            is_expected = not equals
        elif is_expected:
            pairs[-1] = (pairs[-1][0], word)
            is_expected = False
        else:
            pairs.append(("", word))
    return pairs


# --- files ------------------------------------------------------------------------------------------------------------


def asked_in(path: Path) -> list[str]:
    """The words of ``graphmem serve`` for the server that a file starts. Raises :class:`SourceError`,
    :class:`UsageError`."""
    found = [words for document in flexible.documents_in(path) for words in _servers_of(document, 0)]
    if not found:
        raise SourceError(f"{path} starts no server that is known; accepted: a service or container with {_ACCEPTED}")
    if len(found) > 1:
        models = ", ".join(words[0] for words in found)
        raise SourceError(f"{path} starts {len(found)} servers ({models}); give a file with one")
    return found[0]


def _servers_of(value: object, depth: int) -> Iterator[list[str]]:
    """The servers that a tree of values starts: containers, and the models of a chart."""
    if depth > _DEEPEST:
        return
    if isinstance(value, list):
        for one in value:
            yield from _servers_of(one, depth + 1)
    if not isinstance(value, Mapping):
        return
    words = _of_container(value) or _of_values(value)
    if words is not None:
        yield words
        return
    for one in value.values():
        yield from _servers_of(one, depth + 1)


def _of_container(value: Mapping[object, object]) -> list[str] | None:
    words = [word for key in ("entrypoint", "command", "args") for word in _words(value.get(key))]
    variables = dict(_environment(value.get("environment", value.get("env"))))
    if _server_in(words) is not None:
        return asked_by(words, variables)
    server = _by_image(str(value.get("image", "")))
    if server is None or not (words or any(_options_of(server, variables, ()))):
        return None
    return asked_by(["docker", str(value["image"]), *words], variables)


def _environment(value: object) -> Iterator[tuple[str, str]]:
    """A container's variables: a mapping, a list of ``NAME=VALUE``, or one of ``{name, value}``."""
    if isinstance(value, Mapping):
        yield from ((str(name), str(text)) for name, text in value.items())
    for one in value if isinstance(value, list) else ():
        if isinstance(one, str):
            yield from _variables_in([one]).items()
        elif isinstance(one, Mapping) and "name" in one and "value" in one:
            yield str(one["name"]), str(one["value"])


def _of_values(value: Mapping[object, object]) -> list[str] | None:
    """The values of vLLM's production stack: ``modelURL`` and ``vllmConfig``."""
    model, config = value.get("modelURL"), value.get("vllmConfig", {})
    if not isinstance(model, str) or not isinstance(config, Mapping):
        return None
    words = [model, "--engine", "vllm"]
    for key, option in _VALUES.items():
        if config.get(key) is not None:
            words += [option, str(config[key])]
    return [*words, *map(spelled, flexible.as_options(_words(config.get("extraArgs"))))]


def _words(value: object) -> list[str]:
    """A command as a list, or as a shell would split it; a shell's ``-c`` has it in one word."""
    if isinstance(value, str):
        try:
            return shlex.split(value.replace("\\\n", " "))
        except ValueError as error:
            raise SourceError(f"{shown(value)} is no command line: {error}") from None
    if not isinstance(value, list):
        return []
    words = [str(one) for one in value]
    return [part for word in words for part in (_words(word) if " " in word.strip() and "{" not in word else [word])]
