"""Fourier transforms: what of them is recorded, and that the rest is said to be an estimate."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.diagnostics import Code  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION, births, record  # noqa: E402

#: Shape, transform, and what the CUDA build of 2.13 allocates before it asks cuFFT for a plan.
RECORDED = [
    ((8, 501), torch.fft.irfft, [32000, 32064]),
    ((8, 1000), torch.fft.irfft, [63936, 64000]),
    ((4, 3, 64, 33), torch.fft.irfft2, [196608, 202752]),
    ((8, 1000), torch.fft.fft, [64000]),
]


@pytest.mark.parametrize(("shape", "transform", "sizes"), RECORDED)
def test_results_and_copies_are_those_of_the_cuda_build(
    shape: tuple[int, ...], transform: Any, sizes: list[int]
) -> None:
    born = births(record(lambda: transform(torch.zeros(shape, dtype=torch.complex64, device="cuda"))))[1:]
    assert [birth.bytes for birth in born[: len(sizes)]] == sizes
    assert [birth.label for birth in born[len(sizes) :]] == ["cuFFT work area (estimate)"]


def test_the_work_area_is_counted_as_unknown() -> None:
    def step() -> None:
        torch.stft(torch.zeros(8, 16000, device="cuda"), 400, 160, return_complex=True)

    captured = capture(lambda _: step(), source="test", device=H100, torch_version=TORCH_VERSION)
    assert any(one.code is Code.ESTIMATED for one in captured.assumed)
