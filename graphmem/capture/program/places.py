"""Places in the program's own files: which of its functions run, and how far each has come."""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
from collections.abc import Container
from inspect import CO_GENERATOR
from itertools import zip_longest
from types import CodeType, FrameType, TracebackType

from graphmem.base.imports import library_folder
from graphmem.training.program import LibraryFunction

#: The module that runs the program's first line.
_STARTS = "graphmem.capture.program.main_module"
#: Packages whose own loops are those of one step: over hooks, and groups of parameters.
_OF_STEPS = ("torch", "graphmem")
#: Methods of iterators over others.
_HANDS_ON = frozenset({"__iter__", "__next__"})
#: The functions of the program's own files that run, outermost first: frame, code, the instruction it has come to.
Place = tuple[tuple[int, CodeType, int], ...]
#: The first and the last.
Lines = tuple[int, int]


def here(files: set[str]) -> Place:
    """The place of the caller; ``files`` are the program's own."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files:
            found.append((id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(found))


def has_moved_on(before: Place, now: Place) -> bool:
    """Whether a function that ran before, and still does, has come further since. The same call made again, in a loop
    of a library, is no move."""
    for then, since in zip_longest(before, now):
        if then is None or since is None or then[:2] != since[:2]:
            return False
        if then[2] != since[2]:
            return since[2] > then[2]
    return False


def innermost() -> int:
    """The innermost function that runs and is not ours: what its frame is known by."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) == "graphmem":
        frame = frame.f_back
    return id(frame)


def is_asked_in(frames: Container[int]) -> bool:
    """Whether a data loader is asked for a batch by hand, ``next(batches)``, by one of the functions in ``frames`` or
    by one that it calls. Generators that hand batches on are looked through; a loop of a library between them is the
    one that asks."""
    frame: FrameType | None = sys._getframe(1)
    is_handed_on = True
    while frame is not None and frame.f_globals.get("__name__") != _STARTS:
        code = frame.f_code
        if id(frame) in frames:
            return True
        is_ours = _package(frame) in _OF_STEPS
        is_handed_on &= is_ours or bool(code.co_flags & CO_GENERATOR) or code.co_name in _HANDS_ON
        if not (is_handed_on or is_ours) and library_folder(code.co_filename) and _is_in_loop(code, frame.f_lineno):
            return False
        frame = frame.f_back
    return False


def handles_the_end(frames: Container[int]) -> bool:
    """Whether one of the functions in ``frames``, or one that it calls, handles that the iterator it asks is out: by a
    ``try`` around the call, or a second argument of ``next``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != _STARTS:
        guarded = () if _package(frame) in _OF_STEPS else _guarded(frame.f_code.co_filename)
        if any(first <= frame.f_lineno <= last for first, last in guarded):
            return True
        if id(frame) in frames:
            return False
        frame = frame.f_back
    return False


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def calls_a_library(raised: TracebackType | None, files: set[str]) -> bool:
    """Whether what was raised comes out of a library that the function handling it called, and that is called from the
    program's first line on by nothing but the program's own functions."""
    below = raised and raised.tb_next
    if raised is None or below is None or below.tb_frame.f_code.co_filename in files:
        return False
    above: FrameType | None = raised.tb_frame
    while above is not None and above.f_code.co_filename in files:
        above = above.f_back
    return above is not None and above.f_globals.get("__name__") == _STARTS


def loops_on_stack() -> tuple[LibraryFunction, ...]:
    """The functions of libraries that the program runs in, and that have come to a line of a loop of theirs."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := str(frame.f_globals.get("__name__", ""))) != _STARTS:
        code, is_of_steps = frame.f_code, name.partition(".")[0] in _OF_STEPS
        if not is_of_steps and library_folder(code.co_filename) and _is_in_loop(code, frame.f_lineno):
            found.append(named(code))
        frame = frame.f_back
    return tuple(found)


def _is_in_loop(code: CodeType, line: int) -> bool:
    loops = _loops(code.co_filename)
    return any(code.co_firstlineno < first <= line <= last for first, last in loops)


@functools.lru_cache(maxsize=64)
def _loops(file: str) -> tuple[Lines, ...]:
    """The lines of the loops of a file."""
    return tuple(_lines(node, node) for node in _nodes(file) if isinstance(node, (ast.For, ast.While)))


@functools.lru_cache(maxsize=64)
def _guarded(file: str) -> tuple[Lines, ...]:
    """The lines of a file where the end of an iterator is handled."""
    nodes = _nodes(file)
    tried = [_lines(node.body[0], node.body[-1]) for node in nodes if isinstance(node, ast.Try) and _is_caught(node)]
    called = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) == 2]
    return *tried, *(_lines(node, node) for node in called if getattr(node.func, "id", None) == "next")


def _is_caught(node: ast.Try) -> bool:
    types = (handler.type for handler in node.handlers)
    return any(kind is None or re.search(r"\b(StopIteration|Exception)\b", ast.unparse(kind)) for kind in types)


def _nodes(file: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return []


def _lines(first: ast.stmt | ast.expr, last: ast.stmt | ast.expr) -> Lines:
    return first.lineno, last.end_lineno or last.lineno


def named(code: CodeType) -> LibraryFunction:
    """The function that has this code."""
    return LibraryFunction(code.co_filename, code.co_qualname, code.co_firstlineno)
