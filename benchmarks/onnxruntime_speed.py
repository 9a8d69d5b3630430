"""Seconds to plan and replay ONNX Runtime sessions: a large graph once, and ResNet-50 over many batch sizes.

    python benchmarks/onnxruntime_speed.py [--nodes 5000] [--batches 100]

The graph is a chain of residual blocks (MatMul, Add, Relu, Add). ResNet-50 is the one the tests keep. Limits that must
hold on two CPU cores: 1 s for the plan and replay of 5,000 nodes, 5 s for 100 batch sizes, reading the file included.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.replay import replay
from graphmem.runtimes.onnxruntime.arenas import default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.options import Options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.runtimes.onnxruntime.plan.session import plan_session
from graphmem.sources.onnx_file import read_onnx

RESNET = Path(__file__).parent.parent / "tests" / "golden" / "onnxruntime" / "models" / "resnet50.onnx.gz"
WIDTH = 256


def chain(nodes: int, batch: int) -> Graph:
    """Residual blocks of four nodes each."""
    made: list[Node] = []
    tensors = {"x0": TensorSpec("x0", "float32", (batch, WIDTH))}
    weights: list[str] = []
    for block in range(nodes // 4):
        weight, bias = f"w{block}", f"b{block}"
        weights += [weight, bias]
        tensors[weight] = TensorSpec(weight, "float32", (WIDTH, WIDTH))
        tensors[bias] = TensorSpec(bias, "float32", (WIDTH,))
        names = [f"{kind}{block}" for kind in ("m", "a", "r")] + [f"x{block + 1}"]
        for name in names:
            tensors[name] = TensorSpec(name, "float32", (batch, WIDTH))
        product, biased, positive, total = names
        for kind, inputs, output in (
            ("MatMul", (f"x{block}", weight), product), ("Add", (product, bias), biased),
            ("Relu", (biased,), positive), ("Add", (positive, f"x{block}"), total),
        ):  # fmt: skip
            made.append(Node(output, kind, "", inputs, (output,)))
    return Graph("chain", tuple(made), tensors, ("x0",), (f"x{nodes // 4}",), tuple(weights), (("", 18),))


def plan_and_replay(graph: Graph, options: Options) -> int:
    """Peak reserved bytes of two runs."""
    trace = plan([[graph, graph]], options).trace
    allocator = default_allocator(options, reserved=reserved_allocations(trace))
    return replay(trace, allocator).peak_reserved_bytes


def sweep(batches: int) -> list[int]:
    """Peak reserved bytes of ResNet-50 for every batch size; read, optimized and planned once."""
    options = Options()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "resnet50.onnx"
        path.write_bytes(gzip.decompress(RESNET.read_bytes()))
        file = read_onnx(path, options.fusion_level)
    once = plan_session(file.bind(batch=1), options.session)
    peaks = []
    for batch in range(1, batches + 1):
        graph = file.bind(batch=batch)
        trace = plan([[graph, graph]], options, plans=[once]).trace
        allocator = default_allocator(options, reserved=reserved_allocations(trace))
        peaks.append(replay(trace, allocator).peak_reserved_bytes)
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--batches", type=int, default=100)
    arguments = parser.parse_args()
    graph = chain(arguments.nodes, 8)
    timed(f"plan and replay of {len(graph.nodes)} nodes", lambda: plan_and_replay(graph, Options()))
    timed(f"ResNet-50, {arguments.batches} batch sizes", lambda: sweep(arguments.batches))


def timed(what: str, work: Callable[[], object]) -> None:
    """Do ``work`` and print its seconds by the clock and of the processor."""
    begin, busy = time.perf_counter(), time.process_time()
    work()
    print(f"{what}: {time.perf_counter() - begin:.2f} s, {time.process_time() - busy:.2f} s of processor time")


if __name__ == "__main__":
    main()
