"""Grows a file of ``graphmem/capture/kernels/cudnn/plans`` from cuDNN's answers.

    python -m tests.oracles.cudnn.grow_trees [--keep OLD.txt] [--only groups largest --] ANSWERS ... > hopper.txt

``ANSWERS`` are files that ``tests.oracles.cudnn.ask`` wrote, named ``CARD_anything.txt`` after the card that was asked
for. Sections of ``OLD.txt`` that the answers have nothing for are kept; ``--only`` grows only sections whose names
contain one of the words. Needs scikit-learn, which nothing else here does. README.md tells the whole way.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from graphmem.capture.kernels.cudnn.choice import Branch, Leaf, features, parse, render, section
from graphmem.capture.kernels.cudnn.problem import Direction, Problem
from graphmem.capture.kernels.cudnn.workspaces import workspace_bytes
from graphmem.devices import device_named
from tests.oracles.cudnn.shapes import Shape, held_out

DIRECTIONS = {"fwd": Direction.FORWARD, "bwd_data": Direction.BACKWARD_DATA, "bwd_weight": Direction.BACKWARD_WEIGHT}
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
#: Engines with stream-K (knob 25, workspace, is 0 where it may take one), and tiles by the value of knob 2.
STREAM_K = {62, 65, 67, 68, 71}
#: Engines that keep a table of offsets.
OFFSETS = {26, 34, 27, 28, 35}
TILE_KNOB = {
    0: (128, 128), 1: (128, 64), 3: (256, 128), 4: (256, 64), 5: (64, 64), 6: (128, 256), 7: (64, 128), 9: (64, 256),
    18: (64, 192), 20: (128, 192),
}  # fmt: skip
#: Forms by which an answer is named, the likeliest causes first.
PLAIN = ["needed", "none", "copy IOF", "copy IF", "pad IF", "copy F", "copy IO", "copy OF", "all", "pad OF", "pad IO",
         "copy I", "copy O", "pad I", "pad O", "pad F"]  # fmt: skip
FIRST_LAYER = [f"pad{pad} {names}" for pad in (2, 4) for names in ("I", "IF", "OF", "IOF")]
GROUPED = ["packed", "packed all"] + [
    f"group{width} {names}"
    for width in ("2n", "v", 4, 8, 16, 32, 2)
    for names in ("IOF", "IO", "IF", "OF", "I", "O", "F")
]
DEPTHWISE = ["images"]
#: Engine of depthwise filter gradients: half as many parts as knob 12 says; channels of a block and bytes of a channel.
DEPTHWISE_PARTS, PARTS_KNOB = 61, 12
BLOCKS = ["64x16", "32x32", "64x32", "32x128", "64x128", "32x16", "32x64", "64x64"]
SOME = [f"some {names}" for names in ("IOF", "IO", "IF", "OF", "I", "O")]
WINOGRAD = ["winograd", "copy IO+winograd"]
#: Forms to which a number of parts is added.
SPLIT = ["needed", "all", "none", "copy IOF", "copy IF", "copy OF", "copy IO"]
SPLIT_GROUPED = ["packed", "packed all", *SPLIT, "groupv IOF"]
SPLIT_GROUPED += [f"group{width} IO" for width in ("2n", "v", 4, 8, 16, 32)]
#: Numbers of splits that have a name each; others are called by the nearest.
SPLITS = [*range(1, 16), 17, 20, 23, 26, 28, 30, 33, 36, 40, 44, 50, 55, 60, 66, 75, 79, 88, 96, 105, 112, 120, 126,
          140, 160, 180, 200, 225, 250, 280, 320, 400, 500]  # fmt: skip
#: Workspaces up to this size that have no other form are taken for tables.
SMALL_BYTES = 1 << 17
#: Sections with fewer answers are not grown.
LEAST_ANSWERS = 60
#: A leaf's forms are chosen among those that name so many answers.
LEAST_NAMED = 3
#: A branch stays if it adds more hits than this to those of one leaf in its place.
PRUNE = 1.5
#: What a workspace within 1 % counts on top of one within 10 %.
FINE = 0.5


@dataclass(frozen=True)
class Answer:
    """One convolution in one direction and a plan of cuDNN's for it."""

    problem: Problem
    direction: Direction
    bytes: int
    engine: int
    knobs: dict[int, int]


# --- answers ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[tuple[str, Answer]]:
    """The sections and answers of a file. Convolutions that the tests compare with are left out, and bfloat16 before
    Ampere, which PyTorch does not give to cuDNN."""
    capability = device_named(path.name.split("_")[0]).compute_capability
    assert capability is not None
    for line in path.read_text().splitlines():
        question, *plans = line.split(" ; ")
        direction, dtype, *numbers = question.split()
        shape = Shape(dtype, *map(int, numbers))
        if plans[0] == "none" or shape in held_out() or (shape.dtype == "bf16" and capability < (8, 0)):
            continue
        problem = problem_of(shape, tf32=capability >= (8, 0))
        for plan, largest in zip(plans, (False, True), strict=False):
            size, _, engine, *knobs = plan.split()
            values = {int(knob): int(value) for knob, value in (item.split("=") for item in knobs)}
            answer = Answer(problem, DIRECTIONS[direction], int(size), int(engine), values)
            yield section(problem, answer.direction, largest), answer


def problem_of(shape: Shape, tf32: bool = True) -> Problem:
    """The convolution as graphmem sees it; ``tf32``: the card has it."""
    return Problem(
        shape.batch, shape.channels, shape.filters, shape.side**shape.dims, shape.output_side**shape.dims,
        (shape.taps,) * shape.dims, shape.groups, ITEMSIZE[shape.dtype], bool(shape.last), tf32 and bool(shape.tf32),
        shape.dtype == "bf16", shape.dilation > 1,
    )  # fmt: skip


# --- names of answers -------------------------------------------------------------------------------------------------


@cache
def _size(form: str, problem: Problem, direction: Direction) -> int:
    return workspace_bytes(form, problem, direction)


def label(answer: Answer) -> str:
    """The form of an answer: by its knobs if it is stream-K's, else the first form of its size."""
    if answer.engine in STREAM_K and answer.knobs.get(25) == 0 and answer.knobs.get(2) in TILE_KNOB:
        m, n = TILE_KNOB[answer.knobs[2]]
        form = f"stream {m}x{n} {answer.knobs[27]}x{answer.knobs[28]}"
        if _fits(form, answer):
            return form
    problem = answer.problem
    if problem.groups == problem.channels and (named := _depthwise_parts(answer)):
        return named
    if answer.engine in OFFSETS and abs(_size("offsets", problem, answer.direction) - answer.bytes) <= 256:
        return "offsets"
    if problem.groups == 1:
        forms = [*PLAIN, *(FIRST_LAYER if problem.channels < 8 else WINOGRAD)]
    elif problem.groups == problem.channels:
        forms = [*PLAIN, *DEPTHWISE, *GROUPED, *SOME]
    else:
        forms = [*GROUPED[:1], *PLAIN, *GROUPED[1:], *SOME]
    for form in forms:
        if _fits(form, answer):
            return form
    parts = [(form, "split") for form in (SPLIT_GROUPED if problem.groups > 1 else SPLIT)]
    parts += [(form, "somesplit") for form in SOME[:2] if problem.groups > 1]
    for form, part in parts:
        named = _with_parts(answer, form, part, 0.005)
        if named:
            return named
    if answer.bytes <= SMALL_BYTES:
        return f"bytes {answer.bytes}"
    near = (form for form in forms if _fits(form, answer, 0.02))
    splits = (named for form, part in parts if (named := _with_parts(answer, form, part, 0.05)))
    return next(near, next(splits, "other"))


def _depthwise_parts(answer: Answer) -> str | None:
    if answer.engine != DEPTHWISE_PARTS or PARTS_KNOB not in answer.knobs:
        return None
    count = 2 * answer.knobs[PARTS_KNOB]
    forms = [f"{copies}+parts {block} {count}" for copies in ("copy F", "copy IOF") for block in BLOCKS if count]
    return next((form for form in forms if _fits(form, answer)), None)


def _fits(form: str, answer: Answer, share: float = 0.005) -> bool:
    return abs(_size(form, answer.problem, answer.direction) - answer.bytes) <= max(answer.bytes * share, 600)


def _with_parts(answer: Answer, form: str, part: str, share: float) -> str | None:
    """The form with as many parts added as the size takes, if that is a whole number of parts."""
    one, two = (_size(f"none+{part} {n}", answer.problem, answer.direction) for n in (1, 2))
    left = answer.bytes - _size(form, answer.problem, answer.direction)
    count = round(left / (two - one))
    if count < 1 or abs(left - count * (two - one)) > max(share * answer.bytes, 600):
        return None
    named = f"{form}+{part} {min(SPLITS, key=lambda n: abs(n - count))}"
    return named if _fits(named, answer, 0.1) else None


# --- trees ------------------------------------------------------------------------------------------------------------


def leaves_of(name: str, answers: int) -> int:
    """Leaves that a tree may have before it is pruned: as many as the answers tell apart."""
    return max(8, answers // (6 if "backward weight" in name else 10))


def grow(name: str, answers: list[Answer]) -> Branch | Leaf:
    """A tree over the answers of one section."""
    from sklearn.tree import DecisionTreeClassifier

    labels = [label(answer) for answer in answers]
    forms = [form for form, count in Counter(labels).items() if count >= LEAST_NAMED and form != "other"] or ["needed"]
    sizes = np.array([[_size(form, a.problem, a.direction) for form in forms] for a in answers])
    real = np.array([a.bytes for a in answers])
    rows = [features(a.problem, a.direction) for a in answers]
    values = np.array([list(row.values()) for row in rows], np.float32)
    tree = DecisionTreeClassifier(max_leaf_nodes=leaves_of(name, len(answers)), min_samples_leaf=3, random_state=0)
    tree.fit(values, [_coarse(one) for one in labels])
    error = np.abs(sizes - real[:, None])
    close = error <= np.maximum(real // 10, 512)[:, None]
    score = close + FINE * (error <= np.maximum(real * 0.01, 512)[:, None])
    reached = tree.apply(values)
    counts = {leaf: Counted(close[reached == leaf].sum(0), score[reached == leaf].sum(0)) for leaf in set(reached)}
    return _node(tree.tree_, 0, list(rows[0]), forms, counts)[0]


def _coarse(form: str) -> str:
    """Numbers of splits that are within a third of each other count as one when a tree looks for branches."""
    base, _, splits = form.partition("split ")
    if form.startswith("bytes"):
        return "bytes"
    return f"{base}split {round(np.log(int(splits)) / np.log(1.35))}" if splits else form


@dataclass(frozen=True)
class Counted:
    """By form: answers within 10 %, and their score."""

    close: Any
    score: Any


def _node(
    tree: Any, at: int, feature_names: list[str], forms: list[str], counts: dict[int, Counted]
) -> tuple[Branch | Leaf, Counted, int, float]:
    """The subtree, pruned to where its score less ``PRUNE`` for every leaf is most; its counts, answers and score."""
    count = int(tree.n_node_samples[at])
    if tree.children_left[at] < 0:
        return *_leaf(counts[at], count, forms), count, float(counts[at].score.max()) - PRUNE
    low, low_counts, _, low_score = _node(tree, tree.children_left[at], feature_names, forms, counts)
    high, high_counts, _, high_score = _node(tree, tree.children_right[at], feature_names, forms, counts)
    both = Counted(low_counts.close + high_counts.close, low_counts.score + high_counts.score)
    alone = float(both.score.max()) - PRUNE
    if low_score + high_score <= alone:
        return *_leaf(both, count, forms), count, alone
    branch = Branch(feature_names[tree.feature[at]], float(f"{tree.threshold[at]:.5g}"), low, high)
    return branch, both, count, low_score + high_score


def _leaf(counted: Counted, count: int, forms: list[str]) -> tuple[Leaf, Counted]:
    best = int(np.argmax(counted.score))
    return Leaf(forms[best], int(100 * counted.close[best] / count)), counted


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.cudnn.grow_trees", description=__doc__)
    parser.add_argument("answers", nargs="+", type=Path)
    parser.add_argument("--keep", type=Path, help="file of trees whose other sections are kept")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="only sections with one of the words")
    options = parser.parse_args()
    by_section: dict[str, list[Answer]] = defaultdict(list)
    for path in options.answers:
        for name, answer in read(path):
            by_section[name].append(answer)
    sections = {name: found for name, found in by_section.items() if len(found) >= LEAST_ANSWERS}
    sections = {name: found for name, found in sections.items() if any(word in name for word in options.only)}
    kept = parse(options.keep.read_text()) if options.keep else {}
    cards = sorted({path.name.split("_")[0] for path in options.answers})
    total = sum(map(len, sections.values()))
    print(f"# What cuDNN 9.20 chooses, one decision tree a section; asked for {', '.join(cards)}: {total} plans.")
    print("# Grown by tests/oracles/cudnn/grow_trees.py; read by cudnn_choice.py.")
    for name in sorted({*sections, *kept}):
        tree = grow(name, sections[name]) if name in sections else kept[name]
        print(render({name: tree}), end="", flush=True)


if __name__ == "__main__":
    main()
