"""Strides of results in which a dimension has one element, as the CUDA build of PyTorch 2.13 gave them (stub driver).

They are no matter of bytes, but decide whether a convolution or an interpolation takes a picture for channels_last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.recorded.predict import predicted_changes  # noqa: E402


def _tokens() -> Any:
    """One picture of tokens, as attention leaves it: channels innermost, and an odd stride of the batch."""
    return torch.zeros(1, 4096, 128, device="cuda").transpose(-1, -2).reshape(1, 128, 64, 64)


def _odd() -> Any:
    """Contiguous, but for the stride of the batch."""
    return torch.zeros(128, 64, 64, device="cuda").as_strided((1, 128, 64, 64), (7, 4096, 64, 1))


def _one_channel() -> Any:
    return torch.zeros(4, 1, 8, 16, device="cuda").to(memory_format=torch.channels_last)


_OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "plus a number": lambda x: x + 1.0,
    "divided by a number": lambda x: x / 2,
    "a number minus": lambda x: 1 - x,
    "floor division": lambda x: x // 2,
    "compared with a number": lambda x: x > 0,
    "where with a number": lambda x: torch.where(x > 0, x, 0.0),
    "plus itself": lambda x: x + x,
    "plus a contiguous copy": lambda x: x + x.contiguous(),
    "a contiguous copy plus": lambda x: x.contiguous() + x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "hardswish": torch.nn.functional.hardswish,
    "squared": lambda x: x**2,
    "clamped": lambda x: x.clamp(0, 1),
    "clone": torch.clone,
    "zeros_like": torch.zeros_like,
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "times channels": lambda x: x * torch.zeros(x.shape[1], 1, 1, device="cuda"),
    "channels times": lambda x: torch.zeros(x.shape[1], 1, 1, device="cuda") * x,
}
_LAST, _KEPT = (524288, 1, 8192, 128), (128, 1, 8192, 128)
_FIRST, _LEAST, _ODD = (524288, 4096, 64, 1), (64, 4096, 64, 1), (7, 4096, 64, 1)
_RENEWED, _ONE = (128, 128, 16, 1), (128, 1, 16, 1)
#: Operation -> strides of its result for each of the three pictures.
_RECORDED = {
    "plus a number": (_KEPT, _LEAST, _ONE),
    "divided by a number": (_KEPT, _LEAST, _ONE),
    "a number minus": (_KEPT, _LEAST, _ONE),
    "floor division": (_KEPT, _LEAST, _ONE),
    "compared with a number": (_KEPT, _LEAST, _ONE),
    "where with a number": (_KEPT, _LEAST, _ONE),
    "plus itself": (_LAST, _FIRST, _RENEWED),
    "plus a contiguous copy": (_KEPT, _FIRST, _RENEWED),
    "a contiguous copy plus": (_FIRST, _FIRST, _RENEWED),
    "relu": (_LAST, _FIRST, _RENEWED),
    "silu": (_LAST, _FIRST, _RENEWED),
    "hardswish": (_LAST, _FIRST, _RENEWED),
    "squared": (_LAST, _FIRST, _RENEWED),
    "clamped": (_LAST, _FIRST, _RENEWED),
    "clone": (_KEPT, _ODD, _ONE),
    "zeros_like": (_KEPT, _ODD, _ONE),
    "dropout": (_KEPT, _ODD, _ONE),
    "times channels": (_KEPT, _LEAST, _ONE),
    "channels times": (_KEPT, _LEAST, _ONE),
}


@pytest.mark.parametrize("name", _OPERATIONS)
def test_strides_of_single_elements_are_those_of_the_cuda_build(name: str) -> None:
    strides: list[Any] = []

    def run(mark: Callable[[], None]) -> None:
        mark()
        strides.extend(_OPERATIONS[name](make()).stride() for make in (_tokens, _odd, _one_channel))
        mark()

    predicted_changes(run, name)
    assert tuple(strides) == _RECORDED[name]
