"""What a user reads when a step cannot be analysed: what is wrong, on which line, what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.capture.session.error_messages import explained  # noqa: E402
from graphmem.errors import CaptureError, GraphmemError, SourceError, UsageError  # noqa: E402

USER_CODE = """\
import torch
from torch import nn

class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.read = read

    def forward(self, x):
        return self.read(self.scale(x))

def item(y):
    if y.sum().item() > 0:  # LINE item
        return y * 2
    return y

def truth(y):
    return y if (y > 0).all() else -y  # LINE truth

def nonzero(y):
    return y.nonzero().float()  # LINE nonzero

def mask(y):
    return y[y > 0]  # LINE mask

def unique(y):
    return y.unique()  # LINE unique

def wrong_shape(y):
    return y @ torch.zeros(3, 3, device=y.device)  # LINE wrong_shape

def raises(y):
    raise KeyError("no such key")  # LINE raises

def made(read, batch=2):
    return lambda batch=2: (Reads(read), torch.zeros(batch, 4))

for name in ("item", "truth", "nonzero", "mask", "unique", "wrong_shape", "raises"):
    globals()["build_" + name] = made(globals()[name])

def factory_raises():
    raise ValueError("no such checkpoint")  # LINE factory_raises

def returns_text():
    return "model"

def returns_one():
    return (nn.Linear(2, 2),)

def returns_four():
    return nn.Linear(2, 2), torch.zeros(1, 2), None, None

def returns_five():
    return nn.Linear(2, 2), torch.zeros(1, 2), None, None, None

def with_targets(batch=4):
    return nn.Linear(2, 8), torch.zeros(batch, 2), torch.zeros(batch, 8), nn.functional.mse_loss

def loss_without_targets():
    return nn.Linear(2, 2), torch.zeros(1, 2), torch.zeros(1, 2), lambda output: output.mean()

def returns_no_model():
    return {}, torch.zeros(1, 2)

def returns_no_loss():
    return nn.Linear(2, 2), torch.zeros(1, 2), 0.5

def takes_no_batch():
    return nn.Linear(2, 2), torch.zeros(1, 2)

def needs_batch(batch):
    return nn.Linear(2, 2), torch.zeros(batch, 2)

def needs_depth(depth):
    return nn.Linear(2, 2), torch.zeros(1, 2)

def without_parameters():
    return nn.ReLU(), torch.zeros(1, 2)

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), torch.zeros(1, 2)

def vector_loss():
    return nn.Linear(2, 2), torch.zeros(1, 2), lambda output: output

def detached_loss():
    return nn.Linear(2, 2), torch.zeros(1, 2), lambda output: output.detach().sum()

SETTING = 3
"""


@pytest.fixture(scope="module")
def user_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "train.py"
    path.write_text(USER_CODE)
    return path


def line_of(name: str) -> int:
    (line,) = [n for n, text in enumerate(USER_CODE.splitlines(), 1) if text.endswith(f"# LINE {name}")]
    return line


def failure(user_file: Path, function: str, kind: type[GraphmemError] = CaptureError, **options: Any) -> str:
    with pytest.raises(kind) as raised:
        analyze(f"{user_file}:{function}", **options)
    text = str(raised.value)
    assert "\n" not in text
    return text


# --- what the model does ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [(name, Inference()) for name in ("item", "truth", "nonzero", "mask", "unique")]
    + [(name, Training()) for name in ("item", "truth", "mask")],  # the others have no gradients
)
def test_reading_data_names_the_users_line(user_file: Path, name: str, step: Any) -> None:
    estimate = analyze(f"{user_file}:build_{name}", training=step)
    decided = [said.message for said in estimate.diagnostics if said.kind == "assumed"]
    assert decided
    assert all(f"train.py:{line_of(name)}: " in message for message in decided)


def test_wrong_shapes_name_the_users_line(user_file: Path) -> None:
    text = failure(user_file, "build_wrong_shape")
    assert f"train.py:{line_of('wrong_shape')}: " in text
    assert "[2, 4]" in text


def test_an_error_in_forward_names_its_line(user_file: Path) -> None:
    text = failure(user_file, "build_raises")
    assert f"train.py:{line_of('raises')}: " in text
    assert "KeyError: 'no such key'" in text


def test_an_error_is_said_once(user_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """torch's own log of a failed shape would put a screenful of traceback above the message."""
    failure(user_file, "build_wrong_shape")
    assert caplog.records == []


def test_the_cause_is_kept_for_those_who_debug(user_file: Path) -> None:
    with pytest.raises(CaptureError) as raised:
        analyze(f"{user_file}:build_raises")
    assert isinstance(raised.value.__cause__, KeyError)


def test_example_inputs_that_do_not_fit() -> None:
    with pytest.raises(CaptureError, match="same reduction dim"):
        analyze(nn.Linear(4, 4), torch.zeros(2, 5))
    with pytest.raises(CaptureError, match="unexpected keyword argument 'image'"):
        analyze(nn.Linear(4, 4), {"image": torch.zeros(2, 4)})


@pytest.mark.parametrize("inputs", ["images", 3, object()])
def test_example_inputs_of_another_kind_are_refused(inputs: Any) -> None:
    with pytest.raises(SourceError, match="a tensor, a tuple, or a dict"):
        analyze(nn.Linear(4, 4), inputs)


def test_an_operator_without_shapes_says_what_to_register() -> None:
    library = torch.library.Library("graphmem_test", "DEF")
    try:
        library.define("mystery(Tensor x) -> Tensor")

        class Uses(nn.Linear):
            def forward(self, x: Any) -> Any:
                return torch.ops.graphmem_test.mystery(super().forward(x))

        with pytest.raises(CaptureError, match=r"mystery.*register"):
            analyze(lambda: (Uses(2, 2), torch.zeros(1, 2)))
    finally:
        library._destroy()


# --- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["without_parameters", "frozen"])
def test_nothing_to_train(user_file: Path, name: str) -> None:
    assert "no parameter of the model requires a gradient" in failure(user_file, name)
    assert analyze(f"{user_file}:{name}", training=Inference()).allocated > 0


@pytest.mark.parametrize(("name", "said"), [("vector_loss", "shape (1, 2)"), ("detached_loss", "without gradient")])
def test_a_loss_that_cannot_be_followed_back(user_file: Path, name: str, said: str) -> None:
    text = failure(user_file, name)
    assert said in text
    assert "(model, inputs, loss)" in text


def test_an_unknown_optimizer_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"unknown optimizer 'adamx'; the nearest are adamax, adam, adamw"):
        Training(optimizer="adamx")


def test_an_option_that_the_optimizer_refuses(user_file: Path) -> None:
    step = Training(optimizer="adam", optimizer_args=(("lr", -1.0),))
    text = failure(user_file, "takes_no_batch", training=step)
    assert "torch.optim.Adam refused its arguments" in text
    assert "-1.0" in text


def test_a_list_of_sharded_and_whole_parameters_names_the_way_out() -> None:
    """What DTensor says of ``--tp`` with an optimizer that works on lists (torch/distributed/tensor/_dispatch.py)."""
    said = explained(RuntimeError("aten._foreach_mul_.Scalar got mixed torch.Tensor and DTensor, need to convert all"))
    assert said is not None
    assert "--optimizer-arg foreach=False" in said


def test_nothing_to_checkpoint(user_file: Path) -> None:
    text = failure(user_file, "takes_no_batch", training=Training(checkpoint_activations=True))
    assert "no repeated blocks" in text


# --- what the factory returns -----------------------------------------------------------------------------------------


def test_a_factory_that_raises_names_its_line(user_file: Path) -> None:
    text = failure(user_file, "factory_raises", GraphmemError)
    assert f"train.py:{line_of('factory_raises')}" in text
    assert "ValueError: no such checkpoint" in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("returns_text", "returned a str"),
        ("returns_one", "a tuple of 1"),
        ("returns_four", "targets and no loss"),
        ("returns_five", "a tuple of 5"),
        ("loss_without_targets", "cannot be called as loss(output, targets)"),
        ("returns_no_model", "not a torch.nn.Module"),
        ("returns_no_loss", "not a callable"),
    ],
)
def test_a_factory_that_returns_something_else(user_file: Path, name: str, said: str) -> None:
    text = failure(user_file, name, SourceError)
    assert name in text
    assert said in text


def test_sizes_that_the_factory_does_not_take(user_file: Path) -> None:
    assert "no parameter 'batch'" in failure(user_file, "takes_no_batch", SourceError, batch=4)
    assert "--batch" in failure(user_file, "takes_no_batch", SourceError, batch=4)
    assert "--seq-len" in failure(user_file, "takes_no_batch", SourceError, seq_len=4)


def test_sizes_that_the_factory_needs(user_file: Path) -> None:
    assert "give --batch N" in failure(user_file, "needs_batch", SourceError)
    assert "needs an argument 'depth'" in failure(user_file, "needs_depth", SourceError)


def test_a_function_that_is_not_there(user_file: Path) -> None:
    assert "did you mean" in failure(user_file, "needs_bach", SourceError)
    assert "has no function 'zzz'" in failure(user_file, "zzz", SourceError)
    assert "not a function" in failure(user_file, "SETTING", SourceError)


def test_a_file_or_module_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        analyze(f"{tmp_path}/absent.py:build")
    with pytest.raises(SourceError, match="no Python module 'absent_package'"):
        analyze("absent_package.train:build")


def test_a_file_that_does_not_import(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import graphmem\nraise RuntimeError('not today')\n")
    with pytest.raises(SourceError, match="RuntimeError: not today"):
        analyze(f"{tmp_path}/broken.py:build")
    (tmp_path / "typo.py").write_text("def build(:\n")
    with pytest.raises(SourceError, match="SyntaxError"):
        analyze(f"{tmp_path}/typo.py:build")


def test_of_a_failed_import_the_innermost_cause_comes_first(tmp_path: Path) -> None:
    """As transformers imports its classes: when they are first used, whatever broke below."""
    (tmp_path / "lazy_library.py").write_text(
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    try:\n"
        "        raise RuntimeError('operator vision::nms does not exist')\n"
        "    except RuntimeError as error:\n"
        "        raise ModuleNotFoundError(f'Could not import module {name!r}') from error\n"
    )
    (tmp_path / "at_the_top.py").write_text("from lazy_library import Trainer\n")
    (tmp_path / "inside.py").write_text("def build():\n    from lazy_library import Trainer\n")
    said = r"RuntimeError: operator vision::nms does not exist \(behind ModuleNotFoundError: Could not import"
    with pytest.raises(SourceError, match=said):
        analyze(f"{tmp_path}/at_the_top.py:build")
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(GraphmemError, match=said):
            analyze(f"{tmp_path}/inside.py:build")
        with pytest.raises(SourceError, match=said):
            analyze("at_the_top:build")
    finally:
        sys.path.remove(str(tmp_path))


def test_a_loss_of_targets(user_file: Path) -> None:
    """The targets are on the card: 8 floats a sample, beside 2 of the input."""
    small, large = (analyze(f"{user_file}:with_targets", batch=batch) for batch in (1000, 2000))
    assert small.breakdown["INPUT"] == 1000 * (8 + 2) * 4
    assert large.breakdown["INPUT"] == 2 * small.breakdown["INPUT"]


def test_a_file_that_chooses_its_device_while_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "def train():\n"
        "    torch.zeros(1 << 20, device=device)\n"
    )
    before = torch.cuda.is_available
    assert analyze(f"{tmp_path}/script.py:train").requested == 4 << 20
    assert torch.cuda.is_available is before


def test_a_package_of_cuda_kernels_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text("import mamba_ssm\n")
    with pytest.raises(SourceError, match=r"'mamba_ssm' \(a package of CUDA kernels"):
        analyze(f"{tmp_path}/uses.py:build")


def test_things_that_are_no_model() -> None:
    with pytest.raises(SourceError, match="example_inputs"):
        analyze(nn.Linear(2, 2))
    with pytest.raises(SourceError, match="int"):
        analyze(3)
    with pytest.raises(SourceError, match="did you mean hf:resnet50"):
        analyze("resnet50")


def test_a_custom_step_that_fails_names_its_line() -> None:
    def step() -> None:
        torch.zeros(2, 3, device="cuda") @ torch.zeros(2, 3, device="cuda")

    with pytest.raises(CaptureError, match=Path(__file__).name):
        analyze(step)


def test_an_interrupt_is_not_swallowed() -> None:
    def step() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze(step)
