"""An engine's processes inside a capture, with a stand-in of the few names that are followed."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.support.captures import record  # noqa: E402

_FILES = {
    "__init__.py": "",
    "model_executor/__init__.py": "",
    "model_executor/models/__init__.py": "",
    "model_executor/models/registry.py": "def _run_in_subprocess(function): raise AssertionError('a process')\n",
    "model_executor/warmup/__init__.py": "",
    "model_executor/warmup/kernel_warmup.py": "def cutedsl_warmup(runner): raise AssertionError('a compiler')\n"
    "def flashinfer_autotune(runner): raise AssertionError('timed')\n",
    "compilation/__init__.py": "",
    "compilation/backends.py": "class CompilerManager:\n"
    "    def compile(self, graph, inputs, settings, *, graph_index): return f'piece {graph_index}'\n",
    "engine.py": "def shutdown(): pass\n",
}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in _FILES.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("engine")
def test_the_engine_is_this_process() -> None:
    made = []

    def step() -> None:
        from vllm import engine  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from vllm.model_executor.models import registry  # type: ignore[import-not-found,import-untyped,unused-ignore]
        from vllm.model_executor.warmup import kernel_warmup  # type: ignore[import-not-found,import-untyped,unused-ignore]

        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] == "1"
        assert registry._run_in_subprocess(lambda: 3) == 3
        assert kernel_warmup.cutedsl_warmup(None) is None
        assert kernel_warmup.flashinfer_autotune(None) is None
        made.append(torch.nn.Linear(2, 2, device="cuda"))
        made.append(weakref.finalize(made[0], engine.shutdown))
        assert made[1].atexit

    record(step)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    assert not made[1].atexit
    with pytest.raises(AssertionError, match="a process"):
        sys.modules["vllm.model_executor.models.registry"]._run_in_subprocess(lambda: 3)


def _piece(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) * 2


def _other_piece(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ weight) * 3


def _renamed(hidden: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return torch.relu(hidden @ matrix) * 2


@pytest.mark.usefixtures("engine")
def test_pieces_that_are_the_same_are_compiled_once() -> None:
    found: list[str] = []

    def step() -> None:
        from vllm.compilation.backends import CompilerManager  # type: ignore[import-not-found,import-untyped,unused-ignore]

        manager, settings = CompilerManager(), {"a": 1}
        x, weight, wide = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4, 8)
        pieces = [(_piece, weight), (_renamed, torch.ones(4, 4)), (_other_piece, weight), (_piece, wide), (_piece, x)]
        for place, (function, other) in enumerate(pieces):
            graph = torch.fx.symbolic_trace(function)
            found.append(manager.compile(graph, [x, other], settings, graph_index=place))
        found.append(manager.compile(torch.fx.symbolic_trace(_piece), [x, weight], {"a": 1}, graph_index=9))
        torch.ones(1, device="cuda")

    record(step)
    assert found == ["piece 0", "piece 0", "piece 2", "piece 3", "piece 4", "piece 9"]
