"""The space of layouts, what each needs at least and sends, which are captured, and their configuration files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphmem
from graphmem.answering import runs, stages
from graphmem.answering.question import Question
from graphmem.answering.runs import Progress, shape_of
from graphmem.base.textbook import ModelShape
from graphmem.devices import Device, custom_device, device_named
from graphmem.errors import UsageError
from graphmem.planning.layouts import search
from graphmem.planning.layouts.axes import FRAMEWORKS, Job, Layout, space
from graphmem.planning.layouts.bounds import bound
from graphmem.planning.layouts.cluster import Cluster, cluster_of, sequences_of
from graphmem.planning.layouts.communication import Links, Sent, sent
from graphmem.planning.layouts.configuration import accelerate, files_of
from graphmem.planning.layouts.cost import cost_of
from graphmem.planning.layouts.search import Search, needs_no_more
from graphmem.run import Run
from graphmem.training import Training, ZeRO
from graphmem.units import GIB, MIB
from tests.support.examples import examples

#: Llama 3's 8B.
LARGE = ModelShape(
    "8B", 8_030_261_248, 8_030_261_248, (218_112_000,) * 32, ("LlamaDecoderLayer",), (18_432,) * 32, 4096, 32, 8,
    predicts=128_256, plans=("tp", "pp"),
)  # fmt: skip
#: A mixture of eight experts.
EXPERTS = replace(LARGE, name="8x7B", parameters=46_702_792_704, trainable=46_702_792_704, units=(1_451_270_144,) * 32,
                  experts=8, experts_of_token=2, plans=("tp", "ep"))  # fmt: skip


def job(shape: ModelShape = LARGE, gpus: str = "16xH100-80GB", sequences: int = 128, **step: Any) -> Job:
    return Job(shape, cluster_of(gpus), sequences, 8192, Training(amp="bf16", **step), FRAMEWORKS)


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_cards_and_machines() -> None:
    assert (cluster_of("16xH100-80GB").nodes, cluster_of("16xH100-80GB", 4).on_node) == (2, 4)
    assert cluster_of("2 x RTX-4090").nodes == 1
    assert cluster_of("16xH100").describe() == "16 x H100-80GB in 2 machines"
    for gpus, nodes in (("H100", None), ("0xH100", None), ("16xH100", 3), ("16xH1000", None)):
        with pytest.raises(UsageError):
            cluster_of(gpus, nodes)


@pytest.mark.parametrize(
    ("text", "rows"),
    [("1M-tokens", 128), ("128", 128), (128, 128), ("64k-tokens", 8), ("8192 tokens", 1), ("256 sequences", 256)],
)
def test_global_batches_are_sequences_or_tokens(text: str | int, rows: int) -> None:
    assert sequences_of(text, 8192) == rows


@pytest.mark.parametrize("text", ["1M", "", "-4", "1000000 tokens", "100 tokens", "0", "1.5"])
def test_a_global_batch_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        sequences_of(text, 8192)


def test_tokens_need_the_length_of_a_sequence() -> None:
    with pytest.raises(UsageError, match="seq-len"):
        sequences_of("1M-tokens", None)


# --- the space --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [job(), job(gpus="8xH100"), job(EXPERTS), job(gpus="1xH100"), job(sequences=48)])
def test_every_layout_is_one_that_can_be_asked_for(asked: Job) -> None:
    layouts = space(asked)
    assert layouts
    assert len(set(layouts)) == len(layouts)
    for layout in layouts:
        assert layout.data * layout.rows * layout.accumulate == asked.sequences
        assert layout.replicas * layout.shards == layout.data * layout.context
        step = layout.training(asked.step)  # refuses what does not go together
        assert step.processes is None or step.processes.world_size == layout.processes
        assert layout.words()
    assert len({layout.words() for layout in layouts}) == len(layouts)


def test_experts_are_divided_where_a_model_has_them() -> None:
    assert {layout.expert for layout in space(job(EXPERTS))} == {1, 2, 4, 8}
    assert {layout.expert for layout in space(job())} == {1}
    assert all(layout.expert % layout.tensor == 0 for layout in space(job(EXPERTS)) if layout.expert > 1)


def test_a_batch_that_no_layout_divides() -> None:
    assert not space(replace(job(sequences=3), frameworks=("ddp",)))


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_bounds_are_zero_s_arithmetic() -> None:
    ddp = Layout(16, 8, micro_batch=1, accumulate=8)
    full = replace(ddp, wrapper="fsdp", shard="full", recompute=True)
    parameters = LARGE.parameters
    assert bound(job(), ddp).bytes > 16 * parameters
    assert bound(job(gpus="16xB200-180GB"), replace(full, wrapper="ddp")).bytes >= 20 * parameters
    # 16P/N, or what the loss takes beside 12P/N
    assert bound(job(), full).bytes >= 16 * parameters // 16
    hybrid = replace(full, shard="hybrid:2x8")
    assert bound(job(), hybrid).bytes >= bound(job(), full).bytes


def test_a_refusal_names_the_fewest_parts() -> None:
    found = Search(job(), Links(450), 1, None, lambda _: None)  # type: ignore[arg-type]
    layout = Layout(16, 8, micro_batch=1, accumulate=8)
    refused = found._candidate(layout)
    assert refused.status == search.REFUSED
    assert refused.reason == "needs 89.75 GiB of 79.18 GiB for optimizer states and weights alone"


# --- bounds against captures ------------------------------------------------------------------------------------------

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 320,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 509,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Enough layers for a pipeline of two stages."""
    return written(tmp_path_factory.mktemp("deeper"), TINY | {"num_hidden_layers": 4})


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


@functools.cache
def shape_of_tiny(tiny: str) -> ModelShape:
    return shape_of(Question(tiny, batch=1, seq_len=64))


def tiny_job(tiny: str, step: Training, cards: int = 4, sequences: int = 16) -> Job:
    return Job(shape_of_tiny(tiny), Cluster(card(GIB), cards, cards), sequences, 64, step, ("ddp", "fsdp"))


def card(capacity: int) -> Device:
    return custom_device(capacity, like="A100-80GB")


def test_the_shape_of_a_model(tiny: str) -> None:
    shape = tiny_job(tiny, Training()).shape
    block = 128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 320 + 2 * 128
    assert shape.units == (block,) * 2
    assert shape.parameters == 2 * block + 2 * 509 * 128 + 128
    assert (shape.saved, shape.predicts, shape.plans) == ((128 + 320,) * 2, 509, ("tp", "pp"))
    assert shape.unit_names == ("LlamaDecoderLayer",)


def captured(tiny: str, asked: Job, layout: Layout, iterations: int = 2, **changed: Any) -> graphmem.Estimate:
    step = replace(layout.training(asked.step), **changed)
    return estimated(tiny, layout.rows, step, asked.cluster.card, iterations)


@functools.cache
def estimated(tiny: str, rows: int, step: Training, device: Device, iterations: int) -> graphmem.Estimate:
    question = Question(tiny, batch=rows, seq_len=64, training=step, device=device, top=0, iterations=iterations)
    return stages.estimate_of(question, figures_only=True)


STEPS = (
    Training(amp="bf16"),
    Training(),
    Training(dtype="bf16", optimizer="sgd", loop="drop"),
    Training(amp="bf16", optimizer="adamw8bit"),
)


@settings(max_examples=examples(2), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_bound_is_never_above_a_capture(tiny: str, data: st.DataObject) -> None:
    step = data.draw(st.sampled_from(STEPS))
    asked = tiny_job(tiny, step, *data.draw(st.sampled_from([(4, 16), (3, 12), (1, 2)])))
    layout = data.draw(st.sampled_from(space(asked)))
    most = max(captured(tiny, asked, layout, rank=rank).requested for rank in layout.ranks)
    assert bound(asked, layout).bytes <= most, layout.words()


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_no_bound_of_the_space_is_above_its_capture(deeper: str, step: Training) -> None:
    asked = tiny_job(deeper, step)
    for layout in space(asked):
        most = max(captured(deeper, asked, layout, 3, rank=rank).requested for rank in layout.ranks)
        assert bound(asked, layout).bytes <= most, layout.words()


@pytest.mark.slow
def test_a_pipeline_is_captured_at_both_ends(deeper: str) -> None:
    asked = tiny_job(deeper, Training(amp="bf16"))
    (layout, *_) = [one for one in space(asked) if one.pipeline == 2]
    assert (layout.ranks, layout.in_flight, layout.stages().micro_batches) == ((0, 2), 8, 8)
    layout = replace(layout, in_flight=2)
    first, last = (captured(deeper, asked, layout, rank=rank).requested for rank in layout.ranks)
    assert first != last
    assert bound(asked, layout).bytes <= max(first, last)


@pytest.mark.parametrize("shard", ["full", pytest.param("grad-op", marks=pytest.mark.slow)])
def test_the_second_micro_batch_stands_for_the_others(tiny: str, shard: str) -> None:
    asked = tiny_job(tiny, Training(amp="bf16"))
    layout = Layout(4, 4, "fsdp", shard, micro_batch=1, accumulate=4, whole_gradients=shard == "full")
    peaks = [captured(tiny, asked, layout, grad_accum=count).peak for count in (2, 3)]
    assert peaks[0] == peaks[1]


@pytest.mark.slow
def test_gradients_that_are_reduced_at_once_are_not_kept_whole(tiny: str) -> None:
    asked = tiny_job(tiny, Training(amp="bf16"))
    layout = Layout(4, 4, "fsdp", "full", micro_batch=1, accumulate=2)
    whole = captured(tiny, asked, replace(layout, whole_gradients=True)).requested
    reduced = captured(tiny, asked, layout).requested
    # of a gradient in fp32 the process keeps a quarter in place of all
    assert whole - reduced >= asked.shape.trainable * 4 // 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(3, 3, "fsdp", "full")])
def test_the_first_process_holds_the_most(tiny: str, layout: Layout) -> None:
    asked = tiny_job(tiny, Training(amp="bf16"), 3, 3)
    sizes = [captured(tiny, asked, layout, rank=rank).device for rank in (0, 2)]
    assert sizes[0] == max(sizes)


# --- communication ----------------------------------------------------------------------------------------------------


def test_an_all_reduce_sends_twice_the_whole_less_a_part() -> None:
    ddp = Layout(8, 8, "ddp", micro_batch=16)
    assert sent(job(gpus="8xH100"), ddp) == Sent(near=2 * 4 * LARGE.parameters * 7 // 8)


def test_of_a_ring_through_two_machines_one_edge_in_eight_leaves_one() -> None:
    found = sent(job(), Layout(16, 8, "ddp", micro_batch=8))
    assert found.near + found.far == 2 * 4 * LARGE.parameters * 15 // 16
    assert found.far == (found.near + found.far) // 8


def test_a_hybrid_mesh_sends_its_shards_between_machines_only() -> None:
    full, hybrid = (
        sent(job(), Layout(16, 8, "fsdp", shard, micro_batch=1, accumulate=8)) for shard in ("full", "hybrid:2x8")
    )
    assert 0 < hybrid.far < full.far
    gathers = 2 * 8 * 2 * LARGE.parameters + 8 * 4 * LARGE.parameters
    assert hybrid.near == gathers * 7 // 8


def test_tensor_parallelism_sends_activations_more_often_where_they_are_recomputed() -> None:
    plain = Layout(8, 8, "fsdp", "full", tensor=8, micro_batch=1, accumulate=128)
    block = 8192 * 4096 * 2
    assert sent(job(gpus="8xH100"), plain).near == 2 * 4 * 32 * block * 128 * 7 // 8
    assert sent(job(gpus="8xH100"), replace(plain, recompute=True)).near == 2 * 6 * 32 * block * 128 * 7 // 8


def test_context_parallelism_sends_keys_and_values_round() -> None:
    layout = Layout(8, 8, "fsdp", "full", micro_batch=1, accumulate=32, context=2)
    without = sent(job(gpus="8xH100"), replace(layout, context=1))
    found = sent(job(gpus="8xH100"), layout)
    # 8 of 32 heads are of keys and values
    assert found.near - without.near == 3 * 2 * 4096 * 1024 * 2 * 32 * 32


def test_context_parallelism_is_captured(tiny: str) -> None:
    pytest.importorskip("accelerate")
    asked = tiny_job(tiny, Training(amp="bf16"))
    layout = Layout(4, 4, "fsdp", "full", micro_batch=4, accumulate=2, context=2)
    assert layout in space(asked)
    assert bound(asked, layout).bytes <= captured(tiny, asked, layout).requested


def test_a_pipeline_sends_to_its_neighbours_and_waits() -> None:
    layout = Layout(16, 8, "fsdp", "full", micro_batch=1, accumulate=2, pipeline=2, in_flight=8)
    full = replace(layout, pipeline=1, in_flight=1, accumulate=8)
    assert sent(job(), layout).far == 2 * 8192 * 4096 * 2 * 16
    found = cost_of(job(), layout, Links(450))
    compute = 6 * LARGE.parameters * 128 * 8192 / 16 / (0.4 * 989.4e12)
    assert found.waiting == pytest.approx(compute / 8)
    assert cost_of(job(), full, Links(450)).waiting == 0


def test_offloading_goes_over_the_host_s_link_and_costs_time() -> None:
    layout = Layout(8, 8, "fsdp", "full", micro_batch=16, offload=True)
    found = cost_of(job(gpus="8xH100"), layout, Links(450))
    assert found.sent.host == (2 * 4 + 4) * LARGE.parameters // 8
    assert found.seconds > cost_of(job(gpus="8xH100"), replace(layout, offload=False), Links(450)).seconds


# --- the search -------------------------------------------------------------------------------------------------------


def test_what_saves_memory_needs_no_more() -> None:
    layout = Layout(8, 8, "fsdp", "full", micro_batch=2, accumulate=4, whole_gradients=True)
    for smaller in (
        replace(layout, micro_batch=1, accumulate=8),
        replace(layout, recompute=True),
        replace(layout, offload=True),
        replace(layout, whole_gradients=False),
    ):
        assert needs_no_more(smaller, layout)
        assert not needs_no_more(layout, smaller)
    assert not needs_no_more(replace(layout, shard="grad-op"), layout)


def needing(bytes_of: Callable[[Layout], float], asked: Job) -> Callable[[Layout, Progress], tuple[Any, str]]:
    """Captures that find what ``bytes_of`` says."""
    capacity = asked.cluster.card.capacity_bytes

    def capture(layout: Layout, say: Progress) -> tuple[Any, str]:
        needed = int(bytes_of(layout))
        fit = SimpleNamespace(
            fits=needed <= capacity,
            passes=needed <= capacity,
            needs_cache_flush=False,
            capacity_bytes=capacity,
            margin_bytes=capacity - needed,
        )
        return SimpleNamespace(device=needed, fit=fit), ""

    return capture


@given(st.data())
@settings(max_examples=examples(20), deadline=None)
def test_the_first_that_fits_is_the_cheapest_of_those_that_do(data: st.DataObject) -> None:
    """Whatever lies above the bounds, as long as what saves memory needs no more."""
    asked = job(sequences=32)
    above = {recompute: data.draw(st.floats(1.0, 1.6), label=f"recompute={recompute}") for recompute in (False, True)}
    above[False] = max(above.values())
    states = data.draw(st.integers(0, 8 * GIB), label="beside them")

    def needed(layout: Layout) -> float:
        return above[layout.recompute] * bound(asked, layout).bytes + states

    layouts = space(asked)
    found = Search(asked, Links(450), 200, needing(needed, asked), lambda _: None).run(layouts)
    fit = [one for one in found if needed(one.layout) <= asked.cluster.card.capacity_bytes]
    told: list[Layout] = []
    wide = Search(asked, Links(450), 200, needing(needed, asked), lambda _: None, told.extend, width=3).run(layouts)
    assert [(one.status, one.reason) for one in wide] == [(one.status, one.reason) for one in found]
    assert set(told) >= {one.layout for one in wide if one.estimate is not None}
    chosen = [one for one in found if one.status == search.FITS]
    assert bool(fit) == bool(chosen)
    if fit:
        assert min(chosen, key=lambda one: one.order) is min(fit, key=lambda one: one.order)


def test_what_fails_where_nothing_is_left_to_shard_says_nothing_of_the_others() -> None:
    asked = job(sequences=32)
    shared = next(one for one in space(asked) if one.wrapper == "fsdp" and one.shards > 1)
    alone = replace(shared, tensor=shared.processes)
    others = [replace(shared, tensor=2), replace(alone, micro_batch=alone.micro_batch + 1)]

    def refused(layout: Layout, say: Progress) -> Any:
        raise UsageError("sharded and whole parameters in one list")

    found = Search(asked, Links(450), 1, refused, lambda _: None)
    found.candidates = [found._candidate(one) for one in (alone, *others)]
    for one in found.candidates:
        one.status = search.OPEN
    found._confirm(found.candidates[0])
    assert alone.shards == 1 < others[0].shards
    assert [one.status for one in found.candidates] == [search.FAILED, search.OPEN, search.FAILED]


def test_a_single_capture_is_of_one_that_surely_fits_and_not_of_the_smallest() -> None:
    asked = job(sequences=32)
    run = Search(asked, Links(450), 1, needing(lambda layout: bound(asked, layout).bytes, asked), lambda _: None)
    (only,) = [one for one in run.run(space(asked)) if one.estimate is not None]
    assert only.status == search.FITS
    smallest = min(run.candidates, key=lambda one: one.bound.bytes)
    assert only.cost.seconds < smallest.cost.seconds


def _best_is_only_likely(found: graphmem.Plan) -> None:
    """A best plan that may not fit is said to, in its sentence, its row and its picture."""
    best = found.best
    assert best is not None
    assert best.estimate is not None
    assert best.estimate.fit is not None
    fit = replace(best.estimate.fit, probability=0.97)
    likely = replace(found, fitting=(replace(best, estimate=replace(best.estimate, fit=fit)), *found.fitting[1:]))
    text = str(likely)
    assert f"BEST, LIKELY to fit (97 %): {best.layout.words()}" in text
    assert "likely (97 %)" in text.split("Layouts that fit")[1]
    assert "likely fits" in likely.report("html")
    assert "LIKELY" not in str(found)


def test_a_plan_captures_the_cheapest_and_says_why_not_the_others(tiny: str) -> None:
    found = graphmem.plan(tiny, gpus="4xA100-80GB", global_batch=8, seq_len=64, frameworks=["ddp"], confirm=2)
    assert found.best is not None
    assert found.best.layout.wrapper == "ddp"
    assert found.captured <= 2
    assert all(one.estimate is not None for one in found.fitting)
    assert "BEST: DDP" in str(found)
    assert found._repr_mimebundle_()["text/html"].startswith('<div class="graphmem">')
    assert len(repr(found)) < 120
    _best_is_only_likely(found)
    document = found.to_dict()
    assert document["schema"] == "graphmem.plan/1"
    assert len(document["fitting"]) + len(document["others"]) == len(space(found.job))
    assert json.loads(json.dumps(document)) == document


def test_the_other_loop_of_the_best_layout_is_no_capture_of_its_own(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loops, record = [], runs.record

    def noted(question: Question, *others: Any) -> Run:
        assert isinstance(question.step, Training)
        loops.append(question.step.loop)
        return record(question, *others)

    monkeypatch.setattr(runs, "record", noted)
    found = graphmem.plan(tiny, gpus="4xA100-80GB", global_batch=8, seq_len=64, frameworks=["ddp"], confirm=1)
    (dropped,) = [one for one in found.advice if one.option == "--loop drop"]
    assert loops == ["hold", "hold"]  # the best layout, and gradients as views of its buckets
    assert found.best is not None
    layout = found.best.layout
    alone = replace(layout.training(replace(found.job.step, loop="drop")), rank=layout.ranks[0])
    itself = graphmem.analyze(tiny, device=device_named("A100-80GB"), batch=layout.rows, seq_len=64, training=alone)
    assert dropped.device_bytes == itself.device


def test_a_card_that_is_too_small_for_the_best_layout(tiny: str) -> None:
    """Where the outside of the allocator leaves little, layouts that need less are found, or none."""
    outside = card(GIB).context_bytes
    ask: dict[str, Any] = {"gpus": "4xA100-80GB", "global_batch": 8, "seq_len": 64, "advice": False}
    none = graphmem.plan(tiny, device=card(outside + MIB), frameworks=["ddp"], confirm=2, **ask)
    assert not none.fitting
    assert none.closest is not None
    assert "needs" in none.closest.reason
    assert none.captured <= 2


def test_a_plan_refuses_what_it_chooses_itself(tiny: str) -> None:
    ask: dict[str, Any] = {"gpus": "4xA100-80GB", "global_batch": 8, "seq_len": 64}
    for step in (Training(grad_accum=2), Training(checkpoint_activations=True), Training(tp=2)):
        with pytest.raises(UsageError, match="is what a plan chooses"):
            graphmem.plan(tiny, training=step, **ask)
    with pytest.raises(UsageError, match="unknown framework"):
        graphmem.plan(tiny, frameworks=["horovod"], **ask)
    with pytest.raises(UsageError, match="give global_batch"):
        graphmem.plan(tiny, batch=2, **ask)
    with pytest.raises(UsageError, match="cannot be divided"):
        graphmem.plan(tiny, frameworks=["ddp"], **{**ask, "global_batch": 6})


# --- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", space(replace(job(), step=Training(amp="bf16", clip_grad_norm=1.0)))[::7])
def test_files_are_read_by_those_they_are_for(layout: Layout, tmp_path: Path) -> None:
    asked = job(clip_grad_norm=1.0)
    files = {one.name: one.text for one in files_of(asked, layout, "expandable_segments:True")}
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True" in files["launch.sh"]
    assert "--nproc-per-node 8" in files["launch.sh"]
    if "torchtitan.toml" in files:
        read = pytest.importorskip("tomllib").loads(files["torchtitan.toml"])
        assert read["parallelism"]["pipeline_parallel_degree"] == layout.pipeline
        assert read["training"]["local_batch_size"] == layout.rows
    if "wrap.py" in files:
        compile(files["wrap.py"], "wrap.py", "exec")
    if "deepspeed.json" in files:
        assert ZeRO(16, config=files["deepspeed.json"]).stage == int(layout.shard)
        assert json.loads(files["deepspeed.json"])["gradient_clipping"] == 1.0
    if "accelerate.yaml" in files:
        yaml = pytest.importorskip("yaml")
        assert yaml.safe_load(files["accelerate.yaml"]) == accelerate(asked, layout)
        read = accelerate(asked, layout)
        assert (read["num_processes"], read["num_machines"]) == (16, 2)
