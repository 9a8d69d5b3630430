"""What one CUDA operator does to memory while it runs, written down as a script.

A fake operator shows only its outputs. The CUDA kernel behind it may take buffers and give them back before it
returns, and may lay its outputs out otherwise than the fake one. A *rule* looks at the arguments and outputs and
returns the :class:`Script` of allocations and frees in the order of the real build. Operators without a rule allocate
their outputs in order and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphmem.cudnn.library import Cudnn


@dataclass(frozen=True, slots=True)
class Card:
    """What kernels ask of a device before they choose a launch. ``torch_version`` is (major, minor).

    ``cudnn_workspaces``: whether cuDNN's plans claim workspaces. False gives the runs of a cuDNN that needs none.
    ``in_graph_capture``: whether the current stream is being captured into a CUDA graph.
    """

    compute_capability: tuple[int, int]
    sm_count: int
    max_threads_per_sm: int
    torch_version: tuple[int, int] = (2, 13)
    cudnn_workspaces: bool = True
    in_graph_capture: bool = False
    #: The cuDNN to ask for the plans of convolutions; None where they are predicted.
    cudnn: Cudnn | None = field(default=None, compare=False)
    #: Convolutions that this run has timed already (the cache of ``Conv_v8.cpp`` under ``cudnn.benchmark``).
    timed: set[object] = field(default_factory=set, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """``kind``: ``output`` (birth of output number ``index``; ``bytes`` overrides the fake size if not None),
    ``take`` (a buffer of ``bytes`` with a ``label``, ``index`` its token), ``give`` (token ``index`` goes back),
    ``product`` (cuBLAS is called) or ``empty_cache`` (the allocator gives its unused memory back to the driver)."""

    kind: str
    index: int
    bytes: int | None = None
    label: str = ""


@dataclass(slots=True)
class Script:
    """Builder of the steps of one operator call."""

    steps: list[Step] = field(default_factory=list)
    _tokens: int = 0

    def output(self, index: int = 0, size: int | None = None) -> Script:
        """Output ``index`` (position among the output tensors) is allocated here, of ``size`` bytes if given."""
        self.steps.append(Step("output", index, size))
        return self

    def take(self, size: int, label: str) -> int:
        """A buffer of ``size`` bytes is allocated here. Returns the token to give it back with."""
        self._tokens += 1
        self.steps.append(Step("take", self._tokens, size, label))
        return self._tokens

    def give(self, *tokens: int) -> None:
        """The buffers go back, in this order."""
        self.steps.extend(Step("give", token) for token in tokens)

    def product(self) -> None:
        """The operator calls cuBLAS here, whose workspace is taken now unless the thread holds it already."""
        self.steps.append(Step("product", 0))

    def empty_cache(self) -> None:
        """The operator calls ``CUDACachingAllocator::emptyCache``."""
        self.steps.append(Step("empty_cache", 0))


#: (positional args, keyword args, output tensors, card) -> script, or None for "nothing hidden". Outputs that are no
#: tensors, such as gradients that were not asked for, are left out of the list and of the counting.
Rule = Callable[[Sequence[Any], dict[str, Any], Sequence[Any], Card], "Script | None"]

RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators by full name, for example ``aten.sum.dim_IntList``."""

    def register(function: Rule) -> Rule:
        for operator in operators:
            RULES[operator] = function
        return function

    return register
