"""Options of the built-in step: what holds the model's output, batches that differ, schedulers, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import graphmem  # noqa: E402
from graphmem.errors import GraphmemError  # noqa: E402
from graphmem.training import SCHEDULERS, Training  # noqa: E402
from tests.support.examples import first_quick  # noqa: E402

WIDE = 4096


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.head = nn.Linear(64, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x))


def _factory(batch: int = 8, seq_len: int = 64) -> Any:
    targets = torch.zeros(batch * seq_len, dtype=torch.long)
    return Scores(), torch.zeros(batch, seq_len, 64), targets, _loss


def _loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.view(-1, WIDE), targets)


def _analyze(batch: int = 8, seq_len: int | None = 64, iterations: int | None = None, **options: Any) -> Any:
    return graphmem.analyze(_factory, batch=batch, seq_len=seq_len, iterations=iterations, training=Training(**options))


def test_a_held_output_lives_through_the_next_forward() -> None:
    held, dropped = _analyze(), _analyze(loop="drop")
    output = 8 * 64 * WIDE * 4
    assert held.allocated - dropped.allocated >= output // 2
    assert held.details["loop"]["output_bytes"] == dropped.details["loop"]["output_bytes"] == output


def test_both_figures_are_told_where_they_differ() -> None:
    held, dropped = _analyze(), _analyze(loop="drop")
    told = held.details["loop"]
    assert told["other"] == "drop"
    assert told["other_reserved_bytes"] == dropped.reserved
    assert told["other_allocated_bytes"] == dropped.allocated
    assert dropped.details["loop"]["other_reserved_bytes"] == held.reserved
    assert "With the other loop (--loop drop)" in held.report(details=True)
    assert "With the other loop (--loop hold)" in dropped.report(details=True)
    assert "With the other loop (--loop drop)" in held.report("html")
    assert json.loads(held.to_json())["details"]["loop"]["other"] == "drop"


def test_a_small_output_is_not_analysed_twice() -> None:
    said: list[str] = []
    estimate = graphmem.analyze(
        nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 4)), torch.zeros(64, 64), progress=said.append
    )
    assert "other" not in estimate.details["loop"]
    assert not any("--loop" in word for word in said)
    assert "other loop" not in estimate.report(details=True)


def test_a_longer_batch_among_shorter_ones_decides_the_peak() -> None:
    short, mixed = _analyze(seq_len=32), _analyze(seq_len=None, seq_lens=(32, 64))
    assert mixed.allocated > short.allocated
    assert "4 iterations" in " ".join(mixed.assumptions)


def test_lengths_are_a_range_over_their_orders() -> None:
    first, last = (_analyze(seq_len=None, seq_lens=lengths) for lengths in ((100, 128, 115), (115, 128, 100)))
    assert first.reserved != last.reserved
    for one in (first, last):
        least, most = one.interval("reserved")
        assert least is not None
        assert most is not None
        assert least <= min(first.reserved, last.reserved) <= max(first.reserved, last.reserved) <= most


def test_an_evaluation_keeps_nothing_for_a_backward_pass() -> None:
    trained = _analyze(batch=4, loop="drop")
    evaluated = _analyze(batch=4, loop="drop", eval_batches=1, eval_batch_size=4)
    larger = _analyze(batch=4, loop="drop", eval_batches=1, eval_batch_size=64)
    assert abs(evaluated.allocated - trained.allocated) < 1 << 20
    assert larger.allocated > trained.allocated


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer", first_quick(["sgd", "adamw"], 1))
def test_every_scheduler_runs_and_takes_nothing_but_momentum(name: str, optimizer: str) -> None:
    """One that cycles the momentum gives plain SGD its buffers."""
    options: dict[str, Any] = {"optimizer": optimizer, "iterations": 2, "loop": "drop"}
    if optimizer == "sgd" and name in ("CyclicLR", "OneCycleLR"):
        options["optimizer_args"] = (("momentum", 0.9),)
    plain = _analyze(**options)
    scheduled = _analyze(**{**options, "optimizer_args": ()}, lr_scheduler=name)
    assert scheduled.peak == plain.peak


@pytest.mark.slow
def test_lbfgs_has_its_own_place_for_clearing() -> None:
    with pytest.raises(GraphmemError, match="zero_grad_at"):
        _analyze(optimizer="lbfgs", zero_grad_at="before_forward")
    assert _analyze(optimizer="lbfgs", iterations=2).allocated > 0


def test_a_factory_that_puts_its_model_on_the_card_is_refused_for_several_sizes() -> None:
    def on_card(batch: int = 8) -> Any:
        return Scores().to("cuda"), torch.zeros(batch, 4, 64, device="cuda")

    with pytest.raises(GraphmemError, match="on the host"):
        graphmem.analyze(on_card, batch=8, training=Training(last_batch=2))


def test_an_onnx_graph_has_inputs_of_one_size(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from tests.support import onnx_samples

    path = onnx_samples.save(onnx_samples.perceptron(), tmp_path)
    with pytest.raises(GraphmemError, match="one size"):
        graphmem.analyze(path, batch=2, training=Training(last_batch=1))


def test_the_report_names_the_library_of_the_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    estimate = graphmem.analyze(f"hf:{tmp_path}/config.json", batch=2, seq_len=16)
    assert any(transformers.__version__ in note for note in estimate.assumptions)


def _masked(folder: Path, mask: str | None, **changed: Any) -> graphmem.Estimate:
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config | sizes | changed))
    step, length = Training(attention_mask=mask), None if changed else 64
    return graphmem.analyze(f"hf:{folder}/config.json", batch=4, seq_len=length, training=step, device="h100-80gb")


def test_a_mask_that_hides_nothing_is_dropped_and_one_with_padding_is_kept(tmp_path: Path) -> None:
    """The recorded loops ``mask_that_hides_nothing`` and ``padded_*`` hold the figures."""
    pytest.importorskip("transformers")
    without, ones, padded = (_masked(tmp_path, mask) for mask in (None, "ones", "padded"))
    mask_bytes = 4 * 64 * 8
    assert ones.peak.requested_bytes == without.peak.requested_bytes + mask_bytes
    assert padded.peak.requested_bytes > ones.peak.requested_bytes
    assert "attention mask with padding" in padded.step
    assert "attention mask" not in without.step


def test_a_mask_is_for_models_that_take_one_beside_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(GraphmemError, match="takes no attention_mask beside tokens"):
        _masked(tmp_path, "ones", model_type="vit", architectures=["ViTForImageClassification"])
    with pytest.raises(GraphmemError, match="make the mask where the other inputs are made"):
        graphmem.analyze(_factory, training=Training(attention_mask="ones"))
    with pytest.raises(GraphmemError, match="unknown attention_mask 'some'; accepted: ones, padded"):
        Training(attention_mask="some")


def test_batches_that_are_moved_ahead_are_on_the_card_beside_the_one_that_is_used() -> None:
    """The recorded loops ``prefetched*`` hold the figures."""
    plain, ahead = (
        graphmem.analyze(_factory, training=Training(prefetch=count), device="h100-80gb") for count in (0, 3)
    )
    assert ahead.peak.requested_bytes > plain.peak.requested_bytes
    assert "3 batches prefetched" in ahead.step


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"prefetch": -1}, "prefetch is a whole number from 0 to 100, not -1"),
        ({"prefetch": 1.5}, "prefetch is a whole number from 0 to 100, not 1.5"),
        ({"prefetch": 1, "optimizer": "lbfgs"}, "lbfgs evaluates one batch many times"),
        ({"prefetch": 1, "tp": 2, "sp": True}, "prefetch with sp is not modelled"),
    ],
)
def test_prefetching_that_makes_no_sense_is_refused(step: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphmemError, match=message):
        Training(**step)


def test_a_batch_that_its_factory_puts_on_the_card_is_not_moved_ahead() -> None:
    def factory() -> Any:
        return torch.nn.Linear(8, 8).cuda(), torch.zeros(4, 8, device="cuda")

    with pytest.raises(GraphmemError, match="prefetch moves batches from the host"):
        graphmem.analyze(factory, training=Training(prefetch=1))
