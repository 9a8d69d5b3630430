"""Grows ``graphmem/capture/kernels/cudnn_plans/hopper.txt`` from answers of the real cuDNN to random convolutions.

    python -m tests.oracles.cudnn.grow_trees ASK_PLANS COUNT > hopper.txt

``ASK_PLANS`` is the compiled ``ask_plans.cpp``; ``COUNT`` convolutions of every kind are asked for. The committed file
came from 197,000 convolutions, drawn in several rounds from such distributions, most with the widths and sides
that image models have. Needs scikit-learn, which nothing else here does. Shapes that the goldens hold are left out, so
that the goldens test what was not learnt.
"""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphmem.capture.kernels.cudnn_choice import TILES, Branch, Leaf, features, render, section
from graphmem.capture.kernels.cudnn_problem import Direction, Problem
from graphmem.capture.kernels.cudnn_workspaces import workspace_bytes

FOLDER = Path(__file__).parent
GOLDENS = FOLDER.parent.parent / "golden" / "pytorch" / "ops"
SM_COUNT = 132
DIRECTIONS = {"fwd": Direction.FORWARD, "bwd_data": Direction.BACKWARD_DATA, "bwd_weight": Direction.BACKWARD_WEIGHT}
#: Engines with stream-K (knob 25, workspace, is 0 where it may take one), and tiles by the value of knob 2.
STREAM_K = {62, 65, 67, 68, 71}
TILE_KNOB = {
    0: (128, 128), 1: (128, 64), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256), 7: (64, 128), 9: (64, 256),
    18: (64, 192), 20: (128, 192),
}  # fmt: skip
CLUSTERS = [(m, n) for m in range(1, 9) for n in range(1, 9) if m * n <= 8 and (m == 1 or n == 1 or m * n in (4, 8))]
SPLITS = [*range(1, 16), 17, 20, 23, 26, 28, 30, 33, 36, 40, 44, 50, 55, 60, 66, 75, 79, 88, 96, 105, 112, 120, 126]
COPIES = [f"{kind} {names}" for kind in ("copy", "pad") for names in ("IOF", "IF", "OF", "IO", "I", "O", "F")]
#: Leaves that a tree may have before it is pruned, by direction.
LEAVES = {"fwd": 2400, "bwd_data": 1600, "bwd_weight": 4000}
#: A branch stays if it adds more hits than this to those of one leaf in its place.
PRUNE = 1.5
#: What a workspace within 1 % counts on top of one within 10 %.
FINE = 0.5
WIDTHS = [16, 24, 32, 32, 40, 48, 64, 64, 80, 96, 112, 128, 128, 160, 192, 256, 256, 320, 384, 512, 512, 640, 768, 1024,
          1280, 2048]  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One convolution in one direction and cuDNN's first plan for it."""

    problem: Problem
    direction: Direction
    bytes: int
    engine: int
    knobs: dict[int, int]


def random_shape(pick: random.Random, first_layer: bool) -> dict[str, Any]:
    """Layers as image models have them: batch, channels, filters, side, taps, stride."""
    shape = {"N": pick.choice([1, 2, 4, 8, 16, 24, 32, 32, 64, 96, 128, 256, pick.randint(1, 256)])}
    if first_layer:
        taps, stride = pick.choice([(3, 1), (3, 2), (5, 1), (7, 2), (7, 2), (4, 4), (8, 8), (14, 14), (16, 16), (2, 2)])
        shape |= {"C": pick.choice([1, 2, 3, 3, 3, 3, 4, 6]), "K": pick.choice(WIDTHS), "R": taps, "stride": stride}
        shape |= {"HW": pick.choice([28, 32, 64, 96, 112, 128, 160, 192, 224, 224, 224, 256, 299, 320, 384, 512])}
    else:
        width = (
            WIDTHS if pick.random() < 0.7 else [8 * n for n in range(1, 129)] if pick.random() < 0.7 else range(8, 1025)
        )
        shape |= {"C": pick.choice(width), "R": pick.choice([1, 1, 1, 3, 3, 3, 3, 5, 7]), "K": pick.choice(width)}
        shape |= {"stride": pick.choice([1, 1, 1, 2])}
        shape |= {"HW": pick.choice([7, 14, 28, 56, 112, 8, 16, 32, 64, 128, 20, 38, 40, 80, pick.randint(4, 160)])}
    padding = 0 if shape["stride"] > 2 or shape["R"] == shape["stride"] else shape["R"] // 2
    kind = {"dtype": pick.choice(["fp32", "fp16", "bf16"]), "channels_last": pick.randint(0, 1), "groups": 1}
    return {**shape, **kind, "pad": padding, "tf32": int(pick.random() < 0.9)}


def in_goldens() -> set[str]:
    """Convolutions that the tests compare with."""
    found = set()
    for name in ("conv.jsonl.gz", "conv_plans.jsonl.gz"):
        with gzip.open(GOLDENS / name, "rt") as file:
            found |= {_key(json.loads(line)) for line in file}
    return found


def _key(case: dict[str, Any]) -> str:
    names = ("N", "C", "K", "HW", "R", "stride", "pad", "groups", "dtype", "channels_last")
    return str([case[name] for name in names] + [case.get("tf32", 1)])


def _problem(case: dict[str, Any]) -> Problem:
    side = (case["HW"] + 2 * case["pad"] - case["R"]) // case["stride"] + 1
    return Problem(
        case["N"], case["C"], case["K"], case["HW"] ** 2, side**2, (case["R"], case["R"]), case["groups"],
        4 if case["dtype"] == "fp32" else 2, bool(case["channels_last"]), bool(case["tf32"]), case["dtype"] == "bf16",
    )  # fmt: skip


def ask(program: str, cases: list[dict[str, Any]]) -> list[Answer]:
    """What cuDNN puts first for every case and direction; cases that it does not take are left out."""
    names = ("dtype", "N", "C", "K", "HW", "R", "stride", "pad", "groups", "channels_last", "tf32")
    asked = [(case, name) for case in cases for name in DIRECTIONS]
    questions = "".join(" ".join([name, *(str(case[key]) for key in names)]) + "\n" for case, name in asked)
    command = [program, str(FOLDER / "h200.json")]
    answers = subprocess.run(command, input=questions, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for (case, name), line in zip(asked, answers, strict=True):
        if line != "none":
            size, _, engine, *knobs = line.split()
            values = {int(knob): int(value) for knob, value in (item.split("=") for item in knobs)}
            found.append(Answer(_problem(case), DIRECTIONS[name], int(size), int(engine), values))
    return found


def forms(direction: Direction, first_layer: bool) -> list[str]:
    """The forms among which a tree chooses."""
    tiles = [*TILES, (64, 192), (128, 192)]
    found = ["needed", "none", *COPIES, *(f"stream {m}x{n} {a}x{b}" for m, n in tiles for a, b in CLUSTERS)]
    if direction is Direction.BACKWARD_WEIGHT:
        found += [f"{copies}+split {count}" for copies in ("needed", "all") for count in SPLITS]
    if first_layer:
        found += [f"pad{pad} {names}" for pad in (2, 4) for names in ("I", "IF", "OF", "IOF")]
    return found


def label(answer: Answer, names: list[str], sizes: Any) -> str:
    """The form of an answer: by its knobs if it is stream-K's, else the first form of its size."""
    near = np.abs(sizes - answer.bytes) <= max(answer.bytes * 0.005, 600)
    knobs = answer.knobs
    if answer.engine in STREAM_K and knobs.get(25) == 0 and knobs.get(2) in TILE_KNOB:
        m, n = TILE_KNOB[knobs[2]]
        name = f"stream {m}x{n} {knobs[27]}x{knobs[28]}"
        if name in names and near[names.index(name)]:
            return name
    return next((name for name, fits in zip(names, near, strict=True) if fits and "stream" not in name), "other")


def grow(answers: list[Answer], leaves: int) -> Branch | Leaf:
    """A tree over answers of one section."""
    from sklearn.tree import DecisionTreeClassifier

    direction = answers[0].direction
    names = forms(direction, answers[0].problem.channels < 8)
    sizes = np.array([[workspace_bytes(name, a.problem, direction) for name in names] for a in answers])
    real = np.array([a.bytes for a in answers])
    rows = [features(a.problem, direction, SM_COUNT) for a in answers]
    labels = [label(a, names, row) for a, row in zip(answers, sizes, strict=True)]
    values = np.array([list(row.values()) for row in rows], np.float32)
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves, min_samples_leaf=3, random_state=0).fit(values, labels)
    error = np.abs(sizes - real[:, None])
    close = error <= np.maximum(real // 10, 512)[:, None]
    score = close + FINE * (error <= np.maximum(real * 0.01, 512)[:, None])
    reached = tree.apply(values)
    counts = {leaf: Counted(close[reached == leaf].sum(0), score[reached == leaf].sum(0)) for leaf in set(reached)}
    return _node(tree.tree_, 0, list(rows[0]), names, counts)[0]


@dataclass(frozen=True)
class Counted:
    """By form: answers within 10 %, and their score."""

    close: Any
    score: Any


def _node(
    tree: Any, at: int, feature_names: list[str], names: list[str], counts: dict[int, Counted]
) -> tuple[Branch | Leaf, Counted, int, float]:
    """The subtree, pruned to where its score less ``PRUNE`` for every leaf is most; its counts, answers and score."""
    count = int(tree.n_node_samples[at])
    if tree.children_left[at] < 0:
        return *_leaf(counts[at], count, names), count, float(counts[at].score.max()) - PRUNE
    low, low_counts, _, low_score = _node(tree, tree.children_left[at], feature_names, names, counts)
    high, high_counts, _, high_score = _node(tree, tree.children_right[at], feature_names, names, counts)
    both = Counted(low_counts.close + high_counts.close, low_counts.score + high_counts.score)
    alone = float(both.score.max()) - PRUNE
    if low_score + high_score <= alone:
        return *_leaf(both, count, names), count, alone
    branch = Branch(feature_names[tree.feature[at]], float(f"{tree.threshold[at]:.7g}"), low, high)
    return branch, both, count, low_score + high_score


def _leaf(counted: Counted, count: int, names: list[str]) -> tuple[Leaf, Counted]:
    best = int(np.argmax(counted.score))
    return Leaf(names[best], int(100 * counted.close[best] / count)), counted


def main() -> None:
    program, count = sys.argv[1], int(sys.argv[2])
    pick, known = random.Random(0), in_goldens()
    shapes = [random_shape(pick, first_layer) for first_layer in (False, True) for _ in range(count)]
    large = [s for s in shapes if s["N"] * max(s["C"], s["K"]) * s["HW"] ** 2 >= 2**31]
    answers = ask(program, [s for s in shapes if s["R"] <= s["HW"] and s not in large and _key(s) not in known])
    sections: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        sections[section(answer.problem, answer.direction)].append(answer)
    leaves = {direction: LEAVES[name] for name, direction in DIRECTIONS.items()}
    print("# What cuDNN 9.20 chooses on Hopper (asked for an H200 with 132 SMs), one decision tree a section.")
    print(
        f"# Grown by tests/oracles/cudnn/grow_trees.py from {len(shapes)} random convolutions; read by cudnn_choice.py."
    )
    print(render({name: grow(found, leaves[found[0].direction]) for name, found in sections.items()}), end="")
    print(Counter({name: len(found) for name, found in sections.items()}), file=sys.stderr)


if __name__ == "__main__":
    main()
