"""A model of the zoo as an ONNX file, by torch's own exporter."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from graphmem.errors import SourceError, first_line
from graphmem.sources.base import Sizes
from graphmem.sources.zoo import load_zoo

if TYPE_CHECKING:
    from torch import Tensor


def export_onnx(name: str, file: str, batch: int | None = None, seq_len: int | None = None) -> None:
    """Write the model for inference with a symbolic first dimension called ``batch``.

    Builds the real model, so it takes the memory of its weights. Raises :class:`SourceError` when the exporter, which
    needs onnxscript, is not installed or cannot express the model.
    """
    import torch

    built = load_zoo(name).build(Sizes(batch, seq_len, training=False))
    assert built is not None
    arguments, keywords = _called_with(built.inputs)
    tensors = (*arguments, *keywords.values())
    shapes = [{0: torch.export.Dim.DYNAMIC} if tensor.dim() else {} for tensor in tensors]
    try:
        with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            torch.onnx.export(
                built.model.eval(),
                arguments,
                file,
                kwargs=keywords,
                input_names=list(keywords) or None,
                dynamic_shapes=dict(zip(keywords, shapes, strict=True)) if keywords else tuple(shapes),
                dynamo=True,
                external_data=True,
            )
    except ImportError as error:
        raise SourceError(f"exporting to ONNX needs {error.name}; install it with: pip install {error.name}") from None
    except Exception as error:
        raise SourceError(f"zoo:{name} cannot be exported to ONNX: {first_line(error)}") from error


def _called_with(inputs: object) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    if isinstance(inputs, dict):
        return (), {key: value for key, value in inputs.items() if hasattr(value, "shape")}
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}
