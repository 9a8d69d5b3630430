"""TorchScript: what it is made of is Python, and runs as that, as it does with PyTorch's own switch ``PYTORCH_JIT=0``.

A scripted function runs in C++, below Python, and its fuser joins element-wise operators after some runs: what they
would have kept between them is then not there on a card. Such a step may need less than is found here, with a remark.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from functools import partial, reduce
from types import FunctionType

import torch

from graphmem.capture.patches import Patches, around
from graphmem.diagnostics import Code, Diagnostic


def patch_torch_script(patches: Patches, remark: Callable[[Diagnostic], None]) -> None:
    """Leave functions, classes and modules as they are until ``patches`` are undone, but PyTorch's own, which go into
    tables of its own; the others are given to ``remark``."""

    def script(original: Callable[..., object], obj: object, *args: object, **kwargs: object) -> object:
        obj = getattr(obj, "__original_fn", obj)
        if isinstance(obj, (type, FunctionType)) and obj.__module__.startswith("torch."):
            return original(obj, *args, **{"_rcb": partial(_named_in, obj.__module__), **kwargs})
        remark(Code.SCRIPT_AS_PYTHON.about())
        return obj

    functions: dict[str, Callable[..., object]] = {
        "script": script,
        "freeze": _unless_python,
        "optimize_for_inference": _unless_python,
    }
    patches.around(torch.jit, functions)
    lost = "PyTorch's own modules that are scripted fail"
    patches.wrap("torch.jit._builtins._find_builtin", lost, around(_builtin_behind))


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
