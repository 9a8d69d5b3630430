"""TorchScript: PyTorch's own executor runs scripted code in C++, whose operators pass through the modes of a capture.

A function's first run is its operators one by one. From the second on, what needs a gradient is taken out of autograd
and run with TorchScript's own derivatives, which keep other tensors (``ProfilingGraphExecutorImpl``,
torch/csrc/jit/runtime/profiling_graph_executor_impl.cpp). On a card the fuser joins element-wise operators of later
runs: what they kept between them is gone, and their results are all there at once. Here nothing is fused: a later
backward pass takes what the first one of its derivatives took, which a fused one seldom exceeds.

Code that asks a tensor for its device is told ``meta`` by C++, and runs as the Python that it is made of.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch

from graphmem.capture.patches import Patches, around
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private

_ASKS_DEVICE = re.compile(r"= (prim::device|prim::is_\w+|aten::is_(cuda|cpu|meta)|aten::get_device)\(")
#: Runs before the executor optimizes what it runs: more than there are.
_NEVER = 2**31

_set_profiled_runs: Any = private(
    "torch._C._jit_set_num_profiled_runs", "gradients of scripted code may keep more", lambda runs: runs
)


def patch_torch_script(patches: Patches, remark: Callable[[Diagnostic], None]) -> None:
    """Compile what is scripted, and run it unfused, until ``patches`` are undone. ``remark`` is told what ran."""

    def script(original: Callable[..., object], obj: object, *args: object, **kwargs: object) -> object:
        if not hasattr(obj, "__script_if_tracing_wrapper"):  # PyTorch unwraps those, with the names around them
            obj = getattr(obj, "__original_fn", obj)
        if isinstance(obj, type):
            return original(obj, *args, **{"_rcb": partial(_named_in, obj.__module__), **kwargs})
        scripted = original(obj, *args, **kwargs)
        if "_rcb" in kwargs or str(getattr(obj, "__module__", "")).startswith("torch."):
            return scripted  # a part of what is being compiled; what PyTorch scripts goes into tables of its own
        if not _ASKS_DEVICE.search(str(getattr(scripted, "inlined_graph", ""))):
            return scripted
        remark(Code.SCRIPT_AS_PYTHON.about())
        return obj

    def call(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        if _is_compiled(args[0]):
            remark(Code.SCRIPT_UNFUSED.about())
        return original(*args, **kwargs)

    patches.around(torch.jit, {"script": script, "freeze": _unless_python, "optimize_for_inference": _unless_python})
    for called in (torch.jit.ScriptFunction, torch.ScriptMethod):
        patches.around(called, {"__call__": call})
    for path in ("torch.autograd.graph._engine_run_backward", "torch.autograd._engine_run_backward"):
        patches.wrap(path, "gradients of scripted code may keep more", around(_without_optimizing))
    lost = "PyTorch's own modules that are scripted fail"
    patches.wrap("torch.jit._builtins._find_builtin", lost, around(_builtin_behind))


def _is_compiled(called: Any) -> bool:
    """False for a method of a class of C++, such as the kind of reduction that a collective is given."""
    try:
        return called.graph is not None
    except RuntimeError:
        return False


def _without_optimizing(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """A backward pass in which derivatives that run for the first time are not optimized later."""
    before = _set_profiled_runs(_NEVER)
    try:
        return original(*args, **kwargs)
    finally:
        _set_profiled_runs(before)


def _named_in(module: str, name: str) -> object:
    """The object that ``name``, of one or more parts, stands for in ``module``. TorchScript looks names up in the frame
    that called it, which is not the module's where a function stands between; None where there is none, as it asks."""
    first, *rest = name.split(".")
    found = vars(sys.modules[module]).get(first, getattr(builtins, first, None))
    return reduce(lambda owner, part: getattr(owner, part, None), rest, found)


def _builtin_behind(original: Callable[[object], object], function: object) -> object:
    """TorchScript knows functions of C++ by their identity, and finds those of a capture in their place: PyTorch's
    modules that are imported while a step runs compile with it (torch.distributed.optim)."""
    return original(getattr(function, "__original_fn", function))


def _unless_python(original: Callable[..., object], mod: object, *args: object, **kwargs: object) -> object:
    """``torch.jit.freeze(module)``: unscripted modules stay as they are."""
    return original(mod, *args, **kwargs) if isinstance(mod, torch.jit.ScriptModule) else mod
