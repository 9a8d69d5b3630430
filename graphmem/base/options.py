"""Fields of frozen dataclasses that are options: of Python, of the command line, of JSON and of the docs at once.

    @dataclass(frozen=True)
    class Loop:
        steps: int = option(3, "Steps to run.", Whole(1))

        def __post_init__(self) -> None:
            check_values(self)

``Loop(steps=0)`` raises "steps is a whole number of at least 1, not 0". A command that takes a ``Loop``
(:mod:`graphmem.cli.fields`) has ``--steps N`` with "Steps to run. Default 3." in its help, and docs/OPTIONS.md has the
same line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, replace
from typing import Any, TypeVar

from graphmem.base.records import dataclass
from graphmem.errors import UsageError

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")
#: The default of a field without one.
REQUIRED: Any = MISSING
#: Gives the value that a field keeps, from its name and the value that it was given; raises :class:`UsageError`.
Check = Callable[[str, object], object]
#: Values of a command line by parameter name (``--grad-accum``: ``grad_accum``); None and () where it has none.
Given = Mapping[str, object]

#: Counts are smaller, whatever they count.
_LARGEST = 1 << 31


@dataclass(frozen=True)
class Option:
    """A field as an option.

    ``help``: its description, to which the default is added. ``flags``: its names on the command line, where that is
    not the field's own; ``metavar``: the place of its value in the help; ``heading``: the section of the help, for it
    and those after it.

    ``read`` makes the value of the text, where it is ``repeated`` of each of several texts. ``choices``: the only words
    that the command line accepts. ``bare``: stands for the value that it may be given without. ``is_flag``: it has no
    value at all, and ``opens`` or is looked at by ``make``, which makes the value of all that the command line gives
    (``also``: further options that it needs). ``keyed``: several fields share one option, as ``--ddp-option
    NAME=VALUE``.

    ``parts``: classes whose fields, ``without`` some, are options, the value being an object of the first. It is made
    where an option that ``opens`` it is given.
    """

    help: str
    check: Check | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    read: Callable[[str], object] | None = None
    repeated: bool = False
    choices: tuple[str, ...] = ()
    is_flag: bool = False
    bare: object = None
    keyed: bool = False
    make: Callable[[Given], object] | None = None
    also: tuple[Option, ...] = ()
    parts: tuple[type, ...] = ()
    without: tuple[str, ...] = ()
    opens: bool = False
    heading: str = ""

    @property
    def parameter(self) -> str:
        """Its name among the values of a command line: that of its first long flag."""
        long = next(flag for flag in self.flags if flag.startswith("--"))
        return long.partition("/")[0].lstrip("-").replace("-", "_")


def described(help: str, check: Check | None = None, flags: str = "", **more: object) -> Option:
    """An option that several fields are; ``flags`` divided by blanks, ``more``: fields of :class:`Option`."""
    return Option(help, check, tuple(flags.split()), **more)  # type: ignore[arg-type]


def option(default: Value, known: str | Option, check: Check | None = None, flags: str = "", **more: object) -> Value:
    """A field that is an option, by its help (and further arguments of :func:`described`), or by an existing option."""
    if isinstance(known, Option):
        known = replace(known, check=check or known.check, **more)  # type: ignore[arg-type]
    else:
        known = described(known, check, flags, **more)
    return field(default=default, metadata={"option": known})


def part(kind: type, heading: str = "") -> Option:
    """The option of a field that is an object of ``kind``, whose fields are options."""
    return Option((kind.__doc__ or "").splitlines()[0], parts=(kind,), heading=heading)


def options_of(kind: type) -> Iterator[tuple[Field[object], Option]]:
    """The fields that are options, each with its flags."""
    for one in fields(kind):
        found: Option | None = one.metadata.get("option")
        if found is not None:
            yield one, replace(found, flags=found.flags or (f"--{one.name.replace('_', '-')}",))


def option_of(kind: type, name: str) -> Option:
    """The option of the field ``name``, for a field of another class that is the same one."""
    return next(found for one, found in options_of(kind) if one.name == name)


def help_of(one: Field[object], known: Option) -> str:
    """The help of a field's option, with the default."""
    default = one.default
    if default in (None, MISSING, "", ()) or isinstance(default, bool) or "Default" in known.help:
        return known.help
    return f"{known.help} Default {default}."


def documented(kind: Class) -> Class:
    """The class with its fields listed in its documentation."""
    listed = "\n".join(f"    {one.name}: {help_of(one, known)}" for one, known in options_of(kind))
    kind.__doc__ = f"{kind.__doc__}\n\nFields:\n{listed}\n"
    return kind


def check_values(instance: object) -> None:
    """Replace each field of a frozen object by the result of its check. None is accepted where it is the default.
    Raises :class:`UsageError`."""
    for one in fields(instance):  # type: ignore[arg-type]
        known: Option | None = one.metadata.get("option")
        value = getattr(instance, one.name)
        if known is not None and known.check is not None and not (value is None and one.default is None):
            object.__setattr__(instance, one.name, known.check(one.name, value))


def of_json(kind: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """Values of fields from JSON, which has no tuples and no objects of classes."""
    parts = {one.name: known.parts for one, known in options_of(kind)}
    return {name: _of_json(parts.get(name, ()), value) for name, value in document.items()}


def _of_json(parts: tuple[type, ...], value: object) -> object:
    if parts and isinstance(value, Mapping):
        return parts[0](**of_json(parts[0], value))
    if isinstance(value, list):
        return tuple(_of_json((), item) for item in value)
    return value


@dataclass(frozen=True)
class Whole:
    """A whole number from ``least`` to ``most``; ``words``: its description, where that is clearer."""

    least: int = 1
    most: int | None = None
    words: str = ""

    def __call__(self, name: str, value: object) -> object:
        """The number. Raises :class:`UsageError`."""
        most = _LARGEST if self.most is None else self.most
        if type(value) is not int or not self.least <= value <= most:
            bounds = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise UsageError(f"{name} is {self.words or f'a whole number {bounds}'}, not {value!r}")
        return value


@dataclass(frozen=True)
class OneOf:
    """One of some values."""

    accepted: tuple[object, ...]

    def __call__(self, name: str, value: object) -> object:
        """The value. Raises :class:`UsageError` listing the accepted values."""
        if value not in self.accepted:
            raise UsageError(f"unknown {name} {value!r}; accepted: {', '.join(map(str, self.accepted))}")
        return value


def above_zero(name: str, value: object) -> object:
    """A number above 0. Raises :class:`UsageError`."""
    if not is_number(value) or value <= 0:  # type: ignore[operator]
        raise UsageError(f"{name} is a number above 0 or None, not {value!r}")
    return value


def share(name: str, value: object) -> object:
    """A number above 0 and at most 1. Raises :class:`UsageError`."""
    if not is_number(value) or not 0 < value <= 1:  # type: ignore[operator]
        raise UsageError(f"{name} is a share above 0 and at most 1, or None, not {value!r}")
    return value


def switch(name: str, value: object) -> object:
    """True, False or None. Raises :class:`UsageError`."""
    if value not in (None, True, False):
        raise UsageError(f"{name} is True, False or None, not {value!r}")
    return value


def is_number(value: object) -> bool:
    """True if it is a finite number, and no boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
