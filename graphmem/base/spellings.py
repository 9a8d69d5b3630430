"""Second names: functions that accept a keyword argument under another tool's name, and what a wrong name meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from graphmem.errors import UsageError


def meant(name: str, known: Iterable[str], most: int = 3) -> str:
    """The end of a message about a wrong name: at most so many of the known ones; empty where none is near."""
    close = difflib.get_close_matches(name, list(known), n=most)
    return f"; did you mean {' or '.join(close)}?" if close else ""


Function = TypeVar("Function", bound=Callable[..., Any])


def also_named(name: str, *others: str) -> Callable[[Function], Function]:
    """Decorate a function: its argument ``name`` may be given by the ``others`` too. Raises :class:`UsageError` where
    two of them are given."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def called(*arguments: Any, **values: Any) -> Any:
            given = [one for one in (name, *others) if one in values]
            if len(given) > 1:
                raise UsageError(f"{' and '.join(given)} mean the same; give one of them")
            return function(*arguments, **{name if key in others else key: value for key, value in values.items()})

        return cast("Function", called)

    return decorate
