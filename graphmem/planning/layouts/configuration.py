"""The frameworks' own configuration of a layout, as files: the launch command, and the sharding of the model.

Written from the same values that were captured, so that a file and the figure beside it are of the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphmem.planning.layouts.axes import Job, Layout

#: Where a machine other than the first finds it; the user's to set.
_ADDRESS = "$MASTER_ADDR"


@dataclass(frozen=True)
class File:
    """A file to write: its name and its text."""

    name: str
    text: str


def files_of(job: Job, layout: Layout, alloc_conf: str = "") -> tuple[File, ...]:
    """Of a layout: the launcher, with the allocator's options, and the framework's own ones."""
    return tuple(_files(job, layout, alloc_conf))


def _files(job: Job, layout: Layout, alloc_conf: str) -> Iterator[File]:
    if layout.wrapper == "zero":
        yield File("deepspeed.json", json.dumps(deepspeed(job, layout), indent=2) + "\n")
    if layout.pipeline > 1:
        yield File("torchtitan.toml", torchtitan(job, layout))
        yield File("launch.sh", _launch(layout, alloc_conf))
        return
    if not _is_parted(layout) and layout.processes > 1:
        yield File("accelerate.yaml", _yaml(accelerate(job, layout)))
    if layout.wrapper == "fsdp" and layout.context == 1:  # else accelerate shares out sequences, too
        yield File("wrap.py", _distributed(job, layout) if _is_parted(layout) else _fully_shard(job, layout))
    yield File("launch.sh", _launch(layout, alloc_conf))


def _is_parted(layout: Layout) -> bool:
    return layout.tensor > 1 or layout.expert > 1


def _launch(layout: Layout, alloc_conf: str) -> str:
    nodes = layout.processes // layout.on_node
    lines = ["#!/bin/sh"]
    if alloc_conf:
        lines.append(f"export PYTORCH_ALLOC_CONF={alloc_conf}")
    if nodes > 1:
        lines.append("# on every machine: NODE_RANK is its number, MASTER_ADDR the first one's address")
    where = f" --nnodes {nodes} --node-rank $NODE_RANK --master-addr {_ADDRESS}" if nodes > 1 else ""
    if layout.pipeline > 1:
        lines.append(
            f"torchrun --nproc-per-node {layout.on_node}{where} -m torchtitan.train --job.config_file torchtitan.toml"
        )
        return "\n".join(lines) + "\n"
    lines.append(f"torchrun --nproc-per-node {layout.on_node}{where} train.py  # micro-batch {layout.micro_batch}, "
                 f"{layout.accumulate} micro-batches a step")  # fmt: skip
    if not _is_parted(layout) and layout.processes > 1:
        machines = f" --machine_rank $NODE_RANK --main_process_ip {_ADDRESS}" if nodes > 1 else ""
        lines.append("# or, for a program that uses accelerate:")
        lines.append(f"# accelerate launch --config_file accelerate.yaml{machines} train.py")
    return "\n".join(lines) + "\n"


# --- accelerate -------------------------------------------------------------------------------------------------------


def accelerate(job: Job, layout: Layout) -> dict[str, Any]:
    """The file that ``accelerate config`` would write (accelerate 1.x, commands/config/cluster.py)."""
    kind = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "zero": "DEEPSPEED"}[layout.wrapper]
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": job.step.amp or "no",
        "num_machines": layout.processes // layout.on_node,
        "num_processes": layout.processes,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "use_cpu": False,
    }
    if layout.wrapper == "fsdp":
        config["fsdp_config"] = _accelerate_fsdp(job, layout)
        if layout.replicas > 1 or layout.context > 1:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": layout.replicas,
                "parallelism_config_dp_shard_size": layout.shards // layout.context,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": layout.context,
            }
    if layout.wrapper == "zero":
        del config["mixed_precision"]  # the file of DeepSpeed says it
        config["deepspeed_config"] = {"deepspeed_config_file": "deepspeed.json", "zero3_init_flag": layout.shard == "3"}
    else:
        config["gradient_accumulation_steps"] = layout.accumulate
    return config


def _accelerate_fsdp(job: Job, layout: Layout) -> dict[str, object]:
    wrap: dict[str, Any] = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if job.shape.unit_names:
        wrap["fsdp_transformer_layer_cls_to_wrap"] = ",".join(job.shape.unit_names)
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.shard != "grad-op",
        "fsdp_offload_params": layout.offload,
        "fsdp_activation_checkpointing": layout.recompute,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        **wrap,
    }


def _yaml(config: dict[str, object], indent: str = "") -> str:
    """Of tables, texts, numbers and switches: as much of YAML as these files have."""
    lines = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:\n{_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if value == "no" else str(value)


# --- PyTorch and transformers -----------------------------------------------------------------------------------------

_PRECISIONS = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def _fully_shard(job: Job, layout: Layout) -> str:
    """The options of ``fully_shard`` as a function to call."""
    shape, names = f"({layout.shards},)", '("shard",)'
    if layout.replicas > 1:
        shape, names = f"({layout.replicas}, {layout.shards})", '("replicate", "shard")'
    precision = _PRECISIONS.get(job.step.amp or "")
    lines = [
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard",
        "",
        "",
        "def wrap(model, blocks):",
        f'    """`blocks`: the repeated ones{_called(job)}, each sharded by itself."""',
        "    options = {",
        f'        "mesh": init_device_mesh("cuda", {shape}, mesh_dim_names={names}),',
        f'        "reshard_after_forward": {layout.shard != "grad-op"},',
        '        "mp_policy": '
        + (f"MixedPrecisionPolicy({precision}, torch.float32)," if precision else "MixedPrecisionPolicy(),"),
        f'        "offload_policy": {"CPUOffloadPolicy" if layout.offload else "OffloadPolicy"}(),',
        "    }",
        "    for block in blocks:",
        "        fully_shard(block, **options)",
        "    fully_shard(model, **options)",
        "    return model",
    ]
    if layout.recompute:
        lines.insert(7, "    model.gradient_checkpointing_enable()")
    if layout.accumulate > 1:
        when = "only before the last micro-batch of a step" if layout.whole_gradients else "never"
        lines += [
            "",
            "",
            f"# {layout.accumulate} micro-batches of {layout.micro_batch} a step. model.set_requires_gradient_sync:"
            + (f" False, and True {when}." if layout.whole_gradients else " leave it at True;"),
        ]
        if not layout.whole_gradients:
            lines.append("# with accelerate: GradientAccumulationPlugin(num_steps=N, sync_each_batch=True).")
    return "\n".join(lines) + "\n"


def _called(job: Job) -> str:
    return f" ({', '.join(job.shape.unit_names)})" if job.shape.unit_names else ""


def _distributed(job: Job, layout: Layout) -> str:
    """transformers' own way to load a model in parts."""
    options = {
        "tp_size": layout.tensor,
        "fsdp_size": layout.data,
        "ep_size": layout.expert,
        "fsdp_cpu_offload": layout.offload,
        "fsdp_mixed_precision": job.step.amp == "bf16",
    }
    arguments = ", ".join(
        f"{name}={value}" for name, value in options.items() if not (name == "ep_size" and value == 1)
    )
    recompute = "    model.gradient_checkpointing_enable()\n" if layout.recompute else ""
    return (
        "from transformers import AutoModelForCausalLM\n"
        "from transformers.distributed import DistributedConfig\n\n\n"
        "def load(name):\n"
        f"    config = DistributedConfig({arguments})\n"
        "    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)\n"
        f"{recompute}"
        "    return model\n"
    )


# --- torchtitan -------------------------------------------------------------------------------------------------------


def torchtitan(job: Job, layout: Layout) -> str:
    """The job file of a layout for torchtitan (torchtitan/config/job_config.py); the model's name and flavour are the
    user's."""
    lines = [
        "[training]",
        f"local_batch_size = {layout.rows}",
        f"global_batch_size = {job.sequences}",
        f"seq_len = {job.seq_len}",
        *([f'mixed_precision_param = "{_TITAN[job.step.amp]}"'] if job.step.amp in _TITAN else []),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {layout.replicas}",
        f"data_parallel_shard_degree = {layout.shards}",
        f"tensor_parallel_degree = {layout.tensor}",
        f"pipeline_parallel_degree = {layout.pipeline}",
        'pipeline_parallel_schedule = "1F1B"',
        f"pipeline_parallel_microbatch_size = {layout.micro_batch}",
        "",
        "[activation_checkpoint]",
        f'mode = "{"full" if layout.recompute else "none"}"',
    ]
    return "\n".join(lines) + "\n"


_TITAN = {"bf16": "bfloat16", "fp16": "float16"}


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


def deepspeed(job: Job, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's configuration, whole."""
    precision = job.step.amp or (job.step.dtype if job.step.dtype in _PRECISIONS else None)
    zero = {"stage": int(layout.shard), **layout.zero_configuration().get("zero_optimization", {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulate,
        "zero_optimization": zero,
    }
    if job.step.clip_grad_norm is not None:
        config["gradient_clipping"] = job.step.clip_grad_norm
    if precision:
        config[precision] = {"enabled": True}
    return config
