"""How convolutions are described to cuDNN, by a library that only listens."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.kernels import run_rule  # noqa: E402
from graphmem.capture.kernels.parts.script import Card  # noqa: E402
from graphmem.cudnn.plans import Convolution  # noqa: E402
from tests.support.cards import card_with  # noqa: E402

pytestmark = pytest.mark.usefixtures("cudnn_switches")


class _Listener:
    """Answers every question with the same workspaces."""

    def __init__(self, first: int | None = 0, largest: int | None = 0) -> None:
        self.asked: list[Convolution] = []
        self.answers = first, largest

    def workspaces(self, question: Convolution) -> tuple[int, ...] | None:
        self.asked.append(question)
        return None if self.answers[0] is None else (self.answers[0],)

    def largest_workspace(self, question: Convolution) -> int | None:
        return self.answers[1]


def _card(listener: _Listener) -> Card:
    return card_with((9, 0), 132, 2048, cudnn=listener)


def _forward(tensor: Any, weight: Any, out: Any, listener: _Listener, transposed: bool = False) -> Any:
    dim = tensor.dim() - 2
    arguments = (tensor, weight, None, [2] * dim, [1] * dim, [1] * dim, transposed, [0] * dim, 1)
    return run_rule("aten.convolution.default", arguments, {}, [out], _card(listener))


def _meta(*shape: int, dtype: Any = None) -> Any:
    return torch.empty(shape, device="meta", dtype=dtype or torch.float32)


def test_a_transposed_convolution_is_the_gradient_of_another() -> None:
    listener = _Listener()
    _forward(_meta(2, 8, 5, 5), _meta(8, 4, 3, 3), _meta(2, 4, 9, 9), listener, transposed=True)
    (question,) = listener.asked
    assert question.direction == "backward data"
    assert (question.input, question.filter, question.output) == ((2, 4, 9, 9), (8, 4, 3, 3), (2, 8, 5, 5))
    assert (question.stride, question.padding, question.dilation) == ((2, 2), (1, 1), (1, 1))


def test_one_dimension_becomes_two() -> None:
    listener = _Listener()
    _forward(_meta(2, 8, 31, dtype=torch.float64), _meta(4, 8, 3), _meta(2, 4, 16), listener)
    (question,) = listener.asked
    assert (question.input, question.filter, question.output) == ((2, 8, 1, 31), (4, 8, 1, 3), (2, 4, 1, 16))
    assert (question.stride, question.padding) == ((1, 2), (0, 1))
    assert question.dtype == "float64"


def test_addresses_inside_a_storage_are_told() -> None:
    listener = _Listener()
    storage = _meta(2 * 8 * 9 * 9 + 3, dtype=torch.float16)
    tensor, weight = storage[3:].view(2, 8, 9, 9), _meta(4, 8, 3, 3, dtype=torch.float16)
    _forward(tensor, weight, _meta(2, 4, 5, 5, dtype=torch.float16), listener)
    last = weight.to(memory_format=torch.channels_last)  # the input is copied into that layout, to a block of its own
    _forward(tensor, last, _meta(2, 4, 5, 5, dtype=torch.float16), listener)
    assert [question.alignments for question in listener.asked] == [(2, 32, 32), (32, 32, 32)]
    assert [question.channels_last for question in listener.asked] == [False, True]


def test_what_a_gradient_is_written_to_is_a_block_of_its_own() -> None:
    listener = _Listener()
    tensor = _meta(2 * 8 * 9 * 9 + 2)[2:].view(2, 8, 9, 9)
    grad = _meta(2 * 4 * 5 * 5 + 1)[1:].view(2, 4, 5, 5)
    weight = _meta(4, 8, 3, 3)
    arguments = (grad, tensor, weight, [4], [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    run_rule("aten.convolution_backward.default", arguments, {}, [tensor, weight], _card(listener))
    assert [(question.direction, question.alignments) for question in listener.asked] == [
        ("backward data", (32, 32, 4)),
        ("backward weight", (8, 32, 4)),
    ]


def test_the_switches_are_told() -> None:
    listener = _Listener()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    _forward(_meta(2, 8, 9, 9), _meta(4, 8, 3, 3), _meta(2, 4, 5, 5), listener)
    assert listener.asked[0].deterministic
    assert not listener.asked[0].tf32


def test_plans_are_timed_in_the_largest_ones_workspace() -> None:
    torch.backends.cudnn.benchmark = True
    script = _forward(_meta(2, 8, 9, 9), _meta(4, 8, 3, 3), _meta(2, 4, 5, 5), _Listener(100, 700))
    taken = [(step.bytes, step.label) for step in script.steps if step.kind == "take"]
    assert taken == [(700, "cuDNN workspace for timing plans"), (100, "cuDNN workspace (estimate)")]


def test_an_empty_convolution_is_not_asked() -> None:
    listener = _Listener()
    _forward(_meta(0, 8, 9, 9), _meta(4, 8, 3, 3), _meta(0, 4, 5, 5), listener)
    assert listener.asked == []
