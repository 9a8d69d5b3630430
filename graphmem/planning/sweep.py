"""The same model under every combination of some settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphmem.errors import GraphmemError, UsageError
from graphmem.estimate import Estimate
from graphmem.planning.request import Request


@dataclass(frozen=True)
class Row:
    """One combination: its settings, and its estimate or the reason why there is none."""

    settings: Mapping[str, Any]
    estimate: Estimate | None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values, memory in bytes."""
        settings = {name: getattr(value, "name", value) for name, value in self.settings.items()}
        return {
            "settings": settings,
            "estimate": self.estimate.to_dict() if self.estimate else None,
            "error": self.error or None,
        }


def sweep(
    model: Any,
    example_inputs: Any = None,
    *,
    vary: Mapping[str, Sequence[Any]],
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> list[Row]:
    """Analyse every combination of ``vary``: name of a setting (see :meth:`Request.changed`) -> its values.

    The last setting changes fastest. A combination that cannot be analysed is a row with its error. ``options`` are
    those of :func:`graphmem.analyze`. Raises :class:`GraphmemError` where none can be analysed.
    """
    for name, values in vary.items():
        if isinstance(values, (str, bytes)) or not values:
            raise UsageError(f"vary[{name!r}] is a list of at least one value, not {values!r}")
    request = Request(model, example_inputs, options)
    rows: list[Row] = []
    first_error: GraphmemError | None = None
    for chosen in itertools.product(*vary.values()):
        settings = dict(zip(vary, chosen, strict=True))
        if say is not None:
            say(" ".join(f"{name} {getattr(value, 'name', value)}" for name, value in settings.items()))
        try:
            rows.append(Row(settings, request.changed(**settings).run()))
        except GraphmemError as error:
            rows.append(Row(settings, None, str(error)))
            first_error = first_error or error
    if first_error is not None and all(row.estimate is None for row in rows):
        raise first_error
    return rows
