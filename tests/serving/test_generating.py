"""``graphmem serve --engine hf``: transformers' generate, by captures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import graphmem
from graphmem.errors import UsageError
from graphmem.training import Generation, Inference

pytest.importorskip("transformers")

_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4000,
    "max_position_embeddings": 1024, "dtype": "bfloat16",
}  # fmt: skip
_CARD: dict[str, Any] = {"gpu": "H100", "gpu_memory": "1GiB"}
_NEW = (("max_new_tokens", "3"),)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    return str(tmp_path)


def _analysed(model: str, batch: int, length: int) -> graphmem.Estimate:
    return graphmem.analyze(
        f"hf:{model}", batch=batch, seq_len=length - 3, training=Inference("bf16", generate=Generation(3)),
        device=graphmem.devices.custom_device(1 << 30, like="H100"),
    )  # fmt: skip


@pytest.mark.slow
def test_the_largest_batch_runs_and_one_more_does_not(model: str) -> None:
    report = graphmem.serve(model, engine="hf", max_model_len=1024, arguments=_NEW, advice=False, **_CARD)
    served = report.served
    assert served.basis == "captures"
    batch = served.settings["max_num_seqs"]
    assert served.kv_cache.concurrency == batch > 1
    assert sum(part.bytes for part in served.parts) + served.kv_cache.available_bytes == served.total_bytes
    here, above = (_analysed(model, number, 1024) for number in (batch, batch + 1))
    assert here.fit is not None
    assert here.fit.fits
    assert above.fit is not None
    assert not above.fit.fits
    # Keys and values of two layers, two heads of 64, in 16 bits; the last token is never read.
    assert served.kv_cache.block_bytes == pytest.approx(2 * 2 * 2 * 64 * 2, rel=0.3)


def test_a_batch_and_a_length_are_looked_at_once(model: str) -> None:
    report = graphmem.serve(
        model, engine="hf", max_num_seqs=4, max_model_len=512, lengths="p50=100", arguments=_NEW, **_CARD
    )
    assert report.served.kv_cache.longest == 512
    assert report.concurrency_at_lengths == 4  # texts are padded: their own lengths bring nothing
    assert any("1 captures" in note for note in report.served.notes)


@pytest.mark.slow
def test_what_does_not_fit_says_what_would(model: str) -> None:
    report = graphmem.serve(
        model, engine="hf", gpu="H100", gpu_memory="900MiB", max_num_seqs=2000, max_model_len=64,
        arguments=_NEW, advice=False,
    )  # fmt: skip
    assert report.served.refusal is not None
    assert "2,000 texts of 64 tokens need" in report.served.refusal
    assert "--max-num-seqs" in report.served.refusal


def test_the_longest_is_found(model: str) -> None:
    report = graphmem.serve(
        model, engine="hf", find="max-model-len", max_num_seqs=2, arguments=_NEW, advice=False, **_CARD
    )
    assert report.found == ("max-model-len", 1024)  # the model's own


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 2}, "has no --tp"),
        ({"max_model_len": 3}, "holds no prompt"),
        ({"arguments": (("cache_implementation", "paged"),)}, "accepted: dynamic, static"),
        ({"kv_cache_dtype": "fp8"}, "has no --kv-cache-dtype"),
    ],
)
def test_what_generate_has_not_is_one_line(model: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        graphmem.serve(model, engine="hf", **{"arguments": _NEW, **_CARD, **options})


def test_an_unknown_engine_names_it_too(model: str) -> None:
    with pytest.raises(UsageError, match="onnxruntimegenai, hf"):
        graphmem.serve(model, engine="none")


def test_a_load_is_refused_before_anything_is_captured() -> None:
    with pytest.raises(UsageError, match="transformers generate: its scheduler is not followed"):
        graphmem.serve(
            "meta-llama/Llama-3.1-8B", gpu="H100", engine="hf", arrivals="5/s", lengths={50: 9}, output_lengths={50: 9}
        )
