"""Runs operators on meta tensors and plays the kernel rules: what a CUDA build would allocate and free, in order.

Independent of the recorder. Where CUDA's version of a composite operator calls something else than the meta device
would, the call is spelled out here.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from graphmem.capture.kernels import run_rule
from graphmem.capture.kernels.parts.script import Card, Script
from tests.support.cards import HOPPER

_aten = torch.ops.aten


class KernelReplay(TorchDispatchMode):
    """Collects positive sizes at births and negative ones at deaths; zero-size storages do not count."""

    def __init__(self, card: Card = HOPPER) -> None:
        super().__init__()
        self.card = card
        self._events: list[int] = []

    def taken(self) -> list[int]:
        """The events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {id(t.untyped_storage()) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)}
        out = group_norm_outputs(*args) if func is _aten.native_group_norm.default else func(*args, **kwargs)
        self.play(str(func), args, kwargs, tree_flatten(out)[0], known)
        return out

    def play(
        self,
        operator: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        outputs: Sequence[Any],
        known: set[int] | frozenset[int] = frozenset(),
    ) -> None:
        """Play the rule of one operator whose outputs exist already."""
        tensors = [out for out in outputs if isinstance(out, Tensor)]
        script = run_rule(operator, args, kwargs, tensors, self.card)
        born = self._follow(script, tensors) if script else set()
        for index, tensor in enumerate(tensors):
            if index not in born and id(tensor.untyped_storage()) not in known:
                self._birth(tensor, None)

    def _follow(self, script: Script, tensors: Sequence[Tensor]) -> set[int]:
        taken: dict[int, int] = {}
        born = set()
        for step in script.steps:
            if step.kind == "output":
                born.add(step.index)
                self._birth(tensors[step.index], step.bytes)
            elif step.kind == "take":
                taken[step.index] = step.bytes or 0
                self._record(taken[step.index])
            else:
                self._record(-taken.pop(step.index))
        assert not taken, "a buffer was not given back"
        return born

    def _birth(self, tensor: Tensor, size: int | None) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes() if size is None else size
        self._record(size)
        weakref.finalize(storage, self._record, -size).atexit = False

    def _record(self, size: int) -> None:
        if size:
            self._events.append(size)


def forward_and_backward(make: Callable[[], Tensor]) -> tuple[list[int], list[int], Tensor]:
    """Events of ``make()`` and of its backward pass from an empty gradient, and the output."""
    replay = KernelReplay()
    with replay:
        out = make()
        forward = replay.taken()
    gradient = torch.empty_like(out)
    with replay:
        out.backward(gradient)
        return forward, replay.taken(), out


def group_norm_outputs(x: Tensor, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float) -> Any:
    """Output, mean and inverse deviation, as the meta device has them: there the operator is taken apart in Python, and
    that takes ten times as long as all rules."""
    statistics = (torch.empty(n, groups, dtype=x.dtype, device=x.device) for _ in range(2))
    return (torch.empty_like(x), *statistics)


def batch_norm(module: torch.nn.BatchNorm2d, x: Tensor) -> Tensor:
    """CUDA calls cuDNN unless an argument is bf16 or half weights come with half values."""
    arguments = (x, module.weight, module.bias, module.running_mean, module.running_var, True, 0.1, 1e-5)
    half_weights = module.weight.dtype != torch.float32
    if torch.bfloat16 in (x.dtype, module.weight.dtype) or half_weights:
        return _aten.native_batch_norm.default(*arguments)[0]
    return _aten.cudnn_batch_norm.default(*arguments)[0]


def rms_norm(x: Tensor, weight: Tensor) -> tuple[list[int], list[int]]:
    """The fused operator, which the meta device would take apart; autograd's part is that it saves ``rstd``."""
    replay = KernelReplay()
    rstd = torch.empty((*x.shape[:-1], 1), device="meta")
    out = torch.empty_like(x)
    replay.play("aten._fused_rms_norm.default", (x, x.shape[-1:], weight, None), {}, (out, rstd))
    forward = replay.taken()
    grads = (torch.empty_like(x), torch.empty_like(weight))
    arguments = (torch.empty_like(x), x, x.shape[-1:], rstd, weight, [True, True])
    replay.play("aten._fused_rms_norm_backward.default", arguments, {}, grads)
    del arguments, rstd
    return forward, replay.taken()


def attention(backend: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """scaled_dot_product_attention with a backend that has been chosen; head sizes are multiples of 8."""
    dropout, causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
    if backend == "math":
        return _math_attention(query, key, value, mask, dropout, causal)
    if backend == "flash":
        return _aten._scaled_dot_product_flash_attention.default(query, key, value, dropout, causal)[0]
    if backend == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention.default(query, key, value, mask, True, dropout, causal)[0]
    bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention.default(query, key, value, bias, True, dropout, causal)[0]


def _aligned(mask: Tensor) -> Tensor:
    """pad_bias of attention.cpp: rows of a mask start at multiples of 8 elements."""
    if all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _math_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool) -> Tensor:
    """_scaled_dot_product_attention_math of attention.cpp, temporaries dying in its order."""
    dtype = q.dtype
    if dtype != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    root = math.sqrt(1 / math.sqrt(q.shape[-1]))
    scaled = q * root
    if causal:
        lower = torch.ones((q.shape[-2], k.shape[-2]), dtype=torch.bool, device="meta").tril()
        zero, infinite = (torch.scalar_tensor(x, dtype=q.dtype, device="meta") for x in (0.0, -math.inf))
        mask = torch.where(lower, zero, infinite)
        del zero, infinite, lower
    weights = torch.matmul(scaled, k.transpose(-2, -1) * root)
    if mask is not None:
        weights.add_(mask)
    weights = _aten._safe_softmax.default(weights, -1)
    if dropout:
        weights = _aten.native_dropout.default(weights, dropout, True)[0]
    second_result = weights.to(dtype)
    out = torch.matmul(weights, v).to(dtype)
    del weights, scaled, mask, q, k, v
    del second_result
    return out
