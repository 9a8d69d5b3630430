"""What Python and a notebook show of answers that are several analyses."""

from typing import Any

import pytest
import torch
from torch import nn

import graphmem

MODEL, INPUTS = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.zeros(4, 64)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return {
        "fit": graphmem.fit(MODEL, INPUTS, device="T4", at_most=4),
        "sweep": graphmem.sweep(MODEL, INPUTS, vary={"batch": [8], "device": ["T4", "A10G"]}),
        "advise": graphmem.advise(MODEL, INPUTS, device="T4"),
        "serve": graphmem.serve("meta-llama/Llama-3.1-8B", gpu="RTX-4090", advice=False),
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fit", "The largest batch that fits is 4."),
        ("sweep", "fits A10G-24GB"),
        ("advise", "as it is"),
        ("serve", "DOES NOT START"),
    ],
)
def test_an_answer_prints_as_its_command_does(answers: dict[str, Any], name: str, said: str) -> None:
    found = answers[name]
    assert said in str(found)
    if name != "sweep":  # a list, which Python shows as such
        assert len(repr(found)) < 120
    bundle = found._repr_mimebundle_()
    html = bundle["text/html"]
    assert html.startswith('<div class="graphmem">')
    assert "<table>" in html
    assert bundle["text/markdown"].startswith("# ")
    assert "graphmem.planning" not in html


def test_options_are_called_as_people_write_them(answers: dict[str, Any]) -> None:
    assert str(answers["sweep"]).splitlines()[2].split()[:2] == ["batch", "gpu"]
    assert isinstance(answers["sweep"], list)


def test_a_long_analysis_tells_which_part_it_is_in() -> None:
    said: list[str] = []
    graphmem.sweep(MODEL, INPUTS, vary={"batch": [1, 8]}, device="T4", say=said.append)
    assert any(one.startswith("1 of 2, batch 1: iteration 1 forward, ") for one in said)
    assert any(one.startswith("2 of 2, batch 8: iteration 3 ") for one in said)
    graphmem.fit(MODEL, INPUTS, device="T4", at_most=1, say=said.append)
    assert any(one.startswith("batch 1: iteration 2 backward, ") for one in said)
