"""Random sequences of file operations: what the program sees in a sandbox is what it would really see."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from graphmem.sandbox import MECHANISMS
from tests.sandbox import sequences
from tests.sandbox.test_operations import fly, really, sums

PROGRAM = Path(sequences.__file__)
KINDS = (
    "write", "append", "update", "read", "list", "stat", "chmod", "rename", "rename", "replace", "link", "symlink",
    "copytree", "copy2", "move", "rmtree", "mkdir", "makedirs", "rmdir", "remove", "unlink", "removedirs",
)  # fmt: skip
NAMES = ("a", "b", "d", "e", "l", "k", "d/a", "d/x", "d/s", "d/s/y", "e/a", "l/x", "d/s/n", "d/../b", "new")


def prepare(folder: Path) -> None:
    (folder / "d" / "s").mkdir(parents=True)
    (folder / "e").mkdir()
    for name in ("a", "b", "d/x", "d/s/y"):
        (folder / name).write_text(f"real {name}")
    (folder / "l").symlink_to("d")
    (folder / "k").symlink_to("a")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_random_sequences_of_operations(mechanism: str, tmp_path: Path) -> None:
    # One process for all, as a start takes a second: drawn here, and smaller failures are found by the number printed.
    drawn = random.Random(24 if os.environ.get("CI") else None)
    seed = drawn.randrange(1 << 30)
    drawn = random.Random(seed)
    real, copy = tmp_path / "real", tmp_path / "copy"
    steps = []
    for number in range(int(os.environ.get("SEQUENCES", 60))):
        prepare(real / "folders" / str(number))
        length = drawn.randint(1, 12)
        steps.append([[drawn.choice(KINDS), drawn.choice(NAMES), drawn.choice(NAMES)] for _ in range(length)])
    (real / "steps.json").write_text(json.dumps(steps))
    shutil.copytree(real, copy, symlinks=True)
    before = sums(real)
    expected = [json.loads(line) for line in really(PROGRAM, copy).splitlines()]
    printed, _ = fly(mechanism, PROGRAM, real)
    assert sums(real) == before
    for number, (line, right) in enumerate(zip(printed.splitlines(), expected, strict=True)):
        found = json.loads(line)
        for step, here, there in zip(steps[number], found[0], right[0], strict=True):
            assert here == there, (seed, number, steps[number], step)
        assert found[1] == right[1], (seed, number, steps[number])
