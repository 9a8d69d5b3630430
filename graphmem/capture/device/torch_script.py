"""TorchScript: PyTorch's own executor runs scripted code in C++, whose operators pass through the modes of a capture;
:mod:`graphmem.capture.device.script_executors` has what a card's fuser does with them.

Tensors on the card are on ``meta`` in C++. In functions whose tensors are all on the card, the questions where they are
are answered beforehand; modules that ask, and functions of tensors here and there, run as the Python that they are made
of.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch

from graphmem.capture.device.script_executors import Book, Executors, is_followed
from graphmem.capture.patches import Patches, around
from graphmem.capture.values.tensors import tensors_in
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private

#: What a tensor on the card answers.
_ANSWERS = {"prim::device": torch.device("cuda", 0), "aten::get_device": 0} | {
    f"{kind}::is_{name}": name == "cuda" for kind in ("prim", "aten") for name in ("cuda", "cpu", "meta")
}
_tracing: Any = private("torch._C._get_tracing_state", "traced code that calls scripted code fails", lambda: None)


def patch_torch_script(patches: Patches, remark: Callable[[Diagnostic], None], recorder: Any) -> None:
    """Compile what is scripted, and run it as on a card, until ``patches`` are undone. ``remark`` is told what ran
    otherwise."""
    book = Book(remark, recorder.paused, recorder.before_each_in_backward)
    executors = Executors(torch.jit.ScriptFunction.__call__, book)
    answered: dict[Any, Any] = {}  # graphs -> the same with the card's answers; None where they do not ask

    def script(original: Callable[..., object], obj: object, *args: object, **kwargs: object) -> object:
        if not hasattr(obj, "__script_if_tracing_wrapper"):  # PyTorch unwraps those, with the names around them
            obj = getattr(obj, "__original_fn", obj)
        if isinstance(obj, type):
            return original(obj, *args, **{"_rcb": partial(_named_in, obj.__module__), **kwargs})
        scripted = original(obj, *args, **kwargs)
        if "_rcb" in kwargs or str(getattr(obj, "__module__", "")).startswith("torch."):
            return scripted  # a part of what is being compiled; what PyTorch scripts goes into tables of its own
        if isinstance(scripted, torch.jit.ScriptFunction) or not _asks_device(scripted):
            return scripted
        remark(Code.SCRIPT_AS_PYTHON.about())
        return obj

    def call(original: Callable[..., object], called: Any, *args: object, **kwargs: object) -> object:
        if not _is_compiled(called):
            return original(called, *args, **kwargs)
        graph = called.graph
        if graph not in answered:
            answered[graph] = _with_answers(called)
        if answered[graph] is not None and (on := {one.device.type for one in tensors_in((args, kwargs))}) != {"cpu"}:
            if on != {"cuda"} or _tracing() is not None or not is_followed():
                remark(Code.SCRIPT_AS_PYTHON.about())
                return called._torchdynamo_inline(*args, **kwargs)
            graph = answered[graph]
        if _tracing() is not None:
            return original(called, *args, **kwargs)
        bound = _bound(called, args, kwargs) if is_followed() else None
        if bound is None:
            remark(Code.SCRIPT_UNFUSED.about())
            return original(called, *args, **kwargs)
        return executors.run(graph, bound)

    def backward(original: Callable[..., object], *args: object, **kwargs: object) -> object:
        try:
            return original(*args, **kwargs)
        finally:
            executors.note_finished()

    def optimize(original: Callable[..., object], mod: object, *args: object, **kwargs: object) -> object:
        if isinstance(mod, torch.jit.ScriptModule):
            remark(Code.SCRIPT_CONVOLUTIONS.about())
        return _unless_python(original, mod, *args, **kwargs)

    patches.around(torch.jit, {"script": script, "freeze": _unless_python, "optimize_for_inference": optimize})
    for called in (torch.jit.ScriptFunction, torch.ScriptMethod):
        patches.around(called, {"__call__": call})
    for path in ("torch.autograd.graph._engine_run_backward", "torch.autograd._engine_run_backward"):
        patches.wrap(path, "gradients of scripted code are not fused", around(backward))
    lost = "PyTorch's own modules that are scripted fail"
    patches.wrap("torch.jit._builtins._find_builtin", lost, around(_builtin_behind))


def _asks_device(scripted: Any) -> bool:
    graph = getattr(scripted, "inlined_graph", None)
    return graph is not None and any(graph.findNode(kind) is not None for kind in _ANSWERS)


def _with_answers(called: Any) -> Any:
    """The graph of a function in which every tensor says that it is on the card; None where none is asked."""
    if not isinstance(called, torch.jit.ScriptFunction) or not _asks_device(called):
        return None
    graph = called.inlined_graph
    for kind, answer in _ANSWERS.items():
        for node in graph.findAllNodes(kind):
            with graph.insert_point_guard(node):
                node.output().replaceAllUsesWith(graph.insertConstant(answer))
            node.destroy()
    return graph


def _is_compiled(called: Any) -> bool:
    """False for a method of a class of C++, such as the kind of reduction that a collective is given."""
    try:
        return called.graph is not None
    except RuntimeError:
        return False


def _bound(called: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object] | None:
    """All arguments of a scripted function or method in their order; None: it does not take these."""
    arguments = called.schema.arguments
    bound = [called.owner, *args] if isinstance(called, torch.ScriptMethod) else list(args)
    named = {argument.name for argument in arguments[len(bound) :]}
    if len(bound) > len(arguments) or not named.issuperset(kwargs):
        return None
    for argument in arguments[len(bound) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            return None
        bound.append(kwargs.get(argument.name, argument.default_value))
    return bound


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
