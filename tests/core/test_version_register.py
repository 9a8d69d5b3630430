"""The register of what changed between versions of PyTorch."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from graphmem.base import versions
from tests import places

PAGE = places.ROOT / "docs" / "modeling" / "versions.md"
SOURCES = sorted((places.ROOT / "graphmem").rglob("*.py"))


def test_a_change_holds_from_its_version_on() -> None:
    assert [versions.FUSED_RMS_NORM.holds((2, minor)) for minor in (8, 9, 10, 13)] == [False, True, True, True]


@pytest.mark.parametrize("change", versions.REGISTER.values(), ids=lambda change: change.what)
def test_every_change_lies_in_the_supported_range_and_names_its_source(change: versions.Since) -> None:
    assert versions.OLDEST < change.version <= versions.NEWEST
    assert change.source
    assert change.recorded or change.assumed


def test_rules_ask_for_every_change_and_for_no_other() -> None:
    asked = {
        node.attr
        for path in SOURCES
        if "from graphmem.base import versions" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "versions"
    }
    assert not {name for name in asked if not hasattr(versions, name)}
    own = re.findall(r'REGISTER\["(\w+)"\]', Path(versions.__file__).read_text(encoding="utf-8"))
    table = (places.ROOT / "graphmem" / "devices" / "capabilities.toml").read_text(encoding="utf-8")
    assert versions.REGISTER.keys() <= asked | {*own, *re.findall(r'large_workspace_since = "(\w+)"', table)}


def test_the_page_is_made_of_the_register() -> None:
    page = PAGE.read_text()
    assert versions.with_table(page) == page, "run python -m graphmem.base.versions docs/modeling/versions.md"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no <!-- register: begin -->"):
        versions.with_table("# Versions\n")


def test_the_oldest_and_the_newest_have_a_cudnn() -> None:
    assert min(versions.WHEEL_CUDNN) == versions.OLDEST
    assert max(versions.WHEEL_CUDNN) == versions.NEWEST
    assert versions.wheel_cudnn((2, 20)) == versions.wheel_cudnn(versions.NEWEST)


def _is_a_version(node: ast.expr) -> bool:
    if not isinstance(node, ast.Tuple) or len(node.elts) != 2:
        return False
    major, minor = node.elts
    if not (isinstance(major, ast.Constant) and isinstance(minor, ast.Constant)):
        return False
    return major.value in (1, 2) and isinstance(minor.value, int)


def test_no_other_file_compares_versions_with_numbers() -> None:
    """Comparisons of order with a pair such as (2, 13): what changed when is said in the register alone."""
    order = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    found = [
        f"{path.relative_to(places.ROOT)}:{node.lineno}"
        for path in SOURCES
        if path.name != "versions.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        and any(isinstance(op, order) for op in node.ops)
        and any(_is_a_version(side) for side in (node.left, *node.comparators))
    ]
    assert found == []
