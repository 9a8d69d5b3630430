"""Private pools against recordings of PyTorch's own allocator: CUDA graphs and ``torch.cuda.MemPool``.

Recorded by ``python -m tests.recorded pools record`` (``pool_traces.py`` describes the events) with the CUDA build of
PyTorch 2.13.0 on the stub driver. After every event 15 columns of state are compared, and the checksum of the whole
heap: every segment with its pool, every block with its state.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import places
from tests.recorded.allocator.replayed import PoolRun, allocator_for, load

GOLDEN = places.PYTORCH / "allocator_pools"
RECORDINGS = sorted(GOLDEN.glob("*.json.gz"))


def _by_number(statistics: dict[str, int], numbers: dict[str, int]) -> dict[str, int]:
    """The recorded statistics with our numbers in place of PyTorch's identities of pools."""
    prefix = "reserved_bytes_by_private_pools."
    named = {}
    for key, value in statistics.items():
        if key.startswith(prefix):
            identity, _, rest = key.removeprefix(prefix).partition(".")
            key = f"{prefix}{numbers[identity]}.{rest}"
        named[key] = value
    return named


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_column_of_every_event(path: Path) -> None:
    recording = load(path)
    run = PoolRun(allocator_for(recording["config"]))
    expected = list(zip(*recording["columns"].values(), strict=True))
    for index, (event, wanted) in enumerate(zip(recording["ev"], expected, strict=True)):
        found = run.row(run.step(event))
        if found != wanted:
            differing = {n: (f, w) for n, f, w in zip(recording["columns"], found, wanted, strict=True) if f != w}
            pytest.fail(f"event {index} {event}: (ours, recorded) = {differing}")
    assert run.heap() == recording["snapshot"]
    statistics = run.allocator.memory_stats()
    wanted_statistics = _by_number(recording["peaks"] | recording["final"], recording["pool_ids"])
    assert {name: statistics.get(name) for name in wanted_statistics} == wanted_statistics
    assert run.allocator.driver.peak_used_bytes == recording["phys_peak"]
    messages = [message.split(" If reserved but unallocated")[0] for message in recording["oom_messages"]]
    assert run.messages[:3] == messages


def test_all_recordings_are_there() -> None:
    assert len(RECORDINGS) == 38
