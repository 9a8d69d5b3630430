"""``--optimizer package.module:Class``: an optimizer of the user's own, any subclass of ``torch.optim.Optimizer``.

Its code runs on fake tensors like the model's, so its states and the temporaries of its step are whatever it allocates.
"""

from __future__ import annotations

import inspect

import torch

from graphmem.errors import CaptureError, UsageError


def own_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The class that ``module:Class`` or ``module.py:Class`` names.

    Imports the module, so it is called before anything of torch is replaced for a capture. Raises
    :class:`~graphmem.errors.GraphmemError` where the module or the class is not there, where it is no optimizer, and
    where its step needs a closure, which the default loop gives to L-BFGS alone.
    """
    from graphmem.sources.factory import find_factory  # it knows how to import what a user names

    kind, _ = find_factory(name, "optimizer")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(
            f"{name} is {_what(kind)}; --optimizer takes a name, or module:Class of a subclass of torch.optim.Optimizer"
        )
    if needs_closure(kind) and not issubclass(kind, torch.optim.LBFGS):
        raise CaptureError(
            f"the step of {name} needs a closure, which the default loop does not give; write the loop "
            "yourself as a step function"
        )
    return kind


def needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """True if ``step`` cannot be called without an argument."""
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(one.kind in fixed and one.default is inspect.Parameter.empty for one in parameters)


def _what(found: object) -> str:
    return f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__name__}"
