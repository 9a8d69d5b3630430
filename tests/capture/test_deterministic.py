"""Deterministic mode: which plans are estimates then, and that its end is its end."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.session.session import capture  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION  # noqa: E402


def captured(function: Any, deterministic: bool) -> Any:
    def step(_: Any) -> None:
        torch.use_deterministic_algorithms(deterministic)
        function()

    return capture(step, source="test", device=H100, torch_version=TORCH_VERSION).trace


def convolution() -> None:
    with torch.no_grad():
        torch.nn.Conv2d(64, 128, 3, padding=1, device="cuda")(torch.zeros(8, 64, 56, 56, device="cuda"))


def test_a_forward_pass_has_one_plan_in_both_modes() -> None:
    """Engines that add in any order compute gradients."""
    either, deterministic = (
        [(s.label, s.bytes) for s in captured(convolution, mode).storages if s.label.startswith("cuDNN")]
        for mode in (False, True)
    )
    assert [label for label, _ in either] == ["cuDNN workspace"]
    assert deterministic == either
    assert not torch.are_deterministic_algorithms_enabled()


def test_sums_at_equal_places_are_sorted_first() -> None:
    def gradients() -> None:
        x = torch.zeros(1000, 64, device="cuda", requires_grad=True)
        x.index_select(0, torch.zeros(300, dtype=torch.int64, device="cuda")).sum().backward()

    plain, sorted_ = (captured(gradients, mode) for mode in (False, True))
    assert "sorted indices" not in {s.label for s in plain.storages}
    assert "sorted indices" in {s.label for s in sorted_.storages}
