"""Models whose layers are shared among processes: tensor and expert parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from graphmem.base.documents import read_json
from graphmem.errors import UsageError


def check_parts(tp: int | None, ep: int | None) -> None:
    """Raise :class:`UsageError` for numbers of processes that transformers does not combine."""
    if tp is not None and ep is not None and ep % tp:
        raise UsageError(f"ep {ep} is no multiple of tp {tp}, which transformers asks for")


def processes_of_parts(tp: int | None, ep: int | None, world_size: int | None) -> int:
    """The number of processes without a wrapper. Raises :class:`UsageError`."""
    size = tp or 1
    if ep not in (None, size):
        raise UsageError(f"ep {ep} needs fsdp or as large a tp: without them there are {size} processes")
    if world_size not in (None, size):
        raise UsageError(f"world_size is {world_size}, and tp {size}; add fsdp for the others, or leave world_size out")
    return size


def describe_parts(tp: int | None, ep: int | None) -> list[str]:
    """``["tensor parallel over 4"]``."""
    return [f"{name} parallel over {size}" for name, size in (("tensor", tp), ("expert", ep)) if size]


def checked_plan(given: object) -> tuple[tuple[str, str], ...]:
    """The rules of a plan as pairs of words: the name of a module, which may have ``*`` for the number of a layer, and
    its style. Raises :class:`UsageError` for what is no pairs of words; which names and styles there are is not checked
    here."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        checked = tuple((name, style) for name, style in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        checked = ((None, None),)
    if not all(isinstance(name, str) and isinstance(style, str) for name, style in checked):
        raise UsageError(
            'a plan is names of modules with names of styles, as {"model.layers.*.mlp.up_proj": "colwise"}, not '
            f"{str(given)[:200]}"
        )
    return checked


def plan_in_file(name: str) -> tuple[tuple[str, str], ...]:
    """The plan in a JSON file. Raises :class:`UsageError`."""
    try:
        plan = read_json(Path(name))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return checked_plan(plan)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
