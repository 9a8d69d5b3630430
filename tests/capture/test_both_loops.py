"""One run tells two loops, the one that holds the model's output and the one that drops it: each is, event by event,
what a run of its own gives; and where that cannot be told, the loop that was asked for is run alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem.analyze import analyze  # noqa: E402
from graphmem.answering.question import Question  # noqa: E402
from graphmem.answering.runs import RunCache  # noqa: E402
from graphmem.capture.session import run  # noqa: E402
from graphmem.run import Run, RunMode  # noqa: E402
from graphmem.sources.zoo import usual_step  # noqa: E402
from graphmem.trace import Trace  # noqa: E402
from graphmem.training import LOOPS, DataParallel, Training, other_loop  # noqa: E402
from models_zoo.manifest import entries, entry  # noqa: E402
from tests.recorded.cases.sharded.options import STEPS, given  # noqa: E402


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """What a question captures: both loops in one run, or only the one that is asked for."""
    whole = run.capture_subject

    def capture(question: Question, covers_both: bool) -> Run:
        def capture_subject(subject: Any, mode: RunMode, **options: Any) -> Run:
            return whole(subject, replace(mode, covers_both_loops=covers_both and mode.covers_both_loops), **options)

        monkeypatch.setattr(run, "capture_subject", capture_subject)
        cache = RunCache()
        return cache.run(question)

    return capture


def assert_both_are_told(question: Question, captured: Callable[..., Run]) -> None:
    step = question.step
    assert isinstance(step, Training)
    both = captured(question, True)
    assert both.other_loop is not None
    for told, loop in ((both, step.loop), (both.other_loop, other_loop(step.loop))):
        alone = captured(replace(question, training=replace(step, loop=loop)), False)
        assert alone.other_loop is None
        assert differences(told.trace, alone.trace) == []
        assert (told.notes, told.output_bytes, told.assumed) == (alone.notes, alone.output_bytes, alone.assumed)


def differences(one: Trace, other: Trace) -> list[str]:
    """Parts of two traces that are not the same."""
    pairs = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(Trace)]
    return [name for name, mine, theirs in pairs if not np.array_equal(np.asarray(mine), np.asarray(theirs))]


# --- both are told ----------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Logits, and features in lists and dictionaries of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        features = self.first(x).relu()
        more = [features.view(-1), (features, {"raw": features.exp()}), features[:2].detach()]
        return {"logits": self.second(features), "more": more}


def of_all(output: Any) -> Any:
    flat, (_, others), _ = output["more"]
    return output["logits"].exp().sum() + flat.sum() + others["raw"].sum()


def of_some(output: Any) -> Any:
    return output["logits"].exp().sum()


def two() -> Any:
    return Two(), torch.zeros(4, 16), of_all


def language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.zeros((4, 32), dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(
    ("factory", "step"),
    [
        (two, Training()),
        (two, Training(grad_accum=3, zero_grad_at="before_backward", amp="fp16", clip_grad_norm=1.0, loop="drop")),
        (language_model, Training(amp="bf16", checkpoint_activations=True, zero_grad="zeros")),
        pytest.param(
            language_model,
            Training(dtype="bf16", grad_accum=2, zero_grad_at="before_forward", lr_scheduler="StepLR"),
            marks=pytest.mark.slow,
        ),
        pytest.param(language_model, Training(ddp=DataParallel(4)), marks=pytest.mark.slow),
    ],
)
def test_one_run_tells_what_two_give(factory: Any, step: Training, captured: Callable[..., Run]) -> None:
    if factory is language_model:
        pytest.importorskip("transformers")
    assert_both_are_told(Question(factory, training=step), captured)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if step.pp is None])
@pytest.mark.filterwarnings("ignore")
def test_one_run_tells_what_two_give_around_wrapped_models(name: str, captured: Callable[..., Run]) -> None:
    for package in ("transformers", *(["deepspeed"] if STEPS[name].zero is not None else [])):
        if importlib.util.find_spec(package) is None:  # DeepSpeed chooses its accelerator where it is imported
            pytest.skip(f"needs {package}")
    factory, batch = given(name)
    assert_both_are_told(Question(factory, batch=batch, training=STEPS[name]), captured)


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in entries()])
def test_one_run_tells_what_two_give_of_the_zoo(name: str, captured: Callable[..., Run]) -> None:
    pytest.importorskip(entry(name).library)
    step = usual_step(name)
    assert isinstance(step, Training)
    question = Question(f"zoo:{name}", batch=2, training=step, iterations=2)
    if captured(question, True).other_loop is not None:
        assert_both_are_told(question, captured)
    else:  # an output that the loss does not need, as CLIP's of its two models, has nodes of its own
        assert differences(captured(question, True).trace, captured(question, False).trace) == []


def test_an_analysis_captures_once_for_the_figures_of_both_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    def large() -> Any:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1 << 20, bias=False)), torch.zeros(64, 8)

    runs: list[str] = []
    whole = run.capture_subject

    def counted(subject: Any, *given: Any, **options: Any) -> Run:
        runs.append(subject.step.loop)
        return whole(subject, *given, **options)

    monkeypatch.setattr(run, "capture_subject", counted)
    estimate = analyze(large)
    assert runs == ["hold"]
    assert estimate.details["loop"]["other"] == "drop"
    dropped = analyze(large, training=Training(loop="drop"))
    assert estimate.details["loop"]["other_allocated_bytes"] == dropped.allocated < estimate.allocated


# --- what cannot be told ----------------------------------------------------------------------------------------------


class Keeps(Two):
    """Its output stays in an attribute, too, and may change there."""

    def forward(self, x: Any) -> Any:
        self.kept = super().forward(x)
        return self.kept


class Double(torch.autograd.Function):
    """What it needs in the backward pass is no saved tensor: it lives as long as the graph."""

    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.scale = torch.full_like(x, 2)
        return x * context.scale

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient * context.scale


class Doubles(Two):
    def forward(self, x: Any) -> Any:
        output = super().forward(x)
        output["logits"] = Double.apply(output["logits"])
        return output


class Asks(Two):
    """Does otherwise where more memory is taken."""

    def forward(self, x: Any) -> Any:
        torch.cuda.memory_allocated()
        return super().forward(x)


class Opaque(Two):
    def forward(self, x: Any) -> Any:
        output = super().forward(x)
        flat = output["more"][0]
        output["later"] = lambda: flat
        return output


class Retains(Two):
    def forward(self, x: Any) -> Any:
        output = super().forward(x)
        output["logits"].retain_grad()
        return output


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("model", "loss"), [(Keeps, of_all), (Doubles, of_all), (Asks, of_all), (Opaque, of_all), (Retains, of_all),
                        (Two, of_some)]
)  # fmt: skip
def test_a_loop_is_run_alone_where_the_other_cannot_be_told(
    model: type[Two], loss: Any, loop: str, captured: Callable[..., Run]
) -> None:
    question = Question(lambda: (model(), torch.zeros(4, 16), loss), training=Training(loop=loop))
    both, alone = captured(question, True), captured(question, False)
    assert both.other_loop is None
    assert differences(both.trace, alone.trace) == []
