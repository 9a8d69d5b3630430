"""Models that no family follows, by a capture of transformers' code: against the engine's own starts, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphmem.devices import device_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.serving.vllm import backend
from graphmem.serving.vllm.engine import VLLM
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.serving.vllm.layers import cdiv
from tests.recorded.serving import captured, predicted, runs
from tests.recorded.serving import question as question_of

_HELD = ("weights", "adapters", "buffers for batches", "buffers per sequence", "workspaces", "segment slack")
#: Those that run in every suite: products that are summed over ranks and put side by side, and experts.
_QUICK = (
    "glm-9b-tp2",
    "qwen1.5-moe-6l",
    "lfm2-moe-4l",
    "dots1-2l-tp2",
    "glm4.7-flash-4l",
    "olmo-hybrid-8l-a100-40",
    "bge-reranker-v2-m3-t4",
    "nemotron3-nano-30b-h100",
    "granite-4-h-small-tp2-l40s",
)
#: Bytes that are left for the KV cache as predicted less those recorded, where the engine runs code of its own that is
#: taken to be like transformers'.
LIKE = {
    "gpt2-xl": 4_194_304, "bloom-7b1-8l": -262_656, "minitron-8b-6l-fp8kv": 16_777_216,
    "gemma3n-e2b-10l": -88_113_152, "minicpm3-4b-8l": -137_887_744,
    "gemma4-text-6l": 25_165_824, "zamba2-2.7b-8l": 69_206_016,
    "granite-4-h-tiny-6l": -8_388_608, "cohere2-moe-3l": 18_874_368,
    "longcat-flash-1l": -8_388_608, "glm4.5-air-awq-tp2-a100": 8_388_608,
    # By transformers' code: experts alone are the engine's, and ids of all layers stay; learned positions.
    "hunyuan-a13b-2l": 1_835_008, "biogpt-large": 4_194_304, "nanochat-l4": 8_388_608,
    # Compiled: pieces of experts and of layer norms are taken as eager ones.
    "ms-marco-minilm-t4": 524_288, "olmo3-7b-l40s-cold": 66_560,
    "stablelm-compiled-cold": -69_206_016, "gpt-oss-20b-h100": -174_063_616,
}  # fmt: skip

SMALL: dict[str, Any] = {
    "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def asked(config: dict[str, Any], *arguments: tuple[str, str], **options: Any) -> Served:
    model = ServedModel("small", config)
    question = Question(model, device_named("H100"), enforce_eager=True, arguments=arguments, **options)
    return engine_named("vllm").serve(question)


@pytest.mark.parametrize(
    "name",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in captured()],
)
def test_the_start_is_the_engines(name: str) -> None:
    """To the byte where the engine runs transformers' code."""
    run, answer = captured()[name], predicted(name)
    parts = {part.name: part.bytes for part in answer.parts}
    assert answer.kv_cache.available_bytes - run["available"] == LIKE.get(name, 0)
    if name not in LIKE:
        assert parts["activation peak"] == run["headroom"]
        assert sum(parts.get(part, 0) for part in _HELD) == run["consumed"]
        assert answer.kv_cache.blocks == (run["blocks"] if run["groups"] else 0)


def test_which_models_are_captured() -> None:
    llama = question_of("llama3-8b-eager", runs()["llama3-8b-eager"])
    assert not backend.is_captured(llama)
    assert backend.is_captured(llama.with_(arguments=(("model_impl", "transformers"),)))
    small = Question(ServedModel("small", SMALL), llama.device)
    assert backend.is_captured(small)
    with pytest.raises(UsageError, match="no implementation of model_type 'smollm3' of its own"):
        backend.is_captured(small.with_(arguments=(("model_impl", "vllm"),)))


def test_projections_that_read_one_input_are_one() -> None:
    asked_of = backend.prepared(Question(ServedModel("small", SMALL), device_named("H100"), enforce_eager=True))
    names = [storage.label for storage in VLLM().trace(asked_of).storages]
    assert "model.layers.1.self_attn.qkv_proj.weight" in names
    assert "model.layers.1.mlp.gate_up_proj.weight" in names
    assert "model.layers.1.self_attn.q_proj.weight" not in names


def test_an_answer_says_whose_code_was_captured() -> None:
    own = asked(SMALL)
    assert own.basis == "captures"
    assert any("runs smollm3 by transformers' code" in note for note in own.notes)
    granite = asked(SMALL | {"model_type": "granite", "architectures": ["GraniteForCausalLM"]})
    assert any("not by the engine's code for granite" in note for note in granite.notes)
    assert granite.kv_cache.available_bytes != own.kv_cache.available_bytes


BERT: dict[str, Any] = {
    "model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64, "vocab_size": 512,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
    "torch_dtype": "float16",
}  # fmt: skip


def test_encoders_of_text_keep_nothing() -> None:
    """There is no cache, nothing is estimated of graphs, and a batch is what bounds requests."""
    answer = asked(BERT)
    assert answer.kv_cache.keeps_nothing
    assert (answer.kv_cache.blocks, answer.scheduler, answer.refusal) == (0, None, None)
    assert answer.concurrency_at([100, 300]) == answer.settings["max_num_batched_tokens"] / 200
    assert "CUDA graphs, estimated" not in {part.name for part in answer.parts}
    # The pooler's product and the classifier's two rows, in fp32, of blocks of 512 bytes.
    more = answer.weights_bytes - asked(BERT | {"architectures": ["BertModel"]}).weights_bytes
    assert more == 64 * 64 * 4 + 512 + 512 + 512


def test_adapters_of_a_capture_have_room() -> None:
    """Beside every product, and the embeddings of transformers' code."""
    answer = asked(SMALL, ("enable_lora", "true"), ("max_lora_rank", "8"))
    assert {part.name: part.bytes for part in answer.parts}["adapters"] > 0


def test_layers_of_a_window_have_one() -> None:
    types = ["sliding_attention", "full_attention"]
    config = SMALL | {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"]}
    served = asked(config | {"sliding_window": 256, "layer_types": types})
    assert served.kv_cache.groups == (("sliding window of 256", 1), ("full attention", 1))


def test_quantised_weights_are_the_engines() -> None:
    fp8 = asked(SMALL, quantization="fp8")
    assert fp8.weights_bytes < asked(SMALL).weights_bytes


def test_layers_of_states_alone_are_refused() -> None:
    config = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    with pytest.raises(UsageError, match="no layers of attention"):
        asked(config)


def test_weights_of_a_convolution_are_no_experts() -> None:
    torch = pytest.importorskip("torch")
    from graphmem.sources.vllm_experts import blocks

    experts = torch.nn.Module()
    experts.up, experts.down = (torch.nn.Parameter(torch.zeros(2, 3, 4)) for _ in range(2))
    layer = torch.nn.Sequential(torch.nn.Linear(4, 2), experts)
    assert list(blocks(torch.nn.Sequential(layer))) == ["model.0"]
    assert not blocks(torch.nn.Sequential(torch.nn.Conv1d(4, 4, 3), torch.nn.Linear(4, 4)))


def test_layers_that_differ_have_their_own_pages() -> None:
    """Gemma 4's windows have smaller heads than its other layers, and its last layers read others' keys."""
    config = SMALL | {
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "global_head_dim": 32,
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 256, "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512, "layer_types": ["sliding_attention", "full_attention"] * 3,
    }  # fmt: skip
    served = asked(config)
    assert served.kv_cache.groups == (("sliding window of 256", 2), ("full attention", 2))
    assert served.kv_cache.block_bytes == 2 * 16 * 2 * 2 * 32 * 2


def test_windows_of_chunks_begin_anew() -> None:
    chunks, window = Spec(4096, 64, in_chunks=True), Spec(4096, 64)
    assert [one.unread(100) for one in (chunks, window, Spec(4096))] == [64, 37, 0]
    layout = Layout((Group(chunks, 2), Group(replace(window, times=2), 2)), 16, 32)
    assert layout.request_blocks(1000) == cdiv(64 + 32, 16) + cdiv(63 + 32, 32) + 1


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"model_type": "nonesuch"}, (), "does not know"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, (), "neither a decoder of text"),
        ({"model_type": "electra", "architectures": ["ElectraModel"]}, (), "reads in both directions"),
        ({"model_type": "jetmoe", "architectures": ["JetMoeForCausalLM"]}, (), "experts whose weights are not in"),
        (
            {"model_type": "falcon", "architectures": ["FalconForCausalLM"]}, (("model_impl", "transformers"),),
            "transformers' attention interface",
        ),
        ({"model_type": "mpt", "architectures": ["MPTForCausalLM"]}, (), "mpt does not run with the engine's layers"),
        ({"model_type": "codegen", "architectures": ["CodeGenForCausalLM"]}, (), "codegen does not run with the"),
        (
            {
                "model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"], "num_hidden_layers": 4,
                "num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            },
            (), "share their weights",
        ),
        ({}, (("pipeline_parallel_size", "2"),), "--pipeline-parallel-size is not followed"),
        (
            {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"]}, (("enable_lora", "true"),),
            "--enable-lora is not followed",
        ),
        ({"num_hidden_layers": 100_000}, (), "num_hidden_layers"),
        ({"hidden_act": "nonesuch"}, (), "nonesuch"),
    ],
)  # fmt: skip
def test_refusals_say_what_and_why(config: dict[str, Any], arguments: tuple[tuple[str, str], ...], words: str) -> None:
    with pytest.raises(GraphmemError, match=words):
        asked(SMALL | config, *arguments)
