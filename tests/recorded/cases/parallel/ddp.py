"""Data-parallel training loops, one rank of several. See ``tests/recorded/cases/loops``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from tests.recorded.cases.loops.networks import Transformer, convolutional, images, loss_of, tokens
from tests.recorded.cases.loops.registry import Case
from tests.recorded.cases.parallel.group import processes

WORLD_SIZE, ITERATIONS = 8, 3
Loop = Iterator[None]
CASES: dict[str, Case] = {}


def add(name: str, run: Callable[[], Loop]) -> None:
    CASES[f"ddp_{name}"] = Case(f"ddp_{name}", "ddp", run)


def transformer() -> nn.Module:
    return Transformer()


def wide() -> nn.Module:
    """Larger than the buckets: 26 MB in matrices of up to 9 MB."""
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1000), nn.ReLU(), nn.Linear(1000, 2300))


def rows() -> tuple[Tensor, Tensor]:
    return torch.zeros(32, 1024, device="cuda"), torch.zeros(32, dtype=torch.int64, device="cuda")


def loop(
    make: Callable[[], nn.Module] = transformer,
    batch: Callable[[], tuple[Tensor, Tensor]] = tokens,
    *,
    set_to_none: bool = True,
    micro_batches: int = 1,
    autocast: bool = False,
    hook: Callable[[DistributedDataParallel], None] | None = None,
    **options: Any,
) -> Loop:
    with processes(WORLD_SIZE):
        model = make().cuda()
        x, y = batch()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel = DistributedDataParallel(model, device_ids=[0], **options)
        if hook is not None:
            hook(parallel)
        optimizer = torch.optim.AdamW(parallel.parameters())
        for _ in range(ITERATIONS):
            for number in range(micro_batches):
                last = number == micro_batches - 1
                with contextlib.nullcontext() if last else parallel.no_sync():
                    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                        loss = loss_of(parallel(x), y)
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        yield


class SomeUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.head = nn.Linear(256, 512), nn.Linear(300, 300), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.used(x).relu())


def some_unused_rows() -> tuple[Tensor, Tensor]:
    return torch.zeros(16, 256, device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")


def mixed_types() -> nn.Module:
    model = wide()
    model[2].bfloat16()
    model[1].register_forward_hook(lambda _, __, out: out.bfloat16())
    model[2].register_forward_hook(lambda _, __, out: out.float())
    return model


def deep() -> nn.Module:
    """Several buckets of 25 MiB, and matrices larger than one."""
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(5)), nn.Linear(2048, 4096))


def wide_rows() -> tuple[Tensor, Tensor]:
    return torch.zeros(32, 2048, device="cuda"), torch.zeros(32, dtype=torch.int64, device="cuda")


def compress(parallel: DistributedDataParallel) -> None:
    parallel.register_comm_hook(None, default_hooks.bf16_compress_hook)


add("transformer", loop)
add("wide", partial(loop, wide, rows))
add("convolutional", partial(loop, convolutional, images))
add("mixed_types", partial(loop, mixed_types, rows))
add("tied", partial(loop, partial(Transformer, tied=True)))
for _name, _options in {
    "bucket_view": {"gradient_as_bucket_view": True},
    "bucket_view_zeros": {"gradient_as_bucket_view": True, "set_to_none": False},
    "zeros": {"set_to_none": False},
    "static_graph": {"static_graph": True},
    "static_graph_bucket_view": {"static_graph": True, "gradient_as_bucket_view": True},
    "bucket_cap_1": {"bucket_cap_mb": 1},
    "bucket_cap_10": {"bucket_cap_mb": 10},
    "find_unused": {"find_unused_parameters": True},
    "no_sync": {"micro_batches": 3},
    "no_sync_bucket_view": {"micro_batches": 3, "gradient_as_bucket_view": True},
    "autocast": {"autocast": True},
    "no_init_sync": {"init_sync": False},
    "batched_copy": {"batched_grad_copy": True},
}.items():
    add(f"wide_{_name}", partial(loop, wide, rows, **_options))
for _name, _options in {
    "": {},
    "_bucket_view": {"gradient_as_bucket_view": True},
    "_static": {"static_graph": True, "find_unused_parameters": False},
}.items():
    _options = {"find_unused_parameters": True, **_options}
    add(f"some_unused{_name}", partial(loop, SomeUnused, some_unused_rows, **_options))
add("deep", partial(loop, deep, wide_rows))
add("deep_bucket_view", partial(loop, deep, wide_rows, gradient_as_bucket_view=True))
add("deep_compressed", partial(loop, deep, wide_rows, hook=compress))
add("deep_mixed_precision", partial(loop, deep, wide_rows, mixed_precision=_MixedPrecision(torch.bfloat16)))
add("convolutional_no_broadcast", partial(loop, convolutional, images, broadcast_buffers=False))
add("inputs_on_host", partial(loop, convolutional, lambda: (images("cpu")[0], images()[1])))
