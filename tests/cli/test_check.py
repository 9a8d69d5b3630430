"""``graphmem check``: budgets, cards and committed figures of a project, and the files that run it in CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from graphmem.cli.main import cli
from tests import places

pytest.importorskip("torch")

_MODEL = """
import torch

def build(batch=16):
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]), torch.zeros(batch, 1024)
"""
_TABLE = """
[tool.graphmem]
gpu = "T4"
growth = "1%"

[tool.graphmem.watch.train]
model = "train.py:build"
budget = "1GiB"

[tool.graphmem.watch.large]
model = "train.py:build"
batch = 4096
optimizer = "sgd"
budget = "200MiB"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(_MODEL)
    (tmp_path / "pyproject.toml").write_text(_TABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["check", *arguments], prog_name="graphmem")


def test_a_budget_that_is_exceeded_fails_and_the_others_are_told(project: Path) -> None:
    found = check("--format", "json")
    document = json.loads(found.stdout)
    assert found.exit_code == 3
    train, large = document["rows"]
    assert not train["trouble"]
    assert train["estimate"]["gpu"] == "T4-16GB"
    assert "over its budget of 200.00 MiB" in large["trouble"][0]
    assert large["estimate"]["peak"]["device_bytes"] > 200 << 20
    assert check("train").exit_code == 0


def test_growth_beyond_the_committed_figure_fails_until_it_is_committed(project: Path) -> None:
    assert check("--update", "train").exit_code == 0
    lock = project / "graphmem.lock.json"
    assert check("train").exit_code == 0
    (project / "train.py").write_text(_MODEL.replace("range(4)", "range(8)"))
    grown = check("train")
    assert grown.exit_code == 3
    assert "% more than the committed" in grown.stdout
    before = json.loads(lock.read_text())["device_bytes"]["train"]
    assert check("--update", "train").exit_code == 0
    assert json.loads(lock.read_text())["device_bytes"]["train"] > before
    assert check("train").exit_code == 0


def test_a_card_that_is_too_small_fails(project: Path) -> None:
    (project / "pyproject.toml").write_text(_TABLE.replace('"T4"', '"T4"\nbatch = 4000000'))
    found = check("train")
    assert found.exit_code == 3
    assert "DOES NOT FIT T4-16GB" in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[tool.other]", "has no table [tool.graphmem.watch.NAME]"),
        ("[tool.graphmem.watch.a]\nbatch = 1", "watch 'a': it has no model"),
        ("[tool.graphmem.watch.a]\nmodel = 'm.onnx'\nbudget = 'much'", "watch 'a'"),
        ("[tool.graphmem.watch.a]\nmodel = 'm.onnx'\nnonsense = 1", "no 'nonsense'; accepted: "),
        ("[tool.graphmem]\ngrowth = 'some'\n[tool.graphmem.watch.a]\nmodel = 'm.onnx'", "growth: "),
        ("tool = 3", "has no table"),
        ("[", "is not TOML"),
    ],
)
def test_a_wrong_table_is_one_line(project: Path, table: str, words: str) -> None:
    (project / "pyproject.toml").write_text(table)
    found = subprocess.run(
        [sys.executable, "-m", "graphmem", "check"], capture_output=True, text=True, check=False, cwd=project
    )
    assert found.returncode == 1
    assert words in found.stderr
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": "graphmem.lock/1", "device_bytes": {"train": "1"}}'])
def test_a_lock_file_that_is_none_is_refused(project: Path, text: str) -> None:
    (project / "graphmem.lock.json").write_text(text)
    found = check("train")
    assert found.exit_code != 0
    assert "is no lock file of graphmem check" in found.stderr


def test_the_action_writes_the_table_into_the_summary_of_the_job(project: Path) -> None:
    """The step of action.yml as a runner takes it: a script for bash, with the inputs as its environment."""
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((places.ROOT / "action.yml").read_text())
    step = next(one for one in action["runs"]["steps"] if one["name"] == "check")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(places.ROOT),
        "RUNNER_TEMP": str(project),
        "GITHUB_STEP_SUMMARY": str(project / "summary"),
        "CONFIG": action["inputs"]["config"]["default"],
        "WATCHES": "large train",
    }
    assert set(step["env"]) <= set(environment)
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], env=environment, cwd=project, check=False)
    assert done.returncode == 3
    assert "**1 of 2 watches pass.**" in (project / "summary").read_text()


def test_hook_and_template_call_the_same_command() -> None:
    yaml = pytest.importorskip("yaml")
    (hook,) = yaml.safe_load((places.ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "graphmem check"
    head, job = yaml.safe_load_all((places.ROOT / "templates" / "check.yml").read_text())
    script = " ".join(job["graphmem-check"]["script"])
    assert "graphmem check --config" in script
    assert all(f"inputs.{name} " in str(job) for name in head["spec"]["inputs"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bacth = 4", "watch 'one': no 'bacth' (did you mean batch?); accepted: model, budget, batch, seq-len"),
        ("budjet = '1GiB'", "no 'budjet' (did you mean budget?)"),
        ("optimizer-args = 'momentum=0.9'", "optimizer-args is a table, as { momentum = 0.9 }, not 'momentum=0.9'"),
    ],
)
def test_a_key_that_there_is_not_names_the_one_that_was_meant(project: Path, line: str, said: str) -> None:
    (project / "pyproject.toml").write_text(f"[tool.graphmem.watch.one]\nmodel = 'train.py:build'\n{line}\n")
    found = check()
    assert found.exit_code == 1
    assert said in found.stderr


def test_a_key_of_all_watches_is_read_before_any_is_analysed(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[tool.graphmem]\ngrowht = '2%'\n[tool.graphmem.watch.one]\nmodel = 'a.py:b'\n"
    )
    assert "[tool.graphmem]: no 'growht' (did you mean growth?); accepted: watch, lock, growth" in check().stderr


def test_a_watch_may_be_inference_and_give_the_optimizer_arguments(project: Path) -> None:
    watch = "[tool.graphmem.watch.{}]\nmodel = 'train.py:build'\n{}\n"
    rows = {"infers": "training = false", "plain": "optimizer = 'sgd'"}
    rows["momentum"] = f"{rows['plain']}\noptimizer-args = {{ momentum = 0.9 }}"
    (project / "pyproject.toml").write_text("".join(watch.format(name, lines) for name, lines in rows.items()))
    found = check("--format", "json")
    steps = {row["name"]: row["estimate"] for row in json.loads(found.stdout)["rows"]}
    assert steps["infers"]["step"].startswith("inference")
    assert steps["momentum"]["breakdown"]["OPTIMIZER_STATE"] > steps["plain"]["breakdown"]["OPTIMIZER_STATE"]
