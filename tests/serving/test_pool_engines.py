"""Engines that give their cache a share of the card, against figures of public logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import graphmem
from graphmem.devices import device_named
from graphmem.errors import UsageError
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.serving.configurations import model_named
from graphmem.serving.sglang import beside_weights, default_fraction
from graphmem.serving.shapes import FOLLOWED, decoder, outside
from graphmem.sources.checkpoints import Checkpoint
from graphmem.sources.hub import known_models
from graphmem.units import GIB, MIB
from tests.serving.public_logs import POOLS, sglang, tensorrt_llm

LLAMA = "meta-llama/Llama-3.1-8B"


def _served(engine: str, gpu: str = "H100", model: str = LLAMA, **arguments: object) -> Served:
    given = tuple((name, str(value)) for name, value in arguments.items())
    return engine_named(engine).serve(Question(model_named(model), device_named(gpu), arguments=given))


@pytest.mark.parametrize("name", POOLS["sglang"])
def test_sglangs_tokens_are_those_of_public_logs(name: str) -> None:
    """Given what was free before loading: loading takes as much to 0.14 GiB, and the rest is the log's arithmetic."""
    log = POOLS["sglang"][name]
    served = sglang(log)
    loaded = sum(part.bytes for part in served.parts if part.name in ("weights", "beside the weights"))
    assert loaded / GIB == pytest.approx(log["free_before_gib"] - log["free_after_gib"], abs=0.14)
    kept = next(part.bytes for part in served.parts if part.name == "kept free")
    left = log["free_after_gib"] * GIB - kept
    assert left / served.kv_cache.block_bytes == pytest.approx(log["tokens"], rel=2e-3)  # as digits are printed


def test_loading_beside_the_weights() -> None:
    """Products of whole 2 MiB leave nothing, so it is Llama's rotary table in fp32; layers that differ are not
    followed."""
    assert beside_weights(model_named(LLAMA), 1) == 131072 * 128 * 4
    assert beside_weights(model_named("Qwen/Qwen3-14B"), 4) > 180 * MIB
    assert beside_weights(model_named("deepseek-ai/DeepSeek-V2-Lite"), 1) == 0
    assert beside_weights(model_named("Qwen/Qwen3-32B-AWQ"), 1) == 0


@pytest.mark.parametrize("name", POOLS["tensorrtllm"])
def test_tensorrt_llms_pool_is_that_of_public_logs(name: str) -> None:
    """The share, its pages and tokens, given what was available (two digits of a GiB): within 0.1 %."""
    printed, predicted = tensorrt_llm(POOLS["tensorrtllm"][name])
    assert predicted == pytest.approx(printed, rel=1.2e-3)


@pytest.mark.parametrize("name", POOLS["sglang_pools"])
def test_sglangs_pool_is_its_tokens(name: str) -> None:
    """What is printed of keys and of values, two digits of a GiB each."""
    log = POOLS["sglang_pools"][name]
    token = 2 * log["layers"] * log["kv_heads"] * log["head_dim"] * log["element"]
    assert log["tokens"] * token / GIB == pytest.approx(log["pool_gib"], abs=0.011)


def test_weights_are_the_published_counts_of_parameters() -> None:
    counts = {"meta-llama/Llama-3.1-8B": 8_030_261_248, "Qwen/Qwen2.5-7B": 7_615_616_512,
              "Qwen/Qwen3-8B": 8_190_735_360, "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
              "Qwen/Qwen3-30B-A3B": 30_532_122_624}  # fmt: skip
    for name, parameters in counts.items():
        own = decoder(Question(model_named(name), device_named("H100")), 1)
        assert own.weights_bytes == 2 * parameters, name
    assert {config["model_type"] for config in known_models().values()} & FOLLOWED


def test_sglangs_own_defaults() -> None:
    served = _served("sglang", "RTX-4090")
    assert (served.settings["chunked_prefill_size"], served.settings["cuda_graph_max_bs"]) == (4096, 48)
    h100 = device_named("H100")
    assert h100.board_bytes is not None
    assert default_fraction(h100, 1, 2048, 8) == round(1 - 10 * GIB / h100.board_bytes, 3)  # at least 10 GiB
    assert default_fraction(h100, 1, 8192, 256) == round(1 - (512 + 12288 + 128 + 512) / 81559, 3)
    assert _served("sglang", context_length=4096).settings["max_running_requests"] == 4096
    capped = _served("sglang", max_total_tokens=1000, context_length=512)
    assert capped.kv_cache.tokens == 1000
    assert capped.settings["max_running_requests"] == 500


def test_shares_cards_and_types_change_what_is_left() -> None:
    half = _served("tensorrtllm", kv_cache_free_gpu_mem_fraction=0.45)
    full = _served("tensorrtllm", free_gpu_memory_fraction=0.9)
    assert full.kv_cache.tokens == pytest.approx(2 * half.kv_cache.tokens, rel=1e-3)
    assert full.kv_cache.tokens % 32 == 0
    two = _served("sglang", tp=2)
    assert two.cards == 2
    assert two.kv_cache.block_bytes * 2 == _served("sglang").kv_cache.block_bytes
    small = _served("tgi", kv_cache_dtype="fp8_e4m3fn")
    assert small.kv_cache.block_bytes * 2 == _served("tgi").kv_cache.block_bytes
    shared, apart = (_served("onnxruntimegenai", max_length=4096, past_present_share_buffer=on) for on in (1, 0))
    assert apart.kv_cache.block_bytes == 2 * shared.kv_cache.block_bytes
    assert shared.kv_cache.tokens == 4096


def test_sglang_shares_what_is_left_between_states_and_tokens() -> None:
    """Of a public log (kvcache-ai/ktransformers#1870): Qwen3.5-397B-A17B on two cards, 19.08 GB free once loaded: 82
    states, and one more, of 7.42 GB, and 580,364 tokens; what was kept free is what is left of that."""
    config = {
        "model_type": "qwen3_5_moe_text", "num_hidden_layers": 60, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 248320,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144, "intermediate_size": 1024,
    }  # fmt: skip
    weights = Checkpoint({}, 2 * round(3.76 * GIB))
    model = ServedModel("x", {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {}}, weights)
    share = 1 - (19.08 - 8.30 - 7.42) / 22.84
    before = sum(one.bytes for one in outside(device_named("RTX-4090"), 2))
    card = replace(device_named("RTX-4090"), capacity_bytes=round(22.84 * GIB) + before)
    question = Question(model, card, arguments=(("tp", "2"), ("mem-fraction-static", f"{share:.4f}")))
    engine: Any = engine_named("sglang")
    served = engine.with_available(question, engine.serve(question), round(19.08 * GIB))
    assert served.kv_cache.block_bytes == 15 * 2 * 256 * 2
    assert served.kv_cache.tokens == pytest.approx(580_364, rel=5e-3)
    states = next(part.bytes for part in served.parts if part.name == "states")
    assert states / GIB == pytest.approx(7.42, abs=0.06)


@pytest.mark.parametrize(
    ("engine", "model", "arguments", "message"),
    [
        ("sglang", "facebook/opt-125m", {}, "'opt' is not followed here"),
        ("sglang", LLAMA, {"tp": 3}, "cannot be shared by 3 cards"),
        ("sglang", LLAMA, {"mem-fraction-static": 2}, "above 0, to 1"),
        ("tgi", LLAMA, {"max-total-tokens": 999_999}, "accepted: 1 to 131072"),
        ("tensorrtllm", LLAMA, {"quantization": "nf4"}, "accepted: awq, gptq, fp8"),
    ],
)
def test_refusals(engine: str, model: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _served(engine, "H100", model, **arguments)


def test_the_question_of_fewest_cards() -> None:
    found = graphmem.serve("Llama-3.1-70B", gpu="H100", engine="sglang", find="tp", advice=False)
    assert found.found == ("tp", 4)  # two cards would have to keep less free
