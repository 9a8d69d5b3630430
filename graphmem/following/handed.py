"""Estimates as JSON, from one process to another: every value is made anew by the annotated types of its fields."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from graphmem.allocators.base import SegmentView
from graphmem.base.documents import parse_json
from graphmem.estimate import Estimate
from graphmem.trace import Trace, from_json, to_json

#: Names in annotations that their modules import for the type checker alone.
_NAMES = {"np": np, "npt": npt, "Trace": Trace, "SegmentView": SegmentView}


def written(estimate: Estimate) -> str:
    """The estimate with all that it holds, but for what finds more of it."""
    return json.dumps(_plain(estimate), separators=(",", ":"))


def read(text: str) -> Estimate:
    """The estimate of :func:`written`. Raises :class:`ValueError`, ``KeyError`` or ``TypeError`` for anything else."""
    found = _made(Estimate, parse_json(text))
    assert isinstance(found, Estimate)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Trace):
        return to_json(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: _plain(one) for name, one in values.items() if not callable(one)}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return list(map(_plain, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _made(hint: Any, value: Any) -> Any:
    """``value`` as the type ``hint`` has it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if value is None or hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        records = [one for one in inner if is_dataclass(one)]
        return _made(records[0], value) if records else value
    if hint is Trace:
        return from_json(value)
    if origin is np.ndarray:
        return np.asarray(value, np.int64)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint[value]
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint, localns=_NAMES)
        return hint(**{name: _made(hints[name], one) for name, one in value.items()})  # type: ignore[operator]
    return _collected(origin, inner, value)


def _collected(origin: Any, inner: Sequence[Any], value: Any) -> Any:
    if not isinstance(origin, type):
        return value
    if issubclass(origin, Mapping):
        return {name: _made(inner[1], one) for name, one in value.items()}
    if issubclass(origin, tuple) and inner[-1] is not Ellipsis:
        return tuple(_made(kind, one) for kind, one in zip(inner, value, strict=True))
    return tuple(_made(inner[0], one) for one in value)
