"""Training loops that share parameters or optimizer state out among processes. See ``tests/recorded/cases/loops``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.recorded.cases.loops.networks import Transformer, loss_of, tokens
from tests.recorded.cases.loops.registry import Case
from tests.recorded.cases.parallel.group import processes

WORLD_SIZE, ITERATIONS = 8, 3
Loop = Iterator[None]
CASES: dict[str, Case] = {}


def add(name: str, run: Callable[[], Loop]) -> None:
    CASES[name] = Case(name, "sharded", run)


def loop(
    wrap: Callable[[Transformer], nn.Module],
    make: Callable[..., Any] = torch.optim.AdamW,
    backend: str = "fake",
    accumulate: int = 1,
) -> Loop:
    with processes(WORLD_SIZE, backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = wrap(Transformer().cuda())
        x, y = tokens()
        optimizer = make(model.parameters())
        for _ in range(ITERATIONS):
            for _ in range(accumulate):
                loss = loss_of(model(x), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield


def fsdp2(model: Transformer, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def tensor_parallel(model: Transformer) -> nn.Module:
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def zero_1(parameters: Any) -> Any:
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
add("fsdp2", partial(loop, fsdp2))
add("fsdp2_kept_unsharded", partial(loop, partial(fsdp2, reshard_after_forward=False)))
add("fsdp2_mixed_precision", partial(loop, partial(fsdp2, mp_policy=BF16)))
add("fsdp2_accumulation", partial(loop, fsdp2, accumulate=2))
add("zero_1", partial(loop, partial(DistributedDataParallel, device_ids=[0]), zero_1, "alone"))
add("tensor_parallel", partial(loop, tensor_parallel, partial(torch.optim.AdamW, foreach=False)))
