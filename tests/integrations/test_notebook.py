"""``%%graphmem`` in a real IPython: the cell is answered for, behind the cells before it, and does not happen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphmem.integrations import notebook

pytest.importorskip("IPython")

_PROGRAM = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.display_pub.publish = lambda data, **_: print(data.get("text/html", "")[:20000])
shell.run_cell("%load_ext graphmem", store_history=True)
shell.run_cell("width = 512", store_history=True)
shell.run_cell('''%%graphmem --gpu T4
import torch
model = torch.nn.Linear(width, 1024).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, width, device="cuda")).sum().backward()
    optimizer.step()
''', store_history=True)
print("in the kernel:", "model" in shell.user_ns)
"""


def test_a_cell_is_answered_behind_those_before_it() -> None:
    pytest.importorskip("torch")
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    assert "T4-16GB" in ran.stdout, ran.stdout + ran.stderr
    assert "2.00 MiB" in ran.stdout  # the weight: width is of the cell before
    assert "in the kernel: False" in ran.stdout


def test_the_program_is_the_cells_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    seen: dict[str, Any] = {}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        seen["command"] = command
        seen["cells"] = [cell["source"] for cell in json.loads(Path(command[-1]).read_text())["cells"]]
        Path(command[command.index("-o") + 1]).write_text("<p>answer</p>")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(notebook.subprocess, "run", run)
    monkeypatch.setattr(notebook, "_show", shown.append)
    typed = ["", "import torch", "%%graphmem\nold", "x = 1", "%%graphmem"]
    shell = SimpleNamespace(history_manager=SimpleNamespace(input_hist_raw=typed))
    notebook._cell(shell, "--gpu L4", "train()")
    assert seen["cells"] == ["import torch", "x = 1", "train()"]
    assert seen["command"][3:8] == ["run", "--format", "notebook", "--gpu", "L4"]
    assert shown == ["<p>answer</p>"]
    notebook._cell(shell, "--alone", "train()")
    assert seen["cells"] == ["train()"]
