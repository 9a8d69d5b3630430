"""Recurrent networks on padded sequences, with what cuDNN asks for: algorithms, dropout, precisions, seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.recorded.cases.loops.networks import loss_of
from tests.recorded.cases.loops.registry import BF16, FP16, ITERATIONS, Loop, add, case, group

group("recurrent")

_STEPS, _BATCH, _WORDS = 35, 16, 500


class _Language(nn.Module):
    """Embedding, network, a score for every step."""

    def __init__(self, kind: Any, width: int, hidden: int, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, width)
        self.network = kind(width, hidden, **options)
        outputs = options.get("proj_size") or hidden
        self.head = nn.Linear(outputs * (2 if options.get("bidirectional") else 1), _WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.network(self.embedding(x))[0])


def _tokens(batch_first: bool = False) -> tuple[Tensor, Tensor]:
    shape = (_BATCH, _STEPS) if batch_first else (_STEPS, _BATCH)
    x, y = (torch.zeros(shape, dtype=torch.int64, device="cuda") for _ in range(2))
    return x, y


def _train(
    kind: Any,
    width: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    between: Callable[[], Any] = lambda: None,
    **options: Any,
) -> Loop:
    model = _Language(kind, width, hidden, **options).to("cuda", dtype)
    x, y = _tokens(bool(options.get("batch_first")))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(ITERATIONS):
        with torch.autocast("cuda", autocast) if autocast else contextlib.nullcontext():
            loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between()
    yield


_LAYERS = {"num_layers": 2, "dropout": 0.5}
_FORMS: dict[str, Callable[[], Loop]] = {
    # PyTorch's thresholds of its persistent algorithms: forward 384 and 192, backward 256 and 128 hidden values.
    "lstm_128": partial(_train, nn.LSTM, 128, 128),
    "lstm_160": partial(_train, nn.LSTM, 128, 160),
    "lstm_650": partial(_train, nn.LSTM, 650, 650, **_LAYERS),
    "lstm_layers_and_directions": partial(_train, nn.LSTM, 96, 192, bidirectional=True, batch_first=True, **_LAYERS),
    "lstm_projected": partial(_train, nn.LSTM, 128, 256, proj_size=64, **_LAYERS),
    "lstm_without_bias": partial(_train, nn.LSTM, 128, 256, bias=False),
    "lstm_double": partial(_train, nn.LSTM, 64, 96, torch.float64),
    "lstm_bfloat16": partial(_train, nn.LSTM, 128, 256, BF16),
    "lstm_half_persistent": partial(_train, nn.LSTM, 512, 512, FP16),
    "lstm_autocast_bf16": partial(_train, nn.LSTM, 128, 256, autocast=BF16, **_LAYERS),
    "lstm_autocast_fp16": partial(_train, nn.LSTM, 128, 256, autocast=FP16, num_layers=2),
    "lstm_seeded_between": partial(_train, nn.LSTM, 128, 256, between=lambda: torch.manual_seed(1), **_LAYERS),
    "lstm_device_seeded_between": partial(
        _train, nn.LSTM, 128, 256, between=lambda: torch.cuda.manual_seed_all(1), **_LAYERS
    ),
    "gru_150": partial(_train, nn.GRU, 128, 150, num_layers=3),
    "gru_512": partial(_train, nn.GRU, 300, 512, bidirectional=True),
    "rnn_300": partial(_train, nn.RNN, 128, 300, num_layers=2, nonlinearity="relu"),
    "rnn_400_half": partial(_train, nn.RNN, 128, 400, FP16),
}
for _name, _run in _FORMS.items():
    add(f"recurrent_{_name}", _run)


@case("recurrent_evaluated_and_trained")
def _evaluated() -> Loop:
    model = _Language(nn.LSTM, 128, 256, **_LAYERS).cuda()
    x, y = _tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(ITERATIONS):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        model.train()
    yield


@case("recurrent_truncated")
def _truncated() -> Loop:
    """The states of one part of the text are those that the next one begins with."""
    model = _Language(nn.LSTM, 128, 256, num_layers=2).cuda()
    x, y = _tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    states: Any = None
    for _ in range(ITERATIONS):
        output, states = model.network(model.embedding(x), states)
        states = tuple(state.detach() for state in states)
        loss_of(model.head(output), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("recurrent_checkpointed")
def _checkpointed() -> Loop:
    """What is computed again draws the same numbers: the device's generator is put back, and cuDNN's made anew."""
    model = _Language(nn.GRU, 128, 256, **_LAYERS).cuda()
    x, y = _tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(ITERATIONS):
        output = checkpoint(model.network, model.embedding(x), use_reentrant=False)[0]
        loss_of(model.head(output), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("recurrent_encoder_and_decoder")
def _encoder_and_decoder() -> Loop:
    """The decoder takes one step at a time, from its own words."""
    encoder, decoder = nn.GRU(128, 256, bidirectional=True).cuda(), nn.GRU(128, 512).cuda()
    embedding, head = nn.Embedding(_WORDS, 128).cuda(), nn.Linear(512, _WORDS).cuda()
    modules = nn.ModuleList([encoder, decoder, embedding, head])
    x, y = _tokens()
    optimizer = torch.optim.Adam(modules.parameters())
    for _ in range(ITERATIONS):
        _, hidden = encoder(embedding(x))
        state = torch.cat((hidden[0], hidden[1]), 1).unsqueeze(0)
        words, scores = x[:1], []
        for _ in range(5):
            output, state = decoder(embedding(words), state)
            scores.append(head(output))
            words = scores[-1].argmax(-1)
        loss_of(torch.cat(scores), y[:5]).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield


@case("recurrent_input_alone_learns")
def _input_alone() -> Loop:
    """Weights that learn nothing: cuDNN is not asked for their gradients."""
    model = _Language(nn.LSTM, 128, 256).cuda()
    for parameter in model.network.parameters():
        parameter.requires_grad_(False)
    x, y = _tokens()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _ in range(ITERATIONS):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield
