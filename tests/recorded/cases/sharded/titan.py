"""The llama of torchtitan on meshes of several dimensions: data, pipeline, tensor parallelism together, with selective
checkpointing, compiled blocks and float8, in the order of its ``parallelize_llama``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.recorded.cases.sharded.models import BF16, ITERATIONS, SEQUENCE, VOCABULARY, Llama, loss_of, start, tokens
from tests.recorded.cases.sharded.registry import add
from tests.recorded.cases.sharded.tensor_parallel import parallelized

_WIDTH = 1024


def _checkpointed(model: Any, every: int) -> None:
    """``every``: of how many blocks one is checkpointed; 0: operators are chosen in each (torchtitan's "op")."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    saved = {aten.mm.default, aten._scaled_dot_product_flash_attention.default}
    saved.add(torch.ops._c10d_functional.reduce_scatter_tensor.default)

    def chosen() -> Any:
        counts: dict[str, int] = {}

        def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            phase = "recomputed" if context.is_recompute else "forward"
            if function is aten.mm.default:
                counts[phase] = counts.get(phase, 0) + 1
                if counts[phase] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if function in saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for number, block in enumerate(model.layers):
        if every == 0:
            model.layers[number] = checkpoint_wrapper(block, context_fn=chosen, preserve_rng_state=False)
        elif number % every == 0:
            model.layers[number] = checkpoint_wrapper(block, preserve_rng_state=False)


def _sharded(model: Any, mesh: Any, is_piped: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)}
    for number, block in enumerate(model.layers):
        last = number == len(model.layers) - 1
        fully_shard(block, **options, reshard_after_forward=not is_piped and not last)
    fully_shard(model, **options, reshard_after_forward=not is_piped)


def titan(
    names: tuple[str, ...],
    sizes: tuple[int, ...],
    every: int | None = None,
    compiles: bool = False,
    accumulate: int = 1,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """``names`` of the mesh: of dp_replicate, dp_shard, tp."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    start()
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
    with torch.device("meta"):
        model = Llama()
    if prepare is not None:
        prepare(model)
    if "tp" in names:
        parallelized(model, mesh["tp"], sequence=True, loss=True)
    if every is not None:
        _checkpointed(model, every)
    if compiles:
        for block in model.layers:
            block.compile(fullgraph=True)
    data = tuple(name for name in names if name.startswith("dp"))
    _sharded(model, mesh[data], is_piped=False)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            ids, labels = tokens(), tokens()
            with loss_parallel() if "tp" in names else contextlib.nullcontext():
                predicted = model(ids)
                loss = loss_of(predicted, labels) / accumulate
                del predicted
                loss.backward()
        _clipped(model)
        optimizer.step()
        scheduler.step()


def _clipped(model: Any, pipeline: Any = None) -> None:
    from torch.distributed.tensor import DTensor

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients, 2.0, error_if_nonfinite=False, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pipeline is not None:
        norm = norm**2
        dist.all_reduce(norm, op=dist.ReduceOp.SUM, group=pipeline.get_group())
        norm = norm**0.5
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)


def titan_piped(schedule: str, sizes: tuple[int, ...] = (2, 2, 2), virtual: int = 1) -> None:
    """Pipeline, data and tensor parallelism: a 3-D mesh."""
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage

    start()
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("pp", "dp_shard", "tp"))
    pipe, rank, count = mesh["pp"], mesh["pp"].get_local_rank(), mesh["pp"].size() * virtual
    device = torch.device("cuda", torch.cuda.current_device())
    stages, models = [], []
    for turn in range(virtual):
        index = turn * mesh["pp"].size() + rank
        with torch.device("meta"):
            model = Llama(layers=8 // count)
        if index > 0:
            model.tok_embeddings = None
        if index < count - 1:
            model.norm = model.output = None
        parallelized(model, mesh["tp"], sequence=True, loss=False)
        _sharded(model, mesh["dp_shard"], is_piped=True)
        model.to_empty(device="cuda")
        ends = _ends(index, count, SEQUENCE // mesh["tp"].size(), device)
        stages.append(PipelineStage(model, index, count, device, *ends, group=pipe.get_group()))
        models.append(model)
    made = getattr(pipelining, schedule)(stages if virtual > 1 else stages[0], n_microbatches=4, loss_fn=loss_of)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True) for model in models]
    for _ in range(ITERATIONS):
        ids = tokens(4, SEQUENCE)
        if rank == 0:
            made.step(ids)
        else:
            made.step(target=ids, losses=[])
        for model in models:
            _clipped(model, pipe)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _ends(index: int, count: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What a stage gets and gives, between stages a share of ``length`` of the sequence: known in advance, as nobody is
    there to be asked."""

    def activations(width: int, length: int = length) -> torch.Tensor:
        return torch.zeros(1, length, width, dtype=BF16, device=device, requires_grad=True)

    ids = torch.zeros(1, SEQUENCE, dtype=torch.long, device=device)
    given = ids if index == 0 else activations(_WIDTH)
    return given, activations(VOCABULARY, SEQUENCE) if index == count - 1 else activations(_WIDTH)


def _float8(model: Any) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model,
        config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
        module_filter_fn=lambda module, name: name != "output",
    )


add("titan_1d_op", titan, names=("dp_shard",), sizes=(8,), every=0, accumulate=2)
add("titan_2d", titan, names=("dp_shard", "tp"), sizes=(4, 2), every=2)
add("titan_hsdp_tp", titan, names=("dp_replicate", "dp_shard", "tp"), sizes=(2, 2, 2), every=0)
add("titan_compiled", titan, names=("dp_shard",), sizes=(8,), compiles=True)
add("titan_float8", titan, "torchao", names=("dp_shard",), sizes=(8,), prepare=_float8)
add("titan_3d_r0", titan_piped, schedule="Schedule1F1B")
add("titan_3d_r7", titan_piped, rank=7, schedule="Schedule1F1B")
