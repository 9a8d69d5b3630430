"""Optimizers of the default step by name: their states, where these lie, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem import Training, analyze  # noqa: E402
from graphmem.cli.main import cli  # noqa: E402
from graphmem.errors import CaptureError, GraphmemError  # noqa: E402
from graphmem.estimate import Estimate  # noqa: E402
from graphmem.trace import Category, Place, Trace  # noqa: E402
from tests.support.captures import births  # noqa: E402

#: Values of the two matrices and the two biases of the model.
MATRIX, BIAS = 400 * 400, 400


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))


class Tokens(nn.Module):
    """An embedding, sparse or not, and a head."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 16, sparse=sparse), nn.Linear(16, 300)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embedding(tokens))


def estimate(optimizer: str, step: nn.Module | None = None, inputs: Any = None, **options: Any) -> Estimate:
    training = Training(optimizer=optimizer, optimizer_args=options.pop("args", ()), **options)
    return analyze(step or model(), torch.zeros(4, 400) if inputs is None else inputs, training=training)


def states(trace: Trace | None, place: Place = Place.DEVICE) -> dict[str, list[int]]:
    """Bytes of the states by their name."""
    assert trace is not None
    found: dict[str, list[int]] = {}
    for born in births(trace, place):
        if born.category is Category.OPTIMIZER_STATE:
            found.setdefault(born.label, []).append(born.bytes)
    return found


def test_states_of_eight_bits_have_a_scale_per_256_values_and_small_tensors_keep_fp32() -> None:
    found = states(estimate("adamw8bit").trace)
    assert found["state1"] == found["state2"] == [MATRIX, 4 * BIAS] * 2
    assert found["absmax1"] == found["absmax2"] == [4 * MATRIX // 256] * 2


def test_the_smallest_tensor_of_eight_bits_is_an_option() -> None:
    assert states(estimate("lion8bit", args=(("min_8bit_size", 400),)).trace)["state1"] == [MATRIX, BIAS] * 2


def test_paged_states_are_managed_memory_and_no_part_of_the_device_figures() -> None:
    paged, plain = estimate("pagedadamw32bit"), estimate("adamw32bit")
    assert paged.managed_bytes == 2 * 2 * 4 * MATRIX
    assert plain.managed_bytes == 0
    assert states(paged.trace)["state1"] == [4 * BIAS] * 2
    assert states(plain.trace)["state1"] == [4 * MATRIX, 4 * BIAS] * 2
    assert paged.to_dict()["host"]["managed_bytes"] == paged.managed_bytes


def test_the_history_of_lbfgs_fills() -> None:
    trace = estimate("lbfgs", args=(("history_size", 5), ("max_iter", 4))).trace
    assert trace is not None
    flat = 4 * (2 * MATRIX + 2 * BIAS)
    for name in ("old_dirs", "old_stps"):
        pairs = [born for born in births(trace) if born.label == name]
        last = max(born.event for born in pairs)
        alive = [born.bytes for born in pairs if born.freed is None or born.freed > last]
        assert alive == [flat] * 6  # the newest exists before the oldest goes


def test_iterations_of_lbfgs_are_its_steps_and_not_its_evaluations() -> None:
    trace = estimate("lbfgs", args=(("history_size", 2), ("max_iter", 3))).trace
    assert trace is not None
    assert max(phase.iteration for phase in trace.phases) == 3


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    found = estimate("muon")
    assert states(found.trace) == {
        "momentum_buffer": [4 * MATRIX] * 2,
        "exp_avg": [4 * BIAS] * 2,
        "exp_avg_sq": [4 * BIAS] * 2,
    }
    assert any("muon steps 2 of the parameters, adamw the other 2" in text for text in found.assumptions)


def test_sparseadam_steps_sparse_embeddings_and_adamw_the_rest() -> None:
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    found = states(estimate("sparseadam", Tokens(sparse=True), tokens).trace)
    assert 4 * 300 * 16 in found["exp_avg"]
    with pytest.raises(CaptureError, match=r"dense gradients.*sparse=True"):
        estimate("sparseadam", Tokens(sparse=False), tokens)


def test_clipping_and_accumulation_work_in_a_closure() -> None:
    args = (("history_size", 2), ("max_iter", 2))
    assert estimate("lbfgs", args=args, grad_accum=2, clip_grad_norm=1.0).device > 0


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("sgd8bit", {}, "without momentum"),
        (
            "sgd8bit",
            {"args": (("momentum", 0.9),), "dtype": "bf16"},
            "no kernel for bfloat16 gradients for tensors below",
        ),
        ("adamw8bit", {"dtype": "fp64"}, "no kernel for float64"),
        ("rmsprop32bit", {"args": (("centered", True),)}, "Centered"),
        ("lion", {"args": (("lr", 0),)}, "lr is above 0"),
        ("lbfgs", {"amp": "fp16"}, "GradScaler"),
    ],
)
def test_what_a_library_refuses_is_refused(optimizer: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        estimate(optimizer, **options)


# --- optimizers of the user's own -------------------------------------------------------------------------------------


class TwoMomenta(torch.optim.Optimizer):
    """Keeps a state of the parameter's size in fp32 and one row of it in fp64."""

    def __init__(self, params: Any, lr: float, rows: int = 1) -> None:
        super().__init__(params, {"lr": lr, "rows": rows})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["slow"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["few"] = torch.zeros(group["rows"], 400, dtype=torch.float64, device=parameter.device)
                state["slow"].lerp_(parameter.grad.float(), 0.1)
                parameter.add_(state["slow"].to(parameter.dtype), alpha=-group["lr"])


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:
        return closure()


class OwnHistory(torch.optim.LBFGS):
    pass


no_optimizer = nn.Linear


def test_an_optimizer_of_ones_own_is_run() -> None:
    found = estimate(f"{__name__}:TwoMomenta", args={"lr": 0.1, "rows": 3}, dtype="bf16")
    assert states(found.trace) == {"slow": [4 * MATRIX, 4 * BIAS] * 2, "few": [8 * 3 * 400] * 4}
    assert f"training, {__name__}:TwoMomenta(lr=0.1, rows=3), bf16 weights" in found.step


def test_an_own_class_of_torchs_asks_for_as_much_as_torchs() -> None:
    own, named = estimate("torch.optim:AdamW", args={"foreach": False}), estimate("adamw", args={"foreach": False})
    assert (own.requested, own.allocated, own.reserved) == (named.requested, named.allocated, named.reserved)


def test_an_own_optimizer_with_a_closure_is_served_if_it_is_lbfgs() -> None:
    own = estimate(f"{__name__}:OwnHistory", args={"history_size": 2, "max_iter": 2})
    assert own.reserved == estimate("lbfgs", args={"history_size": 2, "max_iter": 2}).reserved


def test_an_optimizer_in_a_file_is_found(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import torch\n\n\nclass Plain(torch.optim.SGD):\n    pass\n")
    assert estimate(f"{file}:Plain").reserved == estimate("sgd").reserved


@pytest.mark.parametrize(
    ("optimizer", "args", "message"),
    [
        ("no_such_package:Adam", {}, "no Python module 'no_such_package'"),
        ("torch.optim:Adma", {}, r"torch\.optim has no optimizer 'Adma'; did you mean Adam"),
        ("nowhere.py:Adam", {}, r"nowhere\.py does not exist"),
        (":Adam", {}, "not of the form"),
        ("{here}:no_optimizer", {}, r"is the class Linear; --optimizer takes a name, or module:Class"),
        ("{here}:model", {}, r"is a function; --optimizer takes a name"),
        ("{here}:NeedsClosure", {}, "needs a closure, which the default loop does not give"),
        ("{here}:TwoMomenta", {}, r"TwoMomenta refused its arguments: .*'lr'"),
        ("{here}:TwoMomenta", {"lr": 0.1, "momentum": 2}, r"TwoMomenta refused its arguments: .*'momentum'"),
    ],
)
def test_what_is_no_optimizer_is_refused(optimizer: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphmemError, match=message) as raised:
        estimate(optimizer.format(here=__name__), args=args)
    assert "\n" not in str(raised.value)


def test_the_command_takes_an_own_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\n\n\nclass Plain(torch.optim.SGD):\n    pass\n\n\n"
        "def build():\n    return torch.nn.Linear(400, 400), torch.zeros(4, 400)\n"
    )
    command = ["analyze", f"{file}:build", "--format", "json", "--optimizer"]
    given = CliRunner().invoke(cli, [*command, f"{file}:Plain", "--optimizer-arg", "momentum=0.9"])
    assert given.exit_code == 0, given.output
    named = CliRunner().invoke(cli, [*command, "sgd", "--optimizer-arg", "momentum=0.9"])
    assert json.loads(given.stdout)["peak"] == json.loads(named.stdout)["peak"]
    refused = CliRunner().invoke(cli, [*command, f"{file}:build"])
    assert refused.exit_code != 0
    assert "is a function; --optimizer takes a name" in refused.output
