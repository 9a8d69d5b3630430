"""Asks a cuDNN about random convolutions, and keeps the answers.

    python -m tests.oracles.cudnn.ask LIBCUDNN CARD SEED COUNT [--all] [--kind depthwise] > CARD_SEED.txt

``LIBCUDNN`` is the path of ``libcudnn.so.9`` in the folders of NVIDIA's wheels, ``CARD`` a name that ``graphmem``
knows, such as A100. It is asked as ``graphmem --cudnn`` asks (``graphmem/cudnn``). Every line is a question, the plan
that PyTorch takes, and with ``--all`` the plan of the largest workspace: ``BYTES engine NUMBER KNOB=VALUE ...``, or
``none``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from graphmem.cudnn.card import description
from graphmem.cudnn.descriptors import CudnnError, Descriptor, Descriptors, Kind, Type
from graphmem.cudnn.plans import INSTANT, Convolution, plans
from graphmem.cudnn.worker import describe, load
from graphmem.devices import device_named
from tests.oracles.cudnn.shapes import KINDS, Shape, draw

DIRECTIONS = {"fwd": "forward", "bwd_data": "backward data", "bwd_weight": "backward weight"}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
#: Room for the knobs of a plan.
_KNOBS = 50


def convolution_of(shape: Shape, direction: str) -> Convolution:
    """The question as ``graphmem`` puts it."""
    every, out = (1,) * shape.dims, shape.output_side
    return Convolution(
        DIRECTIONS[direction],
        _DTYPES[shape.dtype],
        input=(shape.batch, shape.channels, *(shape.side,) * shape.dims),
        filter=(shape.filters, shape.channels // shape.groups, *(shape.taps,) * shape.dims),
        output=(shape.batch, shape.filters, *(out,) * shape.dims),
        stride=tuple(shape.stride for _ in every),
        padding=tuple(shape.padding for _ in every),
        dilation=tuple(shape.dilation for _ in every),
        channels_last=bool(shape.last),
        tf32=bool(shape.tf32),
    )


def asker(library: Path, card: str) -> Callable[[Convolution, bool], list[str]]:
    """A function that gives the first plan of a convolution, or the first and the largest."""
    loaded, _ = load(str(library), [library.resolve().parents[3]])
    descriptors = Descriptors(loaded)
    device = describe(descriptors, description(device_named(card)))

    def ask(convolution: Convolution, largest: bool = False) -> list[str]:
        try:
            found = list(islice(plans(descriptors, device, convolution, INSTANT), None if largest else 1))
            chosen = [found[0], max(found, key=lambda plan: plan[0])][: 2 if largest else 1] if found else []
            return [f"{size} {_engine(descriptors, config)}" for size, config in chosen] or ["none"]
        except CudnnError:
            return ["none"]
        finally:
            descriptors.release()

    return ask


def _engine(descriptors: Descriptors, config: Descriptor) -> str:
    (engine,) = descriptors.fill(config, 300, Kind.ENGINE, 1)
    words = ["engine", *map(str, descriptors.numbers(engine, 1301, Type.INT64, 1))]
    for knob in descriptors.fill(config, 302, Kind.KNOB_CHOICE, _KNOBS):
        names, values = descriptors.numbers(knob, 600, Type.KNOB_TYPE, 1), descriptors.numbers(knob, 601, Type.INT64, 1)
        words += [f"{name}={value}" for name, value in zip(names, values, strict=True)]
    return " ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.oracles.cudnn.ask", description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("card")
    parser.add_argument("seed")
    parser.add_argument("count", type=int)
    parser.add_argument("--all", action="store_true", help="also the plan of the largest workspace")
    parser.add_argument("--kind", choices=KINDS, help="only layers of this kind")
    options = parser.parse_args()
    ask = asker(options.library, options.card)
    pick = random.Random(f"{options.card} {options.seed} {options.kind}")
    for _ in range(options.count):
        shape = draw(pick, options.kind)
        for direction in DIRECTIONS:
            answer = ask(convolution_of(shape, direction), options.all)
            print(" ; ".join([shape.question(direction), *answer]), flush=True)


if __name__ == "__main__":
    main()
