"""Asks a cuDNN about random convolutions, and keeps the answers.

Questions go the way of ``graphmem --cudnn`` (``graphmem/cudnn``). A file of answers holds one :class:`Batch`: every
line is a question, the plan that PyTorch takes, the one it takes in deterministic mode (``same`` if it is that one),
and where the batch says so the plan of the largest workspace: ``BYTES engine NUMBER KNOB=VALUE ...``, or ``none``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from graphmem.cudnn.card import description
from graphmem.cudnn.descriptors import CudnnError, Descriptor, Descriptors, Kind, Type
from graphmem.cudnn.plans import INSTANT, Convolution, is_left_out, notes_of, plans
from graphmem.cudnn.worker import describe, load, version_text
from graphmem.devices import device_named
from tests.oracles.cudnn.shapes import Shape, draw, held_out

DIRECTIONS = {"fwd": "forward", "bwd_data": "backward data", "bwd_weight": "backward weight"}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
#: Room for the knobs of a plan.
_KNOBS = 16
#: The kind of a batch that asks about the recorded convolutions instead of random ones.
RECORDED = "recorded"

#: What stands for no plan, and for the plan before.
NO_PLAN, SAME = "none", "same"

#: Gives the plans of a question in text: the first, the first that is deterministic, and that of the largest workspace.
Ask = Callable[[Convolution, bool], list[str]]


@dataclass(frozen=True)
class Batch:
    """``count`` random convolutions of a kind; ``purpose`` and ``number`` are part of the seed.

    ``largest``: the plan of the largest workspace is asked for too, which takes three times as long.
    """

    card: str
    kind: str
    purpose: str
    number: int
    count: int
    largest: bool = False

    @property
    def name(self) -> str:
        largest = "-largest" if self.largest else ""
        return f"{self.purpose}-{self.kind}{largest}-{self.number}-{self.count}"

    def shapes(self) -> Iterator[Shape]:
        if self.kind == RECORDED:
            yield from sorted(held_out(), key=lambda shape: shape.question(""))
            return
        pick = random.Random(f"{self.card} {self.purpose} {self.kind} {self.largest} {self.number}")
        for _ in range(self.count):
            yield draw(pick, self.kind)


def answers(batch: Batch, ask: Ask, folder: Path) -> list[str]:
    """The lines of a batch, from its file in ``folder``, or asked and kept there."""
    path = folder / f"{batch.name}.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w") as file:
            file.writelines(f"{line}\n" for line in _asked(batch, ask))
        unfinished.replace(path)
    return path.read_text().splitlines()


def _asked(batch: Batch, ask: Ask) -> Iterator[str]:
    for shape in batch.shapes():
        for direction in DIRECTIONS:
            yield " ; ".join([shape.question(direction), *ask(convolution_of(shape, direction), batch.largest)])


def convolution_of(shape: Shape, direction: str) -> Convolution:
    """The question as ``graphmem`` puts it."""
    return Convolution(
        DIRECTIONS[direction],
        _DTYPES[shape.dtype],
        input=(shape.batch, shape.channels, *shape.sides),
        filter=(shape.filters, shape.channels // shape.groups, *shape.kernel),
        output=(shape.batch, shape.filters, *shape.output_sides),
        stride=shape.strides,
        padding=shape.paddings,
        dilation=shape.dilations,
        channels_last=bool(shape.last),
        tf32=bool(shape.tf32),
    )


def asker(library: Path, card: str) -> tuple[Ask, str]:
    """What answers for a card, and the version of the library, such as ``9.20.0``."""
    loaded, about = load(str(library), [library.resolve().parents[3]])
    descriptors = Descriptors(loaded)
    device = describe(descriptors, description(device_named(card)))

    def ask(convolution: Convolution, largest: bool = False) -> list[str]:
        deterministic = replace(convolution, deterministic=True)
        try:
            found = list(islice(plans(descriptors, device, convolution, INSTANT), None if largest else 1))
            if not found:
                return [NO_PLAN]
            first = found[0]
            if is_left_out(notes_of(descriptors, first[1]), deterministic):
                other = next(plans(descriptors, device, deterministic, INSTANT), None)
                second = _text(descriptors, other) if other else NO_PLAN
            else:
                second = SAME
            most = [_text(descriptors, max(found, key=lambda plan: plan[0]))] if largest else []
            return [_text(descriptors, first), second, *most]
        except CudnnError:
            return [NO_PLAN]
        finally:
            descriptors.release()

    return ask, version_text(about["version"])


def _text(descriptors: Descriptors, plan: tuple[int, Descriptor]) -> str:
    return f"{plan[0]} {_engine(descriptors, plan[1])}"


def _engine(descriptors: Descriptors, config: Descriptor) -> str:
    (engine,) = descriptors.fill(config, 300, Kind.ENGINE, 1)
    words = ["engine", *map(str, descriptors.numbers(engine, 1301, Type.INT64, 1))]
    for knob in descriptors.fill(config, 302, Kind.KNOB_CHOICE, _KNOBS):
        names, values = descriptors.numbers(knob, 600, Type.KNOB_TYPE, 1), descriptors.numbers(knob, 601, Type.INT64, 1)
        words += [f"{name}={value}" for name, value in zip(names, values, strict=True)]
    return " ".join(words)
