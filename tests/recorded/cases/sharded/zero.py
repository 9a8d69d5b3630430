"""DeepSpeed's ZeRO, stages 0 to 3, with PyTorch's AdamW."""

from __future__ import annotations

import os
from typing import Any

import torch

from tests.recorded.cases.sharded.models import BATCH, ITERATIONS, llama, tokens
from tests.recorded.cases.sharded.registry import add

_PINNED = {"device": "cpu", "pin_memory": True}
_SMALL = {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000, "overlap_comm": True}


def config(stage: int, precision: str = "bf16", clip: float = 0.0, **zero: Any) -> dict[str, Any]:
    """The configuration file."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        precision: {"enabled": True},
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,
    }


def zero(stage: int, precision: str = "bf16", **options: Any) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    import deepspeed

    deepspeed.init_distributed("nccl")
    torch.cuda.set_device(0)
    model = llama(device="cpu")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config=config(stage, precision, **options),
    )
    engine.train()
    for _ in range(ITERATIONS):
        ids = tokens()
        output = engine(input_ids=ids, labels=ids)
        engine.backward(output.loss)
        del output
        engine.step()


_NEEDS = ("transformers", "deepspeed")
add("ds_z0", zero, *_NEEDS, stage=0)
add("ds_z1", zero, *_NEEDS, stage=1)
add("ds_z2", zero, *_NEEDS, stage=2)
add("ds_z2_fp16", zero, *_NEEDS, stage=2, precision="fp16")
add("ds_z2_nocontig", zero, *_NEEDS, stage=2, contiguous_gradients=False)
add("ds_z2_noover", zero, *_NEEDS, stage=2, overlap_comm=False)
add("ds_z2_off", zero, *_NEEDS, stage=2, offload_optimizer=_PINNED)
add("ds_z2_small", zero, *_NEEDS, stage=2, **_SMALL)
add("ds_z3", zero, *_NEEDS, stage=3)
add("ds_z3_noover", zero, *_NEEDS, stage=3, overlap_comm=False)
add("ds_z3_off", zero, *_NEEDS, stage=3, offload_optimizer=_PINNED, offload_param=_PINNED)
