"""PyTorch's own databases of modules, optimizers, classes of tensors and overridable functions, and its transforms:
what passes on the CPU passes in a capture. What does not is a list with reasons (``golden/pytorch/2.13/suites.json``).
"""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's databases import it")

from tests import places  # noqa: E402
from tests.support.pytorch_suites import SUITES, Case, failures  # noqa: E402

#: Case -> why it fails.
KNOWN: dict[str, str] = json.loads((places.PYTORCH / "suites.json").read_text(encoding="utf-8"))
#: One case of so many is tried in every run.
SHARES = {"subclasses": 1, "overrides": 1, "optimizers": 12, "modules": 45, "transforms": 480}


@pytest.mark.parametrize("suite", SUITES)
def test_a_share_passes_in_a_capture(suite: str) -> None:
    _judge(list(SUITES[suite]())[:: SHARES[suite]])


@pytest.mark.slow
@pytest.mark.parametrize("suite", [suite for suite, share in SHARES.items() if share > 1])
def test_whole_suites_pass_in_a_capture(suite: str) -> None:
    _judge(list(SUITES[suite]()))


def _judge(cases: list[Case]) -> None:
    on_host = failures(cases, "cpu")
    tried = [case for case in cases if case.label not in on_host]
    found = failures(tried)
    assert {label: error for label, error in found.items() if label not in KNOWN} == {}
    mended = [case.label for case in tried if case.label in KNOWN and case.label not in found]
    assert not mended, "they pass: take them from suites.json"
