"""Which line of the user's code is running: the innermost frame outside PyTorch, graphmem and the interpreter."""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType, FrameType

import torch

_PACKAGE = str(Path(__file__).parents[2])
_HIDDEN = (
    os.path.dirname(torch.__file__) + os.sep,
    _PACKAGE + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    "<frozen",
)
#: graphmem's own loop: what is called from here, and not from the user's code, has no line of the user's.
_OWN_LOOP = tuple(os.path.join(_PACKAGE, "capture", *name) for name in (("loop", "step.py"), ("session", "session.py")))
_shown: dict[CodeType, str | None] = {}


def user_line(frame: FrameType | None) -> str:
    """``file:line`` of the first frame at or above ``frame`` that is the user's or a model library's; "" if none."""
    while frame is not None:
        code = frame.f_code
        shown = _shown.get(code, "?")
        if shown == "?":
            shown = _shown[code] = None if code.co_filename.startswith(_OWN_LOOP) else _shorten(code.co_filename)
        if shown is None:
            return ""
        if shown:
            return f"{shown}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _shorten(filename: str) -> str:
    """The file's name for people: relative to ``site-packages`` or the working directory; "" if it is hidden."""
    if filename.startswith(_HIDDEN):
        return ""
    _, separator, tail = filename.rpartition("site-packages" + os.sep)
    if separator:
        return tail
    relative = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if relative.startswith("..") else relative


def line_of(code: CodeType, line: int) -> str:
    """``file:line`` if the code is the user's or a model library's, else ""."""
    shown = _shorten(code.co_filename)
    return f"{shown}:{line}" if shown else ""
