"""What PyTorch 2.4 and later spell otherwise than the newest, in one place.

Each function does the same under every supported version; the comment says which version brought the new spelling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

# FakeTensorMode imports it when first made; under 2.4 that must be before torch.cuda's classes are replaced.
import torch._dynamo.config

from graphmem.capture.patches import Patches

_HAS_OVERRIDE = "allow_override" in inspect.signature(torch.library.register_fake).parameters


class ExistingFakes:
    """Fake implementations that stand for those PyTorch has, until they are restored.

    ``register_fake(allow_override=True)`` came after 2.6. Before, the registry that it writes to is written directly.
    """

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library
        self._replaced: list[tuple[Any, Any]] = []

    def replace(self, fakes: Mapping[str, Callable[..., Any]]) -> None:
        """``fakes`` by qualified operator name."""
        for name, fake in fakes.items():
            if _HAS_OVERRIDE:
                torch.library.register_fake(name, fake, lib=self._library, allow_override=True)
            else:
                self._write(name, fake)

    def restore(self) -> None:
        """What was there before; what went through the library goes with it."""
        while self._replaced:
            holder, kernel = self._replaced.pop()
            holder.kernel = kernel

    def _write(self, name: str, fake: Callable[..., Any]) -> None:
        entry: Any = torch._library.simple_registry.singleton.find(name)
        holder = entry.fake_impl if hasattr(entry, "fake_impl") else entry.abstract_impl  # renamed in 2.5
        self._replaced.append((holder, holder.kernel))
        holder.kernel = torch._library.utils.Kernel(fake, "graphmem")


def patch_module_conversion(patches: Patches) -> None:
    """``nn.Module.to`` swaps fake parameters in place, so that tied ones stay tied.

    Newer versions do so themselves (2.9's ``torch/nn/modules/module.py``, ``_apply``). 2.4 would write a fake device
    tensor into the ``data`` of a fake host parameter, which would go on saying that it is on the host.
    """
    if "FakeTensor" not in torch.nn.Module._apply.__code__.co_names:
        patches.set(torch.__future__, "get_swap_module_params_on_conversion", lambda: True)
