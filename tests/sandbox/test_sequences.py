"""Random sequences of file operations: what the program sees in a sandbox is what it would really see."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphmem.sandbox import Permissions, Sandbox
from graphmem.sandbox.wrapped import Wrapped
from tests.sandbox import sequences
from tests.sandbox.test_operations import fly, really, sums
from tests.support.examples import examples

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


STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=12)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_wrapped_calls_see_what_is_really_there(steps: list[tuple[str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, copy = Path(name).resolve() / "real", Path(name).resolve() / "copy"
        for one in (folder, copy):
            prepare(one)
        before = sums(folder)
        right = sequences.carry_out_all(steps, str(copy))
        with Sandbox("wrapped", Wrapped(Permissions())).attempt(lambda: True):
            found = sequences.carry_out_all(steps, str(folder))
        assert sums(folder) == before
        assert found == right


@pytest.mark.parametrize("mechanism", ["namespace", "landlock"])
def test_random_sequences_of_operations(mechanism: str, tmp_path: Path) -> None:
    # One process for all of them, as a start takes a second.
    drawn = random.Random(24 if os.environ.get("CI") else None)
    seed = drawn.randrange(1 << 30)
    drawn = random.Random(seed)
    real, copy = tmp_path / "real", tmp_path / "copy"
    steps = []
    for number in range(int(os.environ.get("SEQUENCES", 30))):
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
