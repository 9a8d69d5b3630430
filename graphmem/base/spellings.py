"""Functions that accept a keyword argument under a second name, such as another tool's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from graphmem.errors import UsageError

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
