"""Tensors around others that libraries make (``Tensor._make_wrapper_subclass``): quantised weights and float8
activations of torchao, masked tensors, nested tensors of jagged layout.

C++ would make them on a CUDA device, which a build without CUDA ends the process over. Here they are as device tensors
are everywhere in a capture: on the card to Python and by their dispatch keys, on ``meta`` to C++. Operators on them are
left to their class, and those that it calls on the inner tensors are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphmem.capture.device.factories import device_named
from graphmem.capture.device.pretend_device import DEVICE, cards
from graphmem.capture.patches import Patches, around
from graphmem.capture.torch_internals import disable_current_modes, make_subclass
from graphmem.torch_names import private

_nested: Any = private("torch.nested._internal.nested_tensor", "nested tensors of jagged layout are not followed")
#: The attribute of those that are on the card.
_ON_CARD = "_graphmem_on_card"
_Make = Callable[..., torch.Tensor]
_META = torch.device("meta")
#: Where ``NestedTensor`` gives its device to ``_make_wrapper_subclass``, behind class and size.
_DEVICE_AT = 5


def patch_wrapper_tensors(patches: Patches, wrappers: set[type]) -> None:
    """Until ``patches`` are undone; their classes are added to ``wrappers``."""

    def make(original: _Make, cls: type, size: Sequence[int], *args: object, **options: Any) -> torch.Tensor:
        if len(args) > _DEVICE_AT and args[_DEVICE_AT - 1] is torch.jagged:
            return jagged(original, cls, size, args, options)
        given: torch.device | None = device_named(options.get("device"))
        if args or given is None or given.type != "cuda" or options.get("layout", torch.strided) != torch.strided:
            return original(cls, size, *args, **options)
        _show_device(patches, cls, wrappers)
        return _on_card(cls, size, **options)

    def jagged(original: _Make, cls: type, size: object, args: tuple[Any, ...], options: Any) -> torch.Tensor:
        if args[_DEVICE_AT].type != "cuda":
            return original(cls, size, *args, **options)
        _show_device(patches, cls, wrappers)
        with disable_current_modes():
            made = original(cls, size, *args[:_DEVICE_AT], _META, *args[_DEVICE_AT + 1 :], **options)
        setattr(made, _ON_CARD, True)
        return made

    lost = "nested tensors of jagged layout are not followed"
    patches.wrap("torch._subclasses.fake_tensor.FakeTensor.get_nested_int", lost, around(_nested_number))
    lost = "tensors around others, as of torchao, cannot be on the card"
    patches.wrap("torch.Tensor._make_wrapper_subclass", lost, lambda found: staticmethod(around(make)(found)))


def _nested_number(original: Callable[..., object], offsets: Any, *, coeff: int = 1) -> object:
    """The symbol of a ragged dimension, one for each tensor of offsets. Fake tensors have one of their mode's symbols,
    where the mode has symbols; outside of the compiler PyTorch counts them (``get_tensor_symint``)."""
    if offsets.fake_mode.shape_env is not None:
        return original(offsets, coeff=coeff)
    numbers = _nested._tensor_symint_registry
    if offsets not in numbers:
        numbers[offsets] = torch.SymInt(_nested.NestedIntNode(_nested._tensor_id_counter, coeff))
        _nested._tensor_id_counter += 1
    return numbers[offsets]


def _on_card(
    cls: type, size: Sequence[int], strides: Sequence[int] | None = None, dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None, requires_grad: bool = False, **_: object,
) -> torch.Tensor:  # fmt: skip
    with disable_current_modes():
        dtype = dtype or torch.get_default_dtype()
        if strides is not None:
            shown = torch.empty_strided(tuple(size), tuple(strides), dtype=dtype, device="meta")
        else:
            layout = memory_format or torch.contiguous_format
            shown = torch.empty(tuple(size), memory_format=layout, dtype=dtype, device="meta")
        made: torch.Tensor = make_subclass(cls, shown, bool(requires_grad), device_for_backend_keys=DEVICE)
    setattr(made, _ON_CARD, True)
    return made


def _show_device(patches: Patches, cls: type, wrappers: set[type]) -> None:
    """Let tensors of the class show their device, as they would on a card."""
    if cls in wrappers:
        return
    wrappers.add(cls)
    if "device" not in cls.__dict__:
        patches.set(cls, "device", _or_card(torch.Tensor.device, lambda: cards().own))
    patches.set(cls, "is_cuda", _or_card(torch.Tensor.is_cuda, lambda: True))
    patches.set(cls, "is_meta", _or_card(torch.Tensor.is_meta, lambda: False))


def _or_card(original: property, answer: Callable[[], object]) -> property:
    return property(lambda self: answer() if hasattr(self, _ON_CARD) else original.__get__(self, type(self)))
