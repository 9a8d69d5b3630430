"""Loops of libraries in which a program was left: in its next run they end at their tops, as the program's own do.

A function of a library was imported long before its loop turns out to be the one that trains, and runs when the program
is left in it. So a run that is left notes the functions whose loops were on the stack (``places.loops_on_stack``), and
in the next run they have code whose loops ask whether they are over (:mod:`graphmem.capture.program.loops`).
"""

from __future__ import annotations

import contextlib
import gc
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType

from graphmem.capture.program.loops import compiled
from graphmem.capture.program.places import named
from graphmem.training.program import LibraryFunction


@contextlib.contextmanager
def loops_opened(wanted: Sequence[LibraryFunction]) -> Iterator[None]:
    """Functions of libraries have loops that ask whether they are over. What is not imported yet stays as it is."""
    before: dict[FunctionType, CodeType] = {}
    try:
        for function in _imported(wanted) if wanted else ():
            code = _with_ends(function.__code__)
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                before[function], function.__code__ = function.__code__, code
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _imported(wanted: Sequence[LibraryFunction]) -> list[FunctionType]:
    functions = (one for one in gc.get_objects() if type(one) is FunctionType)
    return [one for one in functions if named(one.__code__) in wanted]


def _with_ends(code: CodeType) -> CodeType | None:
    """The code of the same function of the file whose loops are rewritten; None if it is not there any more."""
    try:
        parts = [compiled("".join(linecache.getlines(code.co_filename)), code.co_filename)]
    except (SyntaxError, ValueError):
        return None
    while parts:
        part = parts.pop()
        if named(part) == named(code):
            return part
        parts += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
    return None
