"""The names that rewritten loops of a program call (:mod:`graphmem.capture.program.loops`), and what they do where
nobody follows the program: in code that Dynamo compiles, and in a process that was sent a function by its code.
"""

from __future__ import annotations

TYPE_CHECKING = False  # every process below a program imports this, and "typing" takes long
if TYPE_CHECKING:
    from typing import Any

OVER, BEGIN, GOES_ON = "__graphmem_over__", "__graphmem_begin__", "__graphmem_goes_on__"
BY = "__graphmem_by__"
CALLS = "__graphmem_calls__"
LEFT, GO_ON = "__graphmem_left__", "__graphmem_go_on__"


def over(items: object, *_: object, **__: object) -> object:
    """A loop's items."""
    return items


def nothing(*_: object, **__: object) -> None:
    """Nothing is noted."""


def goes_on(_: Any) -> bool:
    """Every loop goes on."""
    return True


def by(_: Any, __: int, ___: object, step: object) -> object:
    """A number is counted on as it is written."""
    return step


class Never(BaseException):
    """No statement is left."""


#: By name: functions, and an error, that change nothing.
AS_WRITTEN: dict[str, Any] = {
    OVER: over, BEGIN: nothing, GOES_ON: goes_on, BY: by, CALLS: nothing, LEFT: Never, GO_ON: nothing,
}  # fmt: skip
