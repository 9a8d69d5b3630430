"""Recurrent networks on packed sequences, with cuDNN and step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from tests.recorded.cases.loops.networks import loss_of
from tests.recorded.cases.loops.registry import ITERATIONS, Loop, add, group

group("packed")

_SORTED, _UNSORTED = [9, 9, 7, 4, 1], [4, 9, 1, 7, 9]


class _Tagger(nn.Module):
    """Embedding, packed network, padded again, a score for every step."""

    def __init__(self, kind: Any, lengths: Any, batch_first: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 24)
        self.network = kind(24, 32, batch_first=batch_first, **options)
        width = options.get("proj_size", 32) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 50)
        self.lengths, self.batch_first = lengths, batch_first

    def forward(self, x: Tensor) -> Tensor:
        lengths = self.lengths(x) if callable(self.lengths) else self.lengths
        sorted_ = lengths is _SORTED
        packed = rnn.pack_padded_sequence(self.embedding(x), lengths, self.batch_first, enforce_sorted=sorted_)
        output, _ = self.network(packed)
        padded, _ = rnn.pad_packed_sequence(output, self.batch_first, total_length=9)
        return self.head(padded)


def _packed(kind: Any, lengths: Any, cudnn: bool, batch_first: bool = False, **options: Any) -> Loop:
    enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, cudnn
    try:
        model = _Tagger(kind, lengths, batch_first, options).cuda()
        shape = (5, 9) if batch_first else (9, 5)
        x = torch.zeros(shape, dtype=torch.int64, device="cuda")
        y = torch.zeros(shape, dtype=torch.int64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(ITERATIONS):
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield
    finally:
        torch.backends.cudnn.enabled = enabled


_FORMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, _SORTED, {}),
    "lstm_unsorted": (nn.LSTM, _UNSORTED, {"batch_first": True}),
    "lstm_layers": (nn.LSTM, _SORTED, {"num_layers": 2, "bidirectional": True}),
    "lstm_projected": (nn.LSTM, torch.tensor(_UNSORTED), {"proj_size": 16}),
    "gru": (nn.GRU, _UNSORTED, {"num_layers": 2}),
    "gru_bidirectional": (nn.GRU, _SORTED, {"bidirectional": True, "batch_first": True}),
    "rnn": (nn.RNN, _SORTED, {"num_layers": 2, "bidirectional": True, "nonlinearity": "relu"}),
    "rnn_tanh": (nn.RNN, _UNSORTED, {"bias": False}),
}
for _name, (_kind, _lengths, _options) in _FORMS.items():
    for _cudnn in (True, False):
        _suffix = "" if _cudnn else "_without_cudnn"
        add(f"packed_{_name}{_suffix}", partial(_packed, _kind, _lengths, _cudnn, **_options))
add(
    "packed_lengths_from_the_device",
    partial(_packed, nn.LSTM, lambda x: (x > 0).sum(0).cpu(), True),
    refused="Length of all samples has to be greater than 0",  # tokens are zeros, and PyTorch refuses them too
)
