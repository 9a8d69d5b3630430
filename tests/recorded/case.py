"""What is recorded one by one, and what a recording of it looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

#: Recordings by name of their case.
Documents = dict[str, dict[str, Any]]
#: Runs a case, calling the second argument before and after what is recorded.
Runner = Callable[[Any, Callable[[], None]], None]


class Case(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def refused(self) -> Any: ...


def named(case: Case, parts: list[str]) -> bool:
    """Whether the case's name contains one of ``parts``, or nothing is asked for."""
    return not parts or any(part in case.name for part in parts)
