"""``dataclass`` as the standard library has it, but imported faster: it compiles less for every class.

Python compiles up to six functions for every dataclass while its module is imported, which was a quarter of the time of
a short command. Here it compiles ``__init__`` alone; comparing, hashing and showing are shared, with the same results.
That frozen ones are not assigned to is what the type checker holds; those that users make refuse it
(:func:`public_value`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "public_value"]

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import dataclass as public_value
else:

    def public_value(*, frozen, slots=False):
        """A dataclass that refuses what :mod:`dataclasses` refuse of frozen ones."""
        return dataclass(frozen=frozen, slots=slots, refuses=True)

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, repr=True, refuses=False):
        """As of :mod:`dataclasses`, with the options that are used here."""

        def made(cls: type) -> type:
            own = frozenset(vars(cls))
            cls = _annotated(cls, slots=slots, frozen=refuses)
            if repr and "__repr__" not in own:
                cls.__repr__ = _shown
            if eq and "__eq__" not in own:
                values = _values(field.name for field in dataclasses.fields(cls) if field.compare)
                cls.__eq__, hashed = _comparing(values)
                if "__hash__" not in own:
                    cls.__hash__ = hashed if frozen else None
            return cls

        return made if cls is None else made(cls)


#: Beginnings of annotations that are no fields' own types, which Python looks for in the text of every annotation.
_SPECIAL = ("ClassVar", "InitVar", "KW_ONLY", "typing.", "dataclasses.")


def _annotated(cls: Any, **options: bool) -> Any:
    """The dataclass, of whose annotations that are text only those are read that may be more than a type."""
    written = dict(vars(cls).get("__annotations__", {}))
    cls.__annotations__ = {n: t if str(t).startswith(_SPECIAL) else object for n, t in written.items()}
    cls = dataclasses.dataclass(cls, repr=False, eq=False, **options)
    for field in dataclasses.fields(cls):
        field.type = written.get(field.name, field.type)
        if field.init:
            cls.__init__.__annotations__[field.name] = field.type
    cls.__annotations__ = written
    return cls


@recursive_repr()
def _shown(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _values(names: Any) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the values of some attributes."""
    names = tuple(names)
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _comparing(values: Callable[[Any], tuple[Any, ...]]) -> tuple[Callable[[Any, Any], Any], Callable[[Any], int]]:
    def equal(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash(values(self))

    return equal, hashed
