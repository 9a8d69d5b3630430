"""Pages of the docs are short, their links lead somewhere, and the files they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import places

ROOT = places.ROOT
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "models_zoo").glob("*.md"),
        *(
            page
            for folder in ("docs", "reports", "tests")
            for page in (ROOT / folder).rglob("*.md")
            if "venv" not in page.parts
        ),
    ]
)
#: A page is read in one sitting. The report of accuracy and the options are written by commands, to be looked up in.
MOST_LINES = 150
LONGER = {"reports/accuracy.md", "docs/OPTIONS.md"}
#: Folders whose files a page may name in full.
NAMED = re.compile(r"`((?:graphmem|tests|docs|models_zoo|reports|benchmarks)/[\w./-]+\.(?:py|md|json|toml|sh|gz))`")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if _name(page) not in LONGER], ids=_name)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{_name(page)} links to {link}"
        assert not anchor or anchor in _anchors(target), f"{_name(page)} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_named_files_are_there(page: Path) -> None:
    for named in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / named).exists(), f"{_name(page)} names {named}"


def test_every_page_of_the_docs_is_linked_from_another() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in _links(page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", link)
    }
    unlinked = [_name(page) for page in (ROOT / "docs").rglob("*.md") if page.resolve() not in linked]
    assert unlinked == []


def test_the_readme_sets_up_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^ {4}.*pip install", text, re.MULTILINE)) == 2
