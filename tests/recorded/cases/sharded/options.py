"""The programs that options stand for (``--fsdp``, ``--zero``): the documentation's loop around a wrapped model."""

from __future__ import annotations

from typing import Any

import torch

from graphmem.training import FullyShard, Training, ZeRO
from tests.recorded.cases.sharded.fsdp import fully_sharded
from tests.recorded.cases.sharded.models import BATCH, BF16, ITERATIONS, SEQUENCE, VOCABULARY, llama, start
from tests.recorded.cases.sharded.registry import add
from tests.recorded.cases.sharded.zero import config

_SMALL = {"reduce_bucket_size": 5_000_000, "stage3_prefetch_bucket_size": 5_000_000}
#: What a user gives for the program of the same name.
STEPS = {
    "option_fsdp": Training(fsdp=FullyShard(8), amp="bf16"),
    "option_fsdp_kept": Training(fsdp=FullyShard(8, "grad-op"), amp="bf16", grad_accum=2, clip_grad_norm=1.0),
    "option_fsdp_hybrid": Training(fsdp=FullyShard(8, "hybrid:2x4", offload=True), optimizer="sgd"),
    "option_zero2": Training(zero=ZeRO(8, 2), amp="bf16"),
    "option_tp": Training(tp=4, dtype="bf16", optimizer_args=(("foreach", False),)),
    "option_tp_fsdp": Training(tp=2, fsdp=FullyShard(8), amp="bf16", optimizer_args=(("foreach", False),)),
    "option_zero3": Training(zero=ZeRO(8, 3, {"zero_optimization": _SMALL}), amp="bf16", clip_grad_norm=1.0),
}


def model_and_batch() -> tuple[Any, dict[str, torch.Tensor]]:
    """On the host, where both are made."""
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return llama(device="cpu"), {"input_ids": ids, "labels": ids.clone()}


def _on_card(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda") for name, tensor in batch.items()}


def sharded(
    *, mixed: bool, mesh: tuple[int, ...] = (8,), offload: bool = False, accumulate: int = 1, clip: bool = False,
    optimizer: str = "AdamW", **options: Any
) -> None:  # fmt: skip
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    model, batch = model_and_batch()
    batch = _on_card(batch)
    model.train()
    start()
    names = ("replicate", "shard")[-len(mesh) :]
    options["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=names)
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(BF16, torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy()
    fully_sharded(model, **options)
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    for _ in range(ITERATIONS):
        for number in range(accumulate):
            if accumulate > 1:
                model.set_requires_gradient_sync(number == accumulate - 1)
            output = model(**batch)
            loss = output.loss
            if accumulate > 1:
                loss = loss / accumulate
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
    del output


def engine(stage: int, clip: float = 0.0, **options: Any) -> None:
    import deepspeed

    model, batch = model_and_batch()
    batch = _on_card(batch)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    deepspeed.init_distributed("nccl")
    settings = config(stage, clip=clip, **options)
    wrapped, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=settings
    )
    for _ in range(ITERATIONS):
        output = wrapped(**batch)
        loss = output.loss
        wrapped.backward(loss)
        wrapped.step()
    del output


def distributed(*, tensor: int, shards: int = 1, mixed: bool = False) -> None:
    """As ``from_pretrained(distributed_config=...)``, without a checkpoint."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    model, batch = model_and_batch()
    if not mixed:
        model = model.to(BF16)
    config = DistributedConfig(tp_size=tensor, fsdp_size=shards, fsdp_mixed_precision=mixed)
    config, _, meshes = LlamaForCausalLM.prepare_distribute_model(config)
    model = LlamaForCausalLM.maybe_distribute_model(model.to("meta"), config, meshes).to_empty(device="cuda")
    batch = _on_card(batch)
    model.train()
    stepper = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(ITERATIONS):
        output = model(**batch)
        loss = output.loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
    del output


add("option_fsdp", sharded, "transformers", mixed=True)
add("option_fsdp_kept", sharded, "transformers", mixed=True, accumulate=2, clip=True, reshard_after_forward=False)
add("option_fsdp_hybrid", sharded, "transformers", mixed=False, mesh=(2, 4), offload=True, optimizer="SGD")
add("option_zero2", engine, "transformers", "deepspeed", stage=2)
add("option_zero3", engine, "transformers", "deepspeed", stage=3, clip=1.0, **_SMALL)
add("option_tp", distributed, "transformers", world=4, tensor=4)
add("option_tp_fsdp", distributed, "transformers", tensor=2, shards=4, mixed=True)
