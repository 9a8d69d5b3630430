"""The programs that options stand for (``--fsdp``, ``--zero``, ``--pp``): the documentation's loop around a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphmem.training import FullyShard, PipelineParallel, Training, ZeRO
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
    "option_tp_sp": Training(tp=4, sp=True, dtype="bf16"),
    "option_tp_plan": Training(
        tp=4, dtype="bf16", tp_plan=(("lm_head", "replicate"),), optimizer_args=(("foreach", False),)
    ),
    "option_tp_fsdp": Training(tp=2, fsdp=FullyShard(8), amp="bf16", optimizer_args=(("foreach", False),)),
    "option_tp_hybrid": Training(
        tp=2, fsdp=FullyShard(8, "hybrid:2x2"), amp="bf16", optimizer_args=(("foreach", False),), rank=5
    ),
    "option_cp": Training(cp=4, fsdp=FullyShard(8), amp="bf16", rank=5),
    "option_ep": Training(ep=4, fsdp=FullyShard(4), amp="bf16", optimizer_args=(("foreach", False),)),
    "option_zero3": Training(zero=ZeRO(8, 3, {"zero_optimization": _SMALL}), amp="bf16", clip_grad_norm=1.0),
    "option_zero1_tp": Training(zero=ZeRO(8, 1), tp=2, amp="bf16"),
    "option_zero3_tp": Training(zero=ZeRO(8, 3, {"zero_optimization": _SMALL}), tp=4, amp="bf16"),
    "option_pp_gpipe": Training(pp=PipelineParallel(4, "gpipe", 4), dtype="bf16"),
    "option_pp_1f1b": Training(pp=PipelineParallel(4, "1f1b"), dtype="bf16", rank=3, clip_grad_norm=1.0),
    "option_pp_1f1b_middle": Training(
        pp=PipelineParallel(4, "1f1b", 4), dtype="bf16", rank=1, loop="drop", checkpoint_activations=True
    ),
    "option_pp_interleaved": Training(
        pp=PipelineParallel(2, "Interleaved1F1B", 2, (1, 1, 1, 1)), rank=1, optimizer="sgd", grad_accum=2
    ),
    "option_pp_zbv": Training(pp=PipelineParallel(2, "zbv", 4), dtype="bf16", loop="drop"),
    "option_pp_zero_bubble": Training(pp=PipelineParallel(2, "InterleavedZeroBubble", 4), dtype="bf16", rank=1),
    "option_pp_looped_bfs": Training(pp=PipelineParallel(2, "LoopedBFS", 4), dtype="bf16", rank=1),
    "option_pp_dual_pipe_v": Training(pp=PipelineParallel(2, "DualPipeV", 4), dtype="bf16", rank=0, loop="drop"),
    "option_pp_fsdp": Training(pp=PipelineParallel(2, "1f1b", 4), fsdp=FullyShard(8, "grad-op"), amp="bf16", rank=7),
    "option_pp_hybrid": Training(pp=PipelineParallel(2, "gpipe", 2), fsdp=FullyShard(8, "hybrid:2x2"), amp="bf16"),
}
#: Rows of the batch that a pipeline cuts.
ROWS = 8


def model_and_batch(batch: int = BATCH) -> tuple[Any, dict[str, torch.Tensor]]:
    """On the host, where both are made."""
    ids = torch.randint(0, VOCABULARY, (batch, SEQUENCE))
    return llama(device="cpu"), {"input_ids": ids, "labels": ids.clone()}


def experts_and_batch() -> tuple[Any, dict[str, torch.Tensor]]:
    """Eight experts a layer, two of them for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=2048,
            use_cache=False,
        )
    )  # fmt: skip
    return model, {"input_ids": ids, "labels": ids.clone()}


def given(name: str) -> tuple[Any, int | None]:
    """What an option is given for: the function that makes the model and its batch, and the rows."""
    step = STEPS[name]
    return experts_and_batch if step.ep else model_and_batch, ROWS if step.pp is not None else None


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


def engine(stage: int, clip: float = 0.0, tensor: int = 1, **options: Any) -> None:
    import deepspeed

    model, batch = model_and_batch()
    batch = _on_card(batch)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    deepspeed.init_distributed("nccl")
    settings = config(stage, clip=clip, **options)
    if tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": tensor}
    wrapped, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=settings
    )
    for _ in range(ITERATIONS):
        output = wrapped(**batch)
        loss = output.loss
        wrapped.backward(loss)
        wrapped.step()
    del output


def share_layers(layers: Any, mesh: Any) -> None:
    """Layers of llama in sequence parallelism: norms on a part of the sequence, the rest gathers and scatters it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    for layer in layers:
        plan: dict[str, Any] = {f"self_attn.{name}_proj": styles.ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": styles.ColwiseParallel() for name in ("gate", "up")}
        plan |= {
            name: styles.RowwiseParallel(output_layouts=Shard(1)) for name in ("self_attn.o_proj", "mlp.down_proj")
        }
        plan |= {name: styles.SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
        plan["mlp"] = styles.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan["self_attn"] = styles.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        styles.parallelize_module(layer, mesh, plan)


def sequence_parallel() -> None:
    """As torchtitan parallelizes a llama of transformers."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as styles

    model, batch = model_and_batch()
    batch["position_ids"] = torch.arange(SEQUENCE).unsqueeze(0)
    start()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = model.to(BF16).to("meta")
    top = {
        "model.embed_tokens": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": styles.SequenceParallel(),
        "lm_head": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    styles.parallelize_module(model, mesh, top)
    share_layers(model.model.layers, mesh)
    model = model.to_empty(device="cuda")
    batch = _on_card(batch)
    model.train()
    stepper = torch.optim.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        output = model(**batch)
        loss = output.loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
    del output


def distributed(
    *, tensor: int = 1, shards: int = 1, experts: int = 1, replicas: int = 1, mixed: bool = False,
    plan: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """As ``from_pretrained(distributed_config=...)``, without a checkpoint."""
    from transformers.distributed import DistributedConfig

    model, batch = experts_and_batch() if experts > 1 else model_and_batch()
    if not mixed:
        model = model.to(BF16)
    config = DistributedConfig(
        tp_size=tensor, fsdp_size=shards, dp_replicate_size=replicas, ep_size=experts, fsdp_mixed_precision=mixed,
        tp_plan=plan,
    )  # fmt: skip
    config, _, meshes = type(model).prepare_distribute_model(config)
    model = type(model).maybe_distribute_model(model.to("meta"), config, meshes).to_empty(device="cuda")
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


def shared_sequences(*, processes: int, shards: int) -> None:
    """As Accelerate prepares a model (``ParallelismConfig(cp_size=..., dp_shard_size=...)``), ``Trainer`` a batch."""
    from accelerate.big_modeling import _attach_context_parallel_hooks
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.experimental import context_parallel

    model, batch = model_and_batch()
    batch["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    batch["position_ids"] = torch.arange(SEQUENCE).expand(BATCH, -1).contiguous()
    batch = _on_card(batch)
    model.train()
    start()
    mesh = init_device_mesh("cuda", (shards, processes), mesh_dim_names=("dp_shard", "cp"))
    _attach_context_parallel_hooks(model)
    joint = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    fully_sharded(model, mesh=joint, mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(ITERATIONS):
        buffers = [batch[name] for name in ("input_ids", "labels", "shift_labels", "position_ids")]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 1, 1]):
            output = model(**batch)
            loss = output.loss
            loss.backward()
        stepper.step()
        stepper.zero_grad()
    del output


class Part(nn.Module):
    """Some layers of a llama: on tokens with the first stage, up to logits with the last."""

    def __init__(self, llama: Any, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        base = llama.model
        base.layers = nn.ModuleList(base.layers[number] for number in layers)
        if not is_first:
            base.embed_tokens = None
        if not is_last:
            base.norm = nn.Identity()
        self.part = llama if is_last else base
        self.takes = "input_ids" if is_first else "inputs_embeds"
        self.gives = "logits" if is_last else "last_hidden_state"

    def forward(self, given: torch.Tensor, **others: Any) -> Any:
        return getattr(self.part(**{self.takes: given}, use_cache=False, **others), self.gives)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> Any:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits=logits, labels=labels, vocab_size=VOCABULARY)


def clip_over(parameters: Sequence[Any], group: Any) -> None:
    """Of one stage of several, by the norm of all of them."""
    norm: Any = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    norm **= 2.0
    torch.distributed.all_reduce(norm, group=group)
    norm **= 0.5
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)


def pipelined(
    *, schedule: str, numbers: Sequence[int], ends: Sequence[int], micro_batches: int = ROWS,
    mesh: tuple[int, ...] = (), dtype: Any = BF16, optimizer: str = "AdamW", clip: bool = False,
    accumulate: int = 1, recompute: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Stages ``numbers`` of a llama whose stages end before the layers ``ends``. ``mesh``: of FSDP2 on each stage;
    ``options`` of it, and of ``schedule.step``."""
    import torch.distributed as dist
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, batch = model_and_batch(ROWS)
    batch = _on_card(batch)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable()
    start()
    device, last = torch.device("cuda", torch.cuda.current_device()), len(ends) - 1
    processes = dist.get_world_size()
    for size in mesh:
        processes //= size
    names = ("pp", "replicate", "shard") if len(mesh) == 2 else ("pp", "shard")[: 1 + len(mesh)]
    meshes = init_device_mesh("cuda", (processes, *mesh), mesh_dim_names=names)
    group = meshes["pp"].get_group()
    steppers, stages, parts = [], [], []
    keywords = {"return_outputs": options.pop("return_outputs")} if "return_outputs" in options else {}
    for number in numbers:
        owned = range(ends[number - 1] if number else 0, ends[number])
        part = Part(copy.deepcopy(model), owned, number == 0, number == last)
        if mesh:
            options |= {"mesh": meshes[names[1:]], "mp_policy": MixedPrecisionPolicy(BF16, torch.float32)}
            for layer in (part.part.model if number == last else part.part).layers:
                fully_shard(layer, **options)
            fully_shard(part, **options)
        else:
            part.to(device, dtype)
        parts.append(part)
    del model
    shape = (ROWS // micro_batches, SEQUENCE)
    hidden = {"dtype": dtype, "device": "meta", "requires_grad": True}
    for number, part in zip(numbers, parts, strict=True):
        steppers.append(getattr(torch.optim, optimizer)(part.parameters(), lr=1e-3))
        given = torch.empty(*shape, 1024, **hidden) if number else torch.empty(*shape, dtype=torch.long, device="meta")
        returned = torch.empty(*shape, VOCABULARY if number == last else 1024, **hidden)
        stages.append(
            pipelining.PipelineStage(
                part, number, len(ends), device, input_args=(given,), output_args=(returned,), group=group
            )
        )
    kind = pipelining.schedules.get_schedule_class(schedule)
    is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    made = kind(stages[0] if is_single else stages, n_microbatches=micro_batches, loss_fn=loss_of)
    for _ in range(ITERATIONS):
        for _ in range(accumulate):
            tokens = [batch["input_ids"]] if 0 in numbers else []
            losses: list[Any] | None = [] if last in numbers else None
            target = batch["labels"] if last in numbers else None
            output = made.step(*tokens, target=target, losses=losses, **keywords)
        if clip:
            clip_over([parameter for part in parts for parameter in part.parameters()], group)
        for stepper in steppers:
            stepper.step()
        for stepper in steppers:
            stepper.zero_grad()
    del output


add("option_fsdp", sharded, "transformers", mixed=True)
add("option_fsdp_kept", sharded, "transformers", mixed=True, accumulate=2, clip=True, reshard_after_forward=False)
add("option_fsdp_hybrid", sharded, "transformers", mixed=False, mesh=(2, 4), offload=True, optimizer="SGD")
add("option_zero2", engine, "transformers", "deepspeed", stage=2)
add("option_zero3", engine, "transformers", "deepspeed", stage=3, clip=1.0, **_SMALL)
add("option_zero1_tp", engine, "transformers", "deepspeed", stage=1, tensor=2)
add("option_zero3_tp", engine, "transformers", "deepspeed", stage=3, tensor=4, **_SMALL)
add("option_tp", distributed, "transformers", world=4, tensor=4)
add("option_tp_sp", sequence_parallel, "transformers", world=4)
add("option_tp_plan", distributed, "transformers", world=4, tensor=4, plan={"lm_head": "replicate"})
add("option_cp", shared_sequences, "transformers", "accelerate", rank=5, processes=4, shards=2)
add("option_ep", distributed, "transformers", world=4, shards=4, experts=4, mixed=True)
add("option_tp_fsdp", distributed, "transformers", tensor=2, shards=4, mixed=True)
add("option_tp_hybrid", distributed, "transformers", rank=5, tensor=2, shards=2, replicas=2, mixed=True)

_FOUR = {"world": 4, "ends": (1, 3, 4, 4)}
_TWO = {"world": 2, "ends": (1, 3, 4, 4)}
add("option_pp_gpipe", pipelined, schedule="GPipe", numbers=(0,), micro_batches=4, **_FOUR)
add("option_pp_1f1b", pipelined, rank=3, schedule="1F1B", numbers=(3,), clip=True, **_FOUR)
add("option_pp_1f1b_middle", pipelined, rank=1, schedule="1F1B", numbers=(1,), micro_batches=4, recompute=True,
    return_outputs=False, **_FOUR)  # fmt: skip
add("option_pp_interleaved", pipelined, world=2, rank=1, schedule="Interleaved1F1B", numbers=(1, 3), ends=(1, 2, 3, 4),
    micro_batches=2, dtype=torch.float32, optimizer="SGD", accumulate=2)  # fmt: skip
add("option_pp_zbv", pipelined, schedule="ZBVZeroBubble", numbers=(0, 3), micro_batches=4, return_outputs=False, **_TWO)
add("option_pp_zero_bubble", pipelined, rank=1, schedule="InterleavedZeroBubble", numbers=(1, 3), micro_batches=4,
    **_TWO)  # fmt: skip
add("option_pp_looped_bfs", pipelined, rank=1, schedule="LoopedBFS", numbers=(1, 3), micro_batches=4, **_TWO)
add("option_pp_dual_pipe_v", pipelined, schedule="DualPipeV", numbers=(0, 3), micro_batches=4, return_outputs=False,
    **_TWO)  # fmt: skip
add("option_pp_fsdp", pipelined, rank=7, schedule="1F1B", numbers=(1,), ends=(2, 4), micro_batches=4, mesh=(4,),
    reshard_after_forward=False)  # fmt: skip
add("option_pp_hybrid", pipelined, schedule="GPipe", numbers=(0,), ends=(2, 4), micro_batches=2, mesh=(2, 2))
