"""One row per compute capability, and nobody else who compares capabilities."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from graphmem.devices import all_devices, as_cuda, device_named
from graphmem.devices.capabilities import CAPABILITIES, limits_of, read_capabilities
from graphmem.errors import UsageError
from graphmem.units import KIB
from tests import places

PACKAGE = places.ROOT / "graphmem"
TREES = PACKAGE / "cudnn" / "predicted" / "plans"


def test_every_capability_of_the_table_of_cards_has_a_row() -> None:
    known = {device.compute_capability for device in all_devices()} - {None}
    assert known <= set(CAPABILITIES)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_a_row_is_possible(capability: tuple[int, int]) -> None:
    row = limits_of(capability)
    assert row.block_shared_bytes <= row.shared_bytes
    assert row.reserved_shared_bytes in (0, KIB)
    assert row.resident_blocks in (16, 24, 32)
    assert list(TREES.glob(f"{row.cudnn_trees}*"))


def test_every_row_says_what_it_stands_on() -> None:
    assert all(row.source for row in CAPABILITIES.values())


TABLE = (PACKAGE / "devices" / "capabilities.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("bfloat16 = false\n", "", r"compute capability 6\.0: .*missing .*'bfloat16'"),
        ("bfloat16 = false\n", "bfloat16 = 0\n", r"compute capability 6\.0: bfloat16 is 0"),
        ("bfloat16 = false\n", "bfloat16 = false\nfloat4 = true\n", r"compute capability 6\.0: .*'float4'"),
        ('"6.1"', '"6.0"', r"compute capability 6\.0 has two rows"),
        ("LARGE_WORKSPACE_ON_BLACKWELL", "NEVER_HEARD", r"compute capability 10\.0, 10\.3: .*'NEVER_HEARD'"),
        ("channels = 12", "chanels = 12", r"compute capability 7\.0: .*'chanels'"),
    ],
)
def test_a_mistake_in_the_table_is_named_with_its_row(line: str, instead: str, message: str) -> None:
    assert line in TABLE
    with pytest.raises(ValueError, match=message):
        read_capabilities(TABLE.replace(line, instead, 1))


def test_what_newer_cards_can_do_older_ones_cannot() -> None:
    """Along the table, what came with a generation stays."""
    rows = [CAPABILITIES[capability] for capability in sorted(CAPABILITIES)]
    for name in ("bfloat16", "triton", "cuda_13", "flash_attention", "efficient_attention", "tensorflow_system_bytes"):
        values = [getattr(row, name) for row in rows]
        assert values == sorted(values), name


@pytest.mark.parametrize(
    ("unknown", "known"), [((3, 7), (6, 0)), ((6, 2), (6, 1)), ((8, 8), (8, 7)), ((10, 1), (10, 0)), ((13, 0), (12, 1))]
)
def test_an_unknown_capability_is_taken_for_the_nearest_older_one(
    unknown: tuple[int, int], known: tuple[int, int]
) -> None:
    assert limits_of(unknown) == CAPABILITIES[known]


def test_a_card_that_is_no_cuda_card_has_no_limits_of_its_own() -> None:
    other = next(device for device in all_devices() if device.compute_capability is None)
    with pytest.raises(UsageError, match="is no CUDA card"):
        _ = other.limits
    cuda = as_cuda(other)
    assert (cuda.name, cuda.capacity_bytes) == (other.name, other.capacity_bytes)
    assert cuda.limits == device_named("H100").limits


def _names_a_capability(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("major", "minor") or "capability" in name


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.Set, ast.List)):
        return bool(node.elts) and all(_is_literal(element) for element in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _comparisons(path: Path) -> list[str]:
    return [
        f"{path.relative_to(places.ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for sides in [(node.left, *node.comparators)]
        if any(map(_names_a_capability, sides)) and any(map(_is_literal, sides))
    ]


def test_no_other_file_compares_capabilities_with_numbers() -> None:
    assert [found for path in sorted(PACKAGE.rglob("*.py")) for found in _comparisons(path)] == []


def test_such_a_comparison_would_be_seen(tmp_path: Path) -> None:
    source = tmp_path / "sample.py"
    source.write_text("a = card.capability[0] == 9\nb = (8, 0) <= capability\nc = major in (9, 10)\n")
    seen = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Compare)]
    assert all(
        any(map(_names_a_capability, (node.left, *node.comparators)))
        and any(map(_is_literal, (node.left, *node.comparators)))
        for node in seen
    )
    assert len(seen) == 3
