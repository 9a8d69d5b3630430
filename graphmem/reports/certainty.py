"""How sure the figures are, in words: one line for every report, and the causes it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphmem.units import format_alike, format_bytes

if TYPE_CHECKING:
    from graphmem.base.figures import Cause, Spread
    from graphmem.estimate import Estimate

#: Levels of the line; requested bytes are as sure as allocated ones.
_LEVELS = ("allocated", "reserved", "device")


def sentence(estimate: Estimate) -> str:
    """``How sure: allocated exact, ...``; empty for a recorded run that ran out of memory, which knows what it held."""
    if "out_of_memory" in estimate.details:
        return ""
    by_interval: dict[str, list[str]] = {}
    for level in _LEVELS:
        by_interval.setdefault(interval(estimate, level), []).append(level)
    levels = [
        f"{' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))} {words}"
        for words, names in by_interval.items()
    ]
    margin = estimate.fit.margin if estimate.fit is not None else None
    at = "" if margin is None else f"; device {_at_margin(estimate, margin)} at p{100 * margin:g}"
    return f"How sure: {', '.join(levels)}{_all_the_same(estimate)}{at}{_largest(estimate)}."


def _all_the_same(estimate: Estimate) -> str:
    """Why a run surely fits a card that has less than it may hold without a limit; "" for any other."""
    fit, most = estimate.fit, estimate.doubts.most("device")
    if fit is None or not fit.fits or fit.probability != 1.0:
        return ""
    if most is None:
        times = estimate.doubts.times
        return f" (the card has room for {times} times the reserved peak, far more than doubts like these ever took)"
    room = fit.capacity_bytes - fit.others_bytes
    if estimate.device + most <= room:
        return ""
    plans = any("cuDNN" in cause.name for cause in estimate.doubts.causes)
    how = "cuDNN takes plans with smaller workspaces, or cached" if plans else "cached"
    return f" if the card had as much (within {format_bytes(room)} it fits even then: {how} segments are given back)"


def _largest(estimate: Estimate) -> str:
    """The largest doubt with its size, and what removes it; "" without one."""
    cause = estimate.doubts.largest
    if cause is None:
        return ""
    remedy = f" ({cause.remedy})" if cause.remedy else ""
    return f"; the largest doubt: {cause.name}, {_off(cause.spread('device'))}{_recorded(cause)}{remedy}"


def _recorded(cause: Cause) -> str:
    return "" if cause.record is None else f"; {cause.record}"


def interval(estimate: Estimate, level: str) -> str:
    """``exact``, or from where to where."""
    least, most = estimate.interval(level)
    if least is not None and least == most:
        return "exact"
    if most is None:
        return "not bounded" if least is None else f"{format_bytes(least)} or more"
    return f"{format_bytes(most)} or less" if least is None else " to ".join(format_alike(least, most))


def rows(estimate: Estimate) -> Iterator[tuple[str, str, str]]:
    """A row for every cause: its name, how far it may move device memory, its source."""
    for cause in estimate.doubts.causes:
        yield cause.name, _off(cause.spread("device")), _source(cause)


def _source(cause: Cause) -> str:
    if cause.inside is None:
        return f"{cause.source}{_recorded(cause)}"
    return f"{cause.source}; {cause.inside:.0%} of such runs are expected inside"


def _at_margin(estimate: Estimate, margin: float) -> str:
    if estimate.doubts.most("device") is None:
        return "not bounded"
    return format_bytes(estimate.device + estimate.doubts.at("device", margin))


def _off(spread: Spread) -> str:
    """``+-26.00 MiB``, from less to more, or what has no bound."""
    least, most = spread.least, spread.most
    if least is None and most is None:
        return "without bound"
    if least is None:
        return "any amount less" if most == 0 else f"any amount less to {_signed(most or 0)}"
    if most is None:
        return "any amount more" if least == 0 else f"{_signed(least)} to any amount more"
    if least == -most:
        return f"+-{format_bytes(most)}"
    return " to ".join(_signed(end) for end in (least, most) if end)


def _signed(size: int) -> str:
    return format_bytes(size) if size < 0 else f"+{format_bytes(size)}"
