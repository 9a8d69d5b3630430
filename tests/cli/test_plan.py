"""``graphmem plan`` as a program: what it prints, in which forms, and how it exits."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from graphmem.cli.main import cli

pytest.importorskip("transformers")

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 500,
    "tie_word_embeddings": False,
}  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments], prog_name="graphmem")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return f"hf:{tmp_path}"


@pytest.fixture
def large(tmp_path: Path) -> str:
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **wide, "num_key_value_heads": 8}))
    return f"hf:{tmp_path}"


def test_a_plan_is_a_text_and_files(model: str, tmp_path: Path) -> None:
    ask = (model, "--gpus", "2xT4", "--global-batch", "4", "-s", "32", "--frameworks", "ddp", "--confirm", "2")
    result = run(*ask, "--no-advice", "--write", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    assert "BEST: DDP, micro-batch 2" in result.stdout
    assert "Layouts that fit, each captured" in result.stdout
    assert "graphmem analyze hf:" in " ".join(result.stdout.split())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["accelerate.yaml", "launch.sh"]
    assert "torchrun --nproc-per-node 2 train.py" in (tmp_path / "out" / "launch.sh").read_text()


def test_what_can_never_fit_needs_no_capture(large: str) -> None:
    ask = (large, "--gpus", "8xT4", "--global-batch", "8", "-s", "4096", "--frameworks", "ddp")
    result = run(*ask)
    assert result.exit_code == 3
    assert "NOTHING FITS." in result.stdout
    assert "for optimizer states alone" in result.stdout
    document = json.loads(run(*ask, "--format", "json").stdout)
    assert (document["fitting"], document["captured"]) == ([], 0)
    assert {one["status"] for one in document["others"]} == {"refused by its bound"}
    rows = list(csv.DictReader(io.StringIO(run(*ask, "--format", "csv").stdout)))
    assert all(int(row["bound_bytes"]) > 0 and row["reason"] for row in rows)
    page = run(*ask, "--format", "html").stdout
    data = page.split('id="graphmem-plan">')[1].split("</script>")[0]
    assert json.loads(data)["schema"] == "graphmem.plan/1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "H100", "--global-batch", "4"), "write how many and which"),
        (("--gpus", "2xH100", "--global-batch", "1M"), "cannot read the global batch"),
        (("--gpus", "2xH100", "--global-batch", "4", "--links", "fast"), "cannot read --links"),
        (("--gpus", "2xH100", "--global-batch", "4", "--frameworks", "jax"), "unknown framework"),
    ],
)
def test_bad_input_gives_one_line(model: str, arguments: tuple[str, ...], words: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == 1
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "missing"), [(("--gpus", "2xH100"), "--global-batch"), (("--global-batch", "4"), "--gpus")]
)
def test_options_that_are_needed_are_asked_for(model: str, arguments: tuple[str, ...], missing: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == 2
    assert f"Missing option '{missing}'" in result.stderr
