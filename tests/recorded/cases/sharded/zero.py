"""DeepSpeed's ZeRO, stages 0 to 3, with PyTorch's AdamW."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
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


def configured(
    own: dict[str, Any],
    precision: str = "bf16",
    accumulate: int = 1,
    prepare: Callable[[Any], Any] = lambda model: model,
    saves: bool = False,
    **zero: Any,
) -> None:
    """Everything in the configuration, the optimizer and its scheduler too (``own``). ``saves``: evaluated and saved in
    between."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda")
    import deepspeed

    deepspeed.init_distributed()
    chosen = {**config(precision=precision, clip=1.0, **zero), "gradient_accumulation_steps": accumulate, **own}
    model = prepare(llama(device="cpu"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=trained, config=chosen)
    assert "scheduler" not in own or scheduler is not None
    for number in range(ITERATIONS * accumulate):
        engine.train()
        ids = tokens()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        del loss
        if saves and number == 1:
            engine.eval()
            with torch.no_grad():
                engine(input_ids=ids, labels=ids)
            engine.save_checkpoint(tempfile.mkdtemp())


def _checkpointed(model: Any) -> Any:
    """DeepSpeed's own activation checkpointing, the saved activations shared out among processes or on the host."""
    import deepspeed

    deepspeed.checkpointing.configure(None, deepspeed_config=_CHECKPOINTING)
    for block in model.model.layers:
        forward = block.forward

        def run(hidden: torch.Tensor, *args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            return deepspeed.checkpointing.checkpoint(lambda given: forward(given, *args, **kwargs), hidden)

        block.forward = run
    return model


_ADAM = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}
_WARMUP = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 100, "warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 2},
}
_OWN = {"optimizer": _ADAM, "scheduler": _WARMUP}
_CHECKPOINTING = {
    "train_micro_batch_size_per_gpu": BATCH,
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
}
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
add("ds_z1_own", configured, *_NEEDS, own=_OWN, stage=1, accumulate=2, saves=True)
add("ds_z2_checkpointing", configured, *_NEEDS, own=_OWN, stage=2, prepare=_checkpointed, **_SMALL)
