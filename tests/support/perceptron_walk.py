"""How much of the package a plain analysis walks through: a perceptron of one hidden layer, in a process of its own.

    python -m tests.support.perceptron_walk [CHECKOUT ...]

Counted are functions that are called, the files that they stand in, and rooms: a room is a folder of the package. The
walk goes over the files in the order in which they are first entered, so that no loop counts twice; a room is *entered
again* where the walk comes back to one that it had left. The first analysis of a process reads tables that later ones
find.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType


@dataclass(frozen=True)
class Walk:
    """Of one analysis: the files whose functions were called, below the package, sorted, how many functions, and how
    often a room was entered again."""

    files: list[str]
    functions: int
    entered_again: int

    @property
    def rooms(self) -> set[str]:
        """Folders of the package."""
        return {file.rpartition("/")[0] for file in self.files}


def walk(analyse: Callable[[], object], package: Path) -> Walk:
    """The walk of a call through the package in that folder."""
    folder, first_calls = f"{package}/", dict[tuple[str, int], None]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = event == "call" and bool(code.co_flags & inspect.CO_OPTIMIZED)  # no module, no class body
        if is_function and code.co_filename.startswith(folder):
            first_calls.setdefault((code.co_filename.removeprefix(folder), code.co_firstlineno))

    sys.setprofile(note)
    try:
        analyse()
    finally:
        sys.setprofile(None)
    files = dict.fromkeys(file for file, _ in first_calls)
    rooms = [file.rpartition("/")[0] for file in files]
    entered = rooms[:1] + [room for before, room in pairwise(rooms) if room != before]
    return Walk(sorted(files), len(first_calls), len(entered) - len(set(entered)))


def walks() -> list[Walk]:
    """Of the first and of the second analysis of this process."""
    import torch
    from torch import nn

    import graphmem

    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    package = Path(graphmem.__file__).parent
    return [walk(lambda: graphmem.analyze(Perceptron(), torch.zeros(32, 784)), package) for _ in range(2)]


def walks_of(checkout: str | Path) -> list[Walk]:
    """The same of a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--here"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Walk(**one) for one in json.loads(done.stdout)]


def main() -> None:
    """Print the figures of each checkout, of this one without any."""
    if sys.argv[1:] == ["--here"]:
        sys.path.insert(0, str(Path.cwd()))
        print(json.dumps([asdict(one) for one in walks()]))
        return
    for checkout in sys.argv[1:] or [str(Path(__file__).resolve().parents[2])]:
        for one, name in zip(walks_of(checkout), ("first", "second"), strict=True):
            figures = f"{len(one.files)} files, {one.functions} functions, {len(one.rooms)} rooms"
            print(f"{checkout} {name} analysis: {figures}, entered again {one.entered_again} times")


if __name__ == "__main__":
    main()
