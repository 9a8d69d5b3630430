"""How far figures may be off where a line reads a value that nobody knows: ``bounds`` analyses other values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphmem

MIB = 1 << 20
HERE = "test_bounds.py"


def branching() -> None:
    x = torch.empty(256, 1024, device="cuda")
    if (x.sum() > 3).item():
        torch.zeros(16 * MIB, device="cuda")


def comparing() -> None:
    x = torch.empty(256, 1024, device="cuda")
    kept = [torch.zeros(4 * MIB, device="cuda")]
    if x.sum().item() > 100:
        kept.append(torch.zeros(16 * MIB, device="cuda"))


def masking() -> None:
    x = torch.empty(4 * MIB, device="cuda")
    chosen = x[x > 0]
    chosen + 1


def waiting() -> None:
    x = torch.empty(256, device="cuda")
    while (x.sum() > 3).item():
        x = x + 1


def counting() -> None:
    count = int(torch.empty(4, device="cuda").sum())
    torch.zeros(count * 1024, 256, device="cuda")


def _analysed(step: Any, **options: Any) -> graphmem.Estimate:
    return graphmem.analyze(step, device="T4", torch_version="2.13", **options)


def _causes(estimate: graphmem.Estimate) -> list[str]:
    return [cause.name for cause in estimate.doubts.about("reserved")]


@pytest.mark.parametrize(("step", "more"), [(branching, 64 * MIB), (comparing, 64 * MIB)])
def test_the_other_way_of_a_branch_is_the_other_end(step: Any, more: int) -> None:
    without, with_bounds = _analysed(step), _analysed(step, bounds=True)
    assert _causes(without) == ["values assumed"]
    assert without.interval("reserved") == (None, None)
    assert with_bounds.reserved == without.reserved
    least, most = with_bounds.interval("allocated")
    assert least == without.allocated
    assert most == pytest.approx(without.allocated + more, abs=MIB + 4096)
    (cause,) = with_bounds.doubts.about("reserved")
    assert cause.name.startswith("value read at ")
    assert HERE in cause.name
    assert cause.to_dict()["bound"] == "both ends are known"
    assert with_bounds.fit is not None
    assert with_bounds.fit.verdict == "yes"


def test_a_selection_lies_between_none_and_all() -> None:
    estimate = _analysed(masking, bounds=True)
    least, most = estimate.interval("allocated")
    assert most == estimate.allocated
    assert least is not None
    assert least < estimate.allocated - 16 * MIB


@pytest.mark.parametrize("step", [waiting, counting])
def test_a_loop_that_does_not_end_and_a_whole_number_have_no_bound(step: Any) -> None:
    estimate = _analysed(step, bounds=True)
    assert _causes(estimate) == ["values assumed"]
    assert estimate.interval("reserved") == (None, None)


class Routed(nn.Module):
    """What a mask does not select takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(64, 64), nn.Linear(64, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = x[:, 0] > 0
        out = torch.zeros_like(x)
        out[keep] = self.small(x[keep])
        out[~keep] = self.large(x[~keep])[:, :64]
        return out


def _analysed_routed(**options: Any) -> graphmem.Estimate:
    return graphmem.analyze(Routed(), torch.zeros(8192, 64), device="T4", **options)


@pytest.mark.slow
def test_what_a_mask_selects_agrees_with_what_it_leaves_and_with_its_gradient() -> None:
    line = Routed.forward.__code__.co_firstlineno + 3
    sizes = [
        _analysed_routed(training=graphmem.Training(assume=((f"{HERE}:{line}", count),))) for count in (0, 4096, 8192)
    ]
    none, half, whole = (one.allocated for one in sizes)
    assert whole < half < none, "the other half takes the larger layer"
    bounded = _analysed_routed(bounds=True)
    assert bounded.interval("allocated") == (whole, none)
