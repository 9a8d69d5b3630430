"""Asks the real cuDNN about random convolutions, and keeps the answers.

    python -m tests.oracles.cudnn.ask ASK_PLANS CARD SEED COUNT [all] > answers.txt

``ASK_PLANS`` is the compiled ``ask_plans.cpp``, ``CARD`` a name of ``devices.json``. Every line is a question, the
plan that cuDNN puts first, and with ``all`` the plan of the largest workspace, in the words of ``ask_plans.cpp``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.oracles.cudnn.shapes import Shape, draw

DEVICES = Path(__file__).parent / "devices.json"
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")
_AT_ONCE = 300


def ask(program: str, card: str, questions: list[str], largest: bool = False) -> list[list[str]]:
    """The first plan of every question, or the first and the largest; ``none`` where cuDNN has no plan."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as device:
        json.dump(json.loads(DEVICES.read_text())[card], device)
        device.flush()
        command = [program, device.name, *(["all"] if largest else [])]
        answers = subprocess.run(command, input="\n".join(questions) + "\n", capture_output=True, text=True, check=True)
    plans = [line.split(" ; ") for line in answers.stdout.splitlines()]
    return [[names[0], max(names, key=_bytes)] if largest else names for names in plans]


def _bytes(plan: str) -> int:
    first = plan.split()[0]
    return -1 if first == "none" else int(first)


def lines(program: str, card: str, shapes: list[Shape], largest: bool) -> Iterator[str]:
    """Questions with their answers, for every direction."""
    questions = [shape.question(direction) for shape in shapes for direction in DIRECTIONS]
    for question, plans in zip(questions, ask(program, card, questions, largest), strict=True):
        yield " ; ".join([question, *plans])


def main() -> None:
    program, card, seed, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    pick = random.Random(f"{card} {seed}")
    for start in range(0, count, _AT_ONCE):
        shapes = [draw(pick) for _ in range(min(_AT_ONCE, count - start))]
        for line in lines(program, card, shapes, "all" in sys.argv[5:]):
            print(line)


if __name__ == "__main__":
    main()
