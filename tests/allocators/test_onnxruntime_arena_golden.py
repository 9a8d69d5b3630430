"""The arena against recordings of ONNX Runtime 1.31.1's own, made through its C API: every column of every row."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from graphmem.allocators.onnxruntime_arena import ArenaConfig, BFCArena, ExtendStrategy
from graphmem.errors import DeviceOutOfMemory
from tests import places

GOLDEN = places.ONNXRUNTIME / "ort_arena_traces.json.gz"
COLUMNS = ("InUse", "MaxInUse", "TotalAllocated", "NumAllocs", "NumReserves", "NumArenaExtensions", "RequestedInUse",
           "MaxAllocSize")  # fmt: skip


def golden_cases() -> list[dict[str, Any]]:
    with gzip.open(GOLDEN, "rt") as file:
        cases: list[dict[str, Any]] = json.load(file)["cases"]
    return cases


class RecordedDriver:
    """Hands out the addresses that the real device allocator gave, in order, and keeps what was asked."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.asked: list[int] = []

    def alloc(self, size: int) -> int:
        self.asked.append(size)
        return self.addresses.pop(0)


def config_of(recorded: dict[str, int]) -> ArenaConfig:
    options: dict[str, Any] = dict(recorded)
    if "arena_extend_strategy" in options:
        options["arena_extend_strategy"] = ExtendStrategy(options["arena_extend_strategy"])
    return ArenaConfig(**options)


def mismatches(case: dict[str, Any]) -> list[str]:
    """Every difference between the arena and the recording, as text."""
    driver = RecordedDriver()
    arena = BFCArena(config_of(case["config"]), driver_alloc=driver.alloc)
    driver.addresses.append(1)  # the session's own 24-byte initializer, whose address was not recorded
    arena.reserve(24)
    stats = arena.stats()
    found = [f"start {k}: {stats[k]} != {v}" for k, v in case["start"].items() if stats[k] != v]
    handles: dict[int, int | None] = {}
    for number, (operation, row) in enumerate(zip(case["ops"], case["expect"], strict=True)):
        kind, identifier, *rest = operation
        address, columns, regions, error = row[0], row[1:9], row[9], row[10]
        driver.asked, driver.addresses = [], [base for _, base in regions] or [address]
        result: int | None = None
        message = None
        try:
            if kind == "f":
                arena.free(handles.pop(identifier, None))  # what failed is freed as a null pointer
            else:
                result = handles[identifier] = (arena.malloc if kind == "a" else arena.reserve)(rest[0])
        except DeviceOutOfMemory as failure:
            result, message = -1, f"{failure}\n"
        stats = arena.stats()
        got = [result, *(stats[name] for name in COLUMNS), message]
        if got != [address, *columns, error]:
            found.append(f"op {number} {operation}: {got} != {[address, *columns, error]}")
        wanted = [size for size, _ in regions] if kind != "R" else [size for size in rest if size]
        if driver.asked != wanted:
            found.append(f"op {number} {operation}: asked the device for {driver.asked}, not {wanted}")
    return found


@pytest.mark.parametrize("case", golden_cases(), ids=lambda c: f"{c['profile']}-{c['config']}")
def test_every_column_of_every_operation(case: dict[str, Any]) -> None:
    assert mismatches(case) == []


def test_the_comparison_can_fail() -> None:
    case = golden_cases()[0]
    case["expect"][7][3] += 256
    assert mismatches(case) != []
