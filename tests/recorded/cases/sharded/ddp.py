"""DistributedDataParallel with what people add to it: communication hooks, accumulation, sharded optimizer states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from tests.recorded.cases.sharded.models import ITERATIONS, gpt2, start, tokens
from tests.recorded.cases.sharded.registry import add

_VOCABULARY = 50257


def ddp(
    hook: Callable[[Any], None] | None = None,
    optimizer: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
    accumulate: int = 1,
    iterations: int = ITERATIONS,
    **options: Any,
) -> None:
    from torch.nn.parallel import DistributedDataParallel

    start()
    model = DistributedDataParallel(gpt2(), device_ids=[torch.cuda.current_device()], **options)
    if hook is not None:
        hook(model)
    chosen = optimizer(model)
    for _ in range(iterations):
        for number in range(accumulate):
            ids = tokens(vocabulary=_VOCABULARY)
            last = number == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids).loss
                (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chosen.step()
        chosen.zero_grad()


def _compressed(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _power(model: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _sharded_states(model: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4, foreach=True)


def synchronized_norms(cells: int = 24, autocast: bool = False, iterations: int = ITERATIONS) -> None:
    """A network of convolutions whose batch norms are taken over all processes, as mmseg and mmdet train theirs."""
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    start()
    layers: list[Any] = []
    for channels, wider in ((3, cells), (cells, 2 * cells), (2 * cells, 4 * cells)):
        layers += [
            nn.Conv2d(channels, wider, 3, padding=1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    network = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * cells, 100), nn.BatchNorm1d(100)
    )
    network = nn.SyncBatchNorm.convert_sync_batchnorm(network).cuda()
    model = DistributedDataParallel(network, device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(iterations):
        images = torch.randn(16, 3, 128, 128, device="cuda")
        labels = torch.randint(0, 100, (16,), device="cuda")
        with torch.autocast("cuda", torch.float16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 3, 128, 128, device="cuda"))


add("ddp_sync_batch_norm", synchronized_norms, backend="alone")
add("ddp_sync_batch_norm_amp", synchronized_norms, backend="alone", cells=32, autocast=True)
add("ddp_fp16_hook", ddp, "transformers", backend="alone", hook=_compressed, accumulate=2)
add("ddp_power_sgd", ddp, "transformers", backend="alone", hook=_power, iterations=4)
add("ddp_zero_states", ddp, "transformers", backend="alone", optimizer=_sharded_states, gradient_as_bucket_view=True)
