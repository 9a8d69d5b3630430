"""Whole programs under ``graphmem run``: the real folder stays as it was, and the report is what a real run does."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox import whole

pytest.importorskip("torch")
h5py = pytest.importorskip("h5py")

RECORDS = json.loads(whole.GOLDEN.read_text(encoding="utf-8"))
#: Quick ones, which need nothing but PyTorch and transformers: the others take minutes in all.
QUICK = {"old_runs_deleted", "shell_commands"}
#: Files whose length is another in each run: they hold dates, addresses, process numbers or the path of their folder.
_VARYING = re.compile(
    r"jobcache/|bundle\.joblib|wandb/|tb/events|\.zip$|\.keras$|best\.pkl|train\.pid|random_states|latest\.pt$"
    r"|args\.yaml|set\.yaml|results\.csv|\.cache$|settings\.json"
)
#: Lines that tell such a length.
_VARYING_LINES = {"pickled"}
#: Programs that end with an error where the programs that they start cannot write, or are refused.
_REFUSED = {
    "namespace": set[str](),
    "landlock": {"shell_commands"},
    "wrapped": {"config_yaml_copy", "shell_commands", "wandb_offline"},
}

#: pip's torchvision is a CUDA build, which does not import beside a CPU build of PyTorch.
_WITH_TORCHVISION = (
    "from graphmem.zoo.libraries import make_torchvision_importable; make_torchvision_importable()\n"
    "from graphmem.cli.main import main; main()"
)


def _packages(program: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(program.read_bytes())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names} | ({"tensorboard"} if "tensorboard" in program.stem else set())


def _cases() -> list[Any]:
    cases: list[Any] = []
    for program in sorted(whole.PROGRAMS.glob("*.py")):
        for mechanism in ("namespace", "landlock", "wrapped"):
            quick = program.stem in QUICK and mechanism == "namespace"
            marks = () if quick else (pytest.mark.slow,)
            cases.append(pytest.param(program, mechanism, marks=marks, id=f"{program.stem}-{mechanism}"))
    return cases


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier") / "run"
    subprocess.run([sys.executable, "-m", "tests.sandbox.earlier_run", str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize(("program", "mechanism"), _cases())
def test_nothing_is_harmed_and_the_report_is_what_a_real_run_does(
    program: Path, mechanism: str, earlier: Path, tmp_path: Path
) -> None:
    missing = [name for name in sorted(_packages(program)) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    folder, report = tmp_path / "work", tmp_path / "report.json"
    shutil.copytree(earlier, folder)
    before = whole.contents(folder)
    start = ["-c", _WITH_TORCHVISION] if "ultralytics" in _packages(program) else ["-m", "graphmem"]
    command = [sys.executable, *start, "run", "--iterations", "60", "--format", "json", "-o", str(report)]
    environment = {**os.environ, "GRAPHMEM_SANDBOX": mechanism}
    done = subprocess.run([*command, str(program)], cwd=folder, env=environment, capture_output=True, text=True)
    assert whole.contents(folder) == before
    if f"graphmem: GRAPHMEM_SANDBOX={mechanism}: " in done.stderr:
        pytest.skip(f"this kernel forbids it: {done.stderr.strip()[-200:]}")
    if program.stem in _REFUSED[mechanism]:
        assert done.returncode == 1, done.stderr[-2000:]
        return
    assert done.returncode == 0, done.stderr[-2000:]
    recorded = RECORDS[program.stem]
    if program.stem not in _VARYING_LINES:
        assert whole.seen(done.stderr) == recorded["seen"]
    files = json.loads(report.read_text(encoding="utf-8"))["details"]["sandbox"]["files"]
    assert sorted(_names(files["deleted"], folder)) == sorted(recorded["deleted"])
    written = [entry for kind in ("written", "overwritten", "renamed") for entry in files[kind]]
    sizes = dict(zip(_names(written, folder), (entry["bytes"] for entry in written), strict=True))
    assert _steady(sizes) == _steady(recorded["written"])


def _names(entries: list[dict[str, object]], folder: Path) -> list[str]:
    return [os.path.relpath(str(entry["path"]), folder) for entry in entries]


def _steady(sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if not _VARYING.search(name)}
