"""Processor seconds of ``graphmem analyze FILE --gpu H200 --batch N`` beside ONNX Runtime's own session start.

    python benchmarks/onnx_headline.py [FILE ...] [--batch 16] [--times 3]

Each is a process of its own, Python's start included, one after the other and in turns, so that what else the machine
does counts for both. A session start reads the file, optimizes its graph and makes its kernels; nothing is run. Without
FILE it is a network of 50 convolutions that is written for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

START = "import sys, onnxruntime; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
LAYERS, WIDTH = 50, 64


def processor_seconds(command: list[str]) -> float:
    """What the process of ``command`` takes."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def network(directory: Path) -> Path:
    """x[batch,64,56,56] through convolutions with activations."""
    weights = [numpy_helper.from_array(np.zeros((WIDTH, WIDTH, 3, 3), np.float32), f"w{i}") for i in range(LAYERS)]
    nodes = []
    for i in range(LAYERS):
        nodes.append(helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"x{i + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", WIDTH, 56, 56])
        for name in ("x0", f"x{LAYERS}")
    ]
    graph = helper.make_graph(nodes, "network", ends[:1], ends[1:], weights)
    path = directory / "network.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'file':40} {'graphmem':>9} {'session':>9} {'ratio':>6}")
    with tempfile.TemporaryDirectory() as directory:
        for file in arguments.files or [network(Path(directory))]:
            ours, theirs = [], []
            for _ in range(arguments.times):
                command = ["-m", "graphmem", "analyze", str(file), "--gpu", "H200", "--batch", str(arguments.batch)]
                ours.append(processor_seconds([sys.executable, *command]))
                theirs.append(processor_seconds([sys.executable, "-c", START, str(file)]))
            one, other = statistics.median(ours), statistics.median(theirs)
            print(f"{file.name[-40:]:40} {one:8.2f}s {other:8.2f}s {one / other:6.2f}")


if __name__ == "__main__":
    main()
