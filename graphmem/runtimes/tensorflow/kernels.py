"""What TensorFlow's GPU kernels do with memory: which inputs an output is written over or shares its buffer with, and
what they take for themselves while they run. From the kernels' sources in tensorflow/core/kernels (2.21), by file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphmem.runtimes.tensorflow.step import Node, Tensor

#: Outputs are inputs under another shape or name: their buffers are shared (reshape_op.h, identity_op.h, ...).
SHARES = frozenset((
    "Reshape", "ExpandDims", "Squeeze", "Identity", "StopGradient", "PreventGradient", "IdentityN", "Bitcast",
    "CheckNumerics", "EnsureShape", "PlaceholderWithDefault", "_Retval", "Enter", "Exit", "NextIteration", "Switch",
))  # fmt: skip

_ONE = (
    "Relu", "Relu6", "Elu", "Selu", "LeakyRelu", "Sigmoid", "Tanh", "Exp", "Expm1", "Log", "Log1p", "Neg", "Abs", "Sqrt",
    "Rsqrt", "Square", "Erf", "Erfc", "Erfinv", "Inv", "Reciprocal", "Floor", "Ceil", "Round", "Rint", "Sign", "Sin", "Cos",
    "Softplus", "Softsign", "Softmax", "LogSoftmax", "BiasAdd", "ClipByValue", "ZerosLike", "OnesLike", "LogicalNot", "Snapshot",
    "ReluGrad", "Relu6Grad",
)  # fmt: skip
_TWO = (
    "Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "MulNoNan", "Pow", "Maximum", "Minimum", "SquaredDifference",
    "FloorDiv", "FloorMod", "Mod", "TruncateDiv", "TruncateMod", "LogicalAnd", "LogicalOr", "Xdivy", "Xlogy", "Atan2", "BitwiseAnd",
    "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "SigmoidGrad", "TanhGrad", "RsqrtGrad", "SqrtGrad", "InvGrad",
    "ReciprocalGrad", "EluGrad", "SeluGrad", "LeakyReluGrad", "SoftplusGrad", "SoftsignGrad", "Select_",
)  # fmt: skip
#: Operator -> the inputs that its first output may be written over, in the order in which the kernel tries them
#: (``forward_input_or_allocate_output``: cwise_ops_common.h, relu_op.h, bias_op.cc, softmax_op_gpu.cu.cc ...), once
#: nobody else needs them and if type and shape are the same. ``AddN`` tries all (aggregate_ops.cc).
FORWARDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(_ONE, (0,)),
    **dict.fromkeys(_TWO, (0, 1)),
    "Select": (1, 2),
    "SelectV2": (1, 2),
}


@dataclass(frozen=True)
class Need:
    """What a kernel takes beside its outputs: ``before`` is requested before them, ``after`` when they are there; all
    of it is given back when the kernel returns."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


Inputs = Sequence[Tensor]
Rule = Callable[[Node, Inputs], Need]


def needs(node: Node, inputs: Inputs) -> Need:
    """The scratch of a node's kernel; nothing where no rule is known."""
    rule = _RULES.get(node.op)
    return rule(node, inputs) if rule is not None else Need()


def _nothing(node: Node, inputs: Inputs) -> Need:
    return Need()


_RULES: Mapping[str, Rule] = {}
