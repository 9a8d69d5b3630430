"""How far the trees move peaks is measured with random networks, for every family, and told in reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from graphmem.answering import causes
from graphmem.units import MIB
from tests.oracles.cudnn.manifest import read_manifest
from tests.oracles.cudnn.networks import QUANTILES, SET_SIZE, SETS, Network, changes, draw_networks, peaks
from tests.oracles.cudnn.shapes import Shape

ROWS = json.loads((Path(causes.__file__).parent / "measured.json").read_text(encoding="utf-8"))["networks"]


def _layer(channels: int, filters: int) -> Shape:
    """1 MiB a channel of input and of output, and a filter of 4 bytes a pair."""
    return Shape.cube(
        dtype="fp32", dims=2, batch=4, channels=channels, filters=filters, side=256, taps=1, stride=1, padding=0,
        dilation=1, groups=1, last=0, tf32=1,
    )  # fmt: skip


def _none(place: int, direction: str) -> int:
    return 0


def test_a_step_keeps_its_outputs_and_a_sample_only_the_newest() -> None:
    layers, filters = (_layer(2, 3), _layer(3, 5), _layer(5, 1)), 3 * 512
    trained = peaks(Network(layers, trains=True, copies=0), _none).allocated
    # Before the middle filter's gradient is done: input, outputs but for the last, and gradients of either side.
    assert trained == (2 + 3 + 5 + 5 + 3) * MIB + filters + 2 * 512
    assert peaks(Network(layers, trains=False, copies=0), _none).allocated == (3 + 5) * MIB + filters
    # The last gradient, a copy of it that the normalization makes, and what that had kept.
    assert peaks(Network(layers[:1], trains=True, copies=1), _none).allocated == (2 + 3 + 3 + 3 + 3) * MIB + 512


@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
def test_a_workspace_moves_the_peak_in_its_direction(direction: str) -> None:
    network = Network((_layer(2, 3), _layer(3, 5)), trains=True, copies=0)

    def space(place: int, of: str) -> int:
        return 100 * MIB if (place, of) == (1, direction) else 0

    allocated, reserved = changes(network, space, _none)
    assert allocated > 4
    assert reserved > 4
    assert changes(network, space, space) == (0, 0)


def test_networks_are_the_same_in_every_run_and_in_no_two_sets() -> None:
    first, again, other = (list(draw_networks(name, 20)) for name in (SETS[0], SETS[0], SETS[1]))
    assert first == again
    assert not set(first) & set(other)


def test_every_family_has_a_row() -> None:
    assert [row[0] for row in ROWS] == sorted(read_manifest().families)
    for _, count, allocated, reserved in ROWS:
        assert 0.8 * len(SETS) * SET_SIZE <= count <= len(SETS) * SET_SIZE  # of Turing those without bfloat16
        for quantiles in (allocated, reserved):
            assert len(quantiles) == QUANTILES
            assert quantiles == sorted(quantiles)
            assert -1 < quantiles[0] <= 0 <= quantiles[-1]
