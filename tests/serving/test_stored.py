"""Weights as they lie in a checkpoint: against sizes of public ones, and headers that somebody else wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.errors import GraphmemError, SourceError, UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.configurations import known_models
from graphmem.serving.stored import FAMILIES, stored
from graphmem.sources.checkpoints import Checkpoint, checkpoint_in
from tests.support.examples import examples

_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "vocab_size": 201088, "tie_word_embeddings": False, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "quantization_config": _BLOCKS,
}  # fmt: skip
_MIXTRAL_8X22B = {
    "model_type": "mixtral", "hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48,
    "num_hidden_layers": 56, "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000,
}  # fmt: skip


def _known(name: str, quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    return {**known_models()[name], **({"quantization_config": quantization} if quantization else {})}


#: Bytes of all tensors of public checkpoints: ``total_size`` of ``model.safetensors.index.json``, or what the Hub says
#: of parameters by type (``Qwen3-32B-AWQ``: the tensors themselves; its index counts some twice).
PUBLIC = {
    "Qwen/Qwen3-32B-AWQ": (_known("Qwen/Qwen3-32B-AWQ"), 19_325_298_688),
    "Qwen/Qwen3-32B-FP8": (_known("Qwen/Qwen3-32B", _BLOCKS), 34_322_434_048),
    "casperhansen/llama-3-70b-instruct-awq": (_known("meta-llama/Meta-Llama-3-70B", _AWQ), 39_767_785_472),
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": (_known("meta-llama/Llama-3.3-70B", _CHANNELS), 72_669_806_592),
    "openai/gpt-oss-20b": (_GPT_OSS, 13_761_264_768),
    "openai/gpt-oss-120b": ({**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}, 65_248_815_744),
    "deepseek-ai/DeepSeek-V3": (_DEEPSEEK_V3, 688_574_839_360),
    "deepseek-ai/DeepSeek-V2-Lite": (_known("deepseek-ai/DeepSeek-V2-Lite"), 31_412_968_448),
    "google/gemma-2-9b": (_known("google/gemma-2-9b"), 18_483_411_968),
    "Qwen/Qwen3-30B-A3B": (_known("Qwen/Qwen3-30B-A3B"), 61_064_245_248),
    "alpindale/WizardLM-2-8x22B": (_MIXTRAL_8X22B, 281_241_268_224),
    "meta-llama/Llama-3.1-8B": (_known("meta-llama/Llama-3.1-8B"), 16_060_522_496),
}
#: Files of TheBloke/dolphin-2.5-mixtral-8x7b-GPTQ by (bits, group), in GB as its card says; a vocabulary of 32,002.
GPTQ = {
    (4, -1): 23.81, (4, 128): 24.70, (4, 32): 27.42, (3, -1): 18.01, (3, 128): 18.85, (3, 32): 21.43, (8, -1): 47.04,
    (8, 128): 48.10,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_bytes_of_public_checkpoints(name: str) -> None:
    config, published = PUBLIC[name]
    assert stored(ServedModel(name, config)) == published


@pytest.mark.parametrize(("bits", "group"), GPTQ)
def test_files_of_gptq(bits: int, group: int) -> None:
    config = {
        **_known("mistralai/Mixtral-8x7B-v0.1", {**_GPTQ, "bits": bits, "group_size": group}),
        "vocab_size": 32002,
    }
    found = stored(ServedModel("mixtral", config)) + 500_000  # and its header: 4,300 names
    assert found / 1e9 == pytest.approx(GPTQ[bits, group], abs=0.006)


def test_every_share_of_several_cards() -> None:
    for config, _ in PUBLIC.values():
        model = ServedModel("m", config)
        whole = stored(model)
        assert whole / 4 <= stored(model, cards=4) < whole / 4 * 1.05


def test_a_method_that_the_configuration_does_not_name() -> None:
    model = ServedModel("m", _known("meta-llama/Llama-3.1-8B"))
    assert stored(model, "awq") == 5_727_854_592
    assert stored(model, "nf4") < stored(model, "int8") < stored(model)
    with pytest.raises(UsageError, match="accepted: awq"):
        stored(model, "none")


def _answered(ask: Callable[[], int]) -> int:
    """The answer; 1 for a refusal in one line, -1 for one that is not."""
    try:
        return ask()
    except GraphmemError as error:
        return -1 if "\n" in str(error) else 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_KEYS = (
    "quant_method", "bits", "group_size", "weight_block_size", "config_groups", "format", "ignore", "load_in_4bit",
    "modules_to_not_convert", "quant_algo", "meta", "bnb_4bit_quant_type", "activation_scheme",
)  # fmt: skip
_METHODS = ("awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "modelopt", "mxfp4")


@settings(max_examples=examples(60), deadline=None)
@given(
    st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=5),
    st.sampled_from(_METHODS),
    st.sampled_from(sorted(FAMILIES)),
)
def test_any_quantisation_is_an_answer_or_one_line(quantization: dict[str, Any], method: str, kind: str) -> None:
    config = {**_known("meta-llama/Llama-3.1-8B"), "model_type": kind}
    config["quantization_config"] = {"quant_method": method, **quantization}
    assert _answered(lambda: stored(ServedModel("m", config))) > 0


# --- headers ----------------------------------------------------------------------------------------------------------


def _file(path: Path, header: Any, data: int = 16) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def _tensor(kind: str, *shape: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": list(shape)}


def _index(folder: Path, where: Any, **metadata: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": where}))


def test_the_index_says_which_files(tmp_path: Path) -> None:
    _file(tmp_path / "model-00001-of-00002.safetensors", {"a": _tensor("BF16", 4, 4)})
    _file(tmp_path / "model-00002-of-00002.safetensors", {"lm_head.weight": _tensor("F8_E4M3", 4)})
    _file(tmp_path / "consolidated.safetensors", {"b": _tensor("F32", 100)})  # the same weights once more
    _index(tmp_path, {"a": "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"})
    found = checkpoint_in(tmp_path)
    assert found is not None
    assert (found.bytes, found.has_head, found.types) == (36, True, {"BF16": 32, "F8_E4M3": 4})


def test_an_index_alone_says_how_much(tmp_path: Path) -> None:
    _index(tmp_path, {"lm_head.weight": "model-00001-of-00002.safetensors"}, total_size=16_060_522_496)
    found = checkpoint_in(tmp_path)
    assert found is not None
    assert (found.bytes, found.has_head) == (16_060_522_496, True)


@pytest.mark.parametrize(
    ("where", "metadata", "said"),
    [
        ([], {}, "no weight_map"),
        ({"a": 1}, {}, "no weight_map"),
        ({"a": "../x.safetensors"}, {}, "no safetensors file beside it"),
        ({"a": "x.safetensors"}, {}, "total_size is None"),
        ({"a": "x.safetensors"}, {"total_size": -1}, "total_size is -1"),
        ({"a": "x.safetensors"}, {"total_size": 10**30}, "total_size is a number of more than 64 bits"),
        ({"a": "x.safetensors", "b": "there.safetensors"}, {}, "'x.safetensors', which is not there"),
    ],
)
def test_a_bad_index_is_one_line(where: Any, metadata: dict[str, Any], said: str, tmp_path: Path) -> None:
    _file(tmp_path / "there.safetensors", {"b": _tensor("F32", 1)})
    _index(tmp_path, where, **metadata)
    with pytest.raises(SourceError, match=said) as caught:
        checkpoint_in(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"x": {"dtype": "F32", "shape": [2**62, 2**62]}}, "64 bits"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "is said to lie at"),
        ({"x": {"dtype": ["F32"], "shape": [2]}}, "no type and shape"),
        ({"x": {"dtype": "F32", "shape": [-1]}}, "no type and shape"),
        ({"x": 7}, "no type and shape"),
    ],
)
def test_a_hostile_header_is_one_line(header: Any, said: str, tmp_path: Path) -> None:
    _file(tmp_path / "model.safetensors", header)
    with pytest.raises(SourceError, match=said) as caught:
        checkpoint_in(tmp_path)
    assert "\n" not in str(caught.value)


def test_gits_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(SourceError, match="git lfs pull"):
        checkpoint_in(tmp_path)


@settings(max_examples=examples(60), deadline=None)
@given(
    header=st.dictionaries(
        st.text(max_size=6), _JSON | st.builds(_tensor, st.sampled_from(("F4", "U8", "x")), st.integers())
    ),
    noise=st.binary(max_size=40),
    cut=st.integers(0, 60),
)
def test_any_header_is_an_answer_or_one_line(
    header: dict[str, Any], noise: bytes, cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("header")
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text
    (folder / "model.safetensors").write_bytes(content[: len(content) - cut] + noise if cut else content + noise)
    assert _answered(lambda: cast(Checkpoint, checkpoint_in(folder)).bytes) >= 0
