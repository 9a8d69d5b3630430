"""Traces by the number of layers: what is written is what is captured, event by event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem import Training, analyze, sweep
from graphmem.answering import deep, runs
from graphmem.answering import sized as sized_runs
from graphmem.answering.deep import run_of_layers
from graphmem.answering.question import Question
from graphmem.answering.runs import RunCache, silent
from graphmem.answering.sized import SizedRunsOfLayers
from graphmem.capture.templates.depth import DepthTemplate
from graphmem.capture.templates.layout import NoTemplate
from graphmem.errors import CaptureError
from graphmem.replay import most_requested
from graphmem.run import Run
from graphmem.trace import Category, Trace, TraceBuilder, same
from graphmem.training import DataParallel, FullyShard, ZeRO
from tests.support.examples import examples, first_quick

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_layer": 8,
    "vocab_size": 64, "n_positions": 32,
}  # fmt: skip


def written(folder: Path, config: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


# --- made by hand -----------------------------------------------------------------------------------------------------


def by_hand(layers: int, kept: tuple[int, ...], late: int, ahead: bool) -> Trace:
    """Two steps of a model whose layers keep so many bytes each, and whose gradients are freed ``late`` layers later;
    with ``ahead`` the buffer of the next layer is taken before the one of this layer is given back."""
    builder = TraceBuilder("by hand")
    of_model = builder.operator("build")
    for layer in range(layers):
        builder.alloc(100, of_model, Category.PARAMETER, label=f"layers.{layer}.weight")
    for iteration in (1, 2):
        saved = list(_forward(builder, iteration, layers, kept, ahead))
        phase, waiting = builder.phase(iteration, "backward"), []
        for layer in reversed(range(layers)):
            call = builder.operator("mm", f"layers.{layer}", phase, "model.py:7")
            waiting.append(builder.alloc(50, call, Category.GRADIENT, label=f"layers.{layer}.weight.grad"))
            for one in saved[layer]:
                builder.free(one, call)
            if len(waiting) > late:
                builder.free(waiting.pop(0), call)
        norm = builder.operator("norm", "", phase)
        builder.free(builder.alloc(8 * layers + 4, norm), norm)
        for one in waiting:
            builder.free(one, norm)
    return builder.build()


def _forward(
    builder: TraceBuilder, iteration: int, layers: int, kept: tuple[int, ...], ahead: bool
) -> Iterator[list[int]]:
    phase, before = builder.phase(iteration, "forward"), None
    for layer in range(layers):
        call = builder.operator("linear", f"layers.{layer}", phase, "model.py:5")
        saved = [builder.alloc(size, call, Category.ACTIVATION) for size in kept]
        gathered = builder.alloc(30, call, Category.COMMUNICATION)
        if before is not None:
            builder.free(before, call)
        before = gathered
        if not ahead:
            builder.free(gathered, call)
            before = None
        yield saved
    if before is not None:
        builder.free(before, builder.operator("end", "", phase))


@settings(max_examples=examples(30), deadline=None)
@given(
    kept=st.lists(st.integers(1, 3), max_size=4).map(tuple),
    late=st.integers(0, 2),
    ahead=st.booleans(),
    layers=st.integers(6, 40),
)
def test_what_is_written_is_what_happens(kept: tuple[int, ...], late: int, ahead: bool, layers: int) -> None:
    template = DepthTemplate.learn(*((few, by_hand(few, kept, late, ahead)) for few in (7, 8)))
    assert same(template.at(layers), by_hand(layers, kept, late, ahead))


def test_a_layer_that_is_unlike_the_others_makes_no_template() -> None:
    def with_odd_last(layers: int) -> Trace:
        trace = by_hand(layers, (1,), 0, False)
        odd = replace(trace.storages[layers - 1], bytes=100 * layers * layers)
        return replace(trace, storages=(*trace.storages[: layers - 1], odd, *trace.storages[layers:]))

    for more in (7, 8):
        with pytest.raises(NoTemplate):
            DepthTemplate.learn((6, with_odd_last(6)), (more, with_odd_last(more)))


# --- against captures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", first_quick([Training(), Training(amp="bf16", checkpoint_activations=True, fsdp=FullyShard(4))], 1)
)
def test_what_is_written_is_what_is_captured(tmp_path: Path, step: Training) -> None:
    model = written(tmp_path, GPT2)
    asked = Question(model, batch=2, seq_len=16, training=step, iterations=2)
    captured = {few: RunCache().run(replace(asked, layers=few)).trace for few in (6, 7, 11)}
    template = DepthTemplate.learn((6, captured[6]), (7, captured[7]))
    assert same(template.at(11), captured[11])


def whole(question: Question) -> Run:
    return runs.record(question, runs.load(question))


def test_a_deep_model_is_run_by_its_layers(tmp_path: Path) -> None:
    asked = Question(written(tmp_path, LLAMA), batch=1, seq_len=16, training=Training(dtype="bf16"), device="T4")
    run, real = RunCache().run(asked), whole(asked)
    for one, other in ((run, real), (run.other_loop, real.other_loop)):
        assert one is not None
        assert other is not None
        assert same(one.trace, other.trace)
        assert one.notes == (*other.notes, "by template of the captures with 4, 5, 6 of its 40 layers")
        known = {"trace": None, "notes": (), "other_loop": None}
        assert replace(one, **known) == replace(other, **known)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_other_loop_is_written_where_its_output_may_matter(tmp_path: Path) -> None:
    asked = Question(written(tmp_path, LLAMA), batch=1, seq_len=2, training=Training(dtype="bf16"), device="T4")
    run = RunCache().run(asked)
    assert 0 < run.output_bytes < most_requested(run.trace) / 1000
    assert run.other_loop is None
    estimate = analyze(asked.model, batch=1, seq_len=2, training=asked.training, device="T4")
    assert "other" not in estimate.details["loop"]


@pytest.mark.slow
def test_a_deep_model_at_many_sizes(tmp_path: Path) -> None:
    def question(batch: int) -> Question:
        return Question(written(tmp_path, LLAMA), batch=batch, seq_len=16, training=Training(dtype="bf16"), device="T4")

    cache = RunCache()
    with SizedRunsOfLayers("batch", question, cache) as sized:
        for size in (2, 3, 5):
            assert not sized.is_proven
            sized.capture(size, silent)
        assert (sized.is_proven, sized.captured) == (True, [2, 3, 5])
        run = sized.by_template(4)
        assert run is not None
        assert cache.run(question(4)) is run
        assert same(run.trace, whole(question(4)).trace)
        layers, sizes = run.notes[-1], run.notes[-2]
        assert layers == "by template of the captures with 4, 5, 6 of its 40 layers"
        assert sizes == "by template of the captures at batch 2, 3, 5"
        assert sized.by_template(9) is None


@pytest.mark.slow
def test_a_deep_model_at_many_sizes_whose_layers_make_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Question(written(tmp_path, LLAMA), batch=2, seq_len=16)
    with SizedRunsOfLayers("batch", lambda batch: replace(asked, batch=batch), RunCache()) as sized:
        monkeypatch.setattr(deep, "_by_template", lambda *_: None)
        assert same(sized.capture(2, silent).trace, whole(asked).trace)
        assert sized.refused
        assert sized.by_template(3) is None


@pytest.mark.slow
def test_every_command_is_told_of_a_template(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"seq_len": 16, "training": Training(dtype="bf16"), "device": "T4"}
    model, note = written(tmp_path, LLAMA), "by template of the captures with 4, 5, 6 of its 40 layers"
    assert note in analyze(model, batch=1, **asked).assumptions
    rows = sweep(model, vary={"batch": [1, 2]}, **asked)
    assert all(row.estimate is not None and note in row.estimate.assumptions for row in rows)


@pytest.mark.parametrize(
    ("config", "step"),
    [
        (LLAMA | {"num_hidden_layers": 12}, Training()),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"] * 20}, Training()),
        (LLAMA, Training(optimizer="lbfgs")),
        (LLAMA, Training(ddp=DataParallel(2))),
        (LLAMA, Training(amp="bf16", zero=ZeRO(2, 3))),
        (LLAMA, Training(compile="default")),
    ],
)
def test_what_has_no_template_is_captured(tmp_path: Path, config: dict[str, object], step: Training) -> None:
    asked = Question(written(tmp_path, config), batch=1, seq_len=16, training=step)

    def capture(few: Question) -> Run:
        raise AssertionError(f"captured with {few.layers} layers")

    assert run_of_layers(asked, runs.load(asked), capture) is None


def test_a_step_that_fails_is_left_to_the_capture_of_all_layers(tmp_path: Path) -> None:
    asked = Question(written(tmp_path, LLAMA), batch=1, seq_len=16)

    def capture(few: Question) -> Run:
        raise CaptureError("it fails")

    assert run_of_layers(asked, runs.load(asked), capture) is None


@pytest.mark.slow
def test_another_capture_disproves_it(tmp_path: Path) -> None:
    captured = list[int | None]()

    def odd(question: Question) -> Run:
        made = whole(question)
        captured.append(question.layers)
        first = made.trace.storages[0]
        growing = replace(first, bytes=first.bytes + (question.layers or 0) ** 2)
        return replace(made, trace=replace(made.trace, storages=(growing, *made.trace.storages[1:])))

    asked = Question(written(tmp_path, LLAMA), batch=1, seq_len=16, training=Training(dtype="bf16"))
    assert run_of_layers(asked, runs.load(asked), odd) is None
    assert captured == list(range(deep.FEWEST, deep.MOST + 1))


@pytest.mark.slow
def test_a_sweep_of_a_deep_model_captures_a_few_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[str, int | None, int | None]] = []
    record = sized_runs.record

    def recorded(question: Question, *others: Any) -> Run:
        captured.append((question.setting.device.name, question.batch, question.layers))
        return record(question, *others)

    monkeypatch.setattr(sized_runs, "record", recorded)
    asked: dict[str, Any] = {"seq_len": 16, "training": Training(dtype="bf16")}
    model, cards = written(tmp_path, LLAMA), ["A100-40GB", "RTX-4090"]
    rows = sweep(model, vary={"device": cards, "batch": [2, 3, 4, 5]}, **asked)
    first, second = ([one[1:] for one in captured if one[0].startswith(card)] for card in ("A100", "RTX"))
    assert sorted(first) == [(batch, layers) for batch in (2, 3, 5) for layers in (4, 5, 6)]
    assert sorted(second) == [(2, layers) for layers in (4, 5, 6)], "the templates of the first card give them"
    assert rows[6].estimate is not None
    layers, sizes = [one for one in rows[6].estimate.assumptions if one.startswith("by template")]
    assert layers.endswith("with 4, 5, 6 of its 40 layers") or sizes.endswith("with 4, 5, 6 of its 40 layers")
