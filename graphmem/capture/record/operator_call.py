"""One call of an operator, as it arrives below autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphmem.capture.kernels.parts.script import BoundRule
from graphmem.capture.operators.facts import OperatorFacts


class OperatorCall:
    """``rule`` is the operator's, or that of the one in whose place this one runs."""

    __slots__ = ("args", "facts", "func", "in_backward", "kwargs", "rule")

    def __init__(self, facts: OperatorFacts, args: Sequence[Any], kwargs: dict[str, Any], in_backward: bool) -> None:
        self.facts = facts
        self.func = facts.func
        self.args = args
        self.kwargs = kwargs
        self.in_backward = in_backward
        self.rule: BoundRule | None = facts.rule
