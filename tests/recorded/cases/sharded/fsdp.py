"""``fully_shard`` (FSDP2) and ``FullyShardedDataParallel`` (FSDP1) as their tutorials use them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.recorded.cases.sharded.models import BF16, blocks, clip_norm, gpt2, llama, start, train
from tests.recorded.cases.sharded.registry import add

#: Of FSDP2: what is said of its mixed precision.
_MIXED = {"param_dtype": BF16, "reduce_dtype": torch.float32}


def checkpoint_blocks(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        apply_activation_checkpointing,
        checkpoint_wrapper,
    )

    block = type(blocks(model)[0])
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: isinstance(module, block),
    )


def fully_sharded(model: Any, **options: Any) -> Any:
    """Every block and the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def fsdp2(
    make: Any = llama,
    *,
    dtype: Any = None,
    device: str = "cuda",
    vocabulary: int = 32000,
    mixed: dict[str, Any] | None = None,
    checkpoint: bool = False,
    accumulate: int = 1,
    clip: bool = False,
    mesh: tuple[int, ...] = (),
    offload: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """``mixed``: in place of bf16 with gradients reduced in fp32; a model in ``dtype`` has no mixed precision."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    start()
    if dtype is None:
        options["mp_policy"] = MixedPrecisionPolicy(**_MIXED if mixed is None else mixed)
    if offload is not None:
        options["offload_policy"] = CPUOffloadPolicy(**offload)
    model = make(dtype, device=device)
    if checkpoint:
        checkpoint_blocks(model)
    if mesh:
        options["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard"))
    fully_sharded(model, **options)
    if device == "meta":
        model.to_empty(device="cuda")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    train(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4, **optimizer or {}),
        accumulate=accumulate,
        clip=clip_norm(model) if clip else None,
        is_last=model.set_requires_gradient_sync if accumulate > 1 else None,
        vocabulary=vocabulary,
    )


def fsdp1(
    make: Any = llama,
    *,
    dtype: Any = None,
    vocabulary: int = 32000,
    mixed: bool = True,
    strategy: str = "FULL_SHARD",
    numbered: bool = True,
    offload: bool = False,
    use_orig_params: bool = True,
    **options: Any,
) -> None:
    """``numbered``: ``device_id`` is a number, as ``torch.cuda.current_device()`` says it."""
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    start()
    model = make(dtype)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(blocks(model)[0])})
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32, buffer_dtype=BF16)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.cuda.current_device() if numbered else torch.device("cuda", 0),
        mixed_precision=precision if mixed else None,
        cpu_offload=CPUOffload(offload_params=True) if offload else None,
        use_orig_params=use_orig_params,
        **options,
    )
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), vocabulary=vocabulary)


_HF = ("transformers",)
add("f2_base", fsdp2, *_HF)
add("f2_ac", fsdp2, *_HF, checkpoint=True)
add("f2_accum", fsdp2, *_HF, accumulate=3)
add("f2_adafused", fsdp2, *_HF, optimizer={"fused": True})
add("f2_bf16", fsdp2, *_HF, dtype=BF16)
add("f2_clip", fsdp2, *_HF, clip=True)
add("f2_cpuinit", fsdp2, *_HF, device="cpu")
add("f2_fp32", fsdp2, *_HF, mixed={})
add("f2_gpt2", fsdp2, *_HF, make=gpt2, vocabulary=50257)
add("f2_hsdp", fsdp2, *_HF, mesh=(2, 4))
add("f2_int2", fsdp2, *_HF, reshard_after_forward=2)
add("f2_keep", fsdp2, *_HF, reshard_after_forward=False)
add("f2_meta", fsdp2, *_HF, device="meta")
add("f2_offload", fsdp2, *_HF, device="cpu", offload={})
add("f2_offload_nopin", fsdp2, *_HF, device="cpu", offload={"pin_memory": False})
add("f2_redbf16", fsdp2, *_HF, mixed={"param_dtype": BF16})
add("f2_w2", fsdp2, *_HF, world=2)
add("f1_full", fsdp1, *_HF)
add("f1_fulldev", fsdp1, *_HF, numbered=False)
add("f1_bf16", fsdp1, *_HF, dtype=BF16, mixed=False)
add("f1_gpt2", fsdp1, *_HF, make=gpt2, vocabulary=50257)
add("f1_gradop", fsdp1, *_HF, strategy="SHARD_GRAD_OP")
add("f1_nolimit", fsdp1, *_HF, limit_all_gathers=False, forward_prefetch=True)
add("f1_nomp", fsdp1, *_HF, mixed=False)
add("f1_offload", fsdp1, *_HF, offload=True)
add("f1_offload_flat", fsdp1, *_HF, offload=True, use_orig_params=False, make=gpt2, vocabulary=50257)
add("f1_noshard", fsdp1, *_HF, strategy="NO_SHARD")
