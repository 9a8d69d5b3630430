"""Which kernels write their output over an input, by execution provider.

``Alias(i, o)``: output ``o`` always is input ``i``. ``MayInplace(i, o)``: it may be, when the planner sees that nobody
else needs the input. The CPU provider's are measured: ``tests/oracles/onnxruntime/record_operators.py`` runs onnx's
test case of every operator between two others in a session of 1.31.1 and records the buffers. The CUDA provider's are
read in ``core/providers/cuda`` and ``contrib_ops/cuda`` (~1.25) and compared with recorded sessions of 1.31.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphmem.graph.model import Node

Pairs = tuple[tuple[int, int], ...]
MICROSOFT = "com.microsoft"
NCHWC = "com.microsoft.nchwc"


@dataclass(frozen=True, slots=True)
class KernelRule:
    """(input, output) positions that share memory, always or where the planner may."""

    alias: Pairs = ()
    may_inplace: Pairs = ()


@dataclass(frozen=True)
class KernelTable:
    """The rules of one provider, by domain and operator; operators not listed have new buffers."""

    provider: str
    rules: Mapping[tuple[str, str], KernelRule]

    def rule(self, node: Node) -> KernelRule:
        """The rule of the kernel of ``node``."""
        return self.rules.get((node.domain, node.op_type), _NEW_BUFFERS)


_NEW_BUFFERS = KernelRule()
_ALIAS = KernelRule(alias=((0, 0),))
_INPLACE = KernelRule(may_inplace=((0, 0),))


def _rules(*groups: tuple[KernelRule, str, tuple[str, ...]]) -> dict[tuple[str, str], KernelRule]:
    return {(domain, name): rule for rule, domain, names in groups for name in names}


_ALIASES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_ACTIVATIONS = (
    "Relu", "Sigmoid", "Tanh", "Elu", "Selu", "LeakyRelu", "HardSigmoid", "Softplus", "Softsign", "ThresholdedRelu",
)  # fmt: skip
_CPU_INPLACE = (
    "Clip", "Softmax", "LogSoftmax", "Cast", "Trilu", "Shrink", "Scatter", "ScatterElements", "TensorScatter",
)  # fmt: skip

CPU = KernelTable(
    "CPU",
    _rules(
        (_ALIAS, "", (*_ALIASES, "BitCast")),
        (_INPLACE, "", (*_ACTIVATIONS, *_CPU_INPLACE)),
        (_INPLACE, "ai.onnx.ml", ("TreeEnsemble",)),
        (KernelRule(may_inplace=((3, 0),)), NCHWC, ("Conv",)),
        (KernelRule(may_inplace=((3, 0),)), MICROSOFT, ("FusedConv",)),
    ),
)
CUDA = KernelTable(
    "CUDA",
    _rules(
        (_ALIAS, "", _ALIASES),
        (_INPLACE, "", (*_ACTIVATIONS, "Gelu", "HardSwish")),  # activation/activations.cc, tensor/gelu.cc
        (_INPLACE, MICROSOFT, ("Affine", "ParametricSoftplus", "ScaledTanh", "Gelu", "QuickGelu")),
        (KernelRule(may_inplace=((3, 1), (4, 2))), MICROSOFT, ("GroupQueryAttention",)),  # past into present
    ),
)
TABLES = {"cpu": CPU, "cuda": CUDA}
