"""Record in which order the nodes of the three kept models are executed, with their shapes, and what they allocate.

    python -m tests.oracles.onnxruntime.record_planner

Writes ``tests/golden/onnxruntime/ort_planner.json.gz``. ``index_order`` are the nodes of the model file that ONNX
Runtime writes; ``exec_order`` those that its profiler saw, each as [name, inputs, outputs, shapes of the outputs]. Both
are kept without optimizations, for nodes that these insert get other names in every process. ``run1_events`` and
``run2_events`` are [alloc | reserve | free, bytes] until the run ends, its outputs still held; the first allocation of
the second run is the block of the memory pattern.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from tests import places
from tests.oracles.onnxruntime.record_sessions import input_shapes, recorded, sized, write
from tests.support.onnx_samples import REAL_MODELS, unpack

TARGET = places.ONNXRUNTIME / "ort_planner.json.gz"
BATCH = 3


def executed(path: Path) -> dict[str, Any]:
    """The model as it is executed without optimizations: its nodes in both orders, and its initializers."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    options.enable_profiling, options.profile_file_prefix = True, str(path.with_suffix(""))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    shapes = input_shapes(path, BATCH)
    kinds = {value.name: np.float32 if value.type == "tensor(float)" else np.int64 for value in session.get_inputs()}
    session.run(None, {name: np.zeros(shape, kinds[name]) for name, shape in shapes.items()})
    profile = json.loads(Path(session.end_profiling()).read_text())
    graph = onnx.load(options.optimized_model_filepath).graph
    nodes = {node.name: node for node in graph.node}
    return {
        "initializers": [tensor.name for tensor in graph.initializer],
        "index_order": [node.name for node in graph.node],
        "exec_order": [
            [name, list(nodes[name].input), list(nodes[name].output), dims] for name, dims in _kernels(profile)
        ],
    }


def _kernels(profile: list[dict[str, Any]]) -> list[tuple[str, list[list[int]]]]:
    """Every node that ran, with the shapes of its outputs."""
    ending = "_kernel_time"
    kernels = [event for event in profile if event.get("cat") == "Node" and event["name"].endswith(ending)]
    return [
        (kernel["name"].removesuffix(ending), [dims for _, dims in _typed(kernel["args"]["output_type_shape"])])
        for kernel in kernels
    ]


def _typed(outputs: list[dict[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Type and shape of every output: the profiler gives each as a dictionary of one entry."""
    return [entry for output in outputs for entry in output.items()]


def allocated(model: str, level: str, folder: Path) -> dict[str, Any]:
    """The events of the first two runs, and the version of ONNX Runtime."""
    case = {"model": model, "batch": BATCH, "level": level, "pattern": 1, "mode": "trace", "runs": 2}
    result = recorded(case, folder)
    events = sized(result["events"])
    runs = {f"run{run}_events": [event for phase, *event in events if phase == f"run{run}"] for run in (1, 2)}
    block = next(size for kind, size in runs["run2_events"] if kind == "alloc")
    return runs | {"pattern_block": block, "version": result["version"]}


def main() -> None:
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for model in sorted(REAL_MODELS):
            path = unpack(model, Path(folder))
            for level in ("disabled", "all"):
                about = {"model": model, "level": level, "batch": BATCH}
                order = executed(path) if level == "disabled" else {}
                cases.append(about | order | allocated(model, level, Path(folder)))
                print(model, level, flush=True)
    version = {case.pop("version") for case in cases}.pop()
    write(TARGET, {"version": version, "cases": cases})


if __name__ == "__main__":
    main()
