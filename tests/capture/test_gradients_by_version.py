"""Gradient formulas of other versions of PyTorch: they compute what the installed one's compute.

Which memory they take is held by recordings (test_functions_of_versions.py).
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.allocators.ideal import IdealAllocator  # noqa: E402
from graphmem.capture.operators import gradients_by_version  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.replay import replay  # noqa: E402
from tests.support.captures import H100, births  # noqa: E402

_aten = torch.ops.aten
TABLES: dict[str, dict[Any, Any]] = {
    "atan2 before 2.10": gradients_by_version._ATAN2_BEFORE,
    "atan2": gradients_by_version._ATAN2,
    "of two before 2.15": gradients_by_version._ONE_TAKES_ALL,
    "of two": gradients_by_version._SHARED,
}
#: Operands: of ``clamp`` also without one of the limits.
OPERANDS = {_aten.clamp.Tensor: ((0, 1, 2), (0, 1), (0, None, 2))}


def _values() -> list[torch.Tensor]:
    """Three of which none is equal to another; the limits cross somewhere."""
    torch.manual_seed(0)
    return list(torch.randperm(3 * 64).reshape(3, 8, 8).double().div(64).sub(1).unbind())


@pytest.mark.parametrize("table", TABLES)
def test_gradients_are_those_of_the_installed_version(table: str) -> None:
    for op, formula in TABLES[table].items():
        for chosen in OPERANDS.get(op, ((0, 1),)):
            values = _values()
            inputs = [None if place is None else values[place].requires_grad_() for place in chosen]
            out = op(*inputs)
            grad = torch.rand_like(out)
            wanted = torch.autograd.grad(out, [each for each in inputs if each is not None], grad)
            ours = formula([each is not None for each in (*inputs, None)], grad, *inputs)
            for one, other in zip([each for each in ours if each is not None], wanted, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("table", TABLES)
def test_a_gradient_that_nobody_wants_is_not_computed(table: str) -> None:
    for op, formula in TABLES[table].items():
        values = _values()[: 3 if op is _aten.clamp.Tensor else 2]
        for place in range(len(values)):
            ours = formula([place == number for number in range(3)], torch.ones(8, 8), *values)
            assert [each is not None for each in ours] == [place == number for number in range(len(values))]


def _transformed(_: Any) -> None:
    x, y = torch.zeros(64, 64, device="cuda"), torch.zeros(64, 64, device="cuda")
    torch.func.grad(lambda a: torch.atan2(a, y).sum())(x)
    torch.func.vmap(torch.func.grad(lambda a, b: torch.maximum(a, b).sum()))(x, y)


@pytest.mark.parametrize("version", [(2, 9), (2, 13), (2, 15)])
def test_they_are_followed_under_torch_func(version: tuple[int, int]) -> None:
    masks = [
        one
        for one in births(capture(_transformed, source="test", device=H100, torch_version=version).trace)
        if one.bytes == 64 * 64
    ]
    assert len(masks) == {(2, 9): 2, (2, 13): 3, (2, 15): 3}[version]


_PAST_ARGUMENTS = {_aten._softmax.default: (-1, False), _aten._log_softmax.default: (0, False),
                   _aten.mean.dim: ([0, -1], False)}  # fmt: skip


@pytest.mark.parametrize("row", gradients_by_version.PAST, ids=lambda row: str(row[0]))
def test_formulas_of_the_past_compute_what_those_of_today_do(row: Any) -> None:
    op, keeps_result, _, _, gradient = row
    inputs = (_values()[0].requires_grad_(), *_PAST_ARGUMENTS.get(op, ()))
    ours, today = gradients_by_version._keeping(op, keeps_result, gradient)(*inputs), op(*inputs)
    grad = torch.rand_like(today)
    one, other = (torch.autograd.grad(out, inputs[0], grad) for out in (ours, today))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("function", "peaks"),
    [
        (lambda x: torch.softmax(x * 2, -1) + 1, {(1, 10): 4, (1, 11): 3, (2, 4): 3}),
        (lambda x: (x * 2).mean(0, keepdim=True).expand_as(x) + x, {(1, 12): 2, (1, 13): 3, (2, 1): 3, (2, 2): 2}),
    ],
    ids=["softmax", "mean"],
)
def test_what_a_formula_keeps_goes_by_the_version(function: Any, peaks: dict[tuple[int, int], int]) -> None:
    """Peaks of forward passes, in tensors of a megabyte."""

    def step(_: Any) -> None:
        function(torch.zeros(512, 512, device="cuda", requires_grad=True))

    for version, tensors in peaks.items():
        trace = capture(step, source="test", device=H100, torch_version=version).trace
        assert replay(trace, IdealAllocator()).peak_allocated_bytes // (1 << 20) == tensors


@pytest.mark.parametrize(("version", "dropped"), [((1, 13), False), ((2, 0), True)])
def test_zero_grad_keeps_gradients_before_2_0(version: tuple[int, int], dropped: bool) -> None:
    def step(_: Any) -> None:
        layer = torch.nn.Linear(8, 8, device="cuda")
        layer(torch.zeros(1, 8, device="cuda")).sum().backward()
        torch.optim.SGD(layer.parameters()).zero_grad()
        seen.append(layer.weight.grad is None)

    seen: list[bool] = []
    capture(step, source="test", device=H100, torch_version=version)
    assert seen == [dropped]
