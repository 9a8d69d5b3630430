"""Launchers: the environment that torchrun and accelerate give a program, and what of their files is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")
pytest.importorskip("yaml")

from graphmem.cli.launch import _FSDP_DEFAULTS, accelerate_launch, launch_of
from graphmem.cli.main import cli
from graphmem.errors import UsageError
from graphmem.training.processes import Processes

PROGRAM = """
import os, torch
import torch.distributed as dist
dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")))
print(dist.get_rank(), dist.get_world_size(), os.environ.get("ACCELERATE_MIXED_PRECISION"))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).to(f"cuda:{local}"), device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    model(torch.zeros(8, 512, device="cuda")).sum().backward()
    optimizer.step()
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", "--format", "json", *arguments], prog_name="graphmem")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def configuration(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--nproc-per-node 8", ["0 0 8 8 29500", "0 8 None"]),
        ("--nproc_per_node=4 --nnodes 2 --node_rank 1 --master-port 1234", ["4 0 8 4 1234", "4 8 None"]),
        ("--nproc-per-node 4 --nnodes 2 --rank 6", ["6 2 8 4 29500", "6 8 None"]),
    ],
)
def test_torchrun(options: str, said: list[str], program: str) -> None:
    pytest.importorskip("torch")
    result = run(*options.split(), program)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[:2] == said
    document = json.loads(result.stdout)
    assert document["step"].startswith("whole program, 3 optimizer steps, rank ")
    assert "of 8 processes" in document["step"]
    assert document["breakdown"]["COMMUNICATION"] >= 512 * 512 * 4


def test_accelerate(program: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\nnum_machines: 2\ngpu_ids: all\n"
    result = run("--config", configuration(tmp_path, text), program)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[:2] == ["0 0 4 2 29500", "0 4 bf16"]


def test_a_mesh_is_told_as_accelerate_tells_it(tmp_path: Path) -> None:
    text = """
distributed_type: FSDP
num_processes: 8
fsdp_config: {fsdp_version: 2}
parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_cp_size: 2}
"""
    told = dict(accelerate_launch(Path(configuration(tmp_path, text))).environment)
    sizes = {name: told[f"PARALLELISM_CONFIG_{name}_SIZE"] for name in ("DP_REPLICATE", "DP_SHARD", "CP", "TP", "SP")}
    assert sizes == {"DP_REPLICATE": "1", "DP_SHARD": "4", "CP": "2", "TP": "1", "SP": "1"}
    assert told["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    with pytest.raises(UsageError, match="parallelism_config_cp_size is a whole number of at least 1, not 0"):
        accelerate_launch(Path(configuration(tmp_path, text.replace("cp_size: 2", "cp_size: 0"))))


def test_fsdp2_is_told_as_accelerate_tells_it(tmp_path: Path) -> None:
    text = """
distributed_type: FSDP
mixed_precision: no
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
dynamo_config:
  dynamo_backend: inductor
"""
    launch = accelerate_launch(Path(configuration(tmp_path, text)))
    values = dict(launch.environment)
    assert launch.processes == Processes(8, 0, 8)
    assert values["ACCELERATE_MIXED_PRECISION"] == "no"
    assert {name: values[name] for name in values if "FSDP" in name} == {
        **_FSDP_DEFAULTS,
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    }
    assert values["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"


def test_deepspeed_is_told_as_accelerate_tells_it(tmp_path: Path) -> None:
    text = """
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 16
num_machines: 2
deepspeed_config:
  deepspeed_multinode_launcher: standard
  zero_stage: 3
  offload_optimizer_device: cpu
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  zero3_init_flag: true
"""
    launch = accelerate_launch(Path(configuration(tmp_path, text)))
    values = dict(launch.environment)
    assert launch.processes == Processes(16, 0, 8)
    assert values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert {name: values[name] for name in values if "DEEPSPEED" in name} == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: MEGATRON_LM\n", "distributed_type MEGATRON_LM is not modelled"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_magic: 3}\n", "deepspeed_config.zero_magic"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_magic: 1}\n", "fsdp_config.fsdp_magic"),
        ("mixed_precision: fp8\n", "mixed_precision fp8"),
        ("use_cpu: true\n", "use_cpu is set"),
        ("megatron_lm_config: {tp: 2}\n", "megatron_lm_config is not modelled"),
        ("something_new: 1\n", "something_new is not modelled"),
        ("parallelism_config: 7\n", "parallelism_config is a table of keys"),
        ("parallelism_config: {parallelism_config_cp_size: 2}\n", "with distributed_type FSDP and fsdp_version 2"),
        ("distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2\n", "no multiple"),
        ("num_processes: many\n", "whole number"),
        ("[1, 2]\n", "no configuration"),
        ("a: [\n", "is not YAML"),
        ("fsdp_config: 3\n", "a table of keys"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        accelerate_launch(Path(configuration(tmp_path, text)))


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="need --nproc-per-node"):
        launch_of(None, 2, None, None, None, None)
    with pytest.raises(UsageError, match="--config says how many"):
        launch_of(2, None, None, None, None, "config.yaml")
    with pytest.raises(UsageError, match="--node-rank 3 of 2 nodes"):
        launch_of(8, 2, 3, None, None, None)
    with pytest.raises(UsageError, match="No such file"):
        launch_of(None, None, None, None, None, "not_there.yaml")
