"""Record what is alive while TensorFlow runs random graphs of matrices, operator by operator.

    python tests/oracles/tensorflow/record_executor.py OUTPUT.json

The operators run in the order written, which control dependencies enforce. Recorded for each: how many matrices are
allocated once it has run, beyond the inputs of the graph.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
from pathlib import Path
from typing import Any

from recording import Recording

SIDE = 200
GRAPHS, OPERATORS, INPUTS = 60, 20, 2
ARITY = {"Neg": 1, "Relu": 1, "Transpose": 1, "Identity": 1, "Softmax": 1, "MatMul": 2, "Add": 2, "Mul": 2, "Sub": 2}


def random_graph(seed: int) -> list[list[Any]]:
    """``[operator, inputs]`` of each tensor after the inputs of the graph, 0 and 1; the last is the output."""
    chance = random.Random(seed)
    rows: list[list[Any]] = []
    for number in range(INPUTS, INPUTS + OPERATORS):
        kind = chance.choice(list(ARITY))
        recent = [max(0, number - 1 - min(int(chance.expovariate(0.5)), number - 1)) for _ in range(ARITY[kind])]
        rows.append([kind, recent])
    return rows


def run(tf: Any, rows: list[list[Any]]) -> Any:
    """The graph function of ``rows``."""
    kernels = {
        "Neg": tf.negative, "Relu": tf.nn.relu, "Transpose": tf.transpose, "Identity": tf.identity,
        "Softmax": tf.nn.softmax, "MatMul": tf.matmul, "Add": tf.add, "Mul": tf.multiply, "Sub": tf.subtract,
    }  # fmt: skip

    @tf.function(autograph=False)
    def graph(*inputs: Any) -> Any:
        tensors = list(inputs)
        previous = None
        for kind, operands in rows:
            with tf.control_dependencies([] if previous is None else [previous]):
                previous = tf.raw_ops.NoOp()
            with tf.control_dependencies([previous]):
                tensors.append(kernels[kind](*(tensors[operand] for operand in operands)))
                previous = tensors[-1].op
        return tensors[-1]

    return graph


def peak_and_count(events: list[list[Any]]) -> tuple[int, int]:
    """Most matrices alive beyond those at the beginning, and how many were allocated."""
    alive: set[int] = set()
    peak = count = 0
    for event in events:
        if event[0] == "a" and event[2] == SIDE * SIDE * 4:
            alive.add(event[1])
            count += 1
            peak = max(peak, len(alive))
        elif event[0] == "f":
            alive.discard(event[1])
    return peak, count


def main() -> None:
    recording = Recording()
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    inputs = [tf.random.uniform([SIDE, SIDE]) for _ in range(INPUTS)]
    found = []
    for seed in range(GRAPHS):
        rows = random_graph(seed)
        graph = run(tf, rows)
        graph(*inputs)
        recording.mark(f"begin {seed}")
        result = graph(*inputs)
        recording.mark(f"end {seed}")
        events = recording.events()
        begin, end = events.index(["m", f"begin {seed}"]), events.index(["m", f"end {seed}"])
        peak, count = peak_and_count(events[begin:end])
        found.append({"rows": rows, "peak": peak, "count": count})
        print(seed, peak, count)
        del result
    source = f"tensorflow {importlib.metadata.version('tensorflow-cpu')}, graph functions on the CPU, in order"
    document = {"source": source, "side": SIDE, "inputs": INPUTS, "graphs": found}
    Path(sys.argv[1]).write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
