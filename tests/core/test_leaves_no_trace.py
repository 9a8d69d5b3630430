"""An analysis leaves the process of its caller, and its folder for temporary files, as they were."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.examples import first_quick

pytest.importorskip("torch")

_SCRIPT = """
import json, logging, os, random, signal, sys
import torch
from torch import nn

def state():
    return {
        "environment": dict(os.environ), "path": list(sys.path), "folder": os.getcwd(), "arguments": list(sys.argv),
        "random": repr(random.getstate()), "torch": torch.get_rng_state().tolist(), "logging": logging.root.level,
        "signals": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM)],
        "dtype": str(torch.get_default_dtype()), "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(), "threads": torch.get_num_threads(),
        "recursion": sys.getrecursionlimit(), "excepthook": str(sys.excepthook),
    }

model, inputs = nn.Linear(8, 8), torch.randn(2, 8)
state()
before = state()
import graphmem
changed = {}
for ask in sys.argv[1:]:
    exec(ask)
    after = state()
    changed[ask] = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
print(json.dumps(changed))
"""

#: Asked one after the other in one process.
_ASKS = (
    "graphmem.analyze(model, inputs)",
    "graphmem.analyze('zoo:gpt2', batch=1, seq_len=16, iterations=1)",
    "graphmem.analyze(model, inputs, training=graphmem.Training(compile='default'))",
)


@pytest.mark.parametrize("asked", first_quick([(_ASKS[0], _ASKS[2]), _ASKS], 1), ids=["some", "all"])
def test_the_process_is_as_it_was(tmp_path: Path, asked: tuple[str, ...]) -> None:
    asks = [ask for ask in asked if "zoo:" not in ask or importlib.util.find_spec("transformers") is not None]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *asks],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {ask: {} for ask in asks}
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert left == []


@pytest.mark.parametrize("broken", ["raise OSError('libx.so.1: cannot open')", "from torch._C import x", None])
def test_a_torch_that_does_not_import_is_not_absent(tmp_path: Path, broken: str | None) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(broken or "raise ModuleNotFoundError('no', name='torch')")
    (tmp_path / "m.py").write_text("def build(): ...")
    done = subprocess.run(
        [sys.executable, "-m", "graphmem", "analyze", f"{tmp_path / 'm.py'}:build"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert ("is installed here and cannot be imported" in done.stderr) is (broken is not None)
    assert ("libx.so.1" if broken and "libx" in broken else "torch") in done.stderr
