"""Predicted steps against recordings of the CUDA build, with a ratchet: a run may get closer, never further away.

``steps_ratchet.json`` beside the recordings holds what was reached. After an improvement, or a change that is better on
the whole and worse on some run, ``pytest --update-goldens`` writes it anew; the diff is there to be reviewed. The runs
that take long or need torchvision or timm are marked slow: ``pytest -m slow tests/capture/test_steps_golden.py``.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from graphmem.accuracy.align import align  # noqa: E402
from tests.recorded.differences import marks  # noqa: E402
from tests.recorded.steps import runs  # noqa: E402
from tests.support import ratchet  # noqa: E402

RATCHET = runs.FOLDER.parent / "steps_ratchet.json"

#: Quick runs of every kind: optimizers, precisions, checkpointing, accumulation, clipping, allocator settings.
QUICK = {
    "gpt2_4_adamw_amp_4_accum=2_clip=1.0",
    "gpt2_4_adamw_bf16_ckpt=1",
    "gpt2_4_adamw_bf16_sdp=math",
    "gpt2_8_adamw_amp_conf=expandable_segments-True",
    "gpt_tiny_8_adamw_amp",
    "gpt_tiny_8_adamw_bf16",
    "gpt_tiny_8_adamw_fp32",
    "mlp_1024_adam_fp32",
    "mlp_1_sgd_fp32",
    "mlp_256_adafactor_fp32",
    "mlp_256_adagrad_fp32",
    "mlp_256_adam_fp32_foreach=0",
    "mlp_256_adam_fp32_fused=1",
    "mlp_256_adam_fp32_keepgrad=1",
    "mlp_256_adamw_amp",
    "mlp_256_adamw_ampfp16",
    "mlp_256_adamw_bf16",
    "mlp_256_adamw_fp32_clip=1.0",
    "mlp_256_none_fp32",
    "mlp_256_rmsprop_fp32",
    "mlp_64_sgdm_fp32",
    "resnet50_16_none_fp32",
    "resnet50_1_sgdm_fp32",
}

#: Library of a run -> the packages it needs.
NEEDED = {"": (), "hf": ("transformers",), "tv": ("torchvision",), "timm": ("timm", "torchvision")}


def _parameters() -> list[Any]:
    return [pytest.param(name, id=name, marks=marks("steps", name, name in QUICK)) for name in runs.names()]


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-goldens"))


@pytest.mark.parametrize("name", _parameters())
def test_a_recorded_run_is_predicted_no_worse_than_before(name: str, update: bool) -> None:
    for package in NEEDED[runs.load(name).library]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    ratchet.hold_run(RATCHET, "steps", name, runs.compare(name), update)


def test_the_ratchet_has_an_entry_for_every_recording_and_no_other() -> None:
    assert sorted(ratchet.read(RATCHET)) == runs.names()
    assert set(runs.names()) >= QUICK


# --- the alignment ----------------------------------------------------------------------------------------------------

_SIZES = st.lists(st.integers(1, 4), max_size=60)


@given(_SIZES, _SIZES)
def test_matched_elements_are_equal_and_in_order(a: list[int], b: list[int]) -> None:
    match = align(a, b)
    end_a = end_b = 0
    for start_a, start_b, length in match.blocks:
        assert start_a >= end_a
        assert start_b >= end_b
        assert a[start_a : start_a + length] == b[start_b : start_b + length]
        end_a, end_b = start_a + length, start_b + length
    covered = sum(length for _, _, length in match.blocks)
    left_a = sum(end - start for start, end, _, _ in match.differences())
    left_b = sum(end - start for _, _, start, end in match.differences())
    assert (covered + left_a, covered + left_b) == (len(a), len(b))
    assert 0 <= match.share <= 1


@given(_SIZES)
def test_equal_sequences_match_in_full(a: list[int]) -> None:
    assert align(a, a).share == 1
    assert align(a, a).differences() == []


def test_what_one_side_has_more_is_the_only_difference() -> None:
    common = list(range(100, 200))
    assert align([*common[:30], 7, 8, 9, *common[30:]], common).differences() == [(30, 33, 30, 30)]
    assert align(common, [*common[:30], 7, *common[30:60], 8, *common[60:]]).differences() == [
        (30, 30, 30, 31),
        (60, 60, 61, 62),
    ]


def test_an_option_that_the_loop_does_not_know_is_refused(tmp_path: Path) -> None:
    import gzip

    document = json.loads(gzip.decompress((runs.FOLDER / f"mlp_1_sgd_fp32{runs.SUFFIX}").read_bytes()))
    document["opts"]["warmup"] = "3"
    (tmp_path / f"odd{runs.SUFFIX}").write_bytes(gzip.compress(json.dumps(document).encode()))
    with pytest.raises(ValueError, match="warmup"):
        runs.load("odd", tmp_path)
