"""``graphmem analyze --generate N``: options, phases, the cache of keys and values, what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

import graphmem
from graphmem.cli.main import cli
from graphmem.errors import GraphmemError, UsageError
from graphmem.training import Generation, Inference

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 2,
    "vocab_size": 1000, "n_positions": 64,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 64, "d_ff": 128, "num_layers": 2,
    "num_heads": 2, "d_kv": 32, "vocab_size": 1000, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
#: Bytes of keys and values of a token in a layer of the models above, in 16 bits.
_TOKEN = 2 * 2 * 32 * 2


def _model(folder: Path, values: dict[str, Any]) -> str:
    path = folder / f"{values['model_type']}.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return f"hf:{path}"


def _generated(folder: Path, values: dict[str, Any], generation: Generation, **options: Any) -> graphmem.Estimate:
    step = Inference("bf16", generate=generation)
    return graphmem.analyze(_model(folder, values), training=step, device="A100-80GB", cudnn="never", **options)


def test_the_cache_is_told_from_activations_and_prefill_from_decoding(tmp_path: Path) -> None:
    estimate = _generated(tmp_path, _LLAMA, Generation(3), batch=2, seq_len=40)
    assert [(phase.iteration, phase.name) for phase in estimate.phases] == [(0, "build"), (1, "prefill"), (1, "decode")]
    assert "3 tokens generated" in estimate.step
    assert "isin" not in str(estimate.diagnostics)  # which looks for a few tokens that end a text
    # The peak is in the prefill, when every layer has the prompt's keys and values.
    assert estimate.breakdown["KV_CACHE"] == 3 * 2 * 40 * _TOKEN


def test_a_static_cache_has_all_its_places_from_the_beginning(tmp_path: Path) -> None:
    generation = Generation(9, cache_implementation="static", arguments=(("disable_compile", True),))
    estimate = _generated(tmp_path, _LLAMA, generation, batch=2, seq_len=40)
    assert estimate.breakdown["KV_CACHE"] == 3 * (2 * (40 + 9 - 1) * _TOKEN + 8)  # and how many there are


def test_the_generation_beside_a_folders_configuration_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"num_beams": 3, "bos_token_id": 1, "eos_token_id": 2, "max_new_tokens": 400}))
    estimate = _generated(tmp_path, _LLAMA, Generation(3), batch=2, seq_len=40)
    assert any("followed: num_beams=3" in line for line in estimate.assumptions)
    file.unlink()
    assert estimate.peak == _generated(tmp_path, _LLAMA, Generation(3, num_beams=3), batch=2, seq_len=40).peak


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "no configuration of a generation"),
        ("{", "not a readable JSON"),
        ('{"num_beams": 0}', "generation_config.json"),
        ('{"prompt_lookup_num_tokens": 3}', "give --generation-arg prompt_lookup_num_tokens=3"),
    ],
)
def test_a_bad_generation_beside_it_is_one_line(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(GraphmemError, match=said) as caught:
        _generated(tmp_path, _LLAMA, Generation(3), batch=2, seq_len=40)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("optimum") is not None, reason="optimum-quanto may be installed")
def test_a_quantised_cache_without_its_package_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(GraphmemError, match="pip install optimum-quanto"):
        _generated(tmp_path, _LLAMA, Generation(3, cache_implementation="quantized"), batch=2, seq_len=40)


def test_an_encoder_decoder_keeps_the_encoders_keys_too(tmp_path: Path) -> None:
    estimate = _generated(tmp_path, _T5, Generation(12), batch=2, seq_len=4)
    of_encoder = 2 * 2 * 4 * _TOKEN
    assert of_encoder < estimate.breakdown["KV_CACHE"] <= of_encoder + 2 * 2 * 2 * 12 * _TOKEN
    without = _generated(tmp_path, _T5, Generation(4, arguments=(("use_cache", False),)), batch=2, seq_len=4)
    assert "KV_CACHE" not in without.breakdown


def test_chunks_of_the_prompt_take_less_than_the_whole(tmp_path: Path) -> None:
    whole, chunked = (
        _generated(tmp_path, _LLAMA, Generation(2, prefill_chunk_size=size), batch=8, seq_len=400)
        for size in (None, 50)
    )
    assert chunked.breakdown["ACTIVATION"] < whole.breakdown["ACTIVATION"] / 3


def test_a_table_of_positions_ends(tmp_path: Path) -> None:
    with pytest.raises(GraphmemError, match=r"60 tokens .* 6 generated need 65 positions, .* table has 64"):
        _generated(tmp_path, _GPT2, Generation(6), seq_len=60)
    assert "54 tokens" not in str(_generated(tmp_path, _GPT2, Generation(6), seq_len=59).assumptions)
    beyond = _generated(tmp_path, _LLAMA, Generation(6), seq_len=510)
    assert any("more than the 512 positions" in note for note in beyond.assumptions)


def test_what_does_not_generate_is_refused(tmp_path: Path) -> None:
    classifier = _LLAMA | {"architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(GraphmemError, match="LlamaForSequenceClassification does not generate"):
        _generated(tmp_path, classifier, Generation(2))
    with pytest.raises(UsageError, match="an ONNX file has none"):
        graphmem.analyze("model.onnx", training=Inference(generate=Generation(2)))


@pytest.mark.slow
def test_of_drafted_tokens_all_and_none_are_tried(tmp_path: Path) -> None:
    drafts = (("assistant_early_exit", 1), ("num_assistant_tokens", 4), ("num_assistant_tokens_schedule", "heuristic"))
    said, in_vain, all_right = (
        _generated(tmp_path, _LLAMA, Generation(12, accepted=accepted, arguments=drafts), seq_len=40)
        for accepted in (None, 0, 100)
    )
    assert said.device == max(in_vain.device, all_right.device)
    assert "how many drafted tokens are right is data" in said.assumptions[0]
    operators = [len(estimate.trace.kinds) for estimate in (in_vain, all_right) if estimate.trace is not None]
    assert operators[0] > 2 * operators[1]  # every draft in vain is a round of its own


def test_drafts_are_for_one_text_of_one_vocabulary(tmp_path: Path) -> None:
    drafts = (("prompt_lookup_num_tokens", 4),)
    with pytest.raises(GraphmemError, match="for one text, and the batch has 2"):
        _generated(tmp_path, _LLAMA, Generation(4, arguments=drafts), batch=2, seq_len=40)
    with pytest.raises(GraphmemError, match="which a static cache cannot"):
        _generated(tmp_path, _LLAMA, Generation(4, cache_implementation="static", arguments=drafts), seq_len=40)
    (tmp_path / "draft").mkdir()
    other = _model(tmp_path / "draft", _LLAMA | {"vocab_size": 900})
    with pytest.raises(GraphmemError, match="a vocabulary of 900 tokens, the model one of 1,000"):
        _generated(tmp_path, _LLAMA, Generation(4, assistant_model=other), seq_len=40)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-beams", "4"], "--num-beams needs --generate"),
        (["--no-do-sample"], "--do-sample needs --generate"),
        (["--generate", "4", "--training"], "--generate is inference; leave out --training"),
        (["--generate", "4", "--optimizer", "sgd"], "--generate is inference; leave out --optimizer"),
        (["--generate", "4", "--compile"], "leave out compile"),
        (["--generate", "4", "--cache-implementation", "magic"], "unknown cache_implementation 'magic'"),
        (["--generate", "4", "--cache-config", "nbits=4"], "give cache_implementation quantized"),
        (["--generate", "4", "--generation-arg", "max_length=4"], "max_new_tokens says how long"),
        (["--generate", "4", "--generation-arg", "assistant_tokenizer=x"], "graphmem run follows a program"),
        (["--assistant-model", "hf:gpt2"], "--assistant-model needs --generate"),
        (["--generate", "4", "--accepted", "2"], "accepted is for assisted decoding"),
        (["--generate", "4", "--num-assistant-tokens", "2"], "num_assistant_tokens is for a model that drafts"),
        (["--generate", "4", "--generation-arg", "prompt_lookup_num_tokens=0"], "a whole number of at least 1"),
        (["--generate", "4", "--generation-arg", "num_beams=4"], "num_beams is an option of its own"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["analyze", "hf:gpt2", *arguments], prog_name="graphmem")
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
