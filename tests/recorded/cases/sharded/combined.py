"""The programs that combined options stand for: meshes of several dimensions, in torchtitan's order.

Stages first, then tensor parallelism on ``meta``, then FSDP2, then memory; sequences are cut around both passes.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from graphmem.training import DataParallel, FullyShard, PipelineParallel, Training
from tests.recorded.cases.sharded.models import BATCH, BF16, ITERATIONS, SEQUENCE, VOCABULARY, start
from tests.recorded.cases.sharded.options import ROWS, Part, clip_over, loss_of, model_and_batch, share_layers
from tests.recorded.cases.sharded.registry import add

_SINGLE = (("foreach", False),)
_MIXED = {"amp": "bf16"}
#: What a user gives for the program of the same name.
STEPS = {
    "option_tp_sp_fsdp": Training(tp=2, sp=True, fsdp=FullyShard(8), **_MIXED, clip_grad_norm=1.0),
    "option_tp_sp_hybrid": Training(
        tp=2, sp=True, fsdp=FullyShard(8, "hybrid:2x2"), checkpoint_activations=True, rank=7, **_MIXED
    ),
    "option_pp_tp": Training(pp=PipelineParallel(2, "1f1b", 4), tp=2, dtype="bf16", optimizer_args=_SINGLE, rank=2),
    "option_pp_tp_sp": Training(pp=PipelineParallel(2, "1f1b", 4), tp=2, sp=True, dtype="bf16", rank=1),
    "option_pp_tp_fsdp": Training(
        pp=PipelineParallel(2, "1f1b", 4), tp=2, sp=True, fsdp=FullyShard(8), rank=7, clip_grad_norm=1.0, **_MIXED
    ),
    "option_pp_tp_hybrid": Training(
        pp=PipelineParallel(2, "gpipe", 4), tp=2, fsdp=FullyShard(16, "hybrid:2x2"), optimizer_args=_SINGLE, **_MIXED
    ),
    "option_cp_tp": Training(cp=2, tp=2, fsdp=FullyShard(8), optimizer_args=_SINGLE, rank=1, **_MIXED),
    "option_cp_tp_sp": Training(cp=2, tp=2, sp=True, fsdp=FullyShard(8), **_MIXED),
    "option_cp_pp": Training(cp=2, pp=PipelineParallel(2, "1f1b", 4), fsdp=FullyShard(8), rank=6, **_MIXED),
    "option_cp_pp_tp": Training(
        cp=2, tp=2, sp=True, pp=PipelineParallel(2, "1f1b", 4), fsdp=FullyShard(16, "grad-op"), **_MIXED
    ),
    "option_ddp_pp": Training(ddp=DataParallel(8), pp=PipelineParallel(2, "1f1b", 4), dtype="bf16", grad_accum=2),
}


def given(name: str) -> tuple[Any, int | None]:
    """What an option is given for: the function that makes the model and its batch, and the rows."""
    return model_and_batch, ROWS if STEPS[name].pp is not None else None


def loss_of_shifted(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits=logits, labels=None, vocab_size=VOCABULARY, shift_labels=labels)


def in_sequence_parallel(model: Any, mesh: Any) -> None:
    """A llama of transformers, or what a stage has of it, as torchtitan parallelizes it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    base = getattr(model, "model", model)
    if getattr(base, "embed_tokens", None) is not None:
        embedding = styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        styles.parallelize_module(base.embed_tokens, mesh, embedding)
    if hasattr(model, "lm_head"):
        styles.parallelize_module(base.norm, mesh, styles.SequenceParallel())
        head = styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        styles.parallelize_module(model.lm_head, mesh, head)
    share_layers(base.layers, mesh)


def _by_plan(model: Any, mesh: Any) -> None:
    """By transformers' own plan."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    apply_tensor_parallelism(model, mesh, plan)


def _fully_sharded(part: Any, layers: Any, mesh: Any, names: set[str], **options: Any) -> None:
    """Over the processes that share no more than a sequence."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    inner = "dp_shard"
    if "cp" in names:
        inner = "dp_shard_cp"
        joint = mesh["dp_shard", "cp"]._flatten(inner)
    else:
        joint = mesh[inner]
    options["mesh"] = mesh["dp_replicate", inner] if "dp_replicate" in names else joint
    options["mp_policy"] = MixedPrecisionPolicy(BF16, torch.float32)
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(part, **options)


def combined(
    *, sequence: bool = False, schedule: str | None = None, stage: int = 0, ends: tuple[int, ...] = (2, 4),
    foreach: bool | None = None, clip: bool = False, recompute: bool = False, accumulate: int = 1,
    options: dict[str, Any] | None = None, **sizes: int,
) -> None:  # fmt: skip
    """``sizes`` of the mesh, of pp, dp_replicate, dp_shard, cp, tp, the outermost first. ``sequence``: activations
    between layers are shared out too, else by transformers' plan. ``stage`` of a pipeline whose stages end before the
    layers ``ends``. ``options`` of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh

    rows, names = ROWS if schedule else BATCH, set(sizes)
    model, batch = model_and_batch(rows)
    if "cp" in names:
        from accelerate.big_modeling import _attach_context_parallel_hooks
        from torch.distributed.tensor.experimental import context_parallel

        batch["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    if sequence or "cp" in names:
        of_rows = rows if schedule or "cp" in names else 1
        batch["position_ids"] = torch.arange(SEQUENCE).expand(of_rows, -1).contiguous()
    batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
    model.train()
    if recompute:
        model.gradient_checkpointing_enable()
    start()
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "cp" in names:
        _attach_context_parallel_hooks(model)
    if "dp_shard" not in names:
        model = model.to(BF16)
    if "tp" in names:
        model = model.to("meta")
        if not sequence:
            _by_plan(model, mesh["tp"])
    last = len(ends) - 1
    if schedule:
        part: Any = Part(model, range(ends[stage - 1] if stage else 0, ends[stage]), stage == 0, stage == last)
        inner = part.part
    else:
        part = inner = model
    del model
    if sequence:
        in_sequence_parallel(inner, mesh["tp"])
    if "dp_shard" in names:
        _fully_sharded(part, getattr(inner, "model", inner).layers, mesh, names, **options or {})
    part = part.to_empty(device="cuda") if "tp" in names else part.to("cuda") if "dp_shard" not in names else part
    if "dp_replicate" in names and "dp_shard" not in names:
        group = mesh["dp_replicate"].get_group()
        part = nn.parallel.DistributedDataParallel(part, device_ids=[torch.cuda.current_device()], process_group=group)
    stepper = torch.optim.AdamW(part.parameters(), lr=1e-3, foreach=foreach)

    def cut() -> Any:
        if "cp" not in names:
            return contextlib.nullcontext()
        return context_parallel(mesh["cp"], buffers=list(batch.values()), buffer_seq_dims=[1] * len(batch))

    if schedule:
        run = _scheduled(part, schedule, stage, last, mesh, sizes, sequence)
    for _ in range(ITERATIONS):
        for _ in range(accumulate):
            with cut():
                if schedule:
                    tokens = [batch["input_ids"]] if stage == 0 else []
                    target = batch["shift_labels" if "cp" in names else "labels"] if stage == last else None
                    losses: list[Any] | None = [] if stage == last else None
                    others = {"position_ids": batch["position_ids"]} if "position_ids" in batch else {}
                    output = run.step(*tokens, target=target, losses=losses, **others)
                else:
                    output = part(**batch)
                    loss = output.loss
                    loss.backward()
        if clip and schedule:
            clip_over(list(part.parameters()), mesh["pp"].get_group())
        elif clip:
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
    del output


def _scheduled(part: Any, name: str, stage: int, last: int, mesh: Any, sizes: dict[str, int], sequence: bool) -> Any:
    """Four micro-batches; what stages exchange is known in advance."""
    from torch.distributed import pipelining

    length = SEQUENCE // sizes.get("cp", 1)
    shared = length // sizes.get("tp", 1) if sequence else length
    hidden = {"dtype": BF16, "device": "meta", "requires_grad": True}
    rows = ROWS // 4
    given = torch.empty(rows, shared, 1024, **hidden)
    if stage == 0:
        given = torch.empty(rows, length, dtype=torch.long, device="meta")
    returned = torch.empty(rows, length, VOCABULARY, **hidden) if stage == last else torch.empty_like(given)
    if stage == 0:
        returned = torch.empty(rows, shared, 1024, **hidden)
    device = torch.device("cuda", torch.cuda.current_device())
    made = pipelining.PipelineStage(
        part, stage, last + 1, device, input_args=(given,), output_args=(returned,), group=mesh["pp"].get_group()
    )
    loss = loss_of_shifted if "cp" in sizes else loss_of
    return pipelining.schedules.get_schedule_class(name)(made, n_microbatches=4, loss_fn=loss)


_PIPED = {"schedule": "1F1B"}
_CUT = ("transformers", "accelerate")
add("option_tp_sp_fsdp", combined, "transformers", sequence=True, dp_shard=4, tp=2, clip=True)
add("option_tp_sp_hybrid", combined, "transformers", rank=7, sequence=True, dp_replicate=2, dp_shard=2, tp=2,
    recompute=True)  # fmt: skip
add("option_pp_tp", combined, "transformers", world=4, rank=2, pp=2, tp=2, stage=1, foreach=False, **_PIPED)
add("option_pp_tp_sp", combined, "transformers", world=4, rank=1, pp=2, tp=2, sequence=True, **_PIPED)
add("option_pp_tp_fsdp", combined, "transformers", rank=7, pp=2, dp_shard=2, tp=2, sequence=True, stage=1, clip=True,
    **_PIPED)  # fmt: skip
add("option_pp_tp_hybrid", combined, "transformers", world=16, pp=2, dp_replicate=2, dp_shard=2, tp=2, foreach=False,
    schedule="GPipe")  # fmt: skip
add("option_cp_tp", combined, *_CUT, rank=1, dp_shard=2, cp=2, tp=2, foreach=False)
add("option_cp_tp_sp", combined, *_CUT, dp_shard=2, cp=2, tp=2, sequence=True)
add("option_cp_pp", combined, *_CUT, rank=6, pp=2, dp_shard=2, cp=2, stage=1, **_PIPED)
add("option_cp_pp_tp", combined, *_CUT, world=16, pp=2, dp_shard=2, cp=2, tp=2, sequence=True,
    options={"reshard_after_forward": False}, **_PIPED)  # fmt: skip
add("option_ddp_pp", combined, "transformers", backend="alone", pp=2, dp_replicate=4, accumulate=2, **_PIPED)
