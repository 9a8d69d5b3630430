"""The gallery: every picture is what the command above it answers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from graphmem.cli import output
from graphmem.cli.main import cli
from tests import places
from tests.support.pictures import picture

_PAGE = places.ROOT / "docs" / "gallery.md"
_FOUND = re.findall(r"^    graphmem (.+)\n\n!\[.+\]\(gallery/(\w+)\.svg\)$", _PAGE.read_text("utf-8"), re.MULTILINE)
_COLUMNS = 100
#: Of several analyses: what their answers say is held by tests of the commands.
_SLOW = ("sweep", "tree")


@pytest.mark.parametrize(
    ("words", "name"),
    [pytest.param(words, name, id=name, marks=pytest.mark.slow if name in _SLOW else ()) for words, name in _FOUND],
)
def test_a_picture_is_the_answer(
    words: str, name: str, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(output, "width", lambda _: _COLUMNS)
    monkeypatch.setattr(output, "_shows_colours", lambda: True)
    result = CliRunner().invoke(cli, shlex.split(words), prog_name="graphmem", color=True)
    assert result.exit_code == 0, result.stderr
    title = f"graphmem {words.partition(' ')[0]}"
    golden(f"../../docs/gallery/{name}.svg", picture(result.stdout, title, name, _COLUMNS + 2))


def test_every_picture_is_on_the_page() -> None:
    assert {path.stem for path in (places.ROOT / "docs" / "gallery").glob("*.svg")} == {name for _, name in _FOUND}
