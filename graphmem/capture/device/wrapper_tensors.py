"""Tensors around others that libraries make (``Tensor._make_wrapper_subclass``): quantised weights and float8
activations of torchao, masked tensors.

C++ would make them on a CUDA device, which a build without CUDA ends the process over. Here they are what device
tensors are everywhere in a capture: on the card to Python and by their dispatch keys, on ``meta`` to C++. Operators on
them are left to their class, and those that it calls on what it is around are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphmem.capture.device.factories import device_named
from graphmem.capture.device.pretend_device import DEVICE, cards
from graphmem.capture.patches import Patches
from graphmem.capture.torch_internals import disable_current_modes, make_subclass

#: The attribute of those that are on the card.
_ON_CARD = "_graphmem_on_card"


def patch_wrapper_tensors(patches: Patches, wrappers: set[type]) -> None:
    """Until ``patches`` are undone; their classes are added to ``wrappers``."""

    def with_device(construct: Any) -> Any:
        def make(cls: Any, size: Any, *args: object, **options: object) -> Any:
            given: torch.device | None = device_named(options.get("device"))
            if args or given is None or given.type != "cuda" or options.get("layout", torch.strided) != torch.strided:
                return construct(cls, size, *args, **options)
            _show_device(patches, cls, wrappers)
            return _on_card(cls, size, options)

        return staticmethod(make)

    lost = "tensors around others, as of torchao, cannot be on the card"
    patches.wrap("torch.Tensor._make_wrapper_subclass", lost, with_device)


def _on_card(cls: Any, size: Any, options: Any) -> Any:
    shape, strides = tuple(size), options.get("strides")
    with disable_current_modes():
        like = {"dtype": options.get("dtype") or torch.get_default_dtype(), "device": "meta"}
        if strides is not None:
            shown = torch.empty_strided(shape, tuple(strides), **like)
        else:
            layout = options.get("memory_format") or torch.contiguous_format
            shown = torch.empty(shape, memory_format=layout, **like)
        made = make_subclass(cls, shown, bool(options.get("requires_grad")), device_for_backend_keys=DEVICE)
    setattr(made, _ON_CARD, True)
    return made


def _show_device(patches: Patches, cls: Any, wrappers: set[type]) -> None:
    """Let tensors of the class say where they are, as they would on a card."""
    if cls in wrappers:
        return
    wrappers.add(cls)
    if "device" not in cls.__dict__:
        patches.set(cls, "device", property(_or_card(torch.Tensor.device, lambda: cards().own)))
    patches.set(cls, "is_cuda", property(_or_card(torch.Tensor.is_cuda, lambda: True)))
    patches.set(cls, "is_meta", property(_or_card(torch.Tensor.is_meta, lambda: False)))


def _or_card(original: Any, answer: Callable[[], Any]) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return answer() if hasattr(self, _ON_CARD) else original.__get__(self, type(self))

    return get
