"""Record CPU sessions of the three kept models: every event of every run, and the arena's statistics after it.

    python -m tests.oracles.onnxruntime.record_sessions

Writes ``tests/golden/onnxruntime/ort_sessions.json.gz``, and the executed graphs into ``executed/``. A case is a job of
``record_session`` in short: ``model``, ``batch``, ``level``, ``pattern``, ``mode``, number of ``runs``, and where it
has them ``arena``, ``config`` and ``shrink`` (the last run gives unused regions back). Its ``events`` are
[phase, alloc | reserve | free, bytes], its ``stats`` those after loading and after every run, outputs given back.

Weights are loaded in an order that differs from process to process, so events of loading are sorted. All else repeats,
but for names of nodes that ONNX Runtime inserts. Its optimized graphs fit the vector width of the machine that records.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

from tests import places
from tests.oracles.onnxruntime.record_session import record
from tests.support.onnx_samples import REAL_MODELS, unpack
from tests.support.onnx_sessions import keep

TARGET = places.ONNXRUNTIME / "ort_sessions.json.gz"
BATCHES = {"resnet50": (1, 4), "bert_mini": (1, 2, 8), "unet": (1, 2, 8)}
#: ``kSameAsRequested``, where the default extends by powers of two.
SAME_AS_REQUESTED = {"max_mem": 0, "arena_extend_strategy": 1}
ON_DEVICE = {"session.use_device_allocator_for_initializers": "1"}
Case = dict[str, Any]


def cases() -> Iterator[Case]:
    """What is asked of every model: batches with and without memory patterns, then one option each."""
    for model in sorted(REAL_MODELS):
        optimized = {"model": model, "level": "all"}
        for batch in BATCHES[model]:
            for pattern in (1, 0):
                asked = optimized | {"batch": batch, "pattern": pattern}
                yield asked | {"mode": "arena", "runs": 3}
                if batch > 1:
                    yield asked | {"mode": "arena", "runs": 3, "arena": SAME_AS_REQUESTED}
                yield asked | {"mode": "trace", "runs": 3 if pattern else 2}
        pair = {"batch": 2, "pattern": 1}
        for mode in ("arena", "trace"):
            yield {"model": model, "level": "disabled", **pair, "mode": mode, "runs": 2}
        yield optimized | pair | {"mode": "arena", "runs": 3, "config": ON_DEVICE}
        yield optimized | pair | {"mode": "arena", "runs": 3, "shrink": 1}


def recorded(case: Case, folder: Path) -> dict[str, Any]:
    """What a session of that case said, in a process of its own."""
    path = folder / f"{case['model']}.onnx"
    shapes = input_shapes(path, case["batch"])
    result = record(case | {"model": str(path), "runs": [shapes] * case["runs"]})
    if "error" in result:
        raise SystemExit(f"{case}: {result['error']}")
    return result


def sized(events: list[list[Any]]) -> list[list[Any]]:
    """The events with what a free frees, in bytes, in place of the block's number; loading sorted."""
    sizes = {number: size for _, kind, size, number in events if kind != "free"}
    found = [[phase, kind, sizes[number]] for phase, kind, _, number in events]
    return sorted(event for event in found if event[0] == "init") + [event for event in found if event[0] != "init"]


def input_shapes(path: Path, batch: int) -> dict[str, list[int]]:
    """The shapes of the model's inputs, its only unknown dimension being the batch."""
    graph = onnx.load(str(path), load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    return {
        value.name: [d.dim_value if d.HasField("dim_value") else batch for d in value.type.tensor_type.shape.dim]
        for value in graph.input
        if value.name not in constants
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Pack ``document``, the same bytes every time."""
    path.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0))


def main() -> None:
    kept, version = [], ""
    with tempfile.TemporaryDirectory() as name:
        for model in REAL_MODELS:
            path = unpack(model, Path(name))
            for level in ("disabled", "all"):
                keep(path, level, model)
        for case in cases():
            result = recorded(case, Path(name))
            version = result["version"]
            kept.append(case | ({"events": sized(result["events"])} if case["mode"] == "trace" else _settled(result)))
            print(*case.values(), flush=True)
    write(TARGET, {"version": version, "cases": kept})


def _settled(result: dict[str, Any]) -> dict[str, Any]:
    return {"stats": {tag: stats for tag, stats in result["stats"].items() if not tag.endswith("_held")}}


if __name__ == "__main__":
    main()
