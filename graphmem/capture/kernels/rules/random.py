"""Buffers of operators that draw random numbers: ``multinomial``, ``randperm``, ``bernoulli``, Dirichlet.

Sources: ``multinomial`` in ATen/native/Distributions.cpp and its kernel in ATen/native/cuda/MultinomialKernel.cu,
``randperm_out_cuda`` in ATen/native/cuda/Randperm.cu, ``bernoulli_kernel`` in ATen/native/cuda/DistributionTemplates.h,
``launch_dirichlet_kernel`` in ATen/native/cuda/Distributions.cu of PyTorch 2.13; orders observed on its CUDA build.
"""

from __future__ import annotations

import math

import torch

from graphmem.base import versions
from graphmem.capture.kernels.parts import cub
from graphmem.capture.kernels.parts.layout import Layout, bytes_of
from graphmem.capture.kernels.parts.reduction import write_sum
from graphmem.capture.kernels.parts.script import Call, Card, Script, recorded_rule


@recorded_rule("aten.multinomial.default")
def multinomial_rule(call: Call) -> Script | None:
    """Without replacement, or one sample: weights over exponentials, of which the largest win, after checks whose
    scalars stay. With replacement: the normalized distribution, its running sum, and a copy of the weights."""
    weights: torch.Tensor = call.self
    samples = int(call.num_samples)
    size = bytes_of(weights)
    if not size:
        return None
    script = Script().output(0)
    if call.replacement and samples > 1:
        copied = () if versions.MULTINOMIAL_COPIES_NO_WEIGHTS.holds(call.card.torch_version) else ("weights",)
        taken = [script.take(size, name) for name in (*copied, "normalized weights", "running sums")]
        if weights.dim() == 1:
            script.scratch(cub.scan_bytes(weights.numel(), weights.element_size(), call.card), "scan")
        return script.give(*reversed(taken))
    scalars = _take_checks(script, weights, call.card)
    races = script.take(size, "weights over exponentials")
    _pick_largest(script, call, samples)
    return script.give(races, *reversed(scalars))


def _pick_largest(script: Script, call: Call, samples: int) -> None:
    """``argmax_out`` of one sample, ``topk_out`` of more, into the result."""
    weights, result = call.self, call.outputs[0]
    strides = Layout.dense_like(weights).stride()
    races = torch.empty_strided(weights.shape, strides, dtype=weights.dtype, device="meta")
    if samples == 1:
        script.call("aten.argmax", races, -1, True, card=call.card, outputs=[result], births=[None])
        return
    values = torch.empty(result.shape, dtype=weights.dtype, device="meta")
    largest = script.take(bytes_of(values), "largest values")
    script.call("aten.topk", races, samples, card=call.card, outputs=[values, result], births=[None, None])
    script.give(largest)


def _take_checks(script: Script, weights: torch.Tensor, card: Card) -> list[int]:
    """That no weight is negative or infinite, and that every row has one above zero."""
    element = weights.element_size()
    scalar = torch.empty((), dtype=weights.dtype, device="meta")
    outputs, checks = [scalar, scalar], ("largest is finite", "smallest is not negative")
    if versions.BOUNDS_IN_ONE_PASS.holds(card.torch_version):
        bounds = script.call("aten.aminmax", weights, card=card, outputs=outputs, births=["smallest", "largest"])
        finite, positive = (script.take(1, name) for name in checks)
        valid = script.take(1, "weights are valid")
        script.give(positive, finite)
    else:
        bounds, held = [], []
        for operator, label, check in zip(("aten.max", "aten.min"), ("largest", "smallest"), checks, strict=True):
            held += script.call(operator, weights, card=card, outputs=[scalar], births=[label])
            held.append(script.take(1, check))
        valid = script.take(1, "weights are valid")
        script.give(*reversed(held))
    rows = weights.numel() // weights.shape[-1]
    sums = script.take(rows * element, "sums of weights")
    write_sum(script, weights, [-1], weights.dtype, card)
    zero = script.take(rows, "sums that are zero")
    if weights.dim() == 2:
        rowwise, zero = zero, script.take(1, "any sum is zero")
        script.give(rowwise)
    script.give(sums)
    script.scratch(1, "no sum is zero")
    return [*bounds, valid, zero]


@recorded_rule("aten.randperm.default", "aten.randperm.generator")
def randperm_rule(call: Call) -> Script | None:
    """A range, sorted by random keys with so many bits that two are rarely equal."""
    items = int(call.n)
    if items < 2:
        return None
    value = call.outputs[0].element_size()
    bits = min(64, math.ceil(math.log2(items - (6 * items**2 + 1) / (12 * math.log(0.9)))))
    key = 4 if bits <= 32 else 8
    script = Script().output(0)
    script.scratch(8, "scalar of the range")
    taken = [
        script.take(items * value, "range"),
        script.take(items * key, "random keys"),
        script.take(items * key, "sorted keys"),
        script.take(cub.radix_sort_bytes(items, key, value, bits, call.card), "radix sort"),
    ]
    return script.give(*reversed(taken))


@recorded_rule("aten.bernoulli.default", "aten.bernoulli_.Tensor")
def bernoulli_rule(call: Call) -> Script | None:
    """Probabilities of another precision are converted: to doubles for doubles, to floats for all else."""
    probabilities = call.self if call.operator == "aten.bernoulli.default" else call.get("p")
    wanted = torch.float64 if call.dtype is torch.float64 else torch.float32
    if probabilities.dtype is wanted or not probabilities.numel():
        return None
    return Script().output(0).scratch(probabilities.numel() * wanted.itemsize, "probabilities in another precision")


@recorded_rule("aten._sample_dirichlet.default")
def dirichlet_rule(call: Call) -> Script | None:
    """Draws of gamma distributions, and the sums of the rows that they are divided by."""
    alpha: torch.Tensor = call.self
    if not alpha.numel():
        return None
    script = Script().output(0)
    sums = script.take(alpha.numel() // alpha.shape[-1] * alpha.element_size(), "sums of gamma draws")
    write_sum(script, alpha, [-1], alpha.dtype, call.card, keepdim=True)
    return script.give(sums)
