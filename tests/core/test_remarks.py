"""Remarks on a model of which nothing was ever on the card."""

from __future__ import annotations

from typing import Any

import pytest

import graphmem

torch = pytest.importorskip("torch")


def _convolution(batch: int) -> tuple[Any, Any]:
    """Weights of an exbibyte, which PyTorch's allocator refuses at once, as those of a ViT whose
    ``num_channels`` is mistyped."""
    channels = 2 * 10**13
    return torch.nn.Conv2d(channels, 64, 16, stride=16), torch.empty(batch, channels, 16, 16)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_whose_first_request_is_refused(training: bool) -> None:
    estimate = graphmem.analyze(_convolution, batch=1, device="H100", training=training)
    assert estimate.fit is not None
    assert not estimate.fit.fits
    assert all("workspaces of convolutions" not in one.message for one in estimate.diagnostics)
