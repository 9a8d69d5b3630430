"""XLA's address plans beside those of graphmem: python benchmarks/xla_plans.py FOLDER ...

Each FOLDER is one that a jitted step was compiled into, with XLA_FLAGS="--xla_dump_to=FOLDER --xla_dump_hlo_as_text".
The values of XLA's temporary block are planned anew within the live ranges that XLA writes down; values at one place
whose lives meet are one buffer. Prints both heights and the lower bound, in bytes; steps with values of which no life
is written (bodies of loops) are left out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from graphmem.plan_memory import Buffer, Graph, Node, offsets

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)$")
_VALUE = re.compile(r" value: <\d+ (.+?) @\d+> \(size=(\d+),offset=(\d+)\)")
_RANGE = re.compile(r"    (.+?\{[\d,]*\}):(\d+)-(\d+)$")


def temporary(text: str) -> tuple[int, dict[str, tuple[int, int]]]:
    """The height of the temporary block, and offset and bytes of each value in it."""
    height, values, inside = 0, {}, False
    for line in text.partition("Total bytes used")[0].splitlines():
        if found := _ALLOCATION.match(line):
            inside = "preallocated-temp" in found[2]
            height = int(found[1]) if inside else height
        elif inside and (value := _VALUE.match(line)):
            name = value[1] if value[1].endswith("}") else f"{value[1]}{{}}"
            values[name] = int(value[3]), int(value[2])
    return height, values


def planned(values: dict[str, tuple[int, int]], ranges: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """The height of our plan, and its lower bound."""
    lives: list[list[int]] = []  # bytes, first and last moment
    last: dict[tuple[int, int], list[int]] = {}
    for name in sorted(values, key=lambda name: ranges[name]):
        place, (begin, end) = values[name], ranges[name]
        if place in last and begin <= last[place][2]:
            last[place][2] = max(last[place][2], end)
        else:
            last[place] = [place[1], begin, end]
            lives.append(last[place])
    moments = 1 + max(end for _, _, end in lives)
    nodes = [
        Node(
            f"{moment}",
            reads=tuple(n for n, (_, begin, end) in enumerate(lives) if begin < moment == end),
            makes=tuple(n for n, (_, begin, _) in enumerate(lives) if begin == moment),
        )
        for moment in range(moments)
    ]
    graph = Graph(tuple(nodes), tuple(Buffer(f"b{number}", size) for number, (size, _, _) in enumerate(lives)))
    plan = offsets(graph, order=range(moments), alignment=256)
    return plan.height, plan.lower_bound


def main(folders: list[str]) -> None:
    """Plan every step of the folders and print a row for it."""
    for path in sorted(
        found for folder in folders for found in Path(folder).glob("*after_optimizations-live-range.txt")
    ):
        lines = path.read_text().partition("BufferLiveRange:")[2].splitlines()
        ranges = {found[1]: (int(found[2]), int(found[3])) for found in map(_RANGE.match, lines) if found}
        height, values = temporary(Path(str(path).replace("live-range", "buffer-assignment")).read_text())
        if not values or not values.keys() <= ranges.keys():
            print(f"{path.parent.name}: {len(values.keys() - ranges.keys())} of {len(values)} values without a life")
            continue
        ours, bound = planned(values, ranges)
        print(f"{path.parent.name}: {len(values)} values, XLA {height:,}, ours {ours:,}, lower bound {bound:,}")


if __name__ == "__main__":
    main(sys.argv[1:])
