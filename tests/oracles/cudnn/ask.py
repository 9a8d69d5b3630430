"""Asks the real cuDNN about random convolutions, and keeps the answers.

    python -m tests.oracles.cudnn.ask ASK_PLANS CARD SEED COUNT [--all] [--kind depthwise] > CARD_SEED.txt

``ASK_PLANS`` is the compiled ``ask_plans.cpp``, ``CARD`` a name of ``devices.json``. Every line is a question, the
plan that cuDNN puts first, and with ``--all`` the plan of the largest workspace, in the words of ``ask_plans.cpp``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.oracles.cudnn.shapes import KINDS, Shape, draw

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
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.cudnn.ask", description=__doc__)
    parser.add_argument("program")
    parser.add_argument("card")
    parser.add_argument("seed")
    parser.add_argument("count", type=int)
    parser.add_argument("--all", action="store_true", help="also the plan of the largest workspace")
    parser.add_argument("--kind", choices=KINDS, help="only layers of this kind")
    options = parser.parse_args()
    pick = random.Random(f"{options.card} {options.seed} {options.kind}")
    for start in range(0, options.count, _AT_ONCE):
        shapes = [draw(pick, options.kind) for _ in range(min(_AT_ONCE, options.count - start))]
        for line in lines(options.program, options.card, shapes, options.all):
            print(line)


if __name__ == "__main__":
    main()
