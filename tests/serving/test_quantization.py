"""Quantised weights: what lies in memory by ``quantization_config``, and what the engine refuses."""

from __future__ import annotations

from typing import Any

import pytest

from graphmem.devices import device_named
from graphmem.errors import UsageError
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.sources.hub import known_models

LLAMA = known_models()["meta-llama/Llama-3.1-8B"]
#: Parameters of its linear layers, and of embeddings, head, norms and rotary table.
LINEAR = 32 * 4096 * (6144 + 4096 + 3 * 14336)
PLAIN = 2 * (2 * 128256 * 4096 + (2 * 32 + 1) * 4096 + 131072 * 128)


def _served(own: dict[str, Any] | None = None, gpu: str = "H100", **options: Any) -> Served:
    config = LLAMA | ({} if own is None else {"quantization_config": own})
    question = Question(ServedModel("a model", config), device_named(gpu), enforce_eager=True, **options)
    return engine_named("vllm").serve(question)


_CT_FP8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": {"dynamic": True},
    }},
    "ignore": ["lm_head"],
}  # fmt: skip
_CT_W4A16 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}},
    "ignore": ["lm_head"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "bytes_of_a_value"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 0.5 + (2 + 2) / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 0.5 + 2 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64, "sym": True}, 1 + 2 / 64),
        (_CT_W4A16, 0.5 + 2 / 128),
        (_CT_FP8, 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2),
        ({"quant_method": "modelopt_fp4"}, 0.5 + 1 / 16),
        ({"quant_method": "mxfp4"}, 2.0),  # of experts alone
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else "",
)
def test_values_scales_and_zeros(own: dict[str, Any], bytes_of_a_value: float) -> None:
    """The whole to 2 %: blocks are rounded, and scales of whole outputs come to little."""
    assert _served(own).weights_bytes == pytest.approx(PLAIN + LINEAR * bytes_of_a_value, rel=0.02)


def test_zeros_of_awq_take_sixteen_bits_where_machete_multiplies() -> None:
    """On Hopper, from 0.20 on; elsewhere and before they stay packed, as Marlin has them."""
    own = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    ada, before = (_served(own, **which).weights_bytes for which in ({"gpu": "L40S"}, {"version": (0, 19)}))
    more = LINEAR * (2 - 0.5) / 128
    # Rests of the allocator's blocks, which depend on the order of sizes, make for loose bounds.
    assert more <= _served(own).weights_bytes - ada <= 1.5 * more
    assert abs(before - ada) < more / 4


def test_fp8_of_a_plain_checkpoint_is_quantised_while_loading() -> None:
    asked = _served(quantization="fp8")
    assert asked.weights_bytes == pytest.approx(PLAIN + LINEAR, rel=0.005)
    assert asked.settings["quantization"] == "fp8"


def test_nf4_where_the_engine_has_it() -> None:
    assert _served(quantization="nf4", version=(0, 21)).weights_bytes == pytest.approx(
        PLAIN + LINEAR * (0.5 + 4 / 64), rel=0.02
    )
    with pytest.raises(UsageError, match="Unknown quantization method: bitsandbytes"):
        _served(quantization="nf4")


def test_what_is_excluded_stays_plain() -> None:
    own = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    all_of_it, no_attention = _served(own), _served(own | {"modules_to_not_convert": ["self_attn"]})
    attention = 32 * 4096 * (6144 + 4096)
    assert no_attention.weights_bytes - all_of_it.weights_bytes == pytest.approx(
        attention * (2 - 0.5 - 4 / 128), rel=0.02
    )


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        (
            None,
            {"quantization": "awq", "gpu": "V100-16GB", "dtype": "half"},
            "Minimum capability: 75. Current capability: 70",
        ),
        (None, {"quantization": "int3"}, "is not followed; accepted"),
        ({"quant_method": "awq"}, {"quantization": "gptq"}, "does not match"),
        ({"quant_method": "hqq"}, {}, "is not followed; accepted"),
        ({"load_in_8bit": True, "quant_method": "bitsandbytes"}, {"version": (0, 11)}, "int8 is not followed"),
    ],
)
def test_refusals(own: dict[str, Any] | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _served(own, **options)


def test_a_format_that_the_checkpoint_does_not_name_is_told() -> None:
    assert any("as it is usual" in note for note in _served(quantization="awq").notes)


def test_repacking_needs_more_than_what_stays() -> None:
    """AWQ's order of bits is put right in 32-bit integers: the largest layer is there twice in them."""
    from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
    from graphmem.replay import replay
    from graphmem.serving.vllm.engine import VLLM

    config = LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}}
    trace = VLLM().trace(Question(ServedModel("a model", config), device_named("H100"), enforce_eager=True))
    loading = trace.event_operators.tolist()
    names = [trace.operators[operator].name for operator in loading]
    last = max(index for index, name in enumerate(names) if name.endswith(".repack"))
    played = replay(trace, PyTorchCachingAllocator()).requested_bytes
    assert int(played[:last].max() - played[last]) >= 2 * 4096 * 2 * 14336 * 4
