"""Apple's machines as cards, each chip with each size of memory that it is sold with (``apple.toml``).

``capacity_bytes`` is Metal's recommended working set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphmem.base.tables import read_table
from graphmem.units import MIB

#: Bytes that a process holds beside PyTorch's heaps.
OTHER_BYTES = 120 * MIB
_OTHER_SOURCE = "assumed: other allocations, 120 MiB in one out-of-memory message (Fooocus#980), 2 MiB to 141 GiB in 16"


def rows() -> Iterator[dict[str, Any]]:
    """Rows as those of ``table.json``. A chip without a size means its smallest memory."""
    table = read_table("graphmem.devices", "apple.toml")
    memories = {one["gigabytes"]: one for one in table["memory"]}
    for chip, sizes in table["chips"].items():
        for gigabytes in sizes:
            yield _row(chip, memories[gigabytes], is_smallest=gigabytes == sizes[0])


def other_sizes(name: str) -> str:
    """The machines of the same chip with other memories, as the end of a sentence; empty for those that have none."""
    found = [row["name"] for row in rows()]
    chip = name.rpartition("-")[0]
    others = [one for one in found if one.rpartition("-")[0] == chip and one != name]
    return f"; the chip is sold with more memory or less, too: --gpu {' or '.join(others)}" if others else ""


def _row(chip: str, memory: dict[str, Any], *, is_smallest: bool) -> dict[str, Any]:
    is_seen = chip in memory["seen"]
    return {
        "name": f"{chip}-{memory['gigabytes']}GB",
        "aliases": [chip] if is_smallest else [],
        "vendor": "Apple",
        "capacity_bytes": memory["bytes"],
        "capacity_source": memory["source"] if is_seen else f"assumed, not seen on this chip: {memory['source']}",
        "capacity_assumed": not is_seen,
        "compute_capability": None,
        "sm_count": 0,
        "max_threads_per_sm": 0,
        "context_bytes": OTHER_BYTES,
        "context_source": _OTHER_SOURCE,
        "unified_memory": True,
        "cublas_workspace_bytes": 0,
    }
