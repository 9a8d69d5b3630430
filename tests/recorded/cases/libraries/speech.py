"""Acoustic models with CTC, in the style of torchaudio's tutorials; nothing but PyTorch is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.recorded.cases.libraries.registry import program

_LETTERS = 29
_MELS = 80


class _Utterances(torch.utils.data.Dataset[Any]):
    """Random spectrograms and transcripts of many lengths."""

    def __init__(self, count: int) -> None:
        draws = torch.Generator().manual_seed(3)
        frames = torch.randint(120, 400, (count,), generator=draws).tolist()
        self.items = [
            (
                torch.randn(length, _MELS, generator=draws),
                torch.randint(1, _LETTERS, (length // 12,), generator=draws),
            )
            for length in frames
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def _collate(batch: Any) -> Any:
    features = nn.utils.rnn.pad_sequence([item[0] for item in batch], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([item[1] for item in batch], batch_first=True)
    lengths = torch.tensor([len(item[0]) // 2 for item in batch])
    return features[:, None].transpose(2, 3), labels, lengths, torch.tensor([len(item[1]) for item in batch])


class _DeepSpeech(nn.Module):
    """Two convolutions, a bidirectional LSTM over packed or padded sequences, a projection."""

    def __init__(self, packed: bool, recurrent: str) -> None:
        super().__init__()
        self.packed = packed
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        kind = getattr(nn, recurrent)
        self.recurrent = kind(32 * _MELS // 2, 256, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(512)
        self.head = nn.Linear(512, _LETTERS)

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(features).flatten(1, 2).transpose(1, 2)
        if self.packed:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            x, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        else:
            x, _ = self.recurrent(x)
        return self.head(functional.gelu(self.norm(x)))


def _decoded(emission: torch.Tensor) -> list[list[int]]:
    """Greedy decoding: the best letters, repeats and blanks left out."""
    best = [torch.unique_consecutive(row).tolist() for row in emission.argmax(dim=-1).cpu()]
    return [[letter for letter in row if letter] for row in best]


def _train(packed: bool, recurrent: str = "LSTM", amp: bool = False, for_cudnn: bool = False) -> None:
    """``for_cudnn``: labels in one row, int32, lengths of the whole batch: what cuDNN's CTC takes."""
    torch.manual_seed(7)
    loader = torch.utils.data.DataLoader(_Utterances(40), batch_size=8, shuffle=True, collate_fn=_collate)
    held = torch.utils.data.DataLoader(_Utterances(8), batch_size=4, collate_fn=_collate)
    model = _DeepSpeech(packed, recurrent).to("cuda")
    criterion = nn.CTCLoss(blank=0, zero_infinity=True).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-4, steps_per_epoch=len(loader), epochs=1)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    model.train()
    for index, (features, labels, lengths, label_lengths) in enumerate(loader):
        features = features.to("cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=amp):
            emission = model(features, lengths)
        scores = functional.log_softmax(emission.float(), dim=2).transpose(0, 1)
        if for_cudnn:
            flat = torch.cat([row[:length] for row, length in zip(labels, label_lengths, strict=True)]).int()
            full = torch.full((scores.shape[1],), scores.shape[0], dtype=torch.int32, device="cuda")
            loss = criterion(scores, flat.to("cuda"), full, label_lengths.int().to("cuda"))
        else:
            loss = criterion(scores, labels.to("cuda"), lengths.to("cuda"), label_lengths.to("cuda"))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        print(index, loss.item())
    model.eval()
    letters = 0
    with torch.inference_mode():
        for features, labels, lengths, label_lengths in held:
            emission = functional.log_softmax(model(features.to("cuda"), lengths), dim=2)
            loss = criterion(emission.transpose(0, 1), labels.to("cuda"), lengths.to("cuda"), label_lengths.to("cuda"))
            letters += sum(map(len, _decoded(emission)))
            print("validation", loss.item())
    print(letters)


@program()
def ctc_lstm_padded() -> None:
    _train(packed=False)


@program()
def ctc_lstm_packed_amp() -> None:
    _train(packed=True, amp=True)


@program()
def ctc_gru_cudnn_loss() -> None:
    _train(packed=False, recurrent="GRU", for_cudnn=True)
