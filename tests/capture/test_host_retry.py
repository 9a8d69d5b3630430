"""What failed on tensors without data is tried again on the host: whose failure it was."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses import FakeTensorMode

import graphmem
from graphmem.capture.program.host_retry import retry_of
from graphmem.training.program import Program

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tracebacks have no columns before Python 3.11")

_PROGRAM = """
import torch

class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

def reads(x):
    return [1, x.sum().item()]

def multiplies(x):
    return x @ x

def refuses(x):
    raise ValueError("no such batch")

def differentiates(x):
    x.sum().item
    return torch.autograd.grad(x.mean(), x)

def nested(values):
    return float(values["layers"][0].weight.sum() + values["x"].sum())
"""


def _program(tmp_path: Path) -> ModuleType:
    path = tmp_path / "program.py"
    path.write_text(_PROGRAM, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("program", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _passes(tmp_path: Path, name: str) -> bool | None:
    """Whether the statement passes on the host at which a function fails on a fake tensor; None: it is not tried."""
    program = _program(tmp_path)
    with FakeTensorMode():
        x = torch.zeros(3, 5)
        given = {"layers": [program.Scale()], "x": x} if name == "nested" else x
        with pytest.raises(Exception) as failed:  # noqa: PT011
            getattr(program, name)(given)
    retry = retry_of(failed.value)
    return None if retry is None else retry.passes()


@pytest.mark.parametrize("name", ["reads", "nested"])
def test_what_passes_with_data_is_not_the_programs_failure(name: str, tmp_path: Path) -> None:
    assert _passes(tmp_path, name) is True


def test_what_fails_with_data_too_is_the_programs(tmp_path: Path) -> None:
    assert _passes(tmp_path, "multiplies") is False


@pytest.mark.parametrize("name", ["refuses", "differentiates"])
def test_what_the_program_raises_and_what_needs_a_graph_is_not_tried(name: str, tmp_path: Path) -> None:
    assert _passes(tmp_path, name) is None


@pytest.mark.parametrize(("width", "fits"), [(2048, None), (50_000, False)])
def test_a_failure_of_the_analysis_has_a_lower_bound_and_no_verdict(
    width: int, fits: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """graphmem has no answer to the fourth line of a program: what it needed until then, and not that it fits;
    on a card that is too small for that, it does not fit."""
    program = tmp_path / "train.py"
    program.write_text(
        f"import torch\nweight = torch.randn({width}, {width}, device='cuda')\nmore = weight @ weight\n"
        "weight.to_sparse_bsr((2, 2))\nprint('never')\n",
        encoding="utf-8",
    )
    estimate = graphmem.analyze(Program(str(program)), device="T4")
    told = estimate.details["program"]
    assert (told["how"], told["code"]) == ("unfollowed", 1)
    assert "train.py:4" in told["error"]
    assert "never" not in capsys.readouterr().out
    assert estimate.requested >= 2 * 4 * width**2
    assert (None if estimate.fit is None else estimate.fit.fits) is fits
