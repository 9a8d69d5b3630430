"""Tensor, sequence and context parallelism with DTensor, as torchtitan's llama does it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from tests.recorded.cases.sharded.models import BF16, ITERATIONS, SEQUENCE, loss_of, start, tokens, written_llama
from tests.recorded.cases.sharded.registry import add


def parallelized(model: Any, mesh: Any, sequence: bool, loss: bool) -> Any:
    """``sequence``: activations between the blocks are sharded too. ``loss``: logits stay sharded."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    out = {"output_layouts": Shard(-1) if loss else Replicate(), "use_local_output": not loss}
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
    whole: dict[str, Any]
    if sequence:
        whole = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), **out),
        }
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            **plan,
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**gathered),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
    else:
        whole = {"tok_embeddings": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel(**out)}
        plan |= {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
    parallelize_module(model, mesh, whole)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def tensor_parallel(
    sequence: bool = False, loss: bool = False, shape: tuple[int, ...] = (), foreach: bool | None = None
) -> None:
    """``shape``: data times tensor parallel, the data by FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import loss_parallel

    start()
    if shape:
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
        tensor_mesh = mesh["tp"]
    else:
        tensor_mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelized(written_llama(None if shape else BF16), tensor_mesh, sequence, loss)
    if shape:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)
    for _ in range(ITERATIONS):
        ids = tokens()
        with loss_parallel() if loss else contextlib.nullcontext():
            loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def context_parallel(rotate: str = "allgather") -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    start()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    set_rotate_method(rotate)
    model = written_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(ITERATIONS):
        ids = tokens(sequence=8 * SEQUENCE)
        labels = ids.clone()
        split = parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1])
        with split, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            loss_of(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


add("tp_plain", tensor_parallel, foreach=False)
add("tp_loss", tensor_parallel, loss=True, foreach=False)
add("tp_sp", tensor_parallel, sequence=True)
add("tp_sp_loss_noforeach", tensor_parallel, sequence=True, loss=True, foreach=False)
add("tp_2d", tensor_parallel, shape=(2, 4))
add("cp_allgather", context_parallel)
