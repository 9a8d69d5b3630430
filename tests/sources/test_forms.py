"""What people give as a model: every form has an answer or one message that says what to write instead."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import graphmem
from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.sources import load
from graphmem.sources.base import Sizes, TorchModel, call_factory
from graphmem.sources.factory import find_factory


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("train.py", "train.py:build"),
        ("config.json", "hf:"),
        ("run.pickle", "graphmem replay"),
        ("model.keras", "keras:model.py:build"),
        ("model.safetensors", "holds weights"),
        ("model.pth", "holds weights"),
        ("notes.txt", "accepted: model.onnx"),
    ],
)
def test_a_file_of_another_kind_is_answered_with_what_to_write(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError, match=hint):
        load(str(tmp_path / name))


def test_a_folder_is_told_from_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="name a file in it"):
        load(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"it holds weights; put the model's config\.json beside them"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="write hf:"):
        load(str(tmp_path))


@pytest.mark.parametrize(("name", "hint"), [("gpt2", "hf:gpt2"), ("org/model", "write hf:org/model")])
def test_a_bare_name_is_answered_with_its_form(name: str, hint: str) -> None:
    with pytest.raises(SourceError, match=hint):
        load(name)


def test_a_hub_model_is_looked_for_in_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceError, match="no network"):
        load("hf:org/model")
    stored = tmp_path / "models--org--model"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("abc")
    (stored / "snapshots" / "abc").mkdir(parents=True)
    (stored / "snapshots" / "abc" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    assert "GPT2LMHeadModel" in load("hf:org/model").name


@pytest.mark.parametrize("content", ["{}", "[]"])
def test_a_configuration_without_a_model_type_is_named(tmp_path: Path, content: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SourceError, match="names no model_type"):
        load(f"hf:{tmp_path / 'config.json'}")


def _notes(name: str) -> tuple[str, ...]:
    model = load(name)
    assert isinstance(model, TorchModel)
    return model.notes


def test_headers_of_the_checkpoint_beside_a_configuration_are_noted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    header = b'{"wte.weight": {"dtype": "BF16", "shape": [5000, 1000]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "its checkpoint has 1 tensors of 0.01 GB: BF16 0.01 GB" in _notes(f"hf:{tmp_path}")
    file.write_bytes(b"{}")
    assert any("is not read" in note for note in _notes(f"hf:{tmp_path}"))


# --- factories --------------------------------------------------------------------------------------------------------


def _linear(batch: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 4), torch.zeros(batch, 4)


def test_a_factory_may_spell_the_sizes_as_trainers_do() -> None:
    def build(batch_size: int, sequence_length: int = 1) -> tuple[nn.Module, torch.Tensor]:
        assert sequence_length == 7
        return _linear(batch_size)

    built = call_factory(build, "build", Sizes(batch=3, seq_len=7))
    assert built is not None
    assert built.inputs.shape == (3, 4)
    with pytest.raises(SourceError, match="needs 'batch_size'; give --batch N"):
        call_factory(build, "build", Sizes())


def test_a_loss_that_wants_more_than_the_output_is_refused_before_the_step() -> None:
    def build() -> tuple[Any, ...]:
        return (*_linear(2), nn.functional.mse_loss)

    with pytest.raises(SourceError, match=r"return \(model, inputs, targets, loss\)"):
        call_factory(build, "build", Sizes())


def test_a_factory_that_returns_and_does_nothing_is_no_step_of_zero_bytes() -> None:
    def forgot_to_return() -> None:
        _linear(2)

    with pytest.raises(SourceError, match="put nothing on the GPU"):
        graphmem.analyze(forgot_to_return)


# --- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"batch": "8"}, {"seq_len": -1}, {"iterations": 0}, {"iterations": True}, {"top": -1}]
)
def test_counts_are_checked_in_python_too(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="whole number"):
        graphmem.analyze(nn.Linear(4, 4), torch.zeros(2, 4), **wrong)


def test_a_sequence_length_that_nothing_takes_is_not_ignored() -> None:
    with pytest.raises(SourceError, match="drop it"):
        graphmem.analyze(nn.Linear(4, 4), torch.zeros(2, 4), seq_len=9)


# --- exported programs ------------------------------------------------------------------------------------------------


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.linear(x).reshape(x.shape[0], -1) * scales["s"]


@pytest.fixture(scope="module")
def dynamic() -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=512)
    scales = {"s": torch.zeros(4, 192)}
    return torch.export.export(
        _Scaled(), (torch.zeros(4, 3, 64), scales), dynamic_shapes=({0: batch}, {"s": {0: batch}})
    )


def test_a_dynamic_batch_of_an_exported_program_follows_the_option(
    dynamic: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    torch.export.save(dynamic, tmp_path / "m.pt2")
    small = graphmem.analyze(str(tmp_path / "m.pt2"), training=False)
    large = graphmem.analyze(str(tmp_path / "m.pt2"), training=False, batch=100)
    assert large.breakdown["INPUT"] == 25 * small.breakdown["INPUT"] == 100 * (3 * 64 + 192) * 4
    assert "batch of 100" in " ".join(large.assumptions)
    with pytest.raises(GraphmemError, match="batches of 1 to 512, not 600"):
        graphmem.analyze(str(tmp_path / "m.pt2"), training=False, batch=600)


def test_an_exported_program_brings_its_own_inputs(dynamic: torch.export.ExportedProgram) -> None:
    assert graphmem.analyze(dynamic, training=False).breakdown["INPUT"] == 4 * (3 * 64 + 192) * 4


def test_a_fixed_program_says_how_to_export_for_other_sizes() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.zeros(2, 4),))
    with pytest.raises(GraphmemError, match=r"torch\.export\.Dim"):
        graphmem.analyze(program, batch=8)


def test_a_pt2_file_that_is_no_archive_is_refused_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.pt2").write_text("hello")
    with pytest.raises(GraphmemError, match="no zip archive"):
        graphmem.analyze(str(tmp_path / "m.pt2"))
    assert "Traceback" not in capfd.readouterr().err


# --- transformers -----------------------------------------------------------------------------------------------------


def _tiny_llama(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    sizes = '"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2'
    (tmp_path / "config.json").write_text(
        f'{{"model_type": "llama", {sizes}, "vocab_size": 100, "max_position_embeddings": 32}}'
    )
    return f"hf:{tmp_path / 'config.json'}"


@pytest.mark.slow
def test_a_sequence_beyond_the_positions_of_the_model_is_told(tmp_path: Path) -> None:
    model = _tiny_llama(tmp_path)
    told = "sequence length 40 is longer than the 32 positions of the configuration"
    assert told in graphmem.analyze(model, seq_len=40).assumptions
    assert not any("longer" in line for line in graphmem.analyze(model, seq_len=32).assumptions)


def test_a_sequence_beyond_a_table_of_positions_is_told_beside_the_verdict(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = '"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 32'
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", {sizes}}}')
    heads = [
        " ".join(
            graphmem.analyze(f"hf:{tmp_path / 'config.json'}", seq_len=length)
            .report(details=True)
            .split("Peak memory")[0]
            .split()
        )
        for length in (40, 32)
    ]
    assert "40 tokens are more than the table of 32 positions of the model: this step fails on a card." in heads[0]
    assert "positions" not in heads[1]


@pytest.mark.slow
def test_a_search_ends_at_the_positions_and_says_where_others_are_beyond_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = '"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 32'
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", {sizes}}}')
    model = f"hf:{tmp_path / 'config.json'}"
    found = graphmem.fit(model, size="seq_len", device="T4", at_most=40)
    assert (found.value, "table of 32 positions" in found.stopped_by) == (32, True)
    found = graphmem.fit(model, seq_len=40, device="T4", at_most=2)
    assert "BUT 40 tokens are more than the table of 32 positions" in " ".join(found.report().split())


def test_checkpointing_calls_nothing_that_transformers_has_deprecated(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        graphmem.analyze(_tiny_llama(tmp_path), training=graphmem.Training(checkpoint_activations=True))


def test_a_file_that_was_edited_within_a_second_is_read_as_it_is(tmp_path: Path) -> None:
    """Python's bytecode cache compares whole seconds and the length."""
    file = tmp_path / "train.py"
    for number in (4, 8):
        file.write_text(f"def build():\n    return {number}\n")
        os.utime(file, (1_700_000_000, 1_700_000_000))
        assert find_factory(f"{file}:build")[0]() == number
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_module_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    module = tmp_path / "broken.py"
    module.write_text("import math\n\nsize = math.floor(width)\n", encoding="utf-8")
    with pytest.raises(SourceError, match=r"broken\.py:3 raised NameError: name 'width' is not defined"):
        graphmem.analyze(f"{module}:build")
