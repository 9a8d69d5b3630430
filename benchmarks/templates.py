"""Many sizes from few captures, checked: python benchmarks/templates.py [--checks N] [--part N/M] [model ...]

Each model is captured at two small sizes and a large one, or at more where its curves need more; then N further sizes
are written by the template and captured. Of an ONNX file, which is planned at every size, what its sizes share is
checked: each is planned after others, and alone. Prints for each model what became of the checks (equal in every event,
storage and byte; refused by the template; wrong), the processor time of a capture and of a size by template, and their
ratio, all of one process; at the end the sums. A wrong one is a defect: the template was proven.

Without models: those of the zoo by their batch, whole configurations of transformers and timm, by the length of their
sequences where they have some, and ONNX files of the tests and of the package onnx.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from graphmem.answering import runs
from graphmem.answering.question import Question
from graphmem.answering.runs import RunCache, silent
from graphmem.answering.sized import SizedRuns
from graphmem.errors import GraphmemError
from graphmem.run import Run
from graphmem.sources.zoo import zoo_entries
from graphmem.trace import same

#: Sizes that are captured, and those that are checked: of batches, and of sequences.
LEARNT = {"batch": (2, 3, 64, 14, 9), "seq_len": (64, 96, 512, 224, 160)}
ASKED = {"batch": (4, 7, 16, 33, 6, 24, 40, 11, 50, 10), "seq_len": (128, 192, 256, 288, 320, 352, 384, 416, 448, 480)}
WHOLE = (
    "hf:distilbert/distilgpt2", "hf:google-bert/bert-base-uncased", "hf:EleutherAI/pythia-70m", "hf:facebook/opt-125m",
    "hf:Qwen/Qwen3-0.6B", "hf:HuggingFaceTB/SmolLM2-135M", "hf:meta-llama/Llama-3.2-1B", "hf:google/gemma-2-2b",
    "timm:vit_tiny_patch16_224", "timm:resnet26d",
)  # fmt: skip
#: Of the package onnx; other files fix their batch.
LIGHT = ("densenet121", "squeezenet")


@dataclass
class Found:
    """What became of the checks of a model, and seconds of processor time."""

    ends: Counter[str] = field(default_factory=Counter)
    captures: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    why: str = ""

    def check(self, size: int, run: Run, alone: Run) -> None:
        """Note whether a run is what it is alone."""
        known = run.planned is None or (alone.planned is not None and run.planned.doubts == alone.planned.doubts)
        self.ends["equal" if known and same(run.trace, alone.trace) else f"WRONG at {size}"] += 1


def checked(model: str, checks: int) -> Found:
    """Raises :class:`GraphmemError` where the model cannot be captured."""
    size = "seq_len" if model.startswith("hf:") else "batch"

    def question(value: int) -> Question:
        return Question(model, device="H200", **{"batch": 2, size: value})

    return (_planned if model.endswith(".onnx") else _captured)(question, size, checks)


def _captured(question: Callable[[int], Question], size: str, checks: int) -> Found:
    found = Found()
    with SizedRuns(size, question, RunCache()) as sized:
        for value in LEARNT[size]:
            with _timed(found.captures):
                sized.capture(value, silent)
            if sized.is_proven or sized.refused:
                break
        found.why = sized.refused or ("" if sized.is_proven else "not proven")
        for value in ASKED[size][:checks]:
            with _timed(found.written):
                run = sized.by_template(value) if sized.is_proven else None
            if run is None:
                found.written.pop()
                found.ends["refused"] += 1
                continue
            found.check(value, run, runs.record(question(value), runs.load(question(value))))
    return found


def _planned(question: Callable[[int], Question], size: str, checks: int) -> Found:
    found, cache = Found(), RunCache()
    cache.run(question(LEARNT[size][0]))
    for value in ASKED[size][:checks]:
        with _timed(found.written):
            run = cache.run(question(value))
        with _timed(found.captures):
            alone = RunCache().run(question(value))
        found.check(value, run, alone)
    return found


@contextlib.contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    """Adds the processor seconds of a block to a list."""
    started = time.process_time()
    yield
    seconds.append(time.process_time() - started)


def models(folder: Path) -> Iterator[str]:
    """What is checked unless something is named; files are unpacked into ``folder``."""
    yield from (f"zoo:{entry.name}" for entry in zoo_entries())
    yield from WHOLE
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    yield from (str(light / f"light_{name}.onnx") for name in LIGHT)
    for packed in sorted(Path(__file__).parents[1].glob("tests/golden/onnxruntime/models/*.onnx.gz")):
        unpacked = folder / packed.stem
        unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
        yield str(unpacked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--checks", type=int, default=6)
    parser.add_argument("--part", default="1/1", metavar="N/M", help="every Mth model from the Nth on")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        total = all_checked(asked.models or list(models(Path(folder))), asked.part, asked.checks)
    print(dict(total))
    sys.exit(any(end.startswith("WRONG") for end in total))


def all_checked(models: Sequence[str], part: str, checks: int) -> Counter[str]:
    """The models of a part, one a line; what became of all checks."""
    first, step = map(int, part.split("/"))
    total = Counter[str]()
    for model in models[first - 1 :: step]:
        name = Path(model).name
        try:
            found = checked(model, checks)
        except GraphmemError as error:
            print(f"{name:36s} not captured: {str(error)[:90]}", flush=True)
            total["models not captured"] += 1
            continue
        total += found.ends
        capture, written = min(found.captures), min(found.written, default=0.0)
        times = f"{capture:6.2f} s {1000 * written:6.0f} ms {capture / written:5.0f}x" if written else ""
        print(f"{name:36s} {dict(found.ends)} {times} {found.why[:110]}", flush=True)
    return total


if __name__ == "__main__":
    main()
