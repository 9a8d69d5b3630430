"""Options of engines by the engines' own names: those of a question for one engine, and none that it does not know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from graphmem.base.documents import shown
from graphmem.base.options import option_of
from graphmem.base.options import options_of as fields_of
from graphmem.base.tables import read_table
from graphmem.errors import UsageError
from graphmem.serving.base import Question, spelled

#: Fields of a question that every engine is asked, whether they change anything there or not.
_OF_ALL = frozenset(("entry", "alloc_conf"))
_WORDS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
TABLES = read_table("graphmem.serving", "options.toml")


def without_effect(whose: str) -> frozenset[str]:
    """Options of servers that change no memory on the card: of ``vllm``, or of ``others``."""
    table = TABLES["without_effect"]
    return frozenset((*table["all"].split(), *table[whose].split()))


_HARMLESS = without_effect("others")
_AT_ONCE = "--load N (requests at once) or --arrivals 5/s, with --lengths p50=800,p99=6000"
#: Words that people know from elsewhere -> what to write where the engine has no such option.
_ELSEWHERE = {
    **dict.fromkeys(("users", "num_users", "concurrency", "concurrent_requests", "requests", "rps", "qps"), _AT_ONCE),
    **dict.fromkeys(("b", "batch", "batch_size", "bs", "max_batch_size"), f"--max-num-seqs N at most; {_AT_ONCE}"),
    **dict.fromkeys(("s", "seq_len", "ctx", "context", "context_length", "max_seq_len"), "--max-model-len N"),
    **dict.fromkeys(("quant", "quantize", "weights", "load_in_4bit"), "--quantization NAME, such as awq, gptq or fp8"),
    **dict.fromkeys(("precision", "bf16", "fp16", "half"), "--dtype bfloat16 or half"),
    **dict.fromkeys(("gpus", "num_gpus", "devices", "world_size", "n_gpus"), "--tp N cards"),
    **dict.fromkeys(("vram", "memory"), "--gpu-memory 24GiB"),
    **dict.fromkeys(("lora", "lora_modules"), "--enable-lora true --max-lora-rank N (vLLM's)"),
}


def here(name: str) -> str:
    """The line that answers an option that no engine has and that is known from elsewhere; empty for another."""
    known = _ELSEWHERE.get(name.replace("-", "_"))
    return f"no option {'-' if len(name) == 1 else '--'}{name}; here: {known}" if known else ""


class Named(Protocol):
    """An engine, as messages name it."""

    title: str
    newest: str


Reader = Callable[[str, str], Any]


@dataclass(frozen=True)
class Option:
    """An engine's option: how its value is read, the question's field that is the same, and the engine's default where
    that is the same for all questions."""

    read: Reader
    field: str = ""
    default: Any = None


def options_of(
    question: Question, engine: Named, options: Mapping[str, Option], short: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Values by the engine's names: those of ``arguments``, those of the question's fields, and defaults; others are
    left out. ``short``: other spellings. Raises :class:`UsageError` for options it lacks."""
    title = engine.title
    if question.version is not None and ".".join(map(str, question.version)) != engine.newest:
        raise UsageError(f"{title} is followed as {engine.newest} only, not {'.'.join(map(str, question.version))}")
    given = ((name, _key(name, short or {}), text) for name, text in question.arguments)
    found = values_of(title, given, {name: option.read for name, option in options.items()}, _HARMLESS)
    known = {option.field: key for key, option in options.items()}
    for field, value in _given(question):
        if field not in known:
            accepted = ", ".join(map(spelled, options))
            raise UsageError(f"{title} has no {option_of(Question, field).flags[0]}; accepted: {accepted}")
        read = options[known[field]].read
        found.setdefault(known[field], read(field, value) if isinstance(value, str) else value)
    return {key: option.default for key, option in options.items() if option.default is not None} | found


def values_of(
    title: str, given: Iterable[tuple[str, str, str]], readers: Mapping[str, Reader], harmless: Collection[str]
) -> dict[str, Any]:
    """Values by name of the options ``given`` as (as it was written, its name, the text), but for those that are
    ``harmless``. Raises :class:`UsageError` for others, and for one that is given twice."""
    found: dict[str, Any] = {}
    for written, name, text in given:
        if name in readers:
            if name in found:
                raise UsageError(f"{title}: {spelled(written)} is given twice")
            found[name] = readers[name](written, text)
        elif name not in harmless:
            like = difflib.get_close_matches(name, (*readers, *harmless))
            like += difflib.get_close_matches(name, readers, cutoff=0.0)
            nearest = f"nearest: {', '.join(map(spelled, list(dict.fromkeys(like))[:3]))}"
            raise UsageError(here(written) or f"{title}: {spelled(written)} is not followed; {nearest}")
    return found


def _key(name: str, short: Mapping[str, str]) -> str:
    key = name.replace("-", "_")
    return short.get(key, key)


def _given(question: Question) -> Iterator[tuple[str, object]]:
    """Fields that are not as they are by default."""
    for field, _ in fields_of(Question):
        value = getattr(question, field.name)
        if field.name not in _OF_ALL and value != field.default:
            yield field.name, value


def whole(least: int = 1, most: int = 1 << 31) -> Reader:
    """A whole number."""

    def read(name: str, text: str) -> int:
        if not re.fullmatch(r"-?\d{1,11}", text.strip()) or not least <= int(text) <= most:
            raise UsageError(f"--{name} {shown(text)}; accepted: a whole number from {least} to {most}")
        return int(text)

    return read


def share(name: str, text: str, most: float = 1) -> float:
    """A number above 0, to 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise UsageError(f"--{name} {shown(text)}; accepted: a number above 0, to {most:g}")
    return value


def ratio(name: str, text: str) -> float:
    """A number above 0, to 100."""
    return share(name, text, 100)


def one_of(*accepted: str) -> Reader:
    """One of these words."""

    def read(name: str, text: str) -> str:
        if text not in accepted:
            raise UsageError(f"--{name} {shown(text)}; accepted: {', '.join(accepted)}")
        return text

    return read


#: How several engines spell the type of weights, and those of quantised files.
DTYPE = Option(one_of("auto", "half", "float16", "bfloat16", "float", "float32"), "dtype", "auto")
QUANTIZATION = Option(one_of("awq", "gptq", "fp8"), "quantization")


def flag(name: str, text: str) -> bool:
    """On or off."""
    if text.lower() not in _WORDS:
        raise UsageError(f"--{name} {shown(text)}; accepted: true, false")
    return _WORDS[text.lower()]
