"""Names the answers of cuDNN: which form (``graphmem/cudnn/predicted/workspaces.py``) a plan's workspace has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from graphmem.cudnn.predicted.choice import Plan, is_unordered, section
from graphmem.cudnn.predicted.problem import Direction, Problem
from graphmem.cudnn.predicted.workspaces import has_tiles, workspace_bytes
from tests.oracles.cudnn.ask import NO_PLAN, SAME
from tests.oracles.cudnn.shapes import Shape

DIRECTIONS = {"fwd": Direction.FORWARD, "bwd_data": Direction.BACKWARD_DATA, "bwd_weight": Direction.BACKWARD_WEIGHT}
ITEMSIZE = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
#: Engines with stream-K (knob 25, workspace, is 0 where it may take one), and tiles by the value of knob 2.
STREAM_K = {62, 65, 67, 68, 71}
#: Engines that leave an fp32 partial result for every split; knob 0 says how many there are.
SPLIT_ENGINES, SPLIT_KNOB = {33, 34, 49, 50}, 0
#: Engines that leave them in whole tiles, and tiles by the value of knob 2; knob 12 says how many splits there are.
TILED_ENGINES, TILED_KNOB = {10, 23, 30, 34, 39, 40, 41}, 12
TILED = {
    0: "128x128", 1: "128x64", 3: "256x128", 4: "256x64", 5: "64x64", 6: "128x256", 7: "64x128", 8: "64x32",
    11: "32x16", 12: "32x32", 14: "16x64", 15: "16x32", 23: "32x128",
}  # fmt: skip
TILED_BASES = ["needed", "none", "copy IOF", "all", "copy IO", "copy IF", "copy OF", "pad2 IOF", "pad4 IOF", "packed"]
#: Bytes that may be missing of a form with tiles.
TILED_LEFT = 640
#: Engines by Winograd's algorithm.
WINOGRAD_ENGINES = {12, 19}
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
WINOGRAD = ["winograd", *(f"copy {names}+winograd" for names in ("IO", "IOF", "IF", "OF", "F"))]
#: Forms to which a number of parts is added.
SPLIT = ["needed", "all", "none", "copy IOF", "copy IF", "copy OF", "copy IO"]
SPLIT_GROUPED = ["packed", "packed all", *SPLIT, "groupv IOF"]
SPLIT_GROUPED += [f"group{width} IO" for width in ("2n", "v", 4, 8, 16, 32)]
#: Numbers of splits that have a name each; others are called by the nearest.
SPLITS = [*range(1, 16), 17, 20, 23, 26, 28, 30, 33, 36, 40, 44, 50, 55, 60, 66, 75, 79, 88, 96, 105, 112, 120, 126,
          140, 160, 180, 200, 225, 250, 280, 320, 400, 500]  # fmt: skip
#: Workspaces up to this size that have no other form are taken for tables.
SMALL_BYTES = 1 << 17


@dataclass(frozen=True)
class Answer:
    """One convolution in one direction and a plan of cuDNN's for it."""

    problem: Problem
    direction: Direction
    bytes: int
    engine: int
    knobs: dict[int, int]

    @staticmethod
    def read(problem: Problem, direction: Direction, plan: str) -> Answer:
        """The answer of a plan in text."""
        size, _, engine, *knobs = plan.split()
        values = {int(knob): int(value) for knob, value in (item.split("=") for item in knobs)}
        return Answer(problem, direction, int(size), int(engine), values)


# --- answers ----------------------------------------------------------------------------------------------------------


def read(lines: Iterable[str], capability: tuple[int, int]) -> Iterator[tuple[Shape, str, Answer]]:
    """Shapes, sections and answers of lines that :mod:`tests.oracles.cudnn.ask` wrote for a card of that capability.

    Left out are convolutions that PyTorch does not give to cuDNN: bfloat16 before Ampere, and depthwise ones of images
    in NCHW other than in fp16 (``use_cudnn_depthwise`` of ATen/native/Convolution.cpp); and what cuDNN has no plan for.
    """
    for line in lines:
        question, *plans = line.split(" ; ")
        direction, *words = question.split()
        shape = Shape.read(words)
        native = shape.groups == shape.channels > 1 and not shape.last and shape.dtype != "fp16"
        if plans[0] == "none" or native or (shape.dtype == "bf16" and capability < (8, 0)):
            continue
        problem = problem_of(shape, tf32=capability >= (8, 0))
        answered = {
            which: Answer.read(problem, DIRECTIONS[direction], plan)
            for which, plan in zip((Plan.FIRST, Plan.DETERMINISTIC, Plan.LARGEST), plans, strict=False)
            if plan not in (NO_PLAN, SAME)
        }
        first = answered[Plan.FIRST]
        if plans[1] == SAME and _is_unordered(first):
            answered[Plan.DETERMINISTIC] = first
        for which, answer in answered.items():
            yield shape, section(problem, answer.direction, which), answer


def _is_unordered(answer: Answer) -> bool:
    """Whether graphmem takes the plan for one that deterministic mode passes over."""
    form = label(answer) if answer.direction is Direction.BACKWARD_DATA else "other"
    return is_unordered(answer.problem, answer.direction, answer.bytes, form)


def problem_of(shape: Shape, tf32: bool = True) -> Problem:
    """The convolution as graphmem sees it; ``tf32``: the card has it."""
    return Problem(
        shape.batch, shape.channels, shape.filters, math.prod(shape.sides), math.prod(shape.output_sides),
        shape.kernel, shape.groups, ITEMSIZE[shape.dtype], bool(shape.last), tf32 and bool(shape.tf32),
        shape.dtype == "bf16", max(shape.dilations) > 1, shape.sides, shape.output_sides, shape.strides[-1],
        shape.paddings[-1], shape.dilations[-1],
    )  # fmt: skip


# --- names of answers -------------------------------------------------------------------------------------------------


@lru_cache(1 << 14)  # an answer is compared with the same forms a few times
def _size(form: str, problem: Problem, direction: Direction) -> int:
    return workspace_bytes(form, problem, direction)


def label(answer: Answer) -> str:
    """The form of an answer, and whether its slack is small."""
    form = _label(answer)
    if form in ("none", "other") or form.startswith("bytes") or has_tiles(form):
        return form
    if not _size(form, answer.problem, answer.direction):
        return form
    tight = f"{form}+tight"
    return tight if _size(tight, answer.problem, answer.direction) == answer.bytes else form


def _label(answer: Answer) -> str:
    """The form of an answer: by its knobs if it is stream-K's or split, else the first form of its size."""
    if answer.engine in STREAM_K and answer.knobs.get(25) == 0 and answer.knobs.get(2) in TILE_KNOB:
        m, n = TILE_KNOB[answer.knobs[2]]
        form = f"stream {m}x{n} {answer.knobs[27]}x{answer.knobs[28]}"
        if _fits(form, answer):
            return form
    problem = answer.problem
    if answer.engine in SPLIT_ENGINES and (named := _splits(answer)):
        return named
    if answer.engine in TILED_ENGINES and (named := _tiled(answer)):
        return named
    if problem.groups == problem.channels and (named := _depthwise_parts(answer)):
        return named
    if answer.engine in OFFSETS and abs(_size("offsets", problem, answer.direction) - answer.bytes) <= 256:
        return "offsets"
    if problem.groups == 1:
        forms = [*PLAIN, *(FIRST_LAYER if problem.channels < 8 else [])]
        forms += WINOGRAD if answer.engine in WINOGRAD_ENGINES else []
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


def _splits(answer: Answer) -> str | None:
    """The form with as many splits as the plan's knob says."""
    count = answer.knobs.get(SPLIT_KNOB, 0)
    if not count:
        return None
    bases = SPLIT_GROUPED if answer.problem.groups > 1 else SPLIT
    named = (f"{base}+split {count}" for base in bases)
    return next((form for form in named if _fits(form, answer, 0.0005)), None)


def _tiled(answer: Answer) -> str | None:
    """The form with as many splits in tiles as the plan's knobs say; -1 leaves one."""
    if TILED_KNOB not in answer.knobs:
        return None
    count = abs(answer.knobs[TILED_KNOB])
    tile = TILED.get(answer.knobs.get(2, -1))
    tiles = [tile] if tile else [*TILED.values()]
    kinds = ("tiles", "vtiles")
    for name in (f"{base}+{kind} {one} {count}" for kind in kinds for one in tiles for base in TILED_BASES):
        if abs(answer.bytes - _size(name, answer.problem, answer.direction)) <= TILED_LEFT:
            return name
    return None


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
