"""Models under TensorFlow from end to end: ONNX files and captured PyTorch steps, by library and command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphmem import Inference, Training, analyze
from graphmem.cli.main import cli
from graphmem.errors import UsageError
from tests.support import onnx_samples as samples
from tests.support.onnx_samples import save


@pytest.fixture
def perceptron(tmp_path: Path) -> str:
    return str(save(samples.perceptron(), tmp_path))


def test_an_onnx_file_under_the_executor(perceptron: str) -> None:
    estimate = analyze(perceptron, batch=2, runtime="tensorflow", device="H100-80GB", alloc_conf="allow_growth:true")
    # weights 512 and 256, input 64, h 128 (which the Relu writes over), y 32, Eigen's 1028
    assert estimate.requested == 512 + 256 + 64 + 128 + 32 + 1028
    assert estimate.allocated == 512 + 256 + 256 + 256 + 256 + 1280
    assert estimate.reserved == 2 << 20
    assumed = " ".join(estimate.assumptions)
    assert "one operator of TensorFlow's executor, in the order of the file" in assumed
    assert "XLA is off" in assumed


def test_the_whole_card_without_growth(perceptron: str) -> None:
    estimate = analyze(
        perceptron, batch=2, runtime="tf", device="H100-80GB", alloc_conf="TF_FORCE_GPU_ALLOW_GROWTH=false"
    )
    assert estimate.fit is not None
    assert estimate.fit.fits
    assert estimate.reserved == estimate.details["memory_limit_bytes"] > 75 << 30
    assert sum(estimate.breakdown.values()) == estimate.device
    assert "works with memory_limit=1 (MiB)" in " ".join(note.message for note in estimate.diagnostics)


def test_a_captured_step_says_whose_operators_it_has() -> None:
    torch = pytest.importorskip("torch")

    def build(batch: int = 4) -> object:
        return torch.nn.Linear(64, 64), torch.zeros(batch, 64)

    plain = analyze(build, training=Training(optimizer="sgd"), device="H100-80GB")
    under = analyze(build, training=Training(optimizer="sgd"), device="H100-80GB", runtime="tensorflow")
    assert under.requested == plain.requested + 1028
    assert "library workspaces are PyTorch's, replayed under TensorFlow's allocator" in " ".join(under.assumptions)
    pooled = analyze(build, training=Training(optimizer="sgd"), device="H100-80GB", runtime="mxnet")
    assert pooled.requested == plain.requested
    assert "MXNet's own memory planning" in " ".join(pooled.assumptions)


def test_what_has_no_plan_is_refused(perceptron: str) -> None:
    with pytest.raises(UsageError, match="run under --runtime onnxruntime, pytorch or tensorflow, not mxnet"):
        analyze(perceptron, batch=2, runtime="mxnet")
    with pytest.raises(UsageError, match="several ONNX files"):
        analyze([perceptron, perceptron], batch=2, runtime="tensorflow", training=Inference())
    with pytest.raises(UsageError, match="unknown runtime 'paddle'; accepted: jax, mxnet, onnxruntime, pytorch"):
        analyze(perceptron, runtime="paddle")


def test_the_command_line(perceptron: str) -> None:
    arguments = [
        "analyze",
        perceptron,
        "--batch",
        "2",
        "--gpu",
        "T4",
        "--tf-option",
        "memory_limit=64",
        "--format",
        "json",
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["runtime"] == "tensorflow"
    assert document["peak"]["reserved_bytes"] == 64 << 20
    failed = CliRunner().invoke(cli, [*arguments[:-2], "--tf-option", "allow_grow=true"])
    assert failed.exit_code == 1
    assert "no memory option 'allow_grow'; accepted: allow_growth" in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1
