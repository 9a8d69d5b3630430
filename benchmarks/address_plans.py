"""Address plans of minimalloc's instances: python benchmarks/address_plans.py FOLDER [seconds]

FOLDER holds the files of github.com/google/minimalloc, benchmarks/challenging (Apache-2.0): a row a buffer, with its
birth, death and bytes; the capacity is in the name of the file. Prints the height found, the lower bound, the height of
the best plan without a search, and seconds of processor time; every plan is checked for overlaps.
"""

from __future__ import annotations

import csv
import itertools
import sys
import time
from pathlib import Path

from graphmem.plan_memory import AddressPlan, offsets
from graphmem.trace import Trace, TraceBuilder


def trace_of(path: Path) -> Trace:
    """The buffers of a file; of one time, deaths come before births."""
    with path.open(newline="") as file:
        rows = [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]
    builder = TraceBuilder(path.name)
    operator = builder.operator("file")
    events = [(row[0], 1, number) for number, row in enumerate(rows)]
    events += [(row[1], 0, number) for number, row in enumerate(rows)]
    storages = {}
    for _, is_birth, number in sorted(events):
        if is_birth:
            storages[number] = builder.alloc(rows[number][2], operator)
        else:
            builder.free(storages[number], operator)
    return builder.build()


def check(trace: Trace, plan: AddressPlan) -> None:
    """Raise AssertionError if two storages overlap in time and addresses."""
    birth, death = trace.birth_of.tolist(), trace.death_of.tolist()
    spans = [(at, at + one.bytes) for at, one in zip(plan.addresses, trace.storages, strict=True) if at is not None]
    for one, other in itertools.combinations(range(len(spans)), 2):
        if birth[one] < death[other] and birth[other] < death[one]:
            assert spans[one][1] <= spans[other][0] or spans[other][1] <= spans[one][0], (one, other)


def main(folder: str, seconds: float = 60.0) -> None:
    """Plan every file and print a row for it."""
    paths = sorted(Path(folder).glob("*.*.csv"))
    for path in (paths[-1], *paths):  # once more for the first, as functions are compiled meanwhile
        trace, capacity = trace_of(path), int(path.suffixes[0][1:])
        start = time.process_time()
        plan = offsets(trace, alignment=1024, capacity=capacity, time_limit=seconds)
        spent = time.process_time() - start
        check(trace, plan)
        quick = offsets(trace, alignment=1024, time_limit=0)
        fits = "fits" if plan.fits else "does not fit"
        found = f"height {plan.height:9,} {fits:12} bound {plan.lower_bound:9,} in {spent:6.2f} s"
        print(f"{path.name:20} {found}; without a search {quick.height:9,} ({quick.by})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:3]))
