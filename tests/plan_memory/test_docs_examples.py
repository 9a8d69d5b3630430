"""The examples of docs/REMATERIALISATION.md run, and print what they say."""

from __future__ import annotations

import re
import sys
import types

import pytest

pytest.importorskip("torch")

from tests.places import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")


def _blocks() -> list[str]:
    text = (ROOT / "docs" / "REMATERIALISATION.md").read_text()
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", text, re.MULTILINE)
    return ["\n".join(line[4:] for line in block.splitlines()).strip() for block in blocks if block.strip()]


def _examples() -> list[str]:
    return [block for block in _blocks() if "import " in block]


@pytest.mark.parametrize(
    ("number", "printed"),
    [(0, "<- peak"), (1, "needs more than 1048576 bytes: peak "), (2, " nodes run again, ")],
)
def test_example_runs(
    number: int, printed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = _examples()
    assert len(examples) == 3
    assert len(examples[number].strip().splitlines()) <= 40
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # Dynamo looks for it
    exec(examples[number], vars(module))
    found = capsys.readouterr().out
    assert printed in found
    if number == 0:
        assert [line.rstrip() for line in found.splitlines()] == _blocks()[1].splitlines()
