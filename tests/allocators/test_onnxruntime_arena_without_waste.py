"""``max_dead_bytes_per_chunk:0`` beside the real arena: what it holds, and the request that ends its process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphmem.allocators.onnxruntime_arena import ArenaConfig, BFCArena
from graphmem.errors import UsageError
from tests import places
from tests.support.examples import examples

pytest.importorskip("onnxruntime")

#: One region for everything, so that no address decides.
REGION = 1 << 20
#: A request: bytes to take, or the number, from the end, of the request to give back.
Request = tuple[str, int]
_REAL = """
import json, os, sys
from tests.oracles.onnxruntime.record_arena import Arena
region = int(sys.argv[2])
arena = Arena({"max_dead_bytes_per_chunk": 0, "arena_extend_strategy": 0, "initial_chunk_size_bytes": region})
start, live = arena.statistics()["InUse"], []
for kind, number in json.loads(sys.argv[1]):
    if kind == "take":
        live.append(arena.alloc(number))
    elif live:
        arena.free(live.pop(number % len(live)))
    print(arena.statistics()["InUse"] - start, flush=True)
os._exit(0)
"""


def real(requests: list[Request]) -> tuple[list[int], bool]:
    """Bytes in use after each request, and whether the process lived through all of them."""
    command = [sys.executable, "-c", _REAL, json.dumps(requests), str(REGION)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=places.ROOT, check=False)
    return [int(line) for line in done.stdout.split()], done.returncode == 0


def predicted(requests: list[Request]) -> tuple[list[int], bool]:
    """The same of ours."""
    arena = BFCArena(ArenaConfig(max_dead_bytes_per_chunk=0, initial_chunk_size_bytes=REGION))
    live: list[int | None] = []
    held: list[int] = []
    for kind, number in requests:
        try:
            if kind == "take":
                live.append(arena.malloc(number))
            elif live:
                arena.free(live.pop(number % len(live)))
        except UsageError:
            return held, False
        held.append(arena.allocated_bytes)
    return held, True


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.one_of(
    st.tuples(st.just("take"), st.sampled_from((1, 200, 256, 512, 700, 1024, 4096))),
    st.tuples(st.just("give"), st.integers(0, 5)),
), min_size=4, max_size=24))  # fmt: skip
def test_it_holds_and_ends_where_the_real_one_does(requests: list[Request]) -> None:
    assert predicted(requests) == real(requests)


@pytest.mark.parametrize(
    ("requests", "lives"),
    [
        ([("take", 1000), ("take", 2000), ("give", 0), ("give", 0)], True),
        ([("take", REGION)], False),  # nothing lies behind it
        ([("take", 1000), ("take", 500), ("give", 0), ("take", 1000)], True),  # the second is lost, and stays
        ([("take", 1000), ("take", 500), ("give", 0), ("take", 1000), ("give", 0)], False),
    ],
)
def test_what_fits_exactly_costs_the_chunk_behind_it(requests: list[Request], lives: bool) -> None:
    assert predicted(requests) == real(requests)
    assert predicted(requests)[1] == lives
