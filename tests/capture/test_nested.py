"""Padded sequences that ``nn.TransformerEncoder`` packs in evaluation: what a mask says, and what nobody knows."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem.capture.operators.nested import UNPADDED  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.diagnostics import Diagnostic  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION  # noqa: E402

#: Nothing else has rows of the hidden layer's prime width.
WIDTH, LONGEST, HIDDEN = 64, 16, 131


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, batch_first=True)
    return nn.TransformerEncoder(layer, 1).cuda().eval()


def packed_rows(mask: Any, share: float | None = None) -> tuple[set[int], dict[Diagnostic, int]]:
    """Rows of what is HIDDEN wide, and what was assumed; ``mask()`` makes the mask on the device."""

    def step(_: Any) -> None:
        made = mask()
        with torch.no_grad():
            encoder()(torch.zeros(made.shape[0], LONGEST, WIDTH, device="cuda"), src_key_padding_mask=made)

    captured = capture(step, source="test", device=H100, torch_version=TORCH_VERSION, data_dependent=share)
    row = 4 * HIDDEN
    return {s.bytes // row for s in captured.trace.storages if s.bytes % row == 0}, dict(captured.assumed)


def unknown() -> Any:
    return torch.empty(3, LONGEST, device="cuda") > 0


def padding(*lengths: int) -> Any:
    return (torch.arange(LONGEST)[None] >= torch.tensor(lengths)[:, None]).cuda()


def test_sequences_are_packed_to_their_lengths() -> None:
    rows, assumed = packed_rows(lambda: padding(11, 7, 5))
    assert 11 + 7 + 5 in rows
    assert 3 * LONGEST not in rows
    assert UNPADDED not in assumed


def test_sequences_padded_on_the_left_are_not_packed() -> None:
    rows, _ = packed_rows(lambda: padding(11, 7, 5).flip(1))
    assert 3 * LONGEST in rows
    assert 11 + 7 + 5 not in rows


def test_of_an_unknown_mask_it_is_said_that_nothing_is_padded() -> None:
    rows, assumed = packed_rows(unknown)
    assert 3 * LONGEST in rows
    assert assumed[UNPADDED]


def test_a_share_shortens_sequences_of_unknown_length() -> None:
    rows, _ = packed_rows(unknown, 0.25)
    assert 3 * LONGEST // 4 in rows
    assert 3 * LONGEST not in rows


def test_other_operators_on_packed_sequences_are_refused() -> None:
    def step(_: Any) -> None:
        with torch.no_grad():
            t, mask = torch.zeros(3, LONGEST, WIDTH, device="cuda"), padding(11, 7, 5).logical_not()
            torch._nested_tensor_from_mask(t, mask) + 1

    with pytest.raises(CaptureError, match="nested tensor is not followed"):
        capture(step, source="test", device=H100, torch_version=TORCH_VERSION)
