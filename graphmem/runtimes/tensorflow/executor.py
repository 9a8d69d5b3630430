"""An ONNX graph as TensorFlow's executor would run it: operator by operator, every tensor freed after its last reader.

Nothing is planned ahead. An operator's output is allocated when it runs; a tensor goes when the last operator that
reads it has run; and many kernels write their output over an input of the same type and shape that nobody else needs
(``OpKernelContext::forward_input_or_allocate_output``, tensorflow/core/framework/op_kernel.h).
"""

from __future__ import annotations

from collections.abc import Mapping

from graphmem.errors import SourceError
from graphmem.graph.liveness import plan_liveness
from graphmem.graph.model import Graph
from graphmem.trace import Trace

_ONE_INPUT = (
    "Relu", "Sigmoid", "Tanh", "Exp", "Log", "Neg", "Abs", "Sqrt", "Reciprocal", "Erf", "Floor", "Ceil", "Round", "Sin",
    "Cos", "Sign", "Elu", "Selu", "Softplus", "Softsign", "LeakyRelu", "Softmax", "LogSoftmax", "Clip",
)  # fmt: skip
_TWO_INPUTS = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum")

#: ONNX operator -> the inputs that TensorFlow's kernel for it forwards. Measured on 2.21, whose CPU and GPU kernels are
#: the same classes here: tests/golden/tensorflow/tf_forwarding.json, made by tests/oracles/tensorflow/
#: record_forwarding.py. The condition of ``Where`` is input 0.
FORWARDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_ONE_INPUT, (0,)),
    **dict.fromkeys(_TWO_INPUTS, (0, 1)),
    "Where": (1, 2),
}

#: Operators whose subgraphs TensorFlow would run as functions, with frames of their own.
_CONTROL_FLOW = frozenset(("If", "Loop", "Scan", "SequenceMap"))

PLAN_NOTES = (
    (
        "plan",
        "each ONNX operator counts as one operator of TensorFlow's executor, in the order of the file (one thread, "
        "graph mode without XLA); outputs are written over inputs where TensorFlow's kernels do so",
    ),
    ("layout", "copies between NCHW and NHWC, which a converter may add, are not counted"),
)


def plan_executor(graph: Graph, *, iterations: int = 2) -> Trace:
    """The trace of loading ``graph`` and running it ``iterations`` times.

    Raises :class:`~graphmem.errors.SourceError` for graphs with control flow, naming its operators.
    """
    branching = sorted({node.op_type for node in graph.nodes if not node.domain and node.op_type in _CONTROL_FLOW})
    if branching:
        raise SourceError(
            f"{graph.name}: control flow ({', '.join(branching)}) is not planned for TensorFlow; "
            "use --runtime onnxruntime"
        )
    return plan_liveness(graph, iterations=iterations, notes=PLAN_NOTES, forwards=FORWARDS)
