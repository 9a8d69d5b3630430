"""The mark of the pytest plug-in, in tests that pytest itself runs."""

from __future__ import annotations

import importlib.metadata

import pytest

pytest.importorskip("torch")
pytest_plugins = ["pytester"]

_PLUGIN = "graphmem.integrations.pytest_plugin"
_TESTS = """
import pytest

def step(width):
    import torch
    model = torch.nn.Linear(width, width).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(8, width, device="cuda")).sum().backward()
        optimizer.step()

@pytest.fixture
def width():
    return 4096

@pytest.mark.limit_gpu_memory("1GiB", gpu="T4")
def test_fits(width):
    step(width)

@pytest.mark.limit_gpu_memory("100MiB", gpu="T4", level="reserved")
def test_takes_too_much(width):
    step(width)

@pytest.mark.limit_gpu_memory(gpu="T4")
def test_is_larger_than_the_card():
    step(65536)

@pytest.mark.limit_gpu_memory("1GiB", gpu="T4")
def test_is_wrong(width):
    assert width == 1

def test_without_a_mark():
    pass
"""


def test_marked_tests_are_held_to_their_limits(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(_TESTS)
    entered = any(one.value == _PLUGIN for one in importlib.metadata.entry_points(group="pytest11"))
    result = pytester.runpytest(*([] if entered else ["-p", _PLUGIN]), "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(["*test_takes_too_much needs * MiB (reserved), limited to 100MiB"])
    result.stdout.fnmatch_lines(["*test_is_larger_than_the_card does not fit T4-16GB"])
    result.stdout.fnmatch_lines(["*AssertionError*"])


def test_the_plug_in_is_entered_and_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = "import sys, graphmem.integrations.pytest_plugin; print('torch' in sys.modules, 'numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False"]
