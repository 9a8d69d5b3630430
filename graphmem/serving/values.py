"""Values of a configuration from elsewhere, checked where they are read: the value, its place, the accepted ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel

#: The most of what is gone through one by one; the most of anything else.
_MOST_COUNTED, _MOST = 1 << 12, 1 << 31
_COUNTED = ("layers", "heads", "experts", "step", "bits", "k_dense_replace", "pattern")


def count(model: ServedModel, name: str, otherwise: int | None = None, *, least: int = 1) -> int:
    """The whole number of this name; ``otherwise`` where there is none. Raises :class:`UsageError`."""
    return counted(model, name, model.config.get(name), otherwise, least=least)


def counted(model: ServedModel, name: str, value: Any, otherwise: int | None = None, *, least: int = 1) -> int:
    """``value`` as a whole number."""
    if value is None and otherwise is not None:
        return otherwise
    most = _MOST_COUNTED if any(part in name for part in _COUNTED) else _MOST
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{model.name}: {name} is {shown(value)}; accepted: a whole number from {least} to {most}")
    return value


def number(model: ServedModel, name: str, value: Any, otherwise: float) -> float:
    """``value`` as a finite number above 0, at most :data:`_MOST`."""
    if value is None:
        return otherwise
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= _MOST:
        raise UsageError(f"{model.name}: {name} is {shown(value)}; accepted: a number above 0")
    return float(value)


def mapping(model: ServedModel, name: str) -> Mapping[str, object]:
    """The object of this name, an empty one where there is none."""
    value = model.config.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UsageError(f"{model.name}: {name} is {shown(value)}; accepted: an object")
    return value


def as_object(value: object) -> Mapping[str, Any]:
    """``value`` where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(model: ServedModel, name: str) -> list[object]:
    """The list of this name, an empty one where there is none."""
    value = model.config.get(name) or []
    if not isinstance(value, list):
        raise UsageError(f"{model.name}: {name} is {shown(value)}; accepted: a list")
    return value


#: Kinds of rotary tables with factors for short texts and others for long ones (``patch_legacy_rope_type``).
LONG_ROPE = ("longrope", "su")
#: Kinds of stretched rotary tables that are multiplied by a factor of their own.
YARN = ("yarn", "deepseek_yarn")


def rope_of(model: ServedModel) -> Mapping[str, object]:
    """The scaling of rotary tables."""
    return mapping(model, "rope_scaling") or mapping(model, "rope_parameters")


def matches(expression: str, name: str) -> bool:
    """True if the name of a module begins as the regular expression says, of a configuration from elsewhere; one that
    cannot be read matches nothing."""
    try:
        return re.match(expression, name) is not None
    except re.error:
        return False
