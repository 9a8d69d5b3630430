"""The ways to say what a step is: factories, modules with inputs, losses, functions that run it all themselves."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import graphmem  # noqa: E402
from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.capture.loop.training_loop import default_loss  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from graphmem.trace import Category, Trace  # noqa: E402
from tests.support.captures import births, of, sizes  # noqa: E402


def traced(model: Any, example_inputs: Any = None, **options: Any) -> Trace:
    trace = analyze(model, example_inputs, **options).trace
    assert trace is not None
    return trace


def inputs_of(trace: Trace) -> dict[str, int]:
    return {born.label: born.bytes for born in of(trace, Category.INPUT)}


class Pair(nn.Module):
    """Two inputs by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, left: Any, right: Any = None) -> Any:
        return self.scale(left) if right is None else self.scale(left) + right


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (lambda: torch.zeros(4, 8), {"input": 128}),
        (lambda: (torch.zeros(4, 8),), {"input[0]": 128}),
        (lambda: (torch.zeros(4, 8), torch.zeros(1, 8)), {"input[0]": 128, "input[1]": 32}),
        (lambda: [torch.zeros(4, 8), torch.zeros(1, 8)], {"input[0]": 128, "input[1]": 32}),
        (lambda: {"left": torch.zeros(4, 8), "right": torch.zeros(2, 1, 8)}, {"left": 128, "right": 64}),
        (lambda: {"left": torch.zeros(4, 8), "right": None}, {"left": 128}),
    ],
    ids=["tensor", "tuple of one", "tuple", "list", "dict", "dict with None"],
)
def test_forms_of_inputs(inputs: Any, expected: dict[str, int]) -> None:
    assert inputs_of(traced(Pair(), inputs())) == expected
    assert inputs_of(traced(lambda: (Pair(), inputs()))) == expected


def test_inputs_follow_the_precision_of_the_weights_and_indices_do_not() -> None:
    def factory() -> Any:
        return nn.Bilinear(8, 8, 4), (torch.zeros(2, 8), torch.zeros(2, 8))

    assert inputs_of(traced(factory, training=Training(dtype="bf16"))) == {"input[0]": 32, "input[1]": 32}
    ids = torch.zeros(5, dtype=torch.long)
    assert inputs_of(traced(nn.Embedding(10, 4), ids, training=Training(dtype="bf16"))) == {"input": 40}


def test_nested_inputs_are_all_moved() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(8, 8)

        def forward(self, batch: Any) -> Any:
            return self.scale(batch["images"]["left"]) + batch["masks"][1]

    batch = {"images": {"left": torch.zeros(4, 8)}, "masks": [torch.zeros(1, 8), torch.zeros(1, 8)]}
    assert sorted(inputs_of(traced(Nested(), (batch,))).values()) == [32, 32, 128]


def test_any_mapping_names_the_inputs() -> None:
    """A tokenizer's answer is a mapping, and no dict."""
    batch = UserDict({"left": torch.zeros(4, 8), "right": torch.zeros(1, 8)})
    assert inputs_of(traced(Pair(), batch)) == {"left": 128, "right": 32}


def test_a_module_may_hold_tensors_that_are_no_buffers() -> None:
    class Caches(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.table = torch.ones(3)
            self.last: Any = None

        def forward(self, x: Any) -> Any:
            self.last = super().forward(x)
            return self.last + self.table.to(x.device).sum()

    model = Caches()
    model(torch.zeros(1, 8))
    assert analyze(model, torch.zeros(4, 8)).allocated > 0
    assert model.last.shape == (1, 8)


# --- factories --------------------------------------------------------------------------------------------------------


def test_a_factory_gets_the_sizes_it_names() -> None:
    def factory(batch: int = 1, seq_len: int = 16) -> Any:
        return nn.Embedding(10, 4), torch.zeros(batch, seq_len, dtype=torch.long)

    assert inputs_of(traced(factory)) == {"input": 16 * 8}
    assert inputs_of(traced(factory, batch=3, seq_len=5)) == {"input": 3 * 5 * 8}


def test_a_factory_may_take_any_keyword() -> None:
    def factory(**sizes: int) -> Any:
        return nn.Linear(2, 2), torch.zeros(sizes.get("batch", 1), 2)

    assert inputs_of(traced(factory, batch=7)) == {"input": 56}


def test_a_file_with_a_factory_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "my_layers.py").write_text("from torch import nn\nclass Layer(nn.Linear): ...\n")
    (tmp_path / "train.py").write_text(
        "import torch\nfrom my_layers import Layer\n"
        "def build(batch=2):\n    return Layer(3, 3), torch.zeros(batch, 3)\n"
    )
    estimate = analyze(f"{tmp_path / 'train.py'}:build", batch=5)
    assert estimate.trace is not None
    assert inputs_of(estimate.trace) == {"input": 60}


def test_a_module_by_its_python_name() -> None:
    assert analyze("models_zoo.reference:gpt_tiny", batch=2).allocated > 0


def test_the_batch_of_example_inputs_is_replaced() -> None:
    assert inputs_of(traced(Pair(), torch.zeros(4, 8), batch=16)) == {"input": 16 * 32}


def test_a_factory_may_build_on_the_device_itself() -> None:
    trace = traced(lambda: (nn.Linear(8, 8).cuda(), torch.zeros(4, 8, device="cuda")))
    assert sizes(of(trace, Category.PARAMETER)) == [256, 32]
    assert sizes(of(trace, Category.INPUT)) == [128]


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_loss_of_the_factory_is_used() -> None:
    def factory() -> Any:
        return nn.Linear(8, 4), torch.zeros(16, 8), lambda output: output.square().sum()

    assert any(born.operator.startswith("aten.pow") for born in births(traced(factory)))


def test_targets_move_with_their_loss() -> None:
    class Loss:
        def __init__(self) -> None:
            self.targets = torch.zeros(16, dtype=torch.long)

        def __call__(self, output: Any) -> Any:
            return functional.cross_entropy(output, self.targets)

    trace = traced(lambda: (nn.Linear(8, 4), torch.zeros(16, 8), Loss()))
    assert inputs_of(trace) == {"input": 512, "targets": 128}


@dataclass
class Output:
    loss: Any
    logits: Any


Scores = namedtuple("Scores", ["main", "auxiliary"])


def test_the_default_loss() -> None:
    scalar, scores, ids = torch.tensor(3.0), torch.full((2, 2), 5.0), torch.tensor([7])
    assert default_loss(Output(scalar, scores)) is scalar
    assert default_loss(SimpleNamespace(loss=scalar)) is scalar
    assert default_loss({"loss": scalar, "logits": scores}) is scalar
    assert default_loss(scores).item() == 5.0
    assert default_loss((ids, scores)).item() == 5.0
    assert default_loss({"ids": ids, "scores": [scores]}).item() == 5.0
    assert default_loss(Scores(scores, ids)).item() == 5.0


@pytest.mark.parametrize("output", [torch.tensor([1]), (), {}, None, 3.0])
def test_an_output_without_scores_needs_a_loss(output: Any) -> None:
    with pytest.raises(CaptureError, match="return a loss from the factory"):
        default_loss(output)


def test_an_output_object_without_a_loss_uses_its_scores() -> None:
    """transformers' outputs are ordered dictionaries whose loss is absent when no labels were given."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import CausalLMOutput

    assert transformers.__version__
    assert default_loss(CausalLMOutput(loss=None, logits=torch.full((2, 2), 5.0))).item() == 5.0


# --- steps that run themselves ----------------------------------------------------------------------------------------


def test_a_function_that_returns_nothing_is_the_whole_step() -> None:
    def step() -> None:
        model = nn.Linear(64, 64).to("cuda")
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.zeros(8, 64, device="cuda")
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    estimate = analyze(step)
    trace = estimate.trace
    assert trace is not None
    assert estimate.step == "custom step function"
    assert [str(phase) for phase in trace.phases] == [
        "build",
        *(f"iteration {n} {stage}" for n in (1, 2) for stage in ("forward", "backward", "optimizer")),
    ]
    assert {born.label for born in of(trace, Category.PARAMETER)} == {"weight", "bias"}
    assert sizes(of(trace, Category.OPTIMIZER_STATE)) == [64 * 64 * 4] * 2 + [64 * 4] * 2
    assert {born.label for born in of(trace, Category.GRADIENT)} == {"weight.grad", "bias.grad"}
    assert sizes(of(trace, Category.INPUT)) == [8 * 64 * 4]


def _factory() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.zeros(16, 64)


def test_a_custom_step_gives_what_the_default_step_gives() -> None:
    def step() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to("cuda")
        x = torch.zeros(16, 64).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            output = model(x)
            loss = output.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    default, custom = analyze(_factory), analyze(step)
    assert custom.peak == default.peak
    assert dict(custom.breakdown) == dict(default.breakdown)


def test_a_custom_step_that_drops_its_output_gives_what_the_dropping_step_gives() -> None:
    def step() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to("cuda")
        x = torch.zeros(16, 64).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss

    default, custom = analyze(_factory, training=Training(loop="drop")), analyze(step)
    assert custom.peak == default.peak
    assert dict(custom.breakdown) == dict(default.breakdown)


def test_a_training_loop_may_read_its_loss_for_the_log() -> None:
    def step() -> None:
        model = nn.Linear(4, 4).cuda()
        loss = model(torch.zeros(2, 4, device="cuda")).sum()
        loss.backward()
        loss = loss.detach()
        print(f"loss {loss.item():.3f} {float(loss)} {loss.tolist()} {bool(loss > 0)}")

    estimate = analyze(step)
    (assumed,) = [d for d in estimate.diagnostics if "read back" in d.message]
    assert assumed.count >= 3


def test_a_step_may_ask_the_device_about_itself() -> None:
    asked: dict[str, Any] = {}

    def step() -> None:
        asked["name"] = torch.cuda.get_device_name()
        asked["capability"] = torch.cuda.get_device_capability(0)
        asked["processors"] = torch.cuda.get_device_properties("cuda").multi_processor_count
        asked["available"] = torch.cuda.is_available()
        asked["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        torch.zeros(4, device=asked["device"])
        torch.cuda.memory_allocated()
        torch.cuda.manual_seed_all(0)

    analyze(step, device="A100-80GB")
    assert asked["capability"] == (8, 0)
    assert asked["processors"] == 108
    assert asked["name"].startswith("A100")
    assert asked["available"]


def test_scaled_half_precision_runs() -> None:
    def step() -> None:
        model = nn.Linear(16, 16).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.zeros(4, 16, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert analyze(step).allocated > 0


def test_inference_is_the_same_for_a_module_and_a_step() -> None:
    def step() -> None:
        model = nn.Linear(64, 64).to("cuda").eval()
        x = torch.zeros(16, 64).to("cuda")
        for _ in range(2):
            with torch.no_grad():
                output = model(x)
            del output

    default = analyze(lambda: (nn.Linear(64, 64), torch.zeros(16, 64)), training=Inference())
    assert analyze(step).peak == default.peak


def test_a_step_may_use_a_data_loader() -> None:
    def step() -> None:
        from torch.utils.data import DataLoader, TensorDataset

        samples = TensorDataset(torch.zeros(6, 8), torch.zeros(6, dtype=torch.long))
        model = nn.Linear(8, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in DataLoader(samples, batch_size=4, shuffle=True, pin_memory=True):
            output = model(inputs.cuda(non_blocking=True))
            functional.cross_entropy(output, targets.cuda(non_blocking=True)).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert [str(phase) for phase in traced(step).phases][-1] == "iteration 2 optimizer"


def test_a_step_may_copy_a_model() -> None:
    def step() -> None:
        model = nn.Linear(16, 16).cuda()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        model(torch.zeros(2, 16, device="cuda")).sum().backward()
        averaged.update_parameters(model)

    assert sizes([born for born in births(traced(step)) if born.bytes == 16 * 16 * 4])[:2] == [1024, 1024]


# --- options of the default step --------------------------------------------------------------------------------------


def _estimate(**options: Any) -> graphmem.Estimate:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    return analyze(model, torch.zeros(64, 256), training=Training(**options))


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [("sgd", 0), ("adam", 2), ("adamw", 2), ("adagrad", 1), ("rmsprop", 1), ("adadelta", 2), ("nadam", 2), ("asgd", 1)],
)
def test_optimizers_keep_their_state(optimizer: str, copies: int) -> None:
    trace = _estimate(optimizer=optimizer).trace
    assert trace is not None
    parameters = sum(sizes(of(trace, Category.PARAMETER)))
    state = sum(size for size in sizes(of(trace, Category.OPTIMIZER_STATE)) if size > 8)
    assert state == copies * parameters


def test_options_of_the_optimizer_arrive() -> None:
    momentum = _estimate(optimizer="sgd", optimizer_args={"momentum": 0.9}).trace
    assert momentum is not None
    parameters = sum(sizes(of(momentum, Category.PARAMETER)))
    assert sum(sizes(of(momentum, Category.OPTIMIZER_STATE))) == parameters
    many, single = _estimate(), _estimate(optimizer_args={"foreach": False})
    assert single.allocated < many.allocated


def test_clipping_and_accumulation_and_precision_change_the_figures_as_expected() -> None:
    plain = _estimate()
    assert _estimate(dtype="bf16").breakdown["PARAMETER"] * 2 == plain.breakdown["PARAMETER"]
    assert _estimate(clip_grad_norm=1.0).trace is not None
    assert _estimate(grad_accum=2).requested >= plain.requested


def test_every_iteration_after_the_second_is_the_same() -> None:
    estimate = analyze(nn.Linear(8, 8), torch.zeros(2, 8), iterations=4)
    levels = [phase.peak for phase in estimate.phases if phase.iteration in (3, 4)]
    assert levels[:3] == levels[3:]
