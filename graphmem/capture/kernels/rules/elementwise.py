"""Operators that are more than one kernel. Orders observed on the CUDA build of PyTorch 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.capture.kernels.parts.script import Card, Script, rule


@rule("aten.abs.default", "aten.angle.default")
def complex_to_real_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    """Of complex numbers: computed as complex, then copied (ATen/native/UnaryOps.cpp)."""
    if not args[0].is_complex():
        return None
    script = Script().output(0)
    script.give(script.take(args[0].numel() * args[0].element_size(), "complex result"))
    return script


@rule("aten.where.self")
def where_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """Values of another type than the result's are converted first (``where_self_out``,
    ATen/native/TensorCompare.cpp)."""
    converted = [
        value for value in args[1:3] if value.is_cuda and value.dtype is not outputs[0].dtype and value.numel() > 0
    ]
    if not converted:
        return None
    script = Script()
    size = outputs[0].element_size()
    tokens = [script.take(value.numel() * size, "values in the result's type") for value in converted]
    script.output(0)
    script.give(*reversed(tokens))
    return script


@rule("aten.unfold_backward.default")
def unfold_backward_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    """Positions along the unfolded dimension (ATen/native/UnfoldBackward.h)."""
    sizes, dim = args[1], args[2]
    if not sizes:
        return None
    script = Script().output(0)
    script.give(script.take(8 * int(sizes[dim]), "positions"))
    return script


@rule("aten.soft_margin_loss_backward.default")
def soft_margin_backward_rule(
    args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card
) -> Script | None:
    """exp(-target * input) from two full-size tensors, then its sum with one (ATen/native/Loss.cpp)."""
    size = args[1].numel() * args[1].element_size()
    script = Script().output(0)
    product = script.take(size, "target times input")
    exponential = script.take(size, "exponential")
    script.give(product, exponential)
    script.give(script.take(size, "gradient of the sum"))
    return script


@rule("aten.rrelu_with_noise.default")
def rrelu_rule(args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Any], card: Card) -> Script | None:
    """In training the kernel takes contiguous values (``_rrelu_with_noise_cuda_train``, RreluWithNoise.cu)."""
    training = bool(args[4] if len(args) > 4 else kwargs.get("training", False))
    if not training or args[0].is_contiguous():
        return None
    script = Script().output(0)
    script.give(script.take(bytes_of(args[0]), "contiguous input"))
    return script
