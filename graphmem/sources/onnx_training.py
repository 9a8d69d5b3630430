"""A bound ONNX graph as a PyTorch model: how one is trained, and run, under PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphmem.errors import UsageError
from graphmem.graph.model import Graph, TensorSpec
from graphmem.sources.base import Built, OnnxModel, Sizes, TorchModel, require_torch

if TYPE_CHECKING:
    from torch import Tensor

    from graphmem.sources.onnx_module.module import OnnxModule

_NORMALIZED = frozenset(
    ("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization")
)


def as_torch_model(loaded: OnnxModel) -> TorchModel:
    """The module of the graph's operators. Raises :class:`UsageError` for several files or runs, and
    :class:`SourceError` when torch is not installed or operators of the graph are not translated."""
    if len(loaded.sessions) != 1 or len(loaded.sessions[0]) != 1:
        raise UsageError("several ONNX files, or runs of several shapes (--shapes), are for --runtime onnxruntime")
    require_torch(f"{loaded.name} in the PyTorch runtime")
    graph = loaded.graph
    notes = tuple(f"{key}: {value}" for key, value in graph.notes)
    return TorchModel(loaded.name, lambda sizes: _build(graph, sizes), notes, framework="ONNX")


def _build(graph: Graph, sizes: Sizes) -> Built:
    from graphmem.sources.onnx_module.gelu import with_whole_gelus
    from graphmem.sources.onnx_module.module import OnnxModule

    whole = with_whole_gelus(graph)
    module = OnnxModule(whole)
    inputs = tuple(_input(graph.tensors[name]) for name in graph.inputs)
    return Built(module, inputs, None, tuple(_notes(whole, module, sizes.training)))


def _input(spec: TensorSpec) -> Tensor:
    import torch

    from graphmem.sources.onnx_module.module import dtype_of

    return torch.zeros(tuple(int(dimension) for dimension in spec.shape), dtype=dtype_of(spec))


def _notes(graph: Graph, module: OnnxModule, training: bool) -> list[str]:
    notes = [
        "every node of the graph is run as PyTorch's operators; of what the exporter took apart only GELU is put "
        "together again"
    ]
    if not training:
        return notes
    made = {node.op_type for node in graph.nodes}
    count = len(list(module.parameters()))
    notes.append("loss: the mean of the first floating-point output")
    notes.append(f"trained: all {count} floating-point initializers of rank 1 or more but batch norms' statistics")
    if "Dropout" not in made:
        notes.append("the graph has no Dropout: exports for inference leave them out, and their masks are not counted")
    if "Conv" in made and not made & _NORMALIZED:
        notes.append(
            "the graph has convolutions and no normalization: an export for inference folds batch norms into the "
            "convolutions, so what they keep for the backward pass is not counted"
        )
    return notes
