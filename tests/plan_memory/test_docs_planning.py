"""The examples of docs/PLANNING_MEMORY.md run, and print what the page says."""

from __future__ import annotations

import re

import pytest

from tests.places import ROOT

PAGE = (ROOT / "docs" / "PLANNING_MEMORY.md").read_text(encoding="utf-8")
BLOCKS = [
    "\n".join(line[4:] for line in block.splitlines())
    for block in re.findall(r"(?:^(?:    .*)?\n)+", PAGE, re.MULTILINE)
]
EXAMPLES = [block.strip() for block in BLOCKS if "import " in block]


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(example.splitlines()) <= 40
    exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) >= 3
    for line in printed[:2]:
        assert line in PAGE


def test_there_are_examples_of_a_graph_and_of_a_search() -> None:
    assert len(EXAMPLES) == 2
