"""Logs of serving engines as users have them: the lines of a file, and what an engine said in them.

A log is text from elsewhere: with colours, timestamps, prefixes of containers and ranks, JSON of Docker's around every
line, several starts one after another, and more lines about requests than about the start. Everything is bounded, and
figures are found by the engine's own words wherever they stand in a line. What those words are each engine says
(:class:`Reader`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from graphmem.base.documents import open_file
from graphmem.devices import device_named
from graphmem.errors import SourceError, UsageError, reading
from graphmem.serving.base import ServedModel
from graphmem.serving.commands import asked_by, pairs_in
from graphmem.serving.configurations import known_by
from graphmem.units import GIB

#: Bytes that are read of a file, and of a line: all options of a start, some hundred names with their values, are in
#: one; lines of requests are longer, and say nothing of memory.
_MOST_BYTES, _LONGEST_LINE = 1 << 28, 1 << 16
#: Bytes that are looked at to see whether a file is text.
_LOOKED_AT = 1 << 12
#: Escape sequences of terminals, and the marks of text in 16 bits, as PowerShell writes it.
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
#: The service before a line of docker compose, and how many may be in a log.
_SERVICE = re.compile(r"([\w.-]+) +\| ")
_MOST_SERVICES = 64
#: The program of a command that starts a server, perhaps in a folder, and Python before a module.
_SERVER = re.compile(
    r"(?:vllm (?:serve|bench (?:latency|throughput))|vllm\.entrypoints\.\S+|sglang\.launch_server|sglang serve|"
    r"trtllm-serve|text-generation-launcher|llama-server|(?:docker|podman|nerdctl) run) "
)
_PYTHON = re.compile(r"(?<!\S)\S{0,200}python[\d.]{0,8} -m $")
#: A word of a list that has one a line.
_WORD = re.compile(r"(?:^|\) )\s*\[?'([^']{0,4000})'[,\]]")
#: The class that the engine makes of a model.
_ARCHITECTURE = re.compile(r"(?:Resolved architecture: |Load weight end\b.{0,400}? type=)(\w+)")
#: A folder of the Hub's cache.
_CACHED = re.compile(r"(models--[\w.-]+?--[\w.-]+)")
#: A model's name on the Hub, or its last part with the size in it, in words around a log.
_NAMES = tuple(
    re.compile(r"(?:(?<=huggingface\.co/)|(?<![\w./-]))" + name + r"(?![\w/])")
    for name in (r"[\w-]{2,40}/[\w.-]{2,80}", r"[A-Za-z][\w.-]{1,60}\d[Bb](?:[-_.][\w.-]{1,40})?")
)
#: How an engine says that its card is Windows', whose driver keeps nothing of the board for itself.
_WINDOWS = "WSL is detected"
#: How engines say that they run on something else than a CUDA card.
_OTHER_PLATFORM = re.compile(
    r"detected platform (?!cuda)\w|\[rocm\.py:|device='npu'|device_config=cpu|\[cpu_worker\.py"
)
#: How drivers and libraries name a card, and files of tuned kernels, which have ``_`` in it.
_CARD = re.compile(r"(?:NVIDIA|Tesla|GeForce|Quadro|AMD Instinct)[ _-][A-Za-z0-9][\w +-]{1,40}")
#: How people name one, perhaps behind how many they have: ``4xH100``, ``RTX 3060 Ti``.
_CARD_IN_WORDS = re.compile(
    r"(?<![\w./-])(?:\d{1,2} ?x ?)?((?:[ABHLV]\d{2,3}S?|GB\d{2,3}|RTX[ -]?\d{4}(?: ?Ti)?)(?: NVL)?)(?![\w.-])"
)
#: Settings as Python and Rust write them: ``name=value``, ``'name': value`` and ``name: value``.
_SETTING = re.compile(r"(?:'(\w+)'\s*:|\b([A-Za-z_]\w*)\s*(?:=|:(?= )))\s*")
#: Names of settings whose values are nobody's business.
_SECRET = re.compile(r"(?:key|token|secret|password)$")
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""
#: Characters of a number that an engine prints, at most, and such a number: a line of digits is looked at once.
_LONGEST_NUMBER = 24
_NUMBER = r"(-?[\d,]{0,20}\.?\d{1,18})"
#: Characters of a value that are looked at.
_LONGEST_VALUE = 1 << 14


@dataclass(frozen=True)
class Printed:
    """A figure that an engine printed: bytes where it is a size, else a count. ``lowest`` and ``highest`` of all ranks;
    ``step``: half of its last digit."""

    name: str
    value: float
    lowest: float
    highest: float
    step: float
    is_size: bool = True


@dataclass(frozen=True)
class Log:
    """What a log says of the engine's last start. ``settings`` have the engine's own names, values as text; ``printed``
    figures the names of the parts of an answer (:class:`graphmem.serving.base.Part`). ``total_bytes`` of the card, and
    ``free_bytes`` of it before the weights were loaded. ``service``: which of several of docker compose it is;
    ``architecture``: the class of the model;
    ``mentioned``: the one public model that words around the log name."""

    engine: str
    version: str | None
    model: str | None
    settings: Mapping[str, str]
    printed: Mapping[str, Printed]
    gpu: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    on_windows: bool = False
    service: str | None = None
    names_options: bool = True
    own_model: tuple[ServedModel, frozenset[str]] | None = None
    architecture: str | None = None
    is_cuda: bool = True
    mentioned: str | None = None


@dataclass(frozen=True)
class PrintedFigure:
    """A figure's place: a line with ``words`` in which ``expression`` finds it as its first group. ``unit``: bytes of
    one, 0 for a count. Of several ranks the ``worst`` is taken."""

    name: str
    words: str
    expression: re.Pattern[str]
    unit: int = GIB
    worst: Callable[..., float] = max


def last(values: Sequence[float]) -> float:
    """The last of several, where those before it are of tries."""
    return values[-1]


def figure(name: str, words: str, expression: str, unit: int = GIB, worst: Callable[..., float] = max) -> PrintedFigure:
    """A :class:`PrintedFigure`; in ``expression`` ``#`` stands for a number."""
    return PrintedFigure(name, words, re.compile(expression.replace("#", _NUMBER)), unit, worst)


@dataclass(frozen=True)
class Reader:
    """How one engine's logs are read.

    ``begins``: words of a line with which a start begins; ``version``, ``model``, ``total`` and ``free`` (GiB of the
    card, and of it before the weights): where they stand; ``figures``: what is printed; ``settings``: the settings that
    the lines of a start tell. ``sums``: the parts of an answer that a printed figure is the sum of, where it has not
    the name of one. ``follows_versions``: whether another version is another answer; ``by_words``: words that lines of
    a version have, the newest first, for logs that do not tell theirs. ``model_in``: the model by what the log prints
    of it, and the figures that this leaves open. ``options_lines``: words of the line that has all options that were
    given; without it what a log does not say may be otherwise than by default. ``adds_up``: figures that other lines of
    a log come to. ``usual``: settings that were otherwise by default when the log was written.
    """

    engine: str
    begins: tuple[str, ...]
    version: re.Pattern[str] | None
    figures: tuple[PrintedFigure, ...]
    settings: Callable[[Sequence[str]], Mapping[str, str]]
    model: tuple[str, ...] = ("model",)
    total: tuple[re.Pattern[str], ...] = ()
    free: re.Pattern[str] | None = None
    sums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    follows_versions: bool = False
    by_words: tuple[tuple[str, str], ...] = ()
    model_in: Callable[[Sequence[str]], tuple[ServedModel, frozenset[str]] | None] = lambda lines: None
    options_lines: tuple[str, ...] = ()
    adds_up: Callable[[Log], Mapping[str, float]] = lambda log: {}
    usual: Callable[[Sequence[str], Mapping[str, str]], Mapping[str, str]] = lambda lines, settings: {}

    def read(self, lines: Sequence[str], commands: Mapping[str, Sequence[str]] | None = None) -> Log | None:
        """The last start that these lines tell of, None where this engine printed no figure. ``commands``: what
        :func:`commands_in` found in them, where somebody has looked."""
        start = self._last_start(lines)
        printed = _printed(start, self.figures)
        if not printed:
            return None
        named, *words = (commands_in(lines) if commands is None else commands).get(self.engine, ("",))
        command = {self.model[0]: named} | _options_in(words) if named else {}
        settings = {**command, **self.settings(start)}
        settings = {**self.usual(start, settings), **settings}
        model = next((settings[name] for name in self.model if settings.get(name)), None)
        model = model or next(_found(lines, _CACHED), None)
        own_model = self.model_in(start)
        mentioned = None if own_model else _known_in(lines)
        return Log(
            self.engine,
            self._version(start),
            model or mentioned,
            {name: text for name, text in settings.items() if name not in self.model and not _SECRET.search(name)},
            printed,
            card_in(start) or card_in(lines),
            next(_sizes(start, self.total), None),
            next(_sizes(start, (self.free,) if self.free else ()), None),
            any(_WINDOWS in line for line in start),
            names_options=bool(command)
            or not self.options_lines
            or any(one in line for line in start for one in self.options_lines),
            own_model=own_model,
            mentioned=mentioned,
            architecture=next(_found(start, _ARCHITECTURE), None),
            is_cuda=not any(map(_OTHER_PLATFORM.search, start)),
        )

    def _version(self, lines: Sequence[str]) -> str | None:
        """As it is told, else by the words of a version."""
        told = next(_found(lines, self.version), None) if self.version else None
        by_words = (f"{text} by its words" for words, text in self.by_words if any(words in line for line in lines))
        return told or next(by_words, None)

    def _last_start(self, lines: Sequence[str]) -> Sequence[str]:
        """The lines from the last beginning on that figures follow."""
        begin, is_printed, starts = 0, False, []
        for number, line in enumerate(lines):
            if is_printed and any(words in line for words in self.begins):
                starts.append(lines[begin:number])
                begin, is_printed = number, False
            elif not is_printed:
                is_printed = any(one.words in line and one.expression.search(line) for one in self.figures)
        if is_printed or not starts:
            starts.append(lines[begin:])
        return starts[-1]


def _known_in(lines: Sequence[str]) -> str | None:
    """The one public model that words around a log name, as in an issue; None where there are several, or none."""
    for names in _NAMES:
        named = {match.strip(".") for line in lines for match in names.findall(line)}
        found = {known: name for name in sorted(named) if (known := known_by(name)) is not None}
        if found:
            return next(iter(found.values())) if len(found) == 1 else None
    return None


def _sizes(lines: Sequence[str], expressions: Sequence[re.Pattern[str]]) -> Iterator[int]:
    """The sizes in bytes of what is printed in GiB."""
    for expression in expressions:
        for text in _found(lines, expression):
            if len(text) <= _LONGEST_NUMBER:
                yield round(float(text.replace(",", "")) * GIB)


def _found(lines: Sequence[str], expression: re.Pattern[str]) -> Iterator[str]:
    return (match[1] for match in map(expression.search, lines) if match)


def _printed(lines: Sequence[str], figures: Sequence[PrintedFigure]) -> dict[str, Printed]:
    """By name, of the first of the places that lines have."""
    found: dict[PrintedFigure, list[tuple[float, float]]] = {}
    for line in lines:
        for one in figures:
            match = one.expression.search(line) if one.words in line else None
            if match is not None:
                found.setdefault(one, []).append(_figure(match[1], one.unit or 1))
    places = {one.name: one for one in reversed(figures) if one in found}
    return {one.name: _of_ranks(one, found[one]) for one in figures if places.get(one.name) is one}


def _figure(text: str, unit: int) -> tuple[float, float]:
    """(value, half of its last digit)."""
    digits = len(text.partition(".")[2])
    return float(text.replace(",", "")) * unit, 0.5 * unit / 10**digits


def _of_ranks(one: PrintedFigure, values: Sequence[tuple[float, float]]) -> Printed:
    alone = [value for value, _ in values]
    step = max(step for _, step in values) if one.unit else 0.0
    return Printed(one.name, one.worst(alone), min(alone), max(alone), step, bool(one.unit))


# --- text -------------------------------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[str]:
    """The lines of a log, without colours. Raises :class:`SourceError` for a file that is none."""
    with reading(path), open_file(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise SourceError(
            f"{path} has more than {_MOST_BYTES >> 20} MiB; give the part of it from the engine's start on, for "
            f"example: head -n 5000 {path.name}"
        )
    if content[:2] in _UTF_16:
        text = content.decode("utf-16", "replace")
    elif b"\0" in content[:_LOOKED_AT]:
        raise SourceError(f"{path} is no text: a log is what the engine printed while it started")
    else:
        text = content.decode("utf-8", "replace")
    text = re.sub(r",[ \t]*[\r\n]+ {12,100}(?=\w)", ", ", text)  # lines that somebody has broken
    return [_plain(line[:_LONGEST_LINE]) for line in re.split(r"[\r\n]+", text) if line.strip()]


def _plain(line: str) -> str:
    """A line without colours, and without the JSON that Docker keeps it in."""
    if line.startswith('{"log":'):
        try:
            line = str(json.loads(line)["log"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return line
    return _COLOURS.sub("", line) if "\x1b" in line else line


def whole_number(text: str) -> int | None:
    """The number that a text is, of at most 18 digits; None for other texts."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def services_in(lines: Sequence[str]) -> dict[str | None, list[str]]:
    """The lines of each service of docker compose, those of none for all; all lines where there are not several."""
    found: dict[str | None, list[str]] = {}
    for line in lines:
        match = _SERVICE.match(line)
        if match:
            found.setdefault(match[1], [])
            if len(found) > _MOST_SERVICES:  # something else stands before these lines
                break
        for service in [match[1]] if match else found:
            found[service].append(line)
    return found if 1 < len(found) <= _MOST_SERVICES else {None: list(lines)}


def commands_in(lines: Sequence[str]) -> dict[str, list[str]]:
    """By engine the last command in these lines that starts its server: the model, and the words of the options."""
    found: dict[str, list[str]] = {}
    following = iter(lines)
    for line in following:
        text = _command_of(line)
        if text is None:
            continue
        while text.endswith(("\\", "`")) and len(text) < _LONGEST_LINE:
            text = text[:-1] + " " + next(following, "").strip()
        with suppress(ValueError, UsageError):
            named, _, engine, *words = asked_by(shlex.split(text))
            found[engine] = [named, *words]
    listed = _listed(lines)
    return {"vllm": listed, **found} if listed else found


def _listed(lines: Sequence[str]) -> list[str]:
    """A server's command as programs that begin engines print it: a list of words, one a line, the model the second;
    empty where none is."""
    words = list(_found(lines, _WORD))
    return words[words.index("serve") + 1 :] if "serve" in words else []


def _command_of(line: str) -> str | None:
    """The command of a line that starts a server, behind a shell's prompt; None where it starts none."""
    match = _SERVER.search(line)
    if match is None:
        return None
    start = max(line.rfind(blank, 0, match.start()) for blank in " \t") + 1
    python = _PYTHON.search(line[max(0, start - 300) : start])
    return f"{python[0] if python else ''}{re.sub('^vllm bench [a-z]+', 'vllm serve', line[start:])}"


def _options_in(words: Sequence[str]) -> dict[str, str]:
    """Options of a command as settings of Python, in which switches are true."""
    found = {name.lstrip("-").replace("-", "_"): text for name, text in pairs_in(words) if name}
    settings = {"tensor_parallel_size": found.pop("tp")} if "tp" in found else {}
    return settings | {name: "True" if text == "true" else text for name, text in found.items()}


def card_in(lines: Sequence[str]) -> str | None:
    """The card of graphmem's table that a line names, or the only one that words do; None where there is none."""
    for line in lines:
        for match in _CARD.finditer(line):
            words = match[0].replace("_", " ").split()
            for length in range(len(words), 0, -1):
                try:
                    return device_named(" ".join(words[:length])).name
                except UsageError:
                    continue
    found = set()
    for name in {name for line in lines for name in _CARD_IN_WORDS.findall(line)}:
        with suppress(UsageError):
            found.add(device_named(name).name)
    return found.pop() if len(found) == 1 else None


def settings_in(text: str) -> dict[str, str]:
    """Settings that a line lists, as text without quotes; of one given twice the first. None and empty ones are left
    out, and so is what brackets hold."""
    found: dict[str, str] = {}
    at = 0
    while match := _SETTING.search(text, at):
        value, at = _value(text, match.end())
        name = match[1] or match[2]
        if value not in ("None", "", "null"):
            found.setdefault(name, value)
    return found


def _value(text: str, start: int) -> tuple[str, int]:
    """(the value that begins here, where it ends)."""
    if text[start : start + 1] in _QUOTES and start < len(text):
        end = text.find(text[start], start + 1)
        return (text[start + 1 :], len(text)) if end < 0 else (text[start + 1 : end], end + 1)
    depth = 0
    end = start
    for end in range(start, min(len(text), start + _LONGEST_VALUE)):
        letter = text[end]
        if letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            if not depth:
                break
            depth -= 1
        elif letter == "," and not depth:
            break
    else:
        end = min(len(text), start + _LONGEST_VALUE)
    return text[start:end].strip(), max(end, start)
