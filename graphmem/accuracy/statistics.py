"""Summaries of signed errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: Below this share of the measured value a prediction counts as under-estimated; smaller gaps are rounding.
UNDER = 1e-9


@dataclass(frozen=True)
class ErrorSummary:
    """Signed relative errors in short. Percentiles are of their absolute values, by nearest rank."""

    count: int
    median_signed: float
    median: float
    p90: float
    p95: float
    largest: float
    exact: int
    under_estimated: float


def summarize_errors(errors: Sequence[float]) -> ErrorSummary:
    """Summarize at least one error."""
    absolute = sorted(map(abs, errors))
    return ErrorSummary(
        count=len(errors),
        median_signed=percentile(sorted(errors), 0.5),
        median=percentile(absolute, 0.5),
        p90=percentile(absolute, 0.9),
        p95=percentile(absolute, 0.95),
        largest=absolute[-1],
        exact=sum(error == 0 for error in errors),
        under_estimated=sum(error < -UNDER for error in errors) / len(errors),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at ``share`` of an ascending list: the nearest rank, so that it is one of the values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
