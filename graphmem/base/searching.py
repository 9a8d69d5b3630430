"""Finds the largest whole number that passes a check, with few calls of the check."""

from __future__ import annotations

from collections.abc import Callable

#: Larger sizes of a model or a program are not tried unless asked for.
AT_MOST = 1 << 20


def largest(does: Callable[[int], bool], top: int) -> int:
    """The largest number from 1 to ``top`` that does, where all below it do too; 0 for none. Doubling, then halving."""
    if top < 1 or not does(1):
        return 0
    good, step = 1, 1
    while good < top:
        tried = min(top, good + step)
        if not does(tried):
            break
        good, step = tried, 2 * step
    else:
        return good
    bad = min(top, good + step)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if does(middle) else (good, middle)
    return good
