"""Templates: the trace that they write for a size is the one that a capture gives, or they say that they serve none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import graphmem  # noqa: E402
from graphmem.answering import runs  # noqa: E402
from graphmem.answering.question import Question  # noqa: E402
from graphmem.answering.runs import RunCache, silent  # noqa: E402
from graphmem.answering.sized import SizedRuns  # noqa: E402
from graphmem.capture.kernels.parts.script import Card  # noqa: E402
from graphmem.capture.record.calls import CallLog  # noqa: E402
from graphmem.capture.templates.curves import Curves, curve_through  # noqa: E402
from graphmem.capture.templates.layout import NoTemplate  # noqa: E402
from graphmem.capture.templates.template import Sample, Template  # noqa: E402
from graphmem.devices import custom_device  # noqa: E402
from graphmem.estimate import Estimate  # noqa: E402
from graphmem.planning.documents import is_by_template  # noqa: E402
from graphmem.trace import same  # noqa: E402
from graphmem.training import FullyShard, Training  # noqa: E402
from graphmem.units import GIB  # noqa: E402
from tests.support.examples import first_quick  # noqa: E402

nn, F = torch.nn, torch.nn.functional

# --- curves -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=3), st.integers(1, 10_000))
def test_a_polynomial_is_found_again(coefficients: list[int], size: int) -> None:
    def value(x: int) -> int:
        return sum(coefficient * x**power for power, coefficient in enumerate(coefficients))

    learnt = (2, 3, 5, 9)
    curve = curve_through(learnt, [value(x) for x in learnt])
    assert curve.at(size) == value(size)
    assert curve.needs <= len(coefficients)


@pytest.mark.parametrize("unit", [8, 32])
def test_what_is_padded_is_found(unit: int) -> None:
    learnt = (unit + 1, 3 * unit, 6 * unit + 5)
    curve = curve_through(learnt, [12 + 4 * (-(-x // unit) * unit) for x in learnt])
    assert [curve.at(x) for x in (1, unit, unit + 1)] == [12 + 4 * unit, 12 + 4 * unit, 12 + 8 * unit]


def test_how_many_samples_a_curve_needs() -> None:
    curves = Curves([2, 3, 5])
    assert (curves[curves.through((7, 7, 7))].needs, curves.most_needed) == (1, 1)
    assert (curves[curves.through((4, 6, 10))].needs, curves.most_needed) == (2, 2)
    curves.through((4, 9, 25))
    assert curves.most_needed == 3  # nothing is left that could prove it


# --- models -----------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Fused attention, whose kernels look at lengths, an embedding, layer norms, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))
        self.head = nn.Linear(64, 512)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 64, 2, dropout=0.1, batch_first=True), nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0][:, -1])


class Contrastive(nn.Module):
    """Its loss has the square of the batch, and takes every sample's own row by index."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(32, 64), nn.Linear(32, 64)

    def forward(self, x: Any) -> Any:
        rows = torch.arange(len(x), device=x.device)
        similar = F.normalize(self.left(x)) @ F.normalize(self.right(x)).T
        return F.cross_entropy(similar, rows) + similar[rows, rows].mean()


def convolutions(batch: int = 2) -> Any:
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, 2))
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)), torch.zeros(batch, 3, 32, 32)


def decoder(batch: int = 2, seq_len: int = 64) -> Any:
    return Decoder(), torch.zeros(batch, seq_len, dtype=torch.long)


def recurrent(batch: int = 2) -> Any:
    return Recurrent(), torch.zeros(batch, 20, 32)


def contrastive(batch: int = 2) -> Any:
    return Contrastive(), torch.zeros(batch, 32)


class Deeper(nn.Module):
    """Takes another way above a batch of 100."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

    def forward(self, x: Any) -> Any:
        x = self.first(x).relu()
        return torch.cat([self.second(x).relu()] * 2) if len(x) > 100 else self.second(x)


def deeper(batch: int = 2) -> Any:
    return Deeper(), torch.zeros(batch, 1024)


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        torch.backends.cudnn.benchmark = True
        return self.convolution(x)


def timed(batch: int = 2) -> Any:
    return Timed(), torch.zeros(batch, 3, 16, 16)


def sample(model: Callable[..., Any], size: int, name: str = "batch", **options: Any) -> Sample:
    sizes: dict[str, Any] = {name: size}
    question = Question(model, device="T4", **sizes, **options)
    log = CallLog()
    return Sample(size, runs.record(question, runs.load(question), calls=log).trace, log)


def card() -> Card:
    setting = Question("x", device="T4").setting
    return Card(setting.device, setting.torch_version)


@pytest.mark.parametrize(
    ("model", "name", "learnt", "asked"),
    [
        (convolutions, "batch", (2, 3, 5), (7, 40)),
        (decoder, "batch", (2, 3, 6), (5, 33)),
        pytest.param(decoder, "seq_len", (64, 96, 160, 224), (128, 512), marks=pytest.mark.slow),
        pytest.param(recurrent, "batch", (2, 3, 6), (5, 64), marks=pytest.mark.slow),
        (contrastive, "batch", (2, 3, 5, 8), (4, 200)),
    ],
)
@pytest.mark.parametrize("step", [graphmem.Training(), graphmem.Inference()], ids=["training", "inference"])
def test_a_template_gives_what_a_capture_gives(
    model: Callable[..., Any], name: str, learnt: tuple[int, ...], asked: tuple[int, ...], step: Any
) -> None:
    template = Template.learn([sample(model, size, name, training=step) for size in learnt])
    assert template.is_proven
    assert template.agrees(card())
    for size, written in zip(asked, template.traces(asked, card()), strict=True):
        assert same(written, sample(model, size, name, training=step).trace)


def test_kernels_take_other_buffers_at_other_sizes() -> None:
    """Else the test above would show little."""
    counts = {len(sample(decoder, size, training=graphmem.Training()).trace) for size in (3, 33)}
    assert len(counts) == 2


def test_what_a_written_trace_shares_is_what_is_in_it() -> None:
    template = Template.learn([sample(convolutions, size) for size in (2, 3, 9)])
    for trace in template.traces([4, 7], card()):
        alone = replace(trace)
        assert all((mine == its).all() for mine, its in zip(trace.columns, alone.columns, strict=True))
        assert trace.labelled == alone.labelled
        assert trace.operator_names == alone.operator_names
        for name in ("allocations", "birth_of", "death_of", "phase_of_event"):
            assert (getattr(trace, name) == getattr(alone, name)).all()


def test_two_ways_make_no_template() -> None:
    with pytest.raises(NoTemplate, match="at 3 and 200 the operators differ"):
        Template.learn([sample(deeper, size) for size in (3, 5, 200)])


def test_plans_that_are_timed_make_no_template() -> None:
    with pytest.raises(NoTemplate, match="times its plans"):
        Template.learn([sample(timed, size) for size in (2, 3)])


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The batches that are captured."""
    sizes: list[int | None] = []
    record = runs.record

    def noted(question: Question, *rest: Any) -> Any:
        sizes.append(question.batch)
        return record(question, *rest)

    monkeypatch.setattr(runs, "record", noted)
    return sizes


def fits(estimate: Estimate | None) -> bool:
    assert estimate is not None
    assert estimate.fit is not None
    return estimate.fit.fits


def by_captures_alone(monkeypatch: pytest.MonkeyPatch, model: Callable[..., Any], **options: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(SizedRuns, "by_template", lambda *_: None)
        return graphmem.fit(model, **options)


@pytest.mark.parametrize("model", first_quick([contrastive, convolutions], 0))
def test_the_largest_batch_is_found_with_few_captures(
    model: Callable[..., Any], captured: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = custom_device(GIB)
    found: Any = graphmem.fit(model, device=card)
    assert found.value in captured  # the answer is no template's
    assert len(captured) == 4
    alone = by_captures_alone(monkeypatch, model, device=card)
    assert (found.value, found.above_value, found.safe_value) == (alone.value, alone.above_value, alone.safe_value)
    assert (found.estimate.peak, found.above.peak) == (alone.estimate.peak, alone.above.peak)


@pytest.mark.slow
def test_a_page_of_the_largest_size_has_others_to_choose_by_template(captured: list[int | None]) -> None:
    """Each says whether a template wrote it, and is what a capture gives."""
    found = graphmem.fit(convolutions, device=custom_device(GIB), grid=8)
    assert len(captured) == 4
    written = {value: one for value, one in found.sizes.items() if is_by_template(one)}
    assert set(found.sizes) - set(written) == set(captured)
    assert len(written) >= 6
    value = sorted(written)[3]
    alone = graphmem.analyze(convolutions, device=custom_device(GIB), batch=value)
    assert (written[value].peak, written[value].breakdown) == (alone.peak, alone.breakdown)
    page = found.report("html")
    assert f'<div data-at="[&quot;{found.value:,}&quot;]">' in page
    assert page.count("(by template)") == len(written)
    assert "sizes" not in found.to_dict()


@pytest.mark.slow
def test_an_answer_on_another_way_is_found_by_captures(captured: list[int | None]) -> None:
    """The template of small batches knows one way of the model."""
    found = graphmem.fit(deeper, device=custom_device(GIB))
    assert {2, 3, found.value, found.above_value} <= set(captured)
    assert fits(found.estimate)
    assert not fits(found.above)


@pytest.mark.slow
def test_rows_of_a_sweep_are_those_of_captures(captured: list[int | None]) -> None:
    sizes = [1, 2, 3, 4, 16, 40]
    rows = graphmem.sweep(convolutions, vary={"batch": sizes, "alloc_conf": ["", "max_split_size_mb:64"]}, device="T4")
    assert set(captured) == {1, 2, 3, 40}
    assert len(captured) == 4
    written = [row.settings["batch"] for row in rows if "by template" in str(row.estimate and row.estimate.assumptions)]
    assert written == [4, 4, 16, 16]
    for row in rows:
        assert row.estimate is not None
        one = graphmem.analyze(convolutions, device="T4", **row.settings)
        assert row.estimate.peak == one.peak
        assert row.estimate.breakdown == one.breakdown


def shortcut(batch: int = 2) -> tuple[nn.Module, torch.Tensor]:
    """It goes another way at the smallest batch."""
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)]
    return nn.Sequential(*(layers if batch > 2 else layers[:1])), torch.zeros(batch, 32)


def test_the_smallest_size_may_go_another_way(captured: list[int | None]) -> None:
    rows = graphmem.sweep(shortcut, vary={"batch": [2, 3, 4, 5, 8, 20]}, device="T4")
    assert captured == [2, 3, 20, 4]
    for row in rows:
        assert row.estimate is not None
        alone = graphmem.analyze(shortcut, device="T4", **row.settings)
        assert (row.estimate.peak, row.estimate.breakdown) == (alone.peak, alone.breakdown)


def test_another_card_needs_one_capture(captured: list[int | None]) -> None:
    """cuBLAS's workspaces, split reductions and plans are those of each card."""
    batches, cards = [2, 3, 8, 20, 32], ["H100", "L4", "T4"]
    rows = graphmem.sweep(convolutions, vary={"device": cards, "batch": batches})
    assert captured == [2, 3, 32, 2, 2]
    found: list[Any] = [row.estimate for row in rows]
    assert any("on another card, which gave the one at 2" in note for note in found[6].assumptions)
    for row, estimate in zip(rows, found, strict=True):
        alone = graphmem.analyze(convolutions, **row.settings)
        assert (estimate.peak, estimate.breakdown) == (alone.peak, alone.breakdown)


def test_values_that_are_no_sizes_are_rows_of_their_own() -> None:
    rows = graphmem.sweep(convolutions, vary={"batch": [None, 2, "many", 0, 3, 5, 8]}, device="T4")
    assert [row.error != "" for row in rows] == [False, False, True, True, False, False, False]


def test_a_run_by_template_is_marked_and_proven_first() -> None:
    cache = RunCache()
    with SizedRuns("batch", lambda size: Question(convolutions, batch=size), cache) as sized:
        sized.capture(2, silent)
        assert sized.by_template(9) is None
        sized.capture(3, silent)
        assert not sized.is_proven
        sized.capture(12, silent)
        assert bool(sized.is_proven)
        run = sized.by_template(9)
        assert run is not None
        assert run.notes[-1] == "by template of the captures at batch 2, 3, 12"
        assert sized.by_template(1) is None
        assert sized.by_template(20) is None


def test_a_sharded_step_at_many_sizes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
        "n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": 64, "n_positions": 32}))  # fmt: skip

    def question(batch: int) -> Question:
        step = Training(fsdp=FullyShard(2))
        return Question(f"hf:{tmp_path}", batch=batch, seq_len=16, training=step, iterations=2)

    with SizedRuns("batch", question, RunCache()) as sized:
        for size in (2, 3, 5):
            sized.capture(size, silent)
        run, real = sized.by_template(4), RunCache().run(question(4))
        assert run is not None
        assert same(run.trace, real.trace)
        assert (run.sharded, run.output_bytes) == (real.sharded, real.output_bytes)
        assert run.sharded.transformer.batch == 4  # type: ignore[union-attr]
