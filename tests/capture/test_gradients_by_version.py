"""Gradient formulas of other versions of PyTorch: they compute what the installed one's compute.

Which memory they take is held by recordings (test_functions_of_versions.py).
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.operators import gradients_by_version  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
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
