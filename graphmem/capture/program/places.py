"""Places in the program's own files: which of its functions run, and how far each has come."""

from __future__ import annotations

import sys
from itertools import zip_longest
from types import CodeType, FrameType

#: The functions of the program's own files that run, outermost first: frame, code, the instruction it has come to.
Place = tuple[tuple[int, CodeType, int], ...]


def here(files: set[str]) -> Place:
    """The place of the caller; ``files`` are the program's own."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files:
            found.append((id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(reversed(found))


def has_moved_on(before: Place, now: Place) -> bool:
    """Whether a function that ran before, and still does, has come further since. The same call made again, in a loop
    of a library, is no move."""
    for then, since in zip_longest(before, now):
        if then is None or since is None or then[:2] != since[:2]:
            return False
        if then[2] != since[2]:
            return since[2] > then[2]
    return False
