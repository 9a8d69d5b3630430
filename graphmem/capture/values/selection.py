"""How much an operator selects whose outputs' size is data: the user's number or share, or all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from graphmem.capture.values import callers
from graphmem.capture.values.assumed_values import AssumedValues
from graphmem.diagnostics import Code


class Selection:
    """How many elements are selected: the user's number for the line, or ``share`` of the candidates (above 0, at most
    1), or with None for the share all of them, which is noted."""

    def __init__(self, share: float | None, values: AssumedValues | None = None) -> None:
        self.share = share
        self._values = values or AssumedValues()
        self.assumed = 0
        self.distinct = 0  # sparse tensors whose indices were taken to be distinct
        self._exact: int | None = None

    def rows(self, candidates: int, what: str = "a selection") -> int:
        """The number selected out of ``candidates``, rounded up."""
        if self._exact is not None:
            return self._exact
        if callers.called_to_drop_empty_inputs():
            return candidates
        if self.share is None or self._values.is_given():
            return self._values.selected(candidates, Code.TAKES_ALL, what=what, candidates=candidates)
        self.assumed += 1
        return math.ceil(self.share * candidates)

    @property
    def exact(self) -> int | None:
        """The number selected, where it is known; nothing is assumed."""
        return self._exact

    @contextlib.contextmanager
    def exactly(self, rows: int | None) -> Iterator[None]:
        """Selections inside are of ``rows``; None changes nothing."""
        self._exact, before = rows, self._exact
        try:
            yield
        finally:
            self._exact = before
