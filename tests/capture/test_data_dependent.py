"""Operators whose result's size is data: all that they can select is taken, unless the user says how much it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem import Inference, Training, analyze  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.errors import UsageError  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION  # noqa: E402

ROWS, WIDTH = 1000, 64


def shape(function: Callable[[Any], Any], share: float | None = 0.25) -> list[tuple[int, ...]]:
    """Shapes of what the function makes of a device tensor."""
    found: list[tuple[int, ...]] = []

    def step(_: Any) -> None:
        out = function(torch.randn(ROWS, WIDTH, device="cuda"))
        found.extend(tuple(t.shape) for t in (out if isinstance(out, tuple) else (out,)))

    capture(step, source="test", device=H100, torch_version=TORCH_VERSION, data_dependent=share)
    return found


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x: x.nonzero(), [(ROWS * WIDTH // 4, 2)]),
        (lambda x: torch.where(x[:, 0] > 0), [(ROWS // 4,)]),
        (lambda x: x[x[:, 0] > 0], [(ROWS // 4, WIDTH)]),
        (lambda x: x[x > 0], [(ROWS * WIDTH // 4,)]),
        (lambda x: x.masked_select(x[:, :1] > 0), [(ROWS * WIDTH // 4,)]),
        (lambda x: x.unique(), [(ROWS * WIDTH // 4,)]),
        (lambda x: x.unique(return_inverse=True), [(ROWS * WIDTH // 4,), (ROWS, WIDTH)]),
        (lambda x: x.unique(dim=0), [(ROWS // 4, WIDTH)]),
        (lambda x: torch.unique_consecutive(x[:, 0], return_counts=True), [(ROWS // 4,), (ROWS // 4,)]),
        (lambda x: torch.bincount(x[:, 0].long()), [(ROWS // 4,)]),
    ],
)
def test_sizes_follow_the_share(function: Callable[[Any], Any], shapes: list[tuple[int, ...]]) -> None:
    assert shape(function) == shapes
    whole = shape(function, None)  # no share: the bound
    assert len(whole) == len(shapes)
    assert whole[0][0] in (ROWS, ROWS * WIDTH)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.argmax(dim=1),
        lambda x: x.max(dim=-1).indices.view(-1, 10)[:50].to(torch.int32),
        lambda x: torch.cat([x.topk(3).indices, x.argsort(dim=1)], 1)[x[:, 0] > 0],
    ],
    ids=["argmax", "max", "topk and argsort"],
)
def test_chosen_classes_are_no_more_than_there_are(choose: Callable[[Any], Any]) -> None:
    """torchmetrics counts them, and raises an error where there are more (``stat_scores.py``)."""
    assert shape(lambda x: choose(x).unique(), None) == [(WIDTH,)]

    def writes(x: Any) -> Any:
        chosen = x.argmax(dim=1)
        chosen += x[:, 0].long()
        return chosen.unique()

    assert shape(writes, None) == [(ROWS,)]


def test_counts_with_a_minimum_need_no_share() -> None:
    assert shape(lambda x: torch.bincount(x[:, 0].long(), minlength=8), None) == [(8,)]


@pytest.mark.parametrize("select", [lambda x: x[x > 0], lambda x: x[x[:, 0] > 0], lambda x: x.masked_select(x > 0)])
def test_gradients_of_selections(select: Callable[[Any], Any]) -> None:
    def step(x: Any) -> Any:
        x.requires_grad_()
        select(x).sum().backward()
        return x.grad

    assert shape(step) == [(ROWS, WIDTH)]


@pytest.mark.parametrize(("share", "rows"), [(None, ROWS), (0.25, ROWS // 4)])
def test_selections_on_the_host_of_what_a_model_computed(share: float | None, rows: int) -> None:
    def greedy(x: Any) -> Any:
        best = torch.nn.functional.linear(x, torch.randn(30, WIDTH, device="cuda")).argmax(1).cpu()
        return best[best != 0]

    assert shape(greedy, share) == [(rows,)]


def test_writing_under_a_mask() -> None:
    def step(x: Any) -> Any:
        x[x[:, 0] > 0] = 1.0
        x[x[:, 0] > 0] += 2.0
        return x

    assert shape(step) == [(ROWS, WIDTH)]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return out


@pytest.mark.parametrize("kind", [Training, Inference])
def test_a_mixture_of_experts_needs_more_the_more_is_selected(kind: Any) -> None:
    needs = []
    for share in (0.25, 1.0):
        step = kind(data_dependent=share)
        estimate = analyze(Experts(), torch.zeros(4 * ROWS, WIDTH), training=step)
        needs.append(estimate.requested)
        (said,) = [d.message for d in estimate.diagnostics if "select" in d.message]
        assert f"{share:.0%}" in said
    assert needs[0] < needs[1]


@pytest.mark.parametrize("share", [0, -0.5, 1.5, "half", True, float("nan")])
def test_a_share_that_is_none(share: Any) -> None:
    for kind in (Training, Inference):
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            kind(data_dependent=share)


def test_checks_for_finite_values_are_passed_and_counted() -> None:
    class Checked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if not torch.isfinite(y).all() or torch.isnan(y).any() or torch.isinf(y).any() or (y != y).any():
                y = y.clamp(-1, 1)
            return y

    estimate = analyze(Checked(8, 8), torch.zeros(2, 8), iterations=1)
    assert estimate.trace is not None
    finite = [d for d in estimate.diagnostics if "taken to be finite" in d.message]
    assert finite
    assert not any(operator.name.startswith("aten.clamp") for operator in estimate.trace.operators)


def test_values_read_inside_a_model_are_named() -> None:
    class Lengths(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert (x > 0).sum(dim=1).max().item() <= x.shape[1]
            return super().forward(x if (x > 0).any() else x.clone())

    estimate = analyze(Lengths(8, 8), torch.zeros(2, 8), training=Training(data_dependent=0.5), iterations=1)
    line = Lengths.forward.__code__.co_firstlineno + 2
    decided = [d.message for d in estimate.diagnostics if d.kind == "assumed"]
    assert any(f"test_data_dependent.py:{line}: a question" in message for message in decided)
