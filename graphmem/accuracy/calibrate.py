"""The memory that a process holds on this machine's card outside PyTorch's allocator, and cuBLAS's workspace, measured
as a card of the user's own."""

from __future__ import annotations

import datetime
from typing import Any

from graphmem.accuracy.measure import Plan, ask
from graphmem.devices import device_named
from graphmem.errors import UsageError


def calibrate(plan: Plan) -> dict[str, Any]:
    """Measure the card in a fresh process; returns the row for the user's table. Raises :class:`UsageError`."""
    answer = ask({"case": None, "calibrate": True}, plan)
    machine, found = answer["machine"], answer["calibration"]
    versions = machine["versions"]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    with_what = f"PyTorch {versions['torch']}, CUDA {versions['cuda']}, driver {versions['driver'] or 'unknown'}"
    return {
        "name": _known_name(machine["gpu"]),
        "aliases": [machine["gpu"]],
        "vendor": "NVIDIA",
        "capacity_bytes": machine["total_bytes"],
        "capacity_source": f"measured by graphmem calibrate, {today}",
        "compute_capability": machine["capability"],
        "sm_count": machine["sm_count"],
        "max_threads_per_sm": machine["threads_per_sm"],
        "context_bytes": found["context_bytes"],
        "context_source": f"measured by graphmem calibrate, {today}, {with_what}, by {found['meter']}",
        "context_measured": True,
        "cublas_workspace_bytes": found["cublas_workspace_bytes"],
    }


def _known_name(gpu: str) -> str:
    """The table's name of the card, so that the measured one takes its place; else what the driver calls it."""
    try:
        return device_named(gpu).name
    except UsageError:
        return gpu
