"""Every golden has its recorder: ``python -m tests.recorded KIND record``. And no test looks outside the checkout."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest

from tests import places
from tests.recorded import kinds

FILES = sorted(str(path.relative_to(places.GOLDEN)) for path in places.GOLDEN.rglob("*") if path.is_file())
PATTERNS = {
    **{pattern: f"recorded by {name}" for name, kind in kinds.KINDS.items() for pattern in kind.goldens},
    **dict.fromkeys(kinds.WRITTEN_BY_TESTS, "written by tests"),
    **dict.fromkeys(kinds.PUBLISHED, "published"),
}


def test_a_golden_has_one_origin() -> None:
    """That which a kind of ``tests/recorded/kinds.py`` says."""
    origins = {file: [origin for pattern, origin in PATTERNS.items() if fnmatch(file, pattern)] for file in FILES}
    assert {file: found for file, found in origins.items() if len(found) != 1} == {}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_has_goldens(pattern: str) -> None:
    assert any(fnmatch(file, pattern) for file in FILES)


@pytest.mark.parametrize("name", kinds.KINDS)
def test_a_kind_can_be_recorded_compared_and_tabulated(name: str) -> None:
    pytest.importorskip("torch")
    kind = kinds.load(name)
    assert all(callable(getattr(kind, what)) for what in ("record", "table", "differ"))


def test_no_test_looks_outside_the_checkout() -> None:
    """Folders beside the checkout are named by options and variables, never assumed."""
    outside = re.compile(r"ROOT\.parent|ROOT / \"\.\.\"|parents\[[3-9]\]|Path\.home\(\)|\"~/|\.\./\.\./\.\.")
    found = [
        f"{path.relative_to(places.ROOT)}:{number}"
        for path in sorted((places.ROOT / "tests").rglob("*.py"))
        if "oracles" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if outside.search(line) and path.name != "test_recorders.py"
    ]
    assert found == []
