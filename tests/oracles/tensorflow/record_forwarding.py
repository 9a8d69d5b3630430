"""Record which operators of TensorFlow write their output over an input that nobody else needs.

    python tests/oracles/tensorflow/record_forwarding.py OUTPUT.json

Each operator runs between two matrix products in a graph function; it forwards an input if it makes no allocation of
its own for its output. The CPU kernels are measured; those of a GPU are the same classes for all of these.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recording import Recording

SIDE = 300  # 360,000 bytes a matrix, told apart from everything small


def operators(tf: Any) -> dict[str, tuple[int, Callable[..., Any]]]:
    """ONNX's name of an operator -> how many matrices it takes, and what TensorFlow runs for it."""
    unary = {
        "Relu": tf.nn.relu, "Sigmoid": tf.sigmoid, "Tanh": tf.tanh, "Exp": tf.exp, "Log": tf.math.log,
        "Neg": tf.negative,
        "Abs": tf.abs, "Sqrt": tf.sqrt, "Reciprocal": tf.math.reciprocal, "Erf": tf.math.erf, "Floor": tf.floor,
        "Ceil": tf.math.ceil, "Round": tf.round, "Sin": tf.sin, "Cos": tf.cos, "Sign": tf.sign, "Elu": tf.nn.elu,
        "Selu": tf.nn.selu, "Softplus": tf.nn.softplus, "Softsign": tf.nn.softsign, "LeakyRelu": tf.nn.leaky_relu,
        "Softmax": tf.nn.softmax, "LogSoftmax": tf.nn.log_softmax, "Transpose": tf.transpose,
        "Reshape": lambda x: tf.reshape(tf.reshape(x, [-1]), [SIDE, SIDE]), "Identity": tf.identity,
        "Squeeze": lambda x: tf.squeeze(tf.expand_dims(x, 0), 0), "Clip": lambda x: tf.clip_by_value(x, -1.0, 1.0),
        "BiasAdd": lambda x: tf.nn.bias_add(x, tf.zeros([SIDE])),
        "BatchNormalization": lambda x: tf.reshape(
            tf.compat.v1.nn.fused_batch_norm(
                tf.reshape(x, [1, SIDE, SIDE, 1]), tf.ones([1]), tf.zeros([1]), tf.zeros([1]), tf.ones([1]),
                is_training=False,
            )[0], [SIDE, SIDE]),
    }  # fmt: skip
    binary = {
        "Add": tf.add, "Sub": tf.subtract, "Mul": tf.multiply, "Div": tf.divide, "Pow": tf.pow, "Max": tf.maximum,
        "Min": tf.minimum, "Sum": lambda x, y: tf.raw_ops.AddN(inputs=[x, y]),
        "Where": lambda x, y: tf.where(tf.constant(True, shape=[SIDE, SIDE]), x, y),
        "Concat": lambda x, y: tf.concat([x, y], 0)[:SIDE],
    }  # fmt: skip
    return {name: (1, run) for name, run in unary.items()} | {name: (2, run) for name, run in binary.items()}


def allocations(recording: Recording, tf: Any, count: int, run: Callable[..., Any], kept: int | None) -> int:
    """How many allocations of a matrix happen from the first product to the last, beyond the products themselves.

    The input number ``kept`` is needed once more afterwards, so that it cannot be written over.
    """

    @tf.function(autograph=False)
    def step(*matrices: Any) -> Any:
        inputs = [tf.matmul(matrix, matrix) for matrix in matrices]
        result = tf.matmul(run(*inputs), matrices[0])
        if kept is not None:
            with tf.control_dependencies([result]):
                result = result + tf.matmul(inputs[kept], matrices[0])
        return result

    matrices = [tf.random.uniform([SIDE, SIDE]) for _ in range(count)]
    step(*matrices)
    recording.mark("begin")
    step(*matrices)
    recording.mark("end")
    events = recording.events()
    begin = len(events) - 1 - events[::-1].index(["m", "begin"])
    made = sum(event[0] == "a" and event[2] == SIDE * SIDE * 4 for event in events[begin:])
    return made - count - 1 - (kept is not None)


def main() -> None:
    recording = Recording()
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    found = {}
    for name, (count, run) in operators(tf).items():
        alone = allocations(recording, tf, count, run, None)
        positions = []
        if alone == 0:  # which of the inputs: one is written over as long as one of those it may take is free
            positions = [i for i in range(count) if count == 1 or allocations(recording, tf, count, run, 1 - i) == 0]
        found[name] = positions
        print(name, alone, positions)
    source = f"tensorflow {importlib.metadata.version('tensorflow-cpu')}, graph functions on the CPU, no rewriting"
    Path(sys.argv[1]).write_text(json.dumps({"source": source, "forwards": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
