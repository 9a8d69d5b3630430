"""An ONNX file without its weights, small enough to lie beside the records that were made with it."""

from __future__ import annotations

import re
from pathlib import Path

from graphmem.graph.onnx_import import read_model


def keep_graph(model: Path, folder: Path) -> Path:
    """Write what a prediction reads of ``model`` into ``folder``: no weights, no remarks of the exporter.

    Returns the file. Raises :class:`graphmem.errors.SourceError` for a file that is no ONNX model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    graph = read_model(model)
    graph.ClearField("metadata_props")
    graph.graph.ClearField("metadata_props")
    graph.graph.doc_string = ""
    for node in graph.graph.node:
        node.ClearField("metadata_props")  # the exporter's: the Python stack of every operator
        node.doc_string = ""
    for value in (*graph.graph.value_info, *graph.graph.input, *graph.graph.output, *graph.graph.initializer):
        value.ClearField("metadata_props")
        value.doc_string = ""
    kept = folder / (re.sub(r"[^A-Za-z0-9_.-]+", "-", model.stem) + ".onnx")
    kept.write_bytes(graph.SerializeToString(deterministic=True))
    return kept
