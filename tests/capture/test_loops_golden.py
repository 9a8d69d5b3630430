"""Training loops against recordings of the CUDA build, with a ratchet: a loop may get closer, never further away.

``loops_ratchet.json`` beside the recordings lists the loops whose allocations are not predicted one for one, with what
was reached; a loop that is not listed is equal. ``pytest --update-goldens`` writes it anew, to be reviewed. All but a
few loops are marked slow: ``pytest -m slow tests/capture/test_loops_golden.py``.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.accuracy.align import align  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from tests.recorded.cases.loops import CASES, Case  # noqa: E402
from tests.recorded.device import peak_bytes  # noqa: E402
from tests.recorded.differences import marks  # noqa: E402
from tests.recorded.loops import FOLDER, predict, recordings  # noqa: E402
from tests.support import ratchet  # noqa: E402

RATCHET = FOLDER.parent / "loops_ratchet.json"
QUICK = {
    "accumulation", "adam_tensor_lr_capturable", "bitsandbytes_PagedAdEMAMix8bit", "checkpoint_reentrant", "clip_norm",
    "data_parallel", "ema_lerp", "evaluation_inference_mode", "frozen_backbone", "sgd_fused", "sgd_momentum",
    "packed_lengths_from_the_device", "packed_lstm_unsorted_without_cudnn", "zero_grad_zeros_first",
}  # fmt: skip
RECORDED = recordings()
_EQUAL = {"peak_error_bytes": 0, "matched": 1.0}


def _parameters() -> list[Any]:
    return [pytest.param(case, id=name, marks=marks("loops", name, name in QUICK)) for name, case in CASES.items()]


#: Parts of names -> the package that such loops need.
_PACKAGES = {"lora": "peft", "transformers": "transformers", "gener": "transformers", "installed": "bitsandbytes"}


def _needs(case: Case) -> str:
    return next((package for part, package in _PACKAGES.items() if part in case.name), "")


@pytest.mark.parametrize("case", _parameters())
def test_a_recorded_loop_is_predicted_no_worse_than_before(case: Case, request: pytest.FixtureRequest) -> None:
    package = _needs(case)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    if case.refused:
        with pytest.raises(CaptureError, match=case.refused):
            predict(case)
        return
    ours, recorded = predict(case), RECORDED[case.name]["changes"]
    matched = 1.0 if ours == recorded else ratchet.rounded(align(ours, recorded).share)
    reached = {"peak_error_bytes": peak_bytes(ours) - peak_bytes(recorded), "matched": matched}
    entries = ratchet.read(RATCHET)
    if request.config.getoption("--update-goldens"):
        entries |= {case.name: reached}
        ratchet.write(RATCHET, {name: entry for name, entry in entries.items() if entry != _EQUAL})
        return
    before = entries.get(case.name, _EQUAL)
    assert abs(reached["peak_error_bytes"]) <= abs(before["peak_error_bytes"]), (
        f"python -m tests.recorded loops differ {case.name}"
    )
    assert reached["matched"] >= before["matched"], f"see python -m tests.recorded loops differ {case.name}"


def test_every_loop_is_recorded_and_every_exception_is_a_loop() -> None:
    assert sorted(RECORDED) == sorted(name for name, case in CASES.items() if not case.refused)
    assert set(ratchet.read(RATCHET)) <= set(CASES)
    assert set(CASES) >= QUICK
