"""What is around a model in training of several processes: accepted values, refused values, words."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.accuracy.case import Case
from graphmem.errors import UsageError
from graphmem.training import DataParallel, FullyShard, Inference, PipelineParallel, Training, ZeRO
from graphmem.training.pipelines import SCHEDULES as SCHEDULES_OF_PIPELINES


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        (DataParallel(8, static_graph=True), "DDP over 8 processes (static_graph)"),
        (FullyShard(8), "FSDP over 8 processes"),
        (FullyShard(8, "hybrid:2x4", offload=True), "FSDP over 8 processes (hybrid:2x4, offloaded)"),
        (ZeRO(4, 2), "DeepSpeed ZeRO-2 over 4 processes"),
        (
            ZeRO(4, 3, {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
            "DeepSpeed ZeRO-3 over 4 processes (parameters on cpu)",
        ),
    ],
)
def test_a_step_names_its_wrapper_and_counts_its_processes(wrapper: Any, words: str) -> None:
    name = {DataParallel: "ddp", FullyShard: "fsdp", ZeRO: "zero"}[type(wrapper)]
    step = Training(**{name: wrapper})
    assert step.wrapper == wrapper
    assert step.processes is not None
    assert step.processes.world_size == wrapper.world_size
    assert step.describe().endswith(words)
    assert Case.from_json(json.loads(json.dumps(Case("c", "m", step).to_json()))).step == step


@pytest.mark.parametrize(
    ("shard", "mesh"),
    [
        ("full", {"shard": 8}),
        ("grad-op", {"shard": 8}),
        ("hybrid:2x4", {"replicate": 2, "shard": 4}),
        ("hybrid:8x1", {"replicate": 8, "shard": 1}),
    ],
)
def test_the_mesh_of_a_sharded_model(shard: str, mesh: dict[str, int]) -> None:
    assert Training(fsdp=FullyShard(8, shard)).mesh == mesh
    pipelined = Training(fsdp=FullyShard(16, shard), pp=PipelineParallel(2), amp="bf16")
    assert pipelined.mesh == {"pp": 2, **mesh}
    assert pipelined.processes is not None
    assert pipelined.processes.world_size == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullyShard(0), "world_size is a whole number"),
        (lambda: FullyShard(8, "half"), "accepted: full, grad-op, hybrid:NxM"),
        (lambda: FullyShard(8, "hybrid:3x4"), "is of 12 processes, and there are 8"),
        (lambda: FullyShard(8, "hybrid:0x8"), "accepted: full"),
        (lambda: ZeRO(8, 4), "0, 1, 2 or 3, not 4"),
        (lambda: ZeRO(8, 2, {"zero_optimization": {"stage": 3}}), "is 2, and 3 in the configuration"),
        (lambda: ZeRO(8, 2, {"zero_optimization": 3}), "is an object"),
        (lambda: ZeRO(8, 2, "{"), "cannot read the configuration of DeepSpeed: it is not JSON"),
        (lambda: ZeRO(8, 2, "nowhere.json"), "cannot read nowhere.json"),
        (lambda: Training(ddp=DataParallel(8), fsdp=FullyShard(8)), "ddp and fsdp wrap the same model"),
        (lambda: Training(fsdp=FullyShard(8), world_size=4), "that of fsdp is 8"),
        (lambda: Training(zero=ZeRO(8, 1), compile="default"), "leave out compile or zero"),
    ],
)
def test_what_is_not_accepted_is_said(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "processes"),
    [
        (lambda: Training(tp=4), 4),
        (lambda: Inference(tp=4), 4),
        (lambda: Training(tp=2, fsdp=FullyShard(8)), 8),
        (lambda: Training(tp=2, ep=8, fsdp=FullyShard(8)), 8),
    ],
)
def test_layers_and_experts_are_shared_among_processes(make: Any, processes: int) -> None:
    step = make()
    assert step.processes.world_size == processes
    assert f"tensor parallel over {step.tp}" in step.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Training(tp=0), "tp is a number of processes of at least 1"),
        (lambda: Inference(ep=True), "ep is a number of processes"),
        (lambda: Training(tp=3, fsdp=FullyShard(8)), "cannot be divided by tp 3"),
        (lambda: Training(tp=2, ep=3, fsdp=FullyShard(8)), "no multiple of tp 2"),
        (lambda: Training(tp=2, ep=4), "needs fsdp or as large a tp"),
        (lambda: Training(tp=2, world_size=8), "add fsdp for the others"),
        (lambda: Training(tp=2, ddp=DataParallel(8)), "leave out ddp"),
        (lambda: Training(tp=2, fsdp=FullyShard(8, "grad-op")), "fsdp_shard is full"),
        (lambda: Training(tp=2, fsdp=FullyShard(8, "hybrid:2x4")), "is of 8 processes, and there are 4"),
        (lambda: Training(tp=3, zero=ZeRO(8, 1)), "DeepSpeed's AutoTP"),
        (lambda: Training(tp=2, sp=True, zero=ZeRO(8, 1)), "leave out ep, sp and tp_plan"),
        (lambda: Inference(tp=2, weights="nf4"), "quantised weights are not distributed"),
    ],
)
def test_parts_that_do_not_go_together_are_said(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("pipeline", "stages", "words"),
    [
        (PipelineParallel(4), [(0,), (1,), (2,), (3,)], "pipeline over 4 (1f1b)"),
        (PipelineParallel(2, "ZBV", 8), [(0, 3), (1, 2)], "pipeline over 2 (zbvzerobubble, 4 stages, 8 micro-batches)"),
        (
            PipelineParallel(2, "Interleaved1F1B", layers=(1, 2, 2, 2, 2, 1)),
            [(0, 2, 4), (1, 3, 5)],
            "pipeline over 2 (interleaved1f1b, 6 stages, layers 1,2,2,2,2,1)",
        ),
    ],
)
def test_the_stages_of_a_pipeline(pipeline: PipelineParallel, stages: list[tuple[int, ...]], words: str) -> None:
    assert [pipeline.stages_of(rank) for rank in range(pipeline.ranks)] == stages
    step = Training(pp=pipeline)
    assert step.describe().endswith(words)
    assert step.processes is not None
    assert step.processes.world_size == pipeline.ranks
    assert Case.from_json(json.loads(json.dumps(Case("c", "m", step).to_json()))).step == step


@given(st.integers(2, 16), st.sampled_from(sorted(SCHEDULES_OF_PIPELINES)), st.integers(1, 200))
def test_every_layer_is_in_one_stage(ranks: int, schedule: str, layers: int) -> None:
    pipeline = PipelineParallel(ranks, schedule)
    assert sorted(stage for rank in range(ranks) for stage in pipeline.stages_of(rank)) == list(range(pipeline.stages))
    if layers + 2 < pipeline.stages:
        with pytest.raises(UsageError, match="stages need"):
            pipeline.divided(layers)
        return
    divided = pipeline.divided(layers)
    assert [layer for owned in divided for layer in owned] == list(range(layers))
    with_ends = [len(owned) for owned in divided]
    with_ends[0] += 1
    with_ends[-1] += 1
    assert max(with_ends) - min(with_ends) <= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelineParallel(1), "at least 2, not 1"),
        (lambda: PipelineParallel("2"), "a number of processes"),  # type: ignore[arg-type]
        (lambda: PipelineParallel(2, "fifo"), "accepted: gpipe, 1f1b"),
        (lambda: PipelineParallel(2, "1f1b", 0), "micro_batches is a whole number"),
        (lambda: PipelineParallel(2, "1f1b", layers=(1, 1, 1, 1)), "1f1b of 2 processes has 2"),
        (lambda: PipelineParallel(2, "zbv", layers=(1,) * 6), "give layers for 4"),
        (lambda: PipelineParallel(2, layers=(1, -1)), "layers of stages are whole numbers"),
        (lambda: PipelineParallel(2, layers=(1, 1)).divided(4), "have 2 layers together, and the model has 4"),
        (lambda: Training(sp=True), "sp is of tensor parallelism: give tp too"),
        (lambda: Training(tp_plan={"lm_head": "replicate"}), "tp_plan is of tensor parallelism"),  # type: ignore[arg-type]
        (lambda: Training(tp=2, tp_plan={"lm_head": 3}), "a plan is names of modules"),  # type: ignore[arg-type]
        (lambda: Training(tp=2, tp_plan=7), "a plan is names of modules"),  # type: ignore[arg-type]
        (lambda: Training(tp=3, sp=True, fsdp=FullyShard(8)), "fsdp's 8 processes cannot be divided by tp 3"),
        (lambda: Training(tp=2, sp=True, ep=2), "leave out ep and tp_plan, or sp"),
        (lambda: Training(tp=2, pp=PipelineParallel(2), ddp=DataParallel(8)), "leave out ddp"),
        (lambda: Training(cp=1, fsdp=FullyShard(8)), "at least 2, not 1"),
        (lambda: Training(cp=2), "cp goes with fsdp"),
        (lambda: Training(cp=2, ep=2, fsdp=FullyShard(8)), "has no context parallelism"),
        (lambda: Training(cp=4, tp=4, fsdp=FullyShard(8)), "cp 4 does not divide the 2 processes"),
        (lambda: Training(cp=2, fsdp=FullyShard(8), last_batch=1), "one length"),
        (lambda: Training(cp=3, fsdp=FullyShard(8)), "does not divide the 8 processes"),
        (lambda: Training(cp=4, fsdp=FullyShard(4, "hybrid:2x2")), "does not divide the 2 processes"),
        (lambda: Training(pp=PipelineParallel(2), amp="bf16"), "amp is FSDP's mixed precision"),
        (lambda: Training(pp=PipelineParallel(2), ddp=DataParallel(3)), "ddp's 3 processes cannot be divided by pp 2"),
        (lambda: Training(pp=PipelineParallel(2), zero=ZeRO(2, 1)), "as its PipelineModule"),
        (lambda: Training(pp=PipelineParallel(2), ep=2), "does not combine ep with pp"),
        (lambda: Training(pp=PipelineParallel(2), compile="default"), "leave out compile or pp"),
        (lambda: Training(pp=PipelineParallel(2), seq_lens=(8, 9)), "one shape"),
        (lambda: Training(pp=PipelineParallel(2), grad_scaler=True), "gradient scaler"),
        (lambda: Training(pp=PipelineParallel(2), zero_grad_at="before_backward"), "after_step or before_forward"),
        (lambda: Training(pp=PipelineParallel(2), world_size=4), "add fsdp for the others"),
        (lambda: Training(pp=PipelineParallel(3), fsdp=FullyShard(8)), "cannot be divided by pp 3"),
        (
            lambda: Training(pp=PipelineParallel(2), fsdp=FullyShard(8, "hybrid:2x4")),
            "is of 8 processes, and there are 4",
        ),
    ],
)
def test_pipelines_that_do_not_go_are_said(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("step", "mesh"),
    [
        (Training(pp=PipelineParallel(2), tp=4), {"pp": 2, "tp": 4}),
        (Training(pp=PipelineParallel(2), ddp=DataParallel(8)), {"pp": 2, "replicate": 4}),
        (Training(tp=2, sp=True, fsdp=FullyShard(8)), {"shard": 4, "tp": 2}),
        (
            Training(pp=PipelineParallel(2), cp=2, tp=2, fsdp=FullyShard(32, "hybrid:2x4")),
            {"pp": 2, "replicate": 2, "shard": 2, "cp": 2, "tp": 2},
        ),
        (Training(tp=2, fsdp=FullyShard(8, "hybrid:2x2")), {}),  # transformers makes it
    ],
)
def test_the_mesh_of_a_step(step: Training, mesh: dict[str, int]) -> None:
    assert list(step.mesh.items()) == list(mesh.items())
    assert step.processes is not None
    assert step.processes.world_size in (math.prod(mesh.values()), 8)


def test_sequences_are_shared_among_processes_that_share_parameters() -> None:
    step = Training(cp=2, fsdp=FullyShard(8, "hybrid:2x4"))
    assert step.mesh == {"replicate": 2, "shard": 2, "cp": 2}
    assert step.describe().endswith("FSDP over 8 processes (hybrid:2x4), context parallel over 2")


def test_a_configuration_of_deepspeed_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": {"enabled": True}})
    )
    read = ZeRO(8, config=file)
    assert read.stage == 3
    assert read == ZeRO(8, 3, json.loads(file.read_text()))
    assert hash(Training(zero=read)) == hash(Training(zero=ZeRO(8, 3, str(file))))
    file.write_text("[]")
    with pytest.raises(UsageError, match="is no configuration of DeepSpeed"):
        ZeRO(8, config=file)
