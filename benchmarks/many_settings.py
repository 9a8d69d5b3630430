"""Many settings of many models through sweeps with a store: python benchmarks/many_settings.py [--settings N]

Twenty models of the zoo, each on five cards, under twenty settings of the allocator, at 25 batches and two lengths, or
50 batches: 100,000 settings with ``--settings 100000``, by default as many batches as make 4,000. Prints for each model
the settings that fit, the captures, milliseconds of processor time a setting (all of it; besides captures and the
templates made of them), and the resident memory; at the end the sums. The store is a file that is deleted, or kept by
``--store FOLDER``: the same command goes on from it.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import graphmem
from graphmem.answering import runs
from graphmem.answering.sized import SizedRuns
from graphmem.sources.zoo import zoo_entries
from graphmem.units import MIB

MODELS = (
    "gpt2", "bert-base", "distilbert-base", "roberta-base", "electra-small", "bart-base", "t5-small", "qwen2-0.5b",
    "pythia-410m", "qwen3-0.6b", "resnet18", "resnet50", "vgg16", "mobilenet-v2", "vit-base", "deit-small", "mlp",
    "mlp-mixer", "convnext-tiny", "efficientnet-b0",
)  # fmt: skip
CARDS = ("T4", "A100-40GB", "A100-80GB", "H100-80GB", "H200")
SPLITS = (21, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    *(f"max_split_size_mb:{size}" for size in SPLITS),
    *(f"roundup_power2_divisions:{parts}" for parts in (2, 4, 8, 16)),
    "garbage_collection_threshold:0.8,max_split_size_mb:256",
    "large_segment_size_mb:64",
)
LENGTHS = (128, 256)


class Clock:
    """Processor time of this process inside some functions, and how often they were called."""

    def __init__(self) -> None:
        self.seconds, self.calls, self._inside = 0.0, 0, False

    def around(self, owner: Any, name: str, *, counts: bool = False) -> None:
        """Time a function of a module or a class from now on."""
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            self.calls += counts
            if self._inside:
                return function(*args, **options)
            self._inside, started = True, time.process_time()
            try:
                return function(*args, **options)
            finally:
                self._inside, self.seconds = False, self.seconds + time.process_time() - started

        setattr(owner, name, timed)


def resident_bytes() -> int:
    """Of this process and those below it."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, more = {os.getpid()}, True
    while more:
        below = {one for one, parent in parents.items() if parent in found} - found
        found, more = found | below, bool(below)
    pages = 0
    for one in found:
        try:
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * resource.getpagesize()


def processor_seconds() -> float:
    """Of this process and those below it that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def grid(model: str, settings: int) -> dict[str, list[Any]]:
    """Settings of a model to vary, about so many combinations."""
    has_length = next(entry for entry in zoo_entries() if entry.name == model).length is not None
    lengths = list(LENGTHS) if has_length else []
    batches = max(4, settings // (len(CARDS) * len(CONFIGURATIONS) * max(1, len(lengths))))
    vary: dict[str, list[Any]] = {"batch": list(range(2, 2 + batches)), "device": list(CARDS)}
    vary["alloc_conf"] = list(CONFIGURATIONS)
    return {"seq_len": lengths, **vary} if lengths else vary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--settings", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--engine", default="")
    parser.add_argument("--scheduler")
    parser.add_argument("--store", type=Path)
    asked = parser.parse_args()
    models = asked.models or list(MODELS)
    clock = Clock()
    clock.around(SizedRuns, "capture")
    clock.around(SizedRuns, "by_template")
    clock.around(runs, "record", counts=True)
    total, fit, started, begun = 0, 0, time.monotonic(), processor_seconds()
    where: dict[str, Any] = {"jobs": asked.jobs, "engine": asked.engine, "scheduler": asked.scheduler}
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.store or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in models:
            before, inside, calls, wall = processor_seconds(), clock.seconds, clock.calls, time.monotonic()
            vary = grid(name, asked.settings // len(models))
            rows = graphmem.sweep(f"zoo:{name}", vary=vary, store=folder / f"{name}.jsonl", **where)
            whole = processor_seconds() - before
            each = (1000 * seconds / len(rows) for seconds in (whole, whole - (clock.seconds - inside)))
            fitting = sum(str(row.figures["fits"]).startswith("yes") for row in rows)
            total, fit = total + len(rows), fit + fitting
            print(
                f"{name:18s} {len(rows):6,} settings, {fitting:6,} fit; {clock.calls - calls:3d} captures; "
                "ms a setting {:6.2f}, besides captures and templates {:5.2f}; ".format(*each)
                + f"{time.monotonic() - wall:6.1f} s; {resident_bytes() / MIB:,.0f} MiB",
                flush=True,
            )
    seconds = processor_seconds() - begun
    print(
        f"{total:,} settings, {fit:,} fit: {seconds:,.0f} s of processor time, {1000 * seconds / total:.2f} ms a "
        f"setting, {1000 * (seconds - clock.seconds) / total:.2f} besides captures and templates; "
        f"{time.monotonic() - started:,.0f} s of wall time"
    )


if __name__ == "__main__":
    main()
