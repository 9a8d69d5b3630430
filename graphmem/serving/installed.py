"""Installed engines: their own code starts on the pretended card, and its figures are read.

Whatever models and options that version knows are followed, and it resolves its settings itself; only the arithmetic of
requests of other lengths is ours. The start is in a process of its own (:mod:`graphmem.serving.starting`), takes no
network and no card, and weights have no values. Of several processes that share every layer the first is followed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphmem.answering import capture_cache
from graphmem.base.processes import last_line
from graphmem.base.versions import Version
from graphmem.errors import GraphmemError, UsageError
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.serving.options import one_of, whole
from graphmem.serving.starting import Asked

#: What an answer stands on if it is asked for by name (``--basis``): the engine first, it alone, our account alone.
BASES = ("auto", "engine", "retold")
#: Files beside a configuration by which an engine reads text; without one it starts with none.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")
#: Seconds that a start may take.
_MOST_SECONDS = 900
#: Starts that are remembered.
_REMEMBERED = 64
#: Where a value of an engine's variables is the folder that its start may write into.
SCRATCH = "(scratch)"


class NotFollowed(UsageError):
    """The installed engine did not come to an end of its start, for a reason that is perhaps not its own."""


@dataclass(frozen=True)
class Program:
    """How an engine is started: its package and its name, the module that starts it, the option that names the model,
    and variables of its environment."""

    package: str
    title: str
    module: str
    model_option: str
    variables: tuple[tuple[str, str], ...] = ()

    def version(self) -> str | None:
        """The installed version; None where there is none."""
        try:
            found = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None
        return found if find_spec(self.package) is not None and find_spec("torch") is not None else None


class AskedFirst:
    """An engine whose own code answers where it is installed, and else our account of it: searches, which ask over and
    over, ask that first too."""

    title: str

    @abstractmethod
    def why_not(self, question: Question) -> str | None:
        """Why the installed engine is not asked; None where it can be."""

    @abstractmethod
    def by_itself(self, question: Question) -> Served:
        """The installed engine's answer. Raises :class:`UsageError` with its reason where it does not start for another
        one than memory, :class:`NotFollowed` among them."""

    @abstractmethod
    def retold(self, question: Question) -> Served:
        """The answer by our own account of the engine's code."""

    def serve(self, question: Question) -> Served:
        """See :class:`graphmem.serving.base.Engine`."""
        basis = _basis_of(question)
        if basis == "engine":
            return self.by_itself(question)
        if not self._starts_itself(question):
            return self.retold(question)
        try:
            return self.by_itself(question)
        except NotFollowed as error:
            return self._retold_instead(question, error)

    def waits_for(self, question: Question) -> str | None:
        """What an answer takes its time for, in words; None where it does not."""
        if _basis_of(question) == "retold" or self.why_not(question) is not None:
            return None
        return f"{self.title} starts on the pretended card: half a minute or more (--basis retold answers at once)"

    def for_searches(self, question: Question) -> Question:
        """The question as searches ask it over and over: of our account, which takes a second where a start of the
        installed engine takes half a minute, unless that has no answer."""
        if not self._starts_itself(question):
            return question
        quick = question.with_(arguments=(*question.arguments, ("basis", "retold")))
        try:
            self.serve(quick)
        except GraphmemError:
            return question
        return quick

    def _starts_itself(self, question: Question) -> bool:
        """Whether the installed engine is asked, without being named."""
        return _basis_of(question) == BASES[0] and self.why_not(question) is None

    def _retold_instead(self, question: Question, error: UsageError) -> Served:
        """Our account's answer where the installed engine's code could not be followed. Raises :class:`UsageError`
        with both reasons where neither has one."""
        try:
            served = self.retold(question)
        except GraphmemError as refused:
            raise UsageError(f"{error}; by graphmem's account of its code: {refused}") from None
        return replace(served, notes=(*served.notes, f"graphmem's account, because {error}"))


def _basis_of(question: Question) -> str:
    return str(one_of(*BASES)("basis", dict(question.arguments).get("basis", BASES[0])))


def why_not(question: Question, title: str, found: str | None) -> str | None:
    """Why an engine of which this version is installed is not asked, for reasons that all engines have."""
    if found is None:
        return f"{title} is not installed in this environment"
    if question.version is not None and question.version != _short(found):
        return f"{title} {found} is installed, and {'.'.join(map(str, question.version))} is asked for"
    return None


def _short(text: str) -> Version:
    major, minor = (int(part) for part in text.split(".")[:2])
    return major, minor


# --- the command line -------------------------------------------------------------------------------------------------


def folder_of(model: ServedModel) -> Path | None:
    """The model's own folder; None where its configuration is one of the table."""
    path = model.path
    return path.parent.resolve() if path is not None and path.name == "config.json" else None


def options_of(program: Program, question: Question, folder: Path | None, names: Mapping[str, str]) -> Iterator[str]:
    """What all engines are told: the model, but for one without a folder of its own, that weights have no values,
    whether there is a tokenizer, and the fields of the question that are given, by the engine's ``names``."""
    if folder is not None:
        yield from (program.model_option, str(folder))
    yield from ("--load-format", "dummy")
    if folder is None or not any((folder / name).is_file() for name in _TOKENIZERS):
        yield "--skip-tokenizer-init"
    for field, name in names.items():
        value = getattr(question, field)
        if value not in (None, "auto"):
            yield from (spelled(name), str(value))


def handed_on(question: Question, left_out: Container[str], off: str = "--no-") -> Iterator[str]:
    """The engine's own options, but for those that are ``left_out``; ``off`` as in :func:`option`."""
    for name, text in question.arguments:
        if name.replace("-", "_") not in left_out:
            yield from option(name, text, off)


def processes(question: Question, names: Sequence[str], otherwise: int = 1) -> int:
    """How many processes share the model in a way that is asked for by one option, whichever of its ``names`` is
    given. Raises :class:`UsageError` for what is no whole number from 1 on."""
    given = {name.replace("-", "_"): text for name, text in question.arguments}
    return int(whole(1)(names[0], next((given[name] for name in names if name in given), str(otherwise))))


def option(name: str, text: str, off: str = "--no-") -> Iterator[str]:
    """An option as engines' parsers read it; a switch that is off has this in front, or is left out for none."""
    word = text.strip().lower()
    if word in ("true", ""):
        yield spelled(name)
    elif word == "false":
        if off:
            yield off + name.replace("_", "-")
    elif word.startswith("["):
        yield from (spelled(name), *map(str, json.loads(text)))
    else:
        yield from (spelled(name), text)


def spelled(name: str) -> str:
    """An option's name on a command line."""
    return f"--{name.replace('_', '-')}"


# --- the start --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=_REMEMBERED)
def started(
    program: Program, version: str, asked: Asked, variables: tuple[tuple[str, str], ...], configuration: str
) -> Mapping[str, Any]:
    """The figures of a start with these further variables, kept on the disk where captures are. Raises
    :class:`NotFollowed` for one that ends in another way."""
    disk = capture_cache.in_use
    place = None if disk is None else disk.place_of(program.title, asked, variables, configuration)
    known = None if disk is None or place is None else disk.recalled_values(place)
    if known is not None:
        return known
    found = start(program, version, asked, variables, configuration)
    dependencies = found.pop("dependencies", None)
    if disk is not None and place is not None and dependencies is not None:
        ours = set(_environment(program, "")) | {name for name, _ in variables}
        read = {name: value for name, value in dependencies["variables"].items() if name not in ours}
        disk.keep_values(place, program.title, found, {**dependencies, "variables": read})
    return found


def start(
    program: Program, version: str, asked: Asked, variables: tuple[tuple[str, str], ...], configuration: str
) -> dict[str, Any]:
    """The figures of a start in a process of its own, and what they depend on. Where the model has no folder one is
    made of its ``configuration`` for as long. Raises :class:`NotFollowed`."""
    title = f"{program.title} {version}"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "answer.json")
        if program.model_option not in asked.options:
            folder = Path(scratch, "model")
            folder.mkdir()
            (folder / "config.json").write_text(configuration, encoding="utf-8")
            asked = replace(asked, options=(program.model_option, str(folder), *asked.options))
        environment = {**os.environ, **_environment(program, scratch), **dict(variables)}
        command = [sys.executable, "-m", "graphmem.serving.starting", program.module, str(out)]
        try:
            ended = subprocess.run(
                command, input=pickle.dumps(asked), env=environment, capture_output=True, timeout=_MOST_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotFollowed(f"{title} had not started after {_MOST_SECONDS} seconds") from None
        if out.is_file():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
    raise NotFollowed(f"{title} did not start: {last_line(ended.stderr, f'it ended with {ended.returncode}')}")


def _environment(program: Program, scratch: str) -> dict[str, str]:
    """No network, nothing kept, temporary files of its libraries among it; and graphmem is found where it was."""
    return {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TMPDIR": scratch, "TRITON_CACHE_DIR": scratch,
        "TORCHINDUCTOR_CACHE_DIR": scratch, "XDG_CACHE_HOME": scratch, "FLASHINFER_WORKSPACE_BASE": scratch,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **{name: scratch if value == SCRATCH else value for name, value in program.variables},
    }  # fmt: skip


# --- errors -----------------------------------------------------------------------------------------------------------

#: How errors begin with which engines refuse options and models before they look at a card.
_REFUSALS = ("ValidationError:", "ValueError:", "NotImplementedError:")


def checked(found: Mapping[str, Any], title: str, for_memory: tuple[str, ...]) -> str | None:
    """The engine's words where memory alone, as texts of it say, keeps it from starting; None where it starts. Raises
    :class:`UsageError` for what it refuses, :class:`NotFollowed` for other ends."""
    error: str | None = found.get("error")
    if error is None:
        return None
    known = found.get("settings")
    if known is None or not any(text in error for text in for_memory):
        refuses = known is None and error.startswith(_REFUSALS)
        raise (UsageError if refuses else NotFollowed)(f"{title} does not start: {first_line(error)}")
    return first_line(error)


def first_line(error: str) -> str:
    """What it says first: of options that pydantic refuses, the line behind their number."""
    lines = [line.strip() for line in error.partition(": ")[2].splitlines() if line.strip()]
    return next((line for line in lines if not re.match(r"\d+ validation errors? for", line)), error)
