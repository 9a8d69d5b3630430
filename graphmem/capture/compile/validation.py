"""``torch.distributions`` looks whether its parameters and samples are in range, until something is compiled.

Dynamo's first context turns that off, once and for the whole process (``patcher.patch`` of 2.13,
torch/_dynamo/eval_frame.py). It is part of a run that compiles, of every one, and of none that follow in the process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributions import Distribution

from graphmem.capture.patches import Patches, constant
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"


def patched_by_dynamo() -> None:
    """Change PyTorch as Dynamo does before it first compiles, and leave the validation as it is."""
    with Patches() as patches:
        patches.set(Distribution, "set_default_validate_args", staticmethod(constant(None)))
        private("torch._dynamo.eval_frame.TorchPatcher", _LOST).patch()


def without_validation(patches: Patches) -> None:
    """From now on distributions are not checked unless the program wants it: those made, not those that are there."""
    checked = False

    def set_default_validate_args(value: bool) -> None:
        nonlocal checked
        checked = value

    def initialize(
        original: Callable[..., None],
        self: Distribution,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008 - as PyTorch's own
        event_shape: torch.Size = torch.Size(),  # noqa: B008
        validate_args: bool | None = None,
    ) -> None:
        original(self, batch_shape, event_shape, checked if validate_args is None else validate_args)

    patches.set(Distribution, "set_default_validate_args", staticmethod(set_default_validate_args))
    patches.around(Distribution, {"__init__": initialize})
