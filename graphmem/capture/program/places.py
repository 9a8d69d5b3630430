"""Places in the program's own files: which of its functions run, and how far each has come."""

from __future__ import annotations

import sys
from itertools import zip_longest
from types import CodeType, FrameType, TracebackType

#: The module that runs the program's first line.
_STARTS = "graphmem.capture.program.main_module"
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


def calls_a_library(raised: TracebackType | None, files: set[str]) -> bool:
    """Whether what was raised comes out of a library that the function handling it called, and that is called from the
    program's first line on by nothing but the program's own functions."""
    below = raised and raised.tb_next
    if raised is None or below is None or below.tb_frame.f_code.co_filename in files:
        return False
    above: FrameType | None = raised.tb_frame
    while above is not None and above.f_code.co_filename in files:
        above = above.f_back
    return above is not None and above.f_globals.get("__name__") == _STARTS
