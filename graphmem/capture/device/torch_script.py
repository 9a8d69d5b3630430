"""TorchScript: what it is made of is Python, and runs as that, as it does with PyTorch's own switch ``PYTORCH_JIT=0``.

A scripted function runs in C++, below Python, and its fuser joins element-wise operators after some runs: what they
would have kept between them is then not there on a card. Such a step may need less than is found here, and is said to.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.diagnostics import Code, Diagnostic


def patch_torch_script(patches: Patches, remark: Callable[[Diagnostic], None]) -> None:
    """Leave functions, classes and modules as they are until ``patches`` are undone, but PyTorch's own, which go into
    tables of its own; ``remark`` is told of the others."""
    compiled = torch.jit.script

    def script(obj: object, *args: object, **kwargs: object) -> object:
        if isinstance(obj, (type, FunctionType)) and obj.__module__.startswith("torch."):
            return compiled(obj, *args, **kwargs)
        remark(Code.SCRIPT_AS_PYTHON.about())
        return obj

    patches.set(torch.jit, "script", script)
    for name in ("freeze", "optimize_for_inference"):
        patches.set(torch.jit, name, _unless_python(getattr(torch.jit, name)))
    patches.wrap("torch.jit._builtins._find_builtin", "PyTorch's own modules that are scripted fail", _builtin_behind)


def _builtin_behind(find: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    """TorchScript knows functions of C++ by their identity, and finds those of a capture in their place: PyTorch's
    modules that are imported while a step runs compile with it (torch.distributed.optim)."""

    def find_builtin(function: object) -> str | None:
        return find(getattr(function, "__original_fn", function))

    return find_builtin


def _unless_python(change: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.jit.freeze(module)``: what was not scripted stays as it is."""

    def changed(mod: object, *args: object, **kwargs: object) -> object:
        return change(mod, *args, **kwargs) if isinstance(mod, torch.jit.ScriptModule) else mod

    return changed
