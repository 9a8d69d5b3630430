"""The zoo: its manifest, its models by name, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import graphmem
from graphmem.answering.question import Question
from graphmem.cli.main import cli
from graphmem.errors import SourceError
from graphmem.sources.zoo import usual_step, zoo_entries, zoo_entry
from graphmem.training import Inference, Training
from models_zoo import manifest, tasks
from tests.support.examples import first_quick

#: Families that the zoo promises.
FAMILIES = {
    "VGG", "ResNet", "DenseNet", "Inception", "MobileNet", "EfficientNet", "RegNet", "ConvNeXt", "U-Net", "Diffusion",
    "ViT", "DeiT", "Swin", "Segformer", "DETR", "CLIP", "BERT", "DistilBERT", "RoBERTa", "T5", "BART", "GPT-2", "OPT",
    "GPT-NeoX", "Llama", "Qwen", "Mistral", "Gemma", "Phi", "Mixtral", "Mamba", "Whisper", "wav2vec2", "LSTM", "DLRM",
    "GNN", "MLP",
}  # fmt: skip


def test_the_zoo_has_every_family_it_promises() -> None:
    entries = zoo_entries()
    assert len(entries) >= 40
    assert {entry.family for entry in entries} >= FAMILIES


@pytest.mark.parametrize("entry", zoo_entries(), ids=lambda entry: entry.name)
def test_every_entry_has_a_step_and_a_task(entry: manifest.Entry) -> None:
    assert isinstance(usual_step(entry.name), Training)
    inference = usual_step(entry.name, training=False)
    assert isinstance(inference, Inference)
    assert inference.dtype == usual_step(entry.name).dtype
    assert (entry.task in tasks.TASKS) == (entry.library == "transformers")


def test_a_mistake_in_a_manifest_is_found(tmp_path: Path) -> None:
    path = tmp_path / "manifest.toml"
    row = '[[model]]\nname = "a"\nfamily = "A"\nmodel = "x:y"\nbatch = 1\n'
    path.write_text(row + "lenght = 3\n")
    with pytest.raises(ValueError, match="a has unknown fields: lenght"):
        manifest.entries(path)
    other = tmp_path / "twice.toml"
    other.write_text(row + row)
    with pytest.raises(ValueError, match="the name a is used twice"):
        manifest.entries(other)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(SourceError, match="did you mean gpt2"):
        zoo_entry("gpt-2")


@pytest.mark.parametrize("name", first_quick(["mlp", "dlrm", "graph-attention", "gcn", "lstm-lm", "vgg16"], 3))
@pytest.mark.parametrize("training", [True, False])
def test_our_own_models_are_analysed(name: str, training: bool) -> None:
    estimate = graphmem.analyze(f"zoo:{name}", batch=2, training=usual_step(name, training=training), iterations=1)
    assert estimate.requested > 0
    assert estimate.model == f"zoo:{name}"


def test_a_length_is_refused_where_there_is_none() -> None:
    with pytest.raises(SourceError, match="vgg16 has no sequence length"):
        graphmem.analyze("zoo:vgg16", seq_len=7)


def test_the_list_and_the_survey_are_commands() -> None:
    listed = CliRunner().invoke(cli, ["zoo", "--family", "mlp", "--format", "json"])
    assert [model["name"] for model in json.loads(listed.stdout)["models"]] == ["mlp", "mlp-mixer"]
    surveyed = CliRunner().invoke(cli, ["zoo", "analyze", "mlp", "--jobs", "1", "--format", "json"])
    assert surveyed.exit_code == 0, surveyed.output
    analyses = json.loads(surveyed.stdout)["analyses"]
    assert [analysis["case"]["name"] for analysis in analyses] == ["mlp-training", "mlp-inference"]
    assert all(analysis["peak"]["reserved_bytes"] > 0 and analysis["ram_bytes"] > 0 for analysis in analyses)


def test_a_zoo_model_keeps_its_usual_step_unless_another_is_asked_for() -> None:
    usual = CliRunner().invoke(cli, ["analyze", "zoo:mlp", "--format", "json"])
    other = CliRunner().invoke(cli, ["analyze", "zoo:mlp", "--format", "json", "--optimizer", "sgd"])
    usual_step, other_step = (json.loads(one.stdout)["step"] for one in (usual, other))
    assert usual_step == "training, adam, fp32 weights (the zoo's usual step)"
    assert other_step == "training, sgd, fp32 weights"
    said = "the step is what its options say, and not the zoo's usual one (training, adam, fp32 weights)"
    assert said in json.loads(other.stdout)["assumptions"]


@pytest.mark.slow
@pytest.mark.parametrize("entry", zoo_entries(), ids=lambda entry: entry.name)
@pytest.mark.parametrize("training", [True, False])
def test_every_entry_is_analysed(entry: manifest.Entry, training: bool) -> None:
    if entry.library == "timm":
        pytest.importorskip("timm")
    estimate = graphmem.analyze(f"zoo:{entry.name}", training=usual_step(entry.name, training=training), iterations=1)
    assert estimate.reserved >= estimate.allocated >= estimate.requested > 0


@pytest.mark.parametrize("training", [None, True, False])
def test_python_takes_the_usual_step_as_the_command_does(training: bool | None) -> None:
    asked = Question("zoo:gpt2", training=training)
    assert asked.step == usual_step("gpt2", training=training is not False)
    assert Question("zoo:gpt2", training=Training()).step == Training()
