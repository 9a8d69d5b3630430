"""``type(x)`` in the files that a capture imports is the class that a card's tensor has."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.device import unnoticed  # noqa: E402
from graphmem.capture.device.unnoticed import with_shown_types  # noqa: E402
from tests.support.captures import record  # noqa: E402

FILE = """
import torch

def move(x):
    if type(x) is torch.Tensor:
        return x.cuda()
    return type(x)(map(move, x)) if type(x) in (list, tuple) else x

class Weight(torch.nn.Parameter):
    pass

def kinds():
    device = torch.device("cuda")
    layer = torch.nn.Linear(2, 2).cuda()
    made = [torch.ones(2), layer.weight, layer(torch.ones(2, device=device)), Weight(torch.ones(2, device=device))]
    return [type(one) for one in made], [one.device.type for one in move([torch.ones(2), (torch.ones(2),)])[1]]

def meta():
    class Meta(type):
        pass
    return isinstance(Meta, type), type("Made", (), {}).__name__, type(3), type(torch.float32)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package that a capture imports."""
    (tmp_path / "moving_package.py").write_text(FILE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "moving_package"
    sys.modules.pop("moving_package", None)


def test_a_library_reads_the_classes_of_a_card(library: str) -> None:
    answers: list[Any] = []

    def step() -> None:
        module = importlib.import_module(library)
        answers.extend([module, *module.kinds()])
        assert module.meta() == (True, "Made", int, torch.dtype)

    record(step)
    module, kinds, devices = answers
    assert kinds == [torch.Tensor, torch.nn.Parameter, torch.Tensor, module.Weight]
    assert devices == ["cuda"]
    assert module.meta() == (True, "Made", int, torch.dtype)  # it stays imported


def test_bytecode_of_a_rewritten_file_is_kept_while_its_source_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a library's, as reading thousands of files anew takes seconds; beside the program's own there is none."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for folder in (tmp_path / "site-packages", tmp_path / "own"):
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
    library, own = tmp_path / "site-packages" / "kept_package.py", tmp_path / "own" / "own_package.py"
    own.write_text(FILE, encoding="utf-8")
    read: list[ast.Module] = []

    def reading(tree: ast.Module) -> ast.Module:
        read.append(tree)
        return with_shown_types(tree)

    monkeypatch.setattr(unnoticed, "with_shown_types", reading)
    for value, times in ((1, 1), (1, 1), (22, 2)):
        if times > len(read):
            library.write_text(f"{FILE}\nVALUE = {value}\n", encoding="utf-8")
        importlib.invalidate_caches()
        record(lambda: importlib.import_module("kept_package").kinds())
        module = sys.modules.pop("kept_package")
        assert (module.VALUE, len(read)) == (value, times)
        assert unnoticed.TYPE in module.move.__code__.co_names
    record(lambda: importlib.import_module("own_package").kinds())
    del sys.modules["own_package"]
    kept = [path.name for path in tmp_path.rglob("*.graphmem-*")]
    assert [name.partition(".")[0] for name in kept] == ["kept_package"]


def test_only_calls_of_one_argument_are_rewritten() -> None:
    source = "type(x)\ntype(*x)\ntype('A', (), {})\nx.type(y)\nisinstance(x, type)"
    changed = ast.unparse(with_shown_types(ast.parse(source))).splitlines()
    assert changed[0] == "__graphmem_type__(x)"
    assert changed[1:] == source.splitlines()[1:]


def test_a_program_moves_what_is_a_tensor(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(FILE + "\nprint(kinds()[1])\ntorch.ones(1, device='cuda')\n", encoding="utf-8")
    command = [sys.executable, "-m", "graphmem", "run", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "['cuda']" in done.stderr
