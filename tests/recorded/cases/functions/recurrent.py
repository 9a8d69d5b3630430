"""Cells of recurrent networks; whole networks have a kind of their own."""

from __future__ import annotations

from torch import nn

from tests.recorded.cases.functions.registry import group, module, t

group("recurrent")
module("lstm_cell", lambda: nn.LSTMCell(64, 128), t(32, 64))
module("gru_cell", lambda: nn.GRUCell(64, 128), t(32, 64), t(32, 128))
module("gru_cell_many_rows", lambda: nn.GRUCell(64, 128), t(4096, 64), t(4096, 128))
module("lstm_cell_many_rows", lambda: nn.LSTMCell(64, 128), t(4096, 64))
