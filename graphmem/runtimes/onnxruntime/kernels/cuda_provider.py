"""Which nodes the CUDA provider takes: those it has a kernel for, of their version and types.

``cuda_kernels.json`` is what onnxruntime-gpu 1.31.1 lists (``tests/oracles/onnxruntime/record_kernels.py``). A kernel
takes a node whose operator was last changed within its versions (``KernelRegistry::TryFindKernel``). Some nodes are
left to the CPU though there is a kernel (``CUDAExecutionProvider::GetCapability``, ``cuda_execution_provider.cc``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import onnx

from graphmem.base.tables import read_table
from graphmem.graph.model import Graph, Node
from graphmem.runtimes.onnxruntime.kernels.context import as_text


@cache
def _table() -> dict[str, Any]:
    return read_table(__name__.rpartition(".")[0], "cuda_kernels.json")  # type: ignore[no-any-return]


def takes(node: Node, graph: Graph) -> bool:
    """Whether the provider has a kernel for ``node``."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    rows = _table()["kernels"].get(domain, {}).get(node.op_type)
    if rows is None:
        return False
    since = _since(node.op_type, domain, dict(graph.opsets).get(domain, 1))
    if not any(first <= since <= (last or since) and _accepts(types, node, graph) for first, last, types in rows):
        return False
    left = _LEFT_TO_CPU.get(node.op_type) if not domain else None
    return left is None or not left(node)


@cache
def _since(name: str, domain: str, version: int) -> int:
    """The version in which the operator was last changed, as of ``version`` of its domain; that one where onnx does
    not know the operator."""
    try:
        return int(onnx.defs.get_schema(name, version, domain).since_version)
    except onnx.defs.SchemaError:
        return version


def _accepts(types: Mapping[str, int], node: Node, graph: Graph) -> bool:
    sets = _table()["types"]
    for letter, names in (("i", node.inputs), ("o", node.outputs)):
        for position, name in enumerate(names):
            allowed = types.get(f"{letter}{position}")
            spec = graph.tensors.get(name) if name and allowed is not None else None
            if spec is not None and spec.dtype not in sets[allowed]:
                return False
    return True


def _recurrent(activations: tuple[str, ...]) -> Callable[[Node], bool]:
    """``RNNNeedFallbackToCPU``: cells that cuDNN does not know."""

    def left(node: Node) -> bool:
        attributes = node.attributes
        if any(attributes.get(name) is not None for name in ("activation_alpha", "activation_beta", "clip")):
            return True
        given = [as_text(value).lower() for value in attributes.get("activations") or ()]
        if any(name not in activations[i % len(activations)].split() for i, name in enumerate(given)):
            return True
        if node.op_type == "LSTM":
            return bool(attributes.get("input_forget", 0)) or (len(node.inputs) > 7 and bool(node.inputs[7]))
        return node.op_type == "GRU" and not attributes.get("linear_before_reset", 0)

    return left


_LEFT_TO_CPU: dict[str, Callable[[Node], bool]] = {
    "LSTM": _recurrent(("sigmoid", "tanh", "tanh")),
    "GRU": _recurrent(("sigmoid", "tanh")),
    "RNN": _recurrent(("tanh relu",)),
    # CastNeedFallbackToCPU, ArgMaxOrArgMinNeedFallbackToCPU
    "Cast": lambda node: bool(node.attributes.get("to") == onnx.TensorProto.STRING),
    "ArgMax": lambda node: bool(node.attributes.get("select_last_index", 0)),
    "ArgMin": lambda node: bool(node.attributes.get("select_last_index", 0)),
}
