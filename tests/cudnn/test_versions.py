"""A newer cuDNN against an older one, of which GRAPHMEM_CUDNN and GRAPHMEM_CUDNN_NEWER name the libraries."""

from __future__ import annotations

import os
from itertools import product

import pytest

from graphmem.cudnn.library import Cudnn
from graphmem.cudnn.plans import Convolution
from graphmem.cudnn.recurrent import GRU, LSTM, STANDARD, Network
from graphmem.devices import device_named

_LIBRARIES = tuple(os.environ.get(name, "") for name in ("GRAPHMEM_CUDNN", "GRAPHMEM_CUDNN_NEWER"))
pytestmark = pytest.mark.skipif(not all(_LIBRARIES), reason="GRAPHMEM_CUDNN and GRAPHMEM_CUDNN_NEWER name two cuDNNs")

NETWORKS = [
    Network(mode, STANDARD, "float32", steps, batch, inputs, hidden, 0, layers, directions)
    for mode, (steps, batch, inputs, hidden, layers, directions) in product(
        (LSTM, GRU),
        ((64, 64, 256, 512, 1, 1), (96, 64, 64, 256, 1, 1), (20, 16, 32, 128, 2, 2), (64, 64, 512, 512, 1, 1)),
    )
]


@pytest.mark.parametrize("card", ["H200-141GB", "A100-80GB", "T4"])
def test_recurrent_networks_ask_for_the_same(card: str) -> None:
    with Cudnn(_LIBRARIES[0], device_named(card)) as older, Cudnn(_LIBRARIES[1], device_named(card)) as newer:
        for network in NETWORKS:
            spaces = newer.recurrent_spaces(network, True)
            assert spaces is not None
            assert spaces == older.recurrent_spaces(network, True), network


def test_convolutions_are_planned_by_both() -> None:
    card, equal, asked = device_named("H200-141GB"), 0, 0
    with Cudnn(_LIBRARIES[0], card) as older, Cudnn(_LIBRARIES[1], card) as newer:
        for dtype, direction in product(("float32", "float16"), ("forward", "backward data", "backward weight")):
            one = Convolution(
                direction, dtype, (32, 64, 64, 64), (64, 64, 3, 3), (32, 64, 64, 64), (1, 1), (1, 1), (1, 1), False
            )
            sizes = newer.workspaces(one), older.workspaces(one)
            assert all(sizes)
            asked += 1
            equal += sizes[0] is not None and sizes[1] is not None and abs(sizes[0][0] - sizes[1][0]) <= 256
    assert equal == asked
