"""TensorFlow's allocator against recordings of 2.21's own: random traces over a pretended device, and Keras runs."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from graphmem.allocators.tensorflow_bfc import BFCOptions, TensorFlowBFC
from graphmem.errors import DeviceOutOfMemory
from graphmem.units import MIB
from tests import places

GOLDEN = places.TENSORFLOW


def golden_cases(name: str) -> list[dict[str, Any]]:
    with gzip.open(GOLDEN / name, "rt") as file:
        cases: list[dict[str, Any]] = json.load(file)["cases"]
    return cases


class PretendedDevice:
    """The device of the recordings: as many bytes as it has, one after the other with a gap, never used again."""

    def __init__(self, capacity: int, gap: int) -> None:
        self.room, self.gap, self.next = capacity, gap, 0
        self.sizes: dict[int, int] = {}
        self.events: list[list[Any]] = []

    def alloc(self, size: int) -> int | None:
        if size > self.room:
            self.events.append(["fail", size])
            return None
        address = self.next
        self.room -= size
        self.next += size + self.gap
        self.sizes[address] = size
        self.events.append(["region", size, address])
        return address

    def free(self, address: int) -> None:
        size = self.sizes.pop(address)
        self.room += size
        self.events.append(["release", size, address])


def allocator_of(config: dict[str, Any]) -> tuple[TensorFlowBFC, PretendedDevice]:
    device = PretendedDevice(config["cap"], config["gap"])
    options = BFCOptions(bool(config["ag"]), bool(config["gc"]), config["ff"], bool(config["co"]))
    return TensorFlowBFC(config["limit"], options, driver_alloc=device.alloc, driver_free=device.free), device


def trace_mismatches(case: dict[str, Any]) -> list[str]:
    """Every difference in address, chunk, statistics and calls of the device, as text."""
    allocator, device = allocator_of(case["config"])
    addresses: dict[int, int | None] = {}
    sizes: dict[int, int] = {}
    found = []
    for number, (operation, expected) in enumerate(zip(case["ops"], case["expect"], strict=True)):
        device.events = []
        if operation[0] == "a":
            before = allocator.allocated_bytes
            try:
                address = allocator.malloc(operation[2])
            except DeviceOutOfMemory:
                address = None
            addresses[operation[1]] = address
            sizes[operation[1]] = allocator.allocated_bytes - before
            head: list[Any] = [-1 if address is None else address, sizes[operation[1]]]
        else:
            allocator.free(addresses.pop(operation[1], None))
            head = [None, None]
        stats = allocator.stats()
        columns = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "peak_pool_bytes")
        got = [*head, *(stats[column] for column in columns), device.events]
        if got != expected:
            found.append(f"op {number} {operation}: {got} != {expected}")
    return found


TRACES = golden_cases("tf_bfc_traces.json.gz")


@pytest.mark.parametrize("case", TRACES, ids=lambda c: f"{c['profile']}-{c['config']}")
def test_every_column_of_every_operation(case: dict[str, Any]) -> None:
    assert trace_mismatches(case) == []


def test_the_comparison_of_traces_can_fail() -> None:
    case = next(case for case in TRACES if case["config"]["ag"])
    assert trace_mismatches({**case, "config": {**case["config"], "ag": 0}}) != []


class RecordedAddresses:
    """Gives each new region the address at which the recording first used it."""

    def __init__(self) -> None:
        self.address = 0

    def alloc(self, size: int) -> int:
        return self.address


def keras_mismatches(case: dict[str, Any]) -> list[str]:
    """Every allocation whose chunk or address differs, and every mark whose statistics do, as text.

    A region's address is not recorded; it is the address of the first chunk in it, since a fresh region is handed out
    from its beginning.
    """
    device = RecordedAddresses()
    options = BFCOptions(allow_growth=True, garbage_collection=False)  # those of the CPU allocator of the recording
    allocator = TensorFlowBFC(65536 * MIB, options, driver_alloc=device.alloc)
    result = case["result"]
    marks = {mark[0]: mark[1:] for mark in result["marks"]}
    addresses: dict[int, int | None] = {}
    found = []
    for number, event in enumerate(result["events"]):
        if event[0] == "a":
            _, identifier, requested, chunk, device.address, _ = event
            before = allocator.allocated_bytes
            address = allocator.malloc(requested)
            addresses[identifier] = address
            if (address or 0, allocator.allocated_bytes - before) != (device.address, chunk):
                found.append(f"event {number} {event}: {address}")
        elif event[0] == "f":
            allocator.free(addresses.pop(event[1], None))
        elif any(marks[event[1]]) and marks[event[1]] != _statistics(allocator):
            found.append(f"mark {event[1]}: {_statistics(allocator)} != {marks[event[1]]}")
    return found


def _statistics(allocator: TensorFlowBFC) -> list[int]:
    columns = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "peak_pool_bytes", "num_allocs", "largest_alloc_size")
    stats = allocator.stats()
    return [stats[column] for column in columns]


@pytest.mark.parametrize("case", golden_cases("tf_train.json.gz"), ids=lambda c: str(c["case"]))
def test_keras_runs_give_every_address_and_every_statistic(case: dict[str, Any]) -> None:
    assert keras_mismatches(case) == []


def test_the_comparison_of_runs_can_fail() -> None:
    case = golden_cases("tf_train.json.gz")[0]
    case["result"]["events"][12][2] += 256
    assert keras_mismatches(case) != []
