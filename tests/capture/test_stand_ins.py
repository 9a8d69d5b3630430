"""Tokenizers and data sets that a program names and that are not on this disk: stand-ins of a stated size."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from graphmem import analyze
from graphmem.errors import GraphmemError, UsageError
from graphmem.training.program import DataSet, Program, parse_data_set

#: As much of the package as a stand-in needs.
_DATASETS = """
class Dataset(list):
    @classmethod
    def from_dict(cls, columns):
        return cls(dict(zip(columns, row)) for row in zip(*columns.values()))
DatasetDict = dict
from datasets.load import load_dataset
"""
_LOAD = """
def load_dataset(path, *args, **kwargs):
    raise ConnectionError(f"Couldn't reach {path}")
"""
_READER = """
import torch
from datasets import load_dataset
rows = load_dataset("org/rows")["train"]
torch.zeros(sum(len(row["text"]) for row in rows), device="cuda", dtype=torch.uint8)
"""
_PROGRAM = """
import torch
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("org/model-of-nobody")
tokens = tokenizer([" the" * 128] * 6, return_tensors="pt")["input_ids"].to("cuda")
torch.zeros(len(tokenizer) << 10, device="cuda", dtype=torch.uint8)
"""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    package = tmp_path / "datasets"
    package.mkdir()
    (package / "__init__.py").write_text(_DATASETS)
    (package / "load.py").write_text(_LOAD)
    (tmp_path / "train.py").write_text(_READER)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "train.py")


def test_a_data_set_has_the_size_that_was_asked_for(reader: str) -> None:
    with pytest.raises(GraphmemError, match="--dataset rows=1000,tokens=512 lets a data set"):
        analyze(Program(reader))
    estimate = analyze(Program(reader, dataset=DataSet(6, 128)))
    assert estimate.requested == 6 * 128 * 4
    said = " ".join(one.message for one in estimate.diagnostics)
    assert "the data set org/rows is not on this disk; 6 rows of 128 tokens" in said


@pytest.mark.slow  # transformers is imported
def test_a_tokenizer_has_the_size_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.py").write_text(_PROGRAM)
    program = str(tmp_path / "train.py")
    with pytest.raises(GraphmemError, match="--vocab 32000 lets a tokenizer"):
        analyze(Program(program))
    estimate = analyze(Program(program, vocab=500))
    assert estimate.requested == 6 * 128 * 8 + (500 << 10)
    said = " ".join(one.message for one in estimate.diagnostics)
    assert "the tokenizer org/model-of-nobody is not on this disk; one of 500 tokens" in said


def test_a_size_is_read() -> None:
    assert parse_data_set("rows=10,tokens=20,columns=prompt+completion") == DataSet(10, 20, ("prompt", "completion"))
    with pytest.raises(UsageError, match="write rows=1000,tokens=512"):
        parse_data_set("rows=0,tokens=20")
