"""Programs with kernels of their own in Triton, and imports of what is not installed here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from graphmem.analyze import analyze  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from graphmem.estimate import Estimate  # noqa: E402
from graphmem.training.program import Program  # noqa: E402

_KERNELS = """
import torch
import triton
import triton.language as tl

@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)

@triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4), triton.Config({"BLOCK": 256})], key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % 2 == 0})
@triton.jit
def scale_kernel(x_ptr, out_ptr, n, s, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    pass

def add(x, y):
    out = torch.empty_like(x)
    add_kernel[lambda meta: (triton.cdiv(out.numel(), meta["BLOCK"]),)](x, y, out, out.numel(), BLOCK=1024)
    return out

x = torch.rand(1 << 20, device="cuda")
y = torch.rand(1 << 20, device="cuda")
out = add(x, y)
"""


def _run(folder: Path, source: str) -> Estimate:
    path = folder / "train.py"
    path.write_text(source, encoding="utf-8")
    return analyze(Program(str(path), ()), device="H200")


def _said(estimate: Estimate) -> str:
    return " ".join(remark.message for remark in estimate.diagnostics)


def test_a_kernel_of_the_program_is_launched_without_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    estimate = _run(tmp_path, _KERNELS + "print(torch.cuda.max_memory_allocated())")
    assert capsys.readouterr().out.split()[-1] == str(3 * 4 << 20)
    assert "add_kernel was launched without effect" in _said(estimate)


def test_an_autotuner_takes_a_cache_once_for_each_key(tmp_path: Path) -> None:
    """On the stub driver, Triton 3.7.1: 281,018,368 bytes at most with three tensors of 4 MiB."""
    launch = "scale_kernel[(8,)](out, x, out.numel(), 2.0)\n"
    assert _run(tmp_path, _KERNELS + launch).peak.allocated_bytes == 281_018_368
    again = "held = torch.empty(64 << 20, device='cuda')\n"  # a second cache would stand beside it
    assert _run(tmp_path, _KERNELS + launch + again + launch).peak.allocated_bytes == 281_018_368


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_what_else_of_triton_is_asked_for_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"triton\.compile is asked for"):
        _run(tmp_path, "import torch, triton\nx = torch.zeros(4, device='cuda')\ntriton.compile(x)")


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_pytorch_finds_no_triton(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
import sys, torch, triton
from torch.utils._triton import has_triton_package
torch.zeros(4, device="cuda")
print(has_triton_package(), "triton" in sys.modules)
"""
    _run(tmp_path, source)
    assert capsys.readouterr().out.split() == ["False", "False"]


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
@pytest.mark.parametrize("is_own", [True, False])
def test_the_other_path_of_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """A doubt where the program itself asks for it, a note where a library that it imports does."""
    source = """
import torch
try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None
torch.zeros(4, device="cuda")
"""
    if not is_own:
        folder = tmp_path / "site-packages"
        folder.mkdir()
        (folder / "drawing.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(folder)
        source = "import drawing"
    estimate = _run(tmp_path, source)
    assert f"{'the program' if is_own else 'drawing'} imports flash_attn, which is not installed here" in _said(
        estimate
    )
    assert [cause.name for cause in estimate.doubts.about("reserved")] == (["assumptions"] if is_own else [])
    assert "scaled_dot_product_attention" not in _said(estimate), "it may be no attention"


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
@pytest.mark.parametrize("runs", [True, False])
def test_a_library_without_triton_is_a_doubt_where_its_operators_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    name = "norms_that_run" if runs else "norms_aside"  # modules stay imported
    folder = tmp_path / "site-packages" / name
    folder.mkdir(parents=True)
    library = """
import torch
try:
    import triton
except ImportError:
    triton = None

def norm(x):
    return x / x.norm()
"""
    (folder / "__init__.py").write_text(library, encoding="utf-8")
    monkeypatch.syspath_prepend(folder.parent)
    used = f"{name}.norm(x)" if runs else "x.relu()"
    estimate = _run(tmp_path, f"import torch, {name}\nx = torch.zeros(4, device='cuda')\n{used}")
    assert f"{name} imports triton, which is not installed here" in _said(estimate)
    assert [cause.name for cause in estimate.doubts.about("reserved")] == (["assumptions"] if runs else [])


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_imports_are_pythons_own_until_a_program_asks_for_triton(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch imports in every operator, and a function in the place of ``__import__`` costs 5 % of its time."""
    source = """
import builtins, importlib, importlib.util, torch
print(type(builtins.__import__).__name__, importlib.util.find_spec("triton"))
import triton.language
print(type(builtins.__import__).__name__, importlib.import_module("triton") is triton)
x = torch.zeros(4, device="cuda")
import json  # the next import of anything forgets it
print(importlib.util.find_spec("triton"))
"""
    _run(tmp_path, source)
    assert capsys.readouterr().out.split() == ["builtin_function_or_method", "None", "function", "True", "None"]


def test_an_autotuner_that_keeps_what_it_found_takes_none(tmp_path: Path) -> None:
    launch = "scale_kernel.cache_results = True\nscale_kernel[(8,)](out, x, out.numel(), 2.0)\n"
    assert _run(tmp_path, _KERNELS + launch).peak.allocated_bytes == 3 * 4 << 20
