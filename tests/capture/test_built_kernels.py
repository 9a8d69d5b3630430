"""Kernels that a library compiles when they are first used, with stand-ins of FlashInfer's builder and CuTe's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from graphmem.analyze import analyze
from graphmem.training.program import Program

_LIBRARY = {
    "cutlass/__init__.py": "",
    "cutlass/base_dsl/__init__.py": "",
    "cutlass/base_dsl/compiler.py": """
class CompileCallable:
    def __call__(self, function, *arguments):
        raise RuntimeError("no card to compile for")
""",
    "cutlass/cute/__init__.py": "",
    "cutlass/cute/runtime.py": """
def from_dlpack(tensor, assumed_align=None):
    return tensor.__dlpack__()
""",
    "flashinfer/__init__.py": "",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/core.py": """
class JitSpec:
    def build_and_load(self):
        raise RuntimeError("nvcc is missing")
""",
    "flashinfer/scanning.py": """
import torch
from cutlass.base_dsl.compiler import CompileCallable
from cutlass.cute.runtime import from_dlpack

def scan(values):
    shown = from_dlpack(values, assumed_align=16).mark_layout_dynamic(leading_dim=1)
    assert shown.shape == values.shape
    workspace = torch.empty(4096, dtype=torch.uint8, device=values.device)
    CompileCallable()(scan, shown)(values, workspace)
    return workspace
""",
    "flashinfer/sampling.py": """
import functools, torch
from flashinfer.jit.core import JitSpec

@functools.cache
def module():
    return JitSpec().build_and_load()

def sample(probs):
    out = torch.empty(len(probs), dtype=torch.int32, device=probs.device)
    module().sampling_from_probs(probs, out, None, True)
    module()["by_item"](out)
    return out
""",
}
_PROGRAM = """
import torch
from flashinfer.sampling import sample
from flashinfer.scanning import scan
chosen = sample(torch.rand(1024, 512, device="cuda"))
kept = scan(torch.empty(8, 8, device="cuda"))
print(torch.cuda.max_memory_allocated())
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library, which nobody finds afterwards."""

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in ("cutlass", "flashinfer")]

    for name, text in _LIBRARY.items():
        path = tmp_path / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in imported():
        del sys.modules[name]


@pytest.mark.usefixtures("stand_in")
def test_kernels_are_neither_built_nor_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program" / "serve.py"  # elsewhere, as what lies beside a program is its own
    program.parent.mkdir()
    program.write_text(_PROGRAM)
    analyze(Program(str(program), ()), device="H200")
    assert capsys.readouterr().out.split()[-1] == str(1024 * 512 * 4 + 4096)
    kept = sys.modules["flashinfer.sampling"].module()
    with pytest.raises(RuntimeError, match="nvcc is missing"):  # outside of a capture it is what it was
        kept.sampling_from_probs()
