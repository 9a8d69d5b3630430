"""The promises about imports: one direction, and no torch where none is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests import places

ROOT = places.ROOT

#: Run before anything else in a fresh interpreter: makes torch and what builds on it impossible to import.
BLOCKER = """
import sys
BLOCKED = {"torch", "transformers", "timm", "torchvision"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked by this test")
sys.meta_path.insert(0, Blocker())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def write_mlp(path: Path) -> Path:
    """A tiny two-layer network with a symbolic batch."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.random(shape, dtype=np.float32), name)
        for name, shape in (("w1", (64, 128)), ("w2", (128, 10)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "w2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 10])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_imports_point_one_way() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_graphmem_needs_and_loads_no_framework() -> None:
    result = python(BLOCKER + "import graphmem, graphmem.cli.main")
    assert result.returncode == 0, result.stderr
    loaded = python("import sys, graphmem; print(*(m for m in ('torch', 'onnx', 'onnxruntime') if m in sys.modules))")
    assert loaded.stdout.split() == []


def test_an_onnx_analysis_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("graphmem.analyze")
    model = write_mlp(tmp_path / "mlp.onnx")
    run = BLOCKER + "from graphmem.cli.main import main; main()"
    result = python(run, "analyze", str(model), "--batch", "4", "--format", "json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["peak"]["device_bytes"] > 0


def test_an_onnx_analysis_loads_no_torch_that_is_there(tmp_path: Path) -> None:
    pytest.importorskip("graphmem.analyze")
    model = write_mlp(tmp_path / "mlp.onnx")
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch loaded:', 'torch' in sys.modules))\n"
        "from graphmem.cli.main import main; main()"
    )
    result = python(code, "analyze", str(model), "--batch", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("torch loaded: False\n")
