"""Diagnostics: their table, their sentences, and that nothing but a reader reads them."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphmem
from graphmem import diagnostics
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.answering import causes
from graphmem.base.figures import Cause, Doubts
from graphmem.devices import device_named
from graphmem.diagnostics import MEANINGS, Code, Diagnostic, Effect, Meaning
from graphmem.estimate import Peak
from graphmem.replay import replay
from graphmem.trace import TraceBuilder
from graphmem.units import GIB

PACKAGE = Path(graphmem.__file__).parent
PEAK = Peak(GIB, GIB, 2 * GIB, 3 * GIB)
_KINDS = ("headline", "assumed", "unknown", "warning", "note")


def _fields(meaning: Meaning) -> set[str]:
    """Names in the braces of a sentence."""
    return {name for _, name, _, _ in string.Formatter().parse(meaning.words) if name}


def _example(code: Code, place: str = "train.py:3") -> Diagnostic:
    named = _fields(MEANINGS[code]) - {"place", "text"}
    numbers: dict[str, float | int] = {"share": 0.5, "candidates": 12}
    return code.about(place=place, **{name: numbers.get(name, name) for name in named})  # type: ignore[arg-type]


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_meaning_and_a_sentence(code: Code) -> None:
    meaning, one = MEANINGS[code], _example(code)
    assert meaning.kind in _KINDS
    assert (meaning.effect in (Effect.NONE, Effect.INTERVAL)) == (not meaning.cause)
    assert not meaning.any_size or meaning.effect in (Effect.MORE, Effect.UNBOUNDED)
    assert "{" not in one.message
    assert one.message or meaning.words == "{text}"
    assert one.to_dict()["code"] == code.name.lower()
    assert Diagnostic(code, "a text").code is Diagnostic(code.name.lower(), "a text").code  # type: ignore[arg-type]


def test_equal_diagnostics_are_one_remark() -> None:
    once, again = (Code.NOT_CHECKED.about(operator="my.kernel.default") for _ in range(2))
    assert {once: 1} == {again: 1}
    (one,) = diagnostics.counted({once: 3})
    assert (one.count, one.message, once.count) == (3, once.message, 1)


def _calls(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """(code, names of arguments) of every ``Code.X.about(...)``."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name("Code"), attr=code), attr="about")):
                yield code, {keyword.arg for keyword in node.keywords if keyword.arg}


def test_sentences_have_the_arguments_that_they_are_made_with() -> None:
    seen = set()
    for path in PACKAGE.rglob("*.py"):
        for code, given_names in _calls(ast.parse(path.read_text(encoding="utf-8"))):
            wanted = _fields(MEANINGS[Code[code]])
            assert wanted - {"place"} == given_names - {"place", "count"}, f"{path.name}: {code}"
            seen.add(code)
    assert len(seen) > 25


# --- nothing reads sentences ------------------------------------------------------------------------------------------

_READS = {"startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "find", "index", "match"}


def _texts(node: ast.AST) -> Iterator[str]:
    for found in ast.walk(node):
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            yield found.value


def _read_texts(tree: ast.AST) -> Iterator[str]:
    """Texts that code looks for in others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READS:
            for argument in node.args:
                yield from _texts(argument)
        if isinstance(node, ast.Compare) and any(isinstance(one, (ast.In, ast.NotIn)) for one in node.ops):
            yield from _texts(node.left)


def test_no_code_looks_for_words_of_a_sentence() -> None:
    sentences = [meaning.words for meaning in MEANINGS.values()]
    for path in PACKAGE.rglob("*.py"):
        for text in _read_texts(ast.parse(path.read_text(encoding="utf-8"))):
            is_phrase = " " in text.strip() and len(text) > 4
            assert not (is_phrase and any(text in words for words in sentences)), f"{path.name}: {text!r}"


@given(st.lists(st.sampled_from(Code), max_size=12), st.sampled_from(["", "train.py:3"]))
def test_other_words_move_no_figure(codes: list[Code], place: str) -> None:
    """Every sentence of the table in other words: the causes and what they do to a verdict stay."""
    found = [_example(code, place) for code in codes]
    before = _weighed(found)
    with pytest.MonkeyPatch.context() as patch:
        for code, meaning in list(MEANINGS.items()):
            patch.setitem(MEANINGS, code, replace(meaning, words=f"{code.name} in other words"))
        assert [one.message for one in found] == [f"{one.code.name} in other words" for one in found]
        assert _weighed(found) == before


def _weighed(found: list[Diagnostic]) -> list[Cause]:
    """The causes of a trace of one storage with these diagnostics, without their sources, which are sentences."""
    builder = TraceBuilder("a run")
    builder.alloc(GIB, builder.operator("aten.mm", phase=builder.phase(1, "forward")))
    trace = builder.build()
    peak = replay(trace, PyTorchCachingAllocator(None))
    assert peak.peak_allocated_bytes == GIB
    made = causes.causes_of_trace(trace, PEAK, found, lambda _: PEAK, device_named("A100-40GB"))
    return [replace(cause, source="") for cause in made]


# --- room -------------------------------------------------------------------------------------------------------------


def test_room_is_enough_for_what_was_weighed_and_not_for_any_number() -> None:
    def times(*codes: Code) -> int | None:
        found = [_example(code) for code in codes]
        return Doubts(
            tuple(causes.causes_of_trace(TraceBuilder("a run").build(), PEAK, found, lambda _: PEAK, _CARD))
        ).times

    assert times() == times(Code.ALL_SELECTED) == times(Code.ONLY_LOGGED) == 1
    assert times(Code.NOT_MODELLED) == times(Code.ANSWERED_YES, Code.DRAWN) == times(Code.NOT_CHECKED, Code.DRAWN) == 50
    for code in (Code.NUMBER, Code.PROGRAM_FAILED, Code.UNKNOWN):
        assert times(code) is None
        assert times(Code.NOT_CHECKED, code) is None


def test_a_long_record_says_how_much_room_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times what the worst of its programs took; of any size, too, where ten programs had it."""

    def times(*changes: float) -> int | None:
        rows = {"programs": [[str(number), change, "whole_number"] for number, change in enumerate(changes)]}
        monkeypatch.setattr(causes, "_measured", lambda: rows)
        found = [_example(Code.WHOLE_NUMBER)]
        (cause,) = causes.causes_of_trace(TraceBuilder("a run").build(), PEAK, found, lambda _: PEAK, _CARD)
        return cause.times

    assert times(*[0.0] * 9) is None
    assert times(*[0.0] * 10) == 10
    assert times(*[-0.5] * 10) == 10
    assert times(*[0.0] * 9, 0.75) == 18
    assert times(*[0.0] * 9, 40.0) == 50


_CARD = device_named("A100-40GB")
