"""Command lines and files that start a server, as they stand: what ``graphmem serve`` is asked by them.

A command line is the engine's own (``vllm serve MODEL ...``, ``python -m sglang.launch_server ...``), with variables
before it, or inside ``docker run``; a file is a docker compose file, a manifest of Kubernetes, or the values of a Helm
chart. Nothing is run: words are read, and files are data.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphmem.base.documents import read_yamls, shown
from graphmem.errors import SourceError, UsageError, reading

#: The ends of files that hold a server.
SUFFIXES = (".yaml", ".yml")
_DEEPEST = 40
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
#: The words that start a server.
_ACCEPTED = (
    "vllm serve MODEL, python -m vllm.entrypoints.openai.api_server, python -m sglang.launch_server, trtllm-serve, "
    "text-generation-launcher, llama-server, or docker run with the image of one"
)


@dataclass(frozen=True)
class _Server:
    """An engine's server: a word that starts it, a part of its image's name, and the options that name the model
    (empty: the first word that is no option)."""

    engine: str
    starts: re.Pattern[str]
    image: re.Pattern[str]
    model: tuple[str, ...]


def _server(engine: str, starts: str, image: str, *model: str) -> _Server:
    return _Server(engine, re.compile(starts), re.compile(image), model)


_SERVERS = (
    _server("vllm", r"(.*/)?vllm|vllm\.entrypoints\.(openai\.)?api_server", r"vllm", "--model"),
    _server("sglang", r"sglang(\.launch_server)?", r"sglang", "--model-path", "--model"),
    _server("tensorrtllm", r"(.*/)?trtllm-serve", r"tensorrt-llm|tensorrt_llm", "--model"),
    _server("tgi", r"(.*/)?text-generation-launcher", r"text-generation-inference", "--model-id"),
    _server("llamacpp", r"(.*/)?llama-server", r"llama\.cpp", "-m", "--model"),
)
#: Engines' options of two letters that the command line would take for an option of one and its value.
OF_TWO_LETTERS = {"-ot": "--override-tensor"}
#: Spellings of vLLM's that it would take for something else.
_SPELLED = {
    "-tp": "--tp",
    "-q": "--quantization",
    "-pp": "--pp",
    "-dp": "--dp",
    "-dcp": "--dcp",
    "-ep": "--ep",
    **OF_TWO_LETTERS,
}
#: Keys of Helm charts' ``vllmConfig`` (production-stack) -> options.
_VALUES = {
    "tensorParallelSize": "--tp", "maxModelLen": "--max-model-len", "dtype": "--dtype", "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
}  # fmt: skip


def asked_by(words: Sequence[str]) -> list[str]:
    """The words of ``graphmem serve`` for a server's command line. Raises :class:`UsageError`."""
    found = _server_in(words)
    if found is None:
        raise UsageError(f"{shown(' '.join(words))} starts no server that is known; accepted: {_ACCEPTED}")
    server, rest = found
    model, options = _model_of(server, rest)
    if model is None:
        raise UsageError(f"{shown(' '.join(words))} names no model ({' or '.join(server.model)})")
    return [model, "--engine", server.engine, *(_SPELLED.get(word, word) for word in options)]


def _server_in(words: Sequence[str]) -> tuple[_Server, list[str]] | None:
    """(the server that is started, the words after it)."""
    for number, word in enumerate(words):
        if _VARIABLE.match(word):
            continue
        for server in _SERVERS:
            if server.starts.fullmatch(word):
                rest = list(words[number + 1 :])
                return server, rest[1:] if rest[:1] == ["serve"] else rest
    return _image_in(words) if words and words[0] in ("docker", "podman", "nerdctl") else None


def _image_in(words: Sequence[str]) -> tuple[_Server, list[str]] | None:
    for number, word in enumerate(words):
        server = _by_image(word)
        if server is not None:
            return server, list(words[number + 1 :])
    return None


def _by_image(name: str) -> _Server | None:
    """The server of an image; a path or an option is none."""
    if name.startswith(("-", "/", ".", "~")) or "=" in name or not re.search(r"[/:]", name):
        return None
    return next((server for server in _SERVERS if server.image.search(name)), None)


def _model_of(server: _Server, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the model, the other words)."""
    rest: list[str] = []
    model: str | None = None
    position = None if words and words[0].startswith("-") else 0
    waiting = False
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if waiting:
            model, waiting = word, False
        elif name in server.model:
            model, waiting = (value, False) if equals else (model, True)
        elif number == position:
            model = word
        else:
            rest.append(word)
    return model, rest


# --- files ------------------------------------------------------------------------------------------------------------


def asked_in(path: Path) -> list[str]:
    """The words of ``graphmem serve`` for the server that a file starts. Raises :class:`SourceError`,
    :class:`UsageError`."""
    found = [words for document in _documents(path) for words in _servers_of(document, 0)]
    if not found:
        raise SourceError(f"{path} starts no server that is known; accepted: a service or container with {_ACCEPTED}")
    if len(found) > 1:
        models = ", ".join(words[0] for words in found)
        raise SourceError(f"{path} starts {len(found)} servers ({models}); give a file with one")
    return found[0]


def _documents(path: Path) -> list[object]:
    try:
        with reading(path):
            return read_yamls(path)
    except ImportError:
        raise SourceError(f"{path}: YAML is read with PyYAML; install it with: pip install pyyaml") from None
    except ValueError as error:
        raise SourceError(f"{path}: {error}") from None


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
    if not words:
        return None
    if _server_in(words) is not None:
        return asked_by(words)
    server = _by_image(str(value.get("image", "")))
    return None if server is None else asked_by(["docker", str(value["image"]), *words])


def _of_values(value: Mapping[object, object]) -> list[str] | None:
    """The values of vLLM's production stack: ``modelURL`` and ``vllmConfig``."""
    model, config = value.get("modelURL"), value.get("vllmConfig", {})
    if not isinstance(model, str) or not isinstance(config, Mapping):
        return None
    words = [model, "--engine", "vllm"]
    for key, option in _VALUES.items():
        if config.get(key) is not None:
            words += [option, str(config[key])]
    return [*words, *(_SPELLED.get(word, word) for word in _words(config.get("extraArgs")))]


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
