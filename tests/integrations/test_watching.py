"""A loop is predicted at its first batch, measured by phases, and compared; Trainer's and Lightning's too."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

import graphmem
from graphmem.errors import GraphmemError
from graphmem.integrations import watching
from graphmem.units import MIB
from tests.support.shapes import differences

torch = pytest.importorskip("torch")


def _loop(model: Any, optimizer: Any, steps: int = 4) -> None:
    for _ in range(steps):
        model(torch.ones(8, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def model() -> Any:
    return torch.nn.Linear(512, 1024)


def test_without_a_card_there_is_the_prediction(model: Any) -> None:
    said: list[str] = []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    with graphmem.watch(model, optimizer, device="T4", say=said.append) as watched:
        _loop(model, optimizer)
    assert watched.answer is not None
    assert watched.answer.phases == ()
    assert "T4-16GB" in said[0]
    assert len(said) == 1
    expected = graphmem.analyze(
        model,
        (torch.ones(8, 512),),
        training=graphmem.Training(optimizer="sgd", optimizer_args=(("momentum", 0.9),)),
        device="T4",
        iterations=3,
    )
    assert watched.answer.estimate.peak == expected.peak
    assert not any((model._forward_hooks, model._forward_pre_hooks, optimizer._optimizer_step_pre_hooks))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def _peaks_of(estimate: graphmem.Estimate, more: int, at: str) -> Iterator[tuple[int, int]]:
    """What a card would measure: as predicted, but in one phase."""
    for phase in estimate.phases:
        if phase.iteration:
            extra = more if str(phase) == at else 0
            yield phase.peak.allocated_bytes + extra, phase.peak.reserved_bytes + extra


@pytest.mark.parametrize(
    ("more", "words"), [(0, "No phase parts"), (5 * MIB, "first in iteration 2 backward, by 5.00")]
)
def test_the_phase_that_goes_another_way_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch, more: int, words: str
) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    expected = graphmem.analyze(model, (torch.ones(8, 512),), device="T4", iterations=3)
    peaks = iter([(0, 0), *_peaks_of(expected, more, "iteration 2 backward")])
    monkeypatch.setattr(watching, "meter", lambda: next(peaks))
    said: list[str] = []
    with graphmem.watch(model, optimizer, device="T4", say=said.append) as watched:
        _loop(model, optimizer)
    assert watched.answer is not None
    assert len(watched.answer.phases) == 9
    assert differences(json.loads(json.dumps(watched.answer.to_dict()))) == []
    assert words in " ".join(said[-1].split())
    part = watched.answer.parts_at
    assert (part is None) == (more == 0)
    assert part is None or (part.iteration, part.name, part.change_bytes) == (2, "backward", -more)


def test_what_cannot_be_predicted_does_not_stop_the_loop(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise GraphmemError("no such thing")

    monkeypatch.setattr(importlib.import_module("graphmem.analyze"), "analyze", refuse)
    said: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphmem.watch(model, optimizer, say=said.append) as watched:
        _loop(model, optimizer)
    assert watched.answer is None
    assert said == ["graphmem: not predicted: no such thing"]


def test_optimizers_are_read() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    found = watching.optimizer_of(torch.optim.Adam(weights, lr=1e-3, amsgrad=True))
    assert found["optimizer"] == "adam"
    assert found["optimizer_args"] == (("amsgrad", True),)

    class Mine(torch.optim.SGD):
        pass

    assert watching.optimizer_of(Mine(weights))["optimizer"].endswith(":test_optimizers_are_read.<locals>.Mine")


def test_trainers_callback_predicts_its_step(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from graphmem.integrations.transformers import MemoryCallback, training_of

    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=100, n_positions=32)
    said: list[str] = []
    callback = MemoryCallback(gpu="T4", say=said.append)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(8)]
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=[callback]
    )
    trainer.train()
    assert callback.answer is not None, said
    assert "adamw" in callback.answer.estimate.step
    assert training_of(arguments).loop == "drop"  # the Trainer keeps no output
    assert training_of(arguments).clip_grad_norm == 1.0
    assert callback.answer.estimate.breakdown["OPTIMIZER_STATE"] > 0


def test_lightnings_callback_predicts_its_step(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from graphmem.integrations.lightning import MemoryCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(512, 1024)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    said: list[str] = []
    callback = MemoryCallback(gpu="T4", say=said.append)
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 512), batch_size=8))
    assert callback.answer is not None, said
    assert callback.answer.estimate.breakdown["OPTIMIZER_STATE"] == 4 * 1024 * (512 + 1)
