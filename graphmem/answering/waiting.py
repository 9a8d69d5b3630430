"""What libraries import and a plain step does not use, which waits until somebody does (:mod:`graphmem.base.deferred`):
half of the time in which a library of models is imported.

Only in a command's own process, and not for steps that are compiled or of several processes, which need all of it.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from graphmem.answering.question import Question
from graphmem.base import deferred
from graphmem.base.deferred import Waiting
from graphmem.training import Training

#: True where nobody else uses this process.
is_own_process = False


def let_wait(question: Question) -> None:
    """Let wait what the question has no need of; and nothing any more for one that has."""
    if not is_own_process or not isinstance(question.model, (str, os.PathLike)):
        return
    step = question.step
    if step.processes is not None or (isinstance(step, Training) and step.compile):
        deferred.run_all()
        return
    deferred.defer((_COMPILER, *_SYMBOLS))
    if str(question.model).startswith(("hf:", "zoo:")):
        deferred.defer((*_OF_SEVERAL_PROCESSES, *_BESIDES))


# --- the compiler, while nothing is compiled --------------------------------------------------------------------------

_NAME = "torch._dynamo"


def _graph_break(_: str = "") -> None:
    """Where nothing is compiled it does nothing."""


def _disable(function: Any = None, recursive: bool = True, **options: Any) -> Any:
    """The function itself as long as nothing is compiled, and then what the compiler makes of it."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, **options)
    if not isinstance(function, FunctionType):
        return deferred.run(_NAME).disable(function, recursive, **options)
    disabled: list[Any] = []

    def _fn(*args: Any, **kwargs: Any) -> Any:
        if not disabled and not deferred.is_waiting(_NAME):
            disabled.append(sys.modules[_NAME].disable(function, recursive, **options))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    if options.get("wrapping", True):
        _fn = functools.wraps(function)(_fn)
    _fn._torchdynamo_disable, _fn._torchdynamo_orig_callable = True, function  # type: ignore[attr-defined]
    return _fn


def _assume_constant_result(function: Any) -> Any:
    function._dynamo_marked_constant = True
    return function


def _allow_in_graph(function: Any) -> Any:
    if not isinstance(function, FunctionType):
        return deferred.run(_NAME).allow_in_graph(function)
    deferred.afterwards(_NAME, lambda compiler: compiler.allow_in_graph(function))
    return function


_COMPILER = Waiting(
    _NAME,
    taken=frozenset(("TransformGetItemToIndex", "ConstantSource", "RandomValueSource")),
    made=frozenset(("ConstantSource", "RandomValueSource")),  # the origin of each tensor that becomes a fake one
    ready=("torch._dynamo.config",),  # fake tensors look into it
    meanwhile={
        "graph_break": _graph_break,
        "disable": _disable,
        "assume_constant_result": _assume_constant_result,
        "allow_in_graph": _allow_in_graph,
    },
)

# --- sizes that are symbols, of which there are none before the module that makes them has run ------------------------

_SHAPES = "torch.fx.experimental.symbolic_shapes"


def _of_numbers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for arguments that are numbers; for others the one that it stands for."""

    def called(*args: Any, **options: Any) -> Any:
        if all(type(one) in (bool, int) for one in args):
            return function(*args)
        return getattr(deferred.run(_SHAPES), name)(*args, **options)

    return called


def _equal(x: Any, y: Any) -> Any:
    """Of numbers, or of sequences of some."""
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)) and all(type(one) is int for one in (*x, *y)):
        return tuple(x) == tuple(y)
    return _equal_numbers(x, y)


_equal_numbers = _of_numbers("sym_eq", operator.eq)
_SAME = ("guard_int", "guard_or_false", "guard_or_true", "guard_size_oblivious", "guarding_hint_or_throw",
         "statically_known_true")  # fmt: skip
_SYMBOLS = (
    Waiting(
        _SHAPES,
        taken=frozenset(("GuardOnDataDependentSymNode",)),
        meanwhile={
            **{name: _of_numbers(name, lambda one: one) for name in _SAME},
            "expect_true": _of_numbers("expect_true", lambda one, skip=0: one),
            "is_nested_int": _of_numbers("is_nested_int", lambda one: False),
            "is_symbolic": _of_numbers("is_symbolic", lambda one: False),
            "has_guarding_hint": _of_numbers("has_guarding_hint", lambda one: True),
            "sym_and": _of_numbers("sym_and", lambda *them: functools.reduce(operator.and_, them)),
            "sym_or": _of_numbers("sym_or", lambda *them: functools.reduce(operator.or_, them)),
            "sym_eq": _equal,
            "_iterate_exprs": lambda value: iter(()),
            "_iterate_nodes": lambda value: iter(()),
            "has_free_unbacked_symbols": lambda value: False,
            "free_unbacked_symbols": lambda value: set(),
            "compute_unbacked_bindings": lambda *args, **options: None,
        },
    ),
    Waiting("torch.utils._sympy.functions", taken=frozenset(("Max",))),
    Waiting("sympy", meanwhile={"Basic": type("Basic", (), {})}),
)

# --- what transformers takes ------------------------------------------------------------------------------------------

_TAKEN = {
    "torch.distributed.tensor": "DTensor Partial Replicate Shard _StridedShard distribute_tensor "
    "compute_local_shape_and_global_offset",
    "torch.distributed.fsdp": "CPUOffloadPolicy MixedPrecisionPolicy",
    "torch.distributed._composable": "fully_shard",
    "torch.distributed.checkpoint": "HuggingFaceStorageReader HuggingFaceStorageWriter",
}
_OF_SEVERAL_PROCESSES = tuple(
    Waiting(name, taken=frozenset(names.split()), made=frozenset(("Partial", "Replicate", "Shard")))
    for name, names in _TAKEN.items()
)
_BESIDES = (
    Waiting("scipy.optimize", taken=frozenset(("linear_sum_assignment",))),
    Waiting("httpcore2"),
    Waiting("httpcore"),
)
