"""Configuration files of fine-tuning tools that are not installed: what is taken, what is named, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("yaml")

from graphmem.cli.main import cli
from graphmem.errors import SourceError, UsageError
from graphmem.sources.manifests import read_manifest

LLAMAFACTORY = """
model_name_or_path: meta-llama/Llama-3.2-1B
stage: sft
finetuning_type: lora
lora_target: q_proj,v_proj
lora_rank: 16
cutoff_len: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
bf16: true
use_galore: false
"""
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
adapter: qlora
load_in_4bit: true
sequence_len: 1024
micro_batch_size: 3
optimizer: paged_adamw_8bit
bf16: auto
gradient_checkpointing: true
lora_target_linear: true
datasets: [{path: org/set, type: alpaca}]
sample_packing: true
"""
TRL = """
model_name_or_path: meta-llama/Llama-3.2-1B
per_device_train_batch_size: 4
max_length: 256
gradient_checkpointing: false
dtype: bfloat16
fp16: false
"""
TORCHTUNE = """
model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj, output_proj],
  lora_rank: 64, apply_lora_to_mlp: true}
batch_size: 2
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3.0e-4}
gradient_accumulation_steps: 8
dtype: bf16
"""
TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
AUTOMODEL = """
step_scheduler: {global_batch_size: 64, local_batch_size: 8}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, torch_dtype: bf16,
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, target_modules: "*_proj", dim: 8}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 1}
"""
#: text, its file's end, what is set, the step by 8 processes, what is named
FILES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "LLaMA-Factory": (
        LLAMAFACTORY, "yaml",
        {"batch": 2, "seq_len": 512, "adapter": True, "lora_rank": 16, "base_dtype": "bf16", "quantized": None},
        {"optimizer": "adamw", "amp": "bf16", "grad_accum": 4, "checkpoint_activations": True, "clip_grad_norm": 1.0},
        ("use_galore",),
    ),
    "axolotl": (
        AXOLOTL, "yml",
        {"batch": 3, "seq_len": 1024, "adapter": True, "quantized": "nf4", "lora_targets": "all-linear"},
        {"optimizer": "pagedadamw8bit", "amp": "bf16", "grad_accum": 1, "checkpoint_activations": True},
        ("sample_packing",),
    ),
    "TRL's SFT": (
        TRL, "yaml",
        {"batch": 4, "seq_len": 256, "adapter": False, "dtype": "bf16"},
        {"dtype": "bf16", "amp": "bf16", "checkpoint_activations": False, "optimizer_args": (("fused", True),)},
        (),
    ),
    "torchtune": (
        TORCHTUNE, "yaml",
        {"batch": 2, "adapter": True, "lora_rank": 64, "lora_mlp": True, "model": "meta-llama/Llama-3.2-1B"},
        {"optimizer": "adamw", "amp": None, "grad_accum": 8, "loop": "hold"},
        (),
    ),
    "torchtitan": (
        TORCHTITAN, "toml",
        {"batch": 1, "seq_len": 8192, "model": "meta-llama/Llama-3.1-8B"},
        {"tp": 2, "amp": "bf16", "checkpoint_activations": True, "clip_grad_norm": 1.0},
        (),
    ),
    "NeMo AutoModel": (
        AUTOMODEL, "yaml",
        {"batch": 8, "adapter": True, "base_dtype": "bf16", "lora_targets": "*_proj"},
        {"optimizer": "adam", "grad_accum": 1},
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("title", FILES)
def test_what_maps_is_taken_and_the_rest_is_named(title: str, tmp_path: Path) -> None:
    text, suffix, sets, steps, left = FILES[title]
    path = tmp_path / f"x.{suffix}"
    path.write_text(text)
    manifest = read_manifest(str(path))
    assert manifest.table["title"] == title
    assert {name: getattr(manifest.settings, name) for name in sets} == sets
    step = manifest.step(8)
    assert {name: getattr(step, name) for name in steps} == steps
    assert manifest.left == left
    assert all(name in " ".join(manifest.notes()) for name in left)
    if title == "torchtitan":
        assert step.fsdp is not None
        assert step.fsdp.world_size == 4
        with pytest.raises(UsageError, match="give --world-size N"):
            manifest.step()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1", "keys of none of the tools"),
        ("- 1", "is no configuration"),
        (
            "model_name_or_path: m\nfinetuning_type: lora\nstage: dpo",
            "no training on the next token; run it: graphmem run",
        ),
        ("base_model: m\nmicro_batch_size: many", "batch is 'many'"),
        ("base_model: !!python/object/apply:os.system ['touch ran']", "cannot be read"),
        ("base_model: &a m\nmicro_batch_size: *a", "alias"),
        ("model: {_component_: torchtune.models.mine.mine_1b}", "names no model that is known"),
    ],
)
def test_other_files_are_refused_in_one_line(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(SourceError, match=words):
        read_manifest("x.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


def test_an_unknown_optimizer_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("base_model: m\noptimizer: galore_adamw")
    with pytest.raises(UsageError, match=r"x\.yaml: unknown optimizer"):
        read_manifest(str(tmp_path / "x.yaml")).step()


def test_options_of_the_command_go_before_the_file(tmp_path: Path) -> None:
    """The whole of it, on a small model; sizes and the step are those of the file, but for what is given."""
    pytest.importorskip("transformers")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,'
        '"num_attention_heads": 2, "num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]}'
    )
    path = tmp_path / "sft.yaml"
    path.write_text(f"model_name_or_path: {model}\nper_device_train_batch_size: 2\nmax_length: 16\nnew_option: 1")
    told = CliRunner().invoke(cli, ["analyze", str(path), "--gpu", "T4", "--optimizer", "sgd", "-s", "8", "--details"])
    assert told.exit_code == 0, told.output
    words = " ".join(told.output.split())
    assert "sgd" in words
    assert "batch 2, by the file" in words
    assert f"of{path}notfollowed:new_option" in words.replace(" ", "")  # whatever the width
