"""The examples of the README, run as they stand there by somebody with the packages that they name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import places

_FILE = places.ROOT / "README.md"
if not _FILE.exists():
    pytest.skip("an installed package has no such page beside it", allow_module_level=True)
_TEXT = _FILE.read_text(encoding="utf-8")
_TRAINER = """
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

texts = [{"input_ids": torch.ones(128, dtype=torch.long), "labels": torch.ones(128, dtype=torch.long)}] * 32
arguments = TrainingArguments("out", per_device_train_batch_size=8, report_to="none")
Trainer(AutoModelForCausalLM.from_config(GPT2Config(n_layer=2)), arguments, train_dataset=texts).train()
"""


def _python(*packages: str) -> str:
    """A Python that has the packages: this one, or that of the CUDA build."""
    if all(map(find_spec, packages)):
        return sys.executable
    other = os.environ.get("GRAPHMEM_CUDA_PYTHON", "")
    looks = f"from importlib.util import find_spec; assert all(map(find_spec, {packages}))"
    if not other or subprocess.run([other, "-c", looks]).returncode:
        pytest.skip(f"without {', '.join(packages)}")
    return other


def _answer(python: str, line: str, folder: Path) -> str:
    command = [python, "-m", *shlex.split(line)]
    environment = {**os.environ, "PYTHONPATH": str(places.ROOT), "PYTHONWARNINGS": "ignore"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def _block(holds: str) -> str:
    """The indented block with these words."""
    blocks = re.findall(r"(?:^(?: {4}.*)?\n)+", _TEXT, re.MULTILINE)
    (found,) = (re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in blocks if holds in block)
    return found


def _line(begins: str) -> str:
    (found,) = re.findall(rf"`({begins}[^`]*)`", _TEXT)
    return found


@pytest.mark.slow
def test_lora(tmp_path: Path) -> None:
    python = _python("torch", "transformers", "peft")
    (tmp_path / "lora.py").write_text(_block("get_peft_model("))
    said = _answer(python, _line("graphmem analyze lora.py"), tmp_path)
    assert "\nFITS T4-16GB" in said
    assert not re.search(r"^(gradients|optimizer state) +[\d.]+ GiB", said, re.MULTILINE), "a few weights are trained"


@pytest.mark.slow
def test_a_script_with_the_trainer(tmp_path: Path) -> None:
    python = _python("torch", "transformers", "accelerate")
    (tmp_path / "finetune.py").write_text(_TRAINER)
    said = _answer(python, _line("graphmem run --gpu T4 finetune.py"), tmp_path)
    assert "\nFITS T4-16GB" in said
    assert "\noptimizer state" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_reports(tmp_path: Path) -> None:
    python = _python("torch", "transformers")
    *made, compared = [_answer(python, line, tmp_path) for line in _block("before.json").strip().splitlines()]
    assert [(tmp_path / name).exists() for name in ("before.json", "after.json")] == [True, True]
    assert "".join(made) == ""
    assert compared.startswith("Device memory shrinks by ")
    assert "transformer.h.*.mlp.act" in compared
