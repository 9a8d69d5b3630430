"""The usual formulas, with the figures that papers and guides give for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.base.textbook import OPTIMIZER_STATES, SHARED_OUT, Sharded, Transformer, compared
from graphmem.units import MIB

#: Parameters of the recorded llama of four layers.
LLAMA = 112_731_136


def mixed(stage: int, ranks: int, parameters: int = LLAMA) -> Sharded:
    return Sharded(f"ZeRO-{stage}", parameters, ranks, stage, 2, has_copy=True)


@pytest.mark.parametrize(
    ("stage", "ranks", "formula", "mib"),
    [(0, 8, "16P", 1720), (1, 8, "4P + 12P/N", 591), (2, 8, "2P + 14P/N", 403), (2, 2, "2P + 14P/N", 968),
     (3, 8, "16P/N", 215)],
)  # fmt: skip
def test_model_states_of_zero(stage: int, ranks: int, formula: str, mib: int) -> None:
    model = mixed(stage, ranks)
    assert model.words("AdamW").startswith(f"{formula}, P=112,731,136")
    assert round(model.state_bytes("AdamW") / MIB) == mib


@pytest.mark.parametrize(
    ("weight", "copy", "optimizer", "each"),
    [(2, True, "Adam", 16), (4, False, "AdamW", 16), (2, False, "AdamW", 8), (4, False, "SGD", 8), (2, True, "SGD", 8),
     (4, False, "Shampoo", 16)],
)  # fmt: skip
def test_bytes_of_a_parameter_by_precision_and_optimizer(weight: int, copy: bool, optimizer: str, each: int) -> None:
    model = Sharded("one process", 1000, 1, 0, weight, copy)
    assert model.state_bytes(optimizer) == 1000 * each
    assert model.words(optimizer) == f"{each}P, P=1,000"


@given(st.integers(1, 1 << 40), st.integers(1, 4096), st.sampled_from(sorted(OPTIMIZER_STATES)))
def test_every_stage_needs_no_more_than_the_one_before(parameters: int, ranks: int, optimizer: str) -> None:
    states = [mixed(stage, ranks, parameters).state_bytes(optimizer) for stage in sorted(SHARED_OUT)]
    assert states == sorted(states, reverse=True)


def test_activations_of_a_layer() -> None:
    """GPT-3's layers: 80 of the 114 parts of sbh are of attention (Korthikanti et al., section 4: 5as/h is 80)."""
    plain = Transformer(1, 12288, 96, 1, 2048, fused_attention=False, recomputes=False)
    fused = Transformer(1, 12288, 96, 1, 2048, fused_attention=True, recomputes=False)
    whole = Transformer(1, 12288, 96, 1, 2048, fused_attention=True, recomputes=True)
    tokens = 2048 * 12288
    assert [one.activation_bytes() // tokens for one in (plain, fused, whole)] == [114, 34, 2]
    assert [one.words().split(",")[0] for one in (plain, fused, whole)] == ["sbhL(34 + 5as/h)", "34sbhL", "2sbhL"]


def test_the_difference_sums_and_what_is_beyond_is_named_with_the_option_that_sizes_it() -> None:
    model = Sharded("DeepSpeed ZeRO-3", LLAMA, 8, 3, 2, True, buckets=(("reduce_bucket_size", 500_000_000),))
    breakdown = {
        "PARAMETER": 10, "GRADIENT": 20, "OPTIMIZER_STATE": 30, "ACTIVATION": 400, "TEMPORARY": 1_000_000_000,
        "ROUNDING": 5, "FRAGMENTATION": 7, "CONTEXT": 999,
    }  # fmt: skip
    largest = [SimpleNamespace(bytes=1_000_000_000, source="stage3.py:782", operator="aten.empty")]
    told = compared(model, "AdamW", breakdown, {"reserved_bytes": 1_000_000_472}, largest)
    assert told["difference"]["MODEL_STATES"] == 60 - 2 * LLAMA
    assert sum(told["difference"].values()) == 1_000_000_472 - told["model_states"]["bytes"]
    assert told["beyond"] == [
        {"bytes": 1_000_000_000, "source": "stage3.py:782", "option": "reduce_bucket_size=500,000,000"}
    ]
    assert "activations" not in told
