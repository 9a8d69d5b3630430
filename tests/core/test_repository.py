"""Files for those who find the repository: how it is cited, and what an issue asks for."""

from __future__ import annotations

from typing import Any

import pytest

import graphmem
from tests import places

yaml = pytest.importorskip("yaml")

_TEMPLATES = places.ROOT / ".github" / "ISSUE_TEMPLATE"
pytestmark = pytest.mark.skipif(not _TEMPLATES.exists(), reason="needs the checkout")


def _read(name: str) -> Any:
    return yaml.safe_load((places.ROOT / name).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = _read("CITATION.cff")
    assert citation["version"] == graphmem.__version__
    notes = (places.ROOT / "docs" / "releases" / f"{graphmem.__version__}.md").read_text(encoding="utf-8")
    assert f"Released {citation['date-released']}" in notes
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()


@pytest.mark.parametrize("name", ["wrong_figure", "error", "missing"])
def test_an_issue_asks_for_what_is_needed_to_answer_it(name: str) -> None:
    template = _read(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert template["name"]
    assert template["description"]
    fields = [part["id"] for part in template["body"]]
    assert len(set(fields)) == len(fields)
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in template["body"])
    assert any(part.get("validations", {}).get("required") for part in template["body"])
