"""PyTorch's private names: all are declared, the manifest is that of the code, and a newer PyTorch is called newer."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphmem import torch_names
from graphmem.base import versions
from graphmem.torch_names import GONE, MANIFEST, MissingName, declarations, manifest, private
from tests import places

PACKAGE = places.ROOT / "graphmem"
#: What captures make themselves (``patches.set(torch._C, "_cuda_...", ...)``), and an attribute of every generator.
_OWN = re.compile(r"torch\._C(\._cuda_\w+)?|torch\.default_generator\._cdata")

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="names are hidden in forks of the process")


# --- what the code spells ---------------------------------------------------------------------------------------------


def _is_private(path: str) -> bool:
    first, *parts = path.split(".")
    is_operator = parts[:1] == ["ops"]
    return first == "torch" and not is_operator and any(p.startswith("_") and not p.endswith("__") for p in parts)


def _spelled(file: Path) -> Iterator[str]:
    """The private names of torch that a file imports, or reaches by attributes, but for types."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    passed = {id(inner) for node in typing for statement in node.body for inner in ast.walk(statement)}
    named: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                named[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and id(node) not in passed:
            for alias in node.names:
                named[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in passed:
            yield _path(node, named)


def _path(node: ast.expr, named: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return named.get(node.id, "")
    return f"{_path(node.value, named)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def test_every_private_name_is_asked_for_where_it_is_declared() -> None:
    found = {
        f"{file.relative_to(PACKAGE)}: {path}"
        for file in PACKAGE.rglob("*.py")
        for path in _spelled(file)
        if path.startswith("torch.") and _is_private(path) and not _OWN.fullmatch(path)
    }
    assert found == set()


def test_the_manifest_is_that_of_the_code() -> None:
    """``python -m graphmem.torch_names graphmem/torch_names.json`` writes it."""
    assert MANIFEST.read_text(encoding="utf-8") == manifest()


def test_every_declaration_says_what_is_lost() -> None:
    assert [one for one in declarations() if not one.lost or one.lost.endswith(".")] == []


# --- a name that is gone ----------------------------------------------------------------------------------------------


@pytest.fixture
def _no_absences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_names, "_absent", {})


@pytest.mark.usefixtures("_no_absences")
def test_a_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_text", lambda: "2.99.0+cu140")
    assert private("torch._C._no_such_name", "nothing", 7) == 7
    newest = versions.words(versions.NEWEST)
    assert [str(one) for one in torch_names.absences()] == [
        f"PyTorch 2.99.0 is newer than {newest}, the newest known; torch._C._no_such_name is gone: nothing"
    ]


@pytest.mark.usefixtures("_no_absences")
def test_a_needed_name_that_is_gone_raises_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_text", lambda: "2.99.0")
    gone = private("torch._subclasses.no_such_module.Tensor", "nothing")
    told = r"PyTorch 2\.99\.0 is newer than .*no_such_module\.Tensor is gone: nothing"
    for use in ("gone()", "gone.attribute", "isinstance(1, gone)", "class Of(gone): ...", "with gone: ..."):
        with pytest.raises(MissingName, match=told):
            exec(use, {"gone": gone})


@pytest.mark.usefixtures("_no_absences")
def test_known_versions_without_a_name_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_text", lambda: "2.8.0")
    private("torch._C._no_such_name", "nothing", None, since=(2, 9))
    private("torch._C._no_such_name", "nothing", None, until=(2, 7))
    assert torch_names.absences() == ()
    private("torch._C._no_such_name", "nothing", None, since=(2, 7), until=(2, 9))
    assert len(torch_names.absences()) == 1


def test_a_name_is_the_object_itself() -> None:
    import torch

    assert private("torch.Tensor._make_subclass", "") is torch.Tensor._make_subclass
    assert torch_names.find("torch.nn.no_such_module") is GONE


def _raised_by(package: str, code: str) -> BaseException:
    with pytest.raises((AttributeError, NameError)) as caught:
        exec(code, {"__name__": f"{package}.some_module"})
    return caught.value


@pytest.mark.parametrize(
    ("package", "code", "is_explained"),
    [
        ("torch", "_no_such_hooks", True),
        ("train", "_no_such_hooks", False),
        ("torch", "def f():\n    a = a + 1\nf()", False),
        ("graphmem", "import torch; torch._no_such_name", True),
    ],
)
def test_an_error_for_want_of_a_name_names_the_version(package: str, code: str, is_explained: bool) -> None:
    assert (torch_names.explained(_raised_by(package, code)) is not None) is is_explained


# --- plain answers without one ----------------------------------------------------------------------------------------

_SAMPLE = (
    "torch.autograd._make_grads",  # replaced
    "torch._C._current_autograd_node",  # something stands in its place
    "torch._subclasses.fake_tensor.FakeTensorMode",  # needed
)


def _hide(*words: str, timeout: float) -> list[str]:
    command = [sys.executable, "-m", "tests.support.hidden_names", *words]
    ran = subprocess.run(command, cwd=places.ROOT, capture_output=True, text=True, timeout=timeout, check=True)
    return ran.stdout.splitlines()


@needs_fork
def test_plain_answers_without_a_name() -> None:
    ends = dict(line.split(": ", 1) for line in _hide(*_SAMPLE, timeout=600)[:-1])
    assert ends == {
        "torch.autograd._make_grads": "the same figures, and what is lost",
        "torch._C._current_autograd_node": "the same figures, and what is lost",
        "torch._subclasses.fake_tensor.FakeTensorMode": "an error that names the version",
    }


@needs_fork
@pytest.mark.slow
def test_nine_of_ten_plain_questions_are_answered_without_any_one_name() -> None:
    *lines, _ = _hide(timeout=6000)
    ends = [line.split(": ", 1)[1] for line in lines]
    assert [line for line in lines if "something else" in line] == []
    assert len([end for end in ends if "error" not in end]) >= 0.9 * len(ends)


# --- rooms that a plain step does not enter ---------------------------------------------------------------------------

_PERCEPTRON = """
    import json, sys
    import torch
    from torch import nn
    from graphmem.analyze import analyze

    def build():
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        return model, torch.randn(32, 64), torch.randint(0, 10, (32,)), nn.functional.cross_entropy

    analyze(build, device="A100-40GB", cudnn="never")
    print(json.dumps(sorted(name for name in sys.modules if name.startswith("graphmem.capture."))))
"""


@pytest.mark.slow
def test_a_plain_step_enters_no_room_of_others() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PERCEPTRON)],
        cwd=places.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = json.loads(ran.stdout.splitlines()[-1])
    rooms = {name.split(".")[2] for name in imported if name.count(".") > 2}
    assert rooms.isdisjoint({"compile", "distributed", "program"})
