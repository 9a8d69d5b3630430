"""Graphs as recorded sessions executed them: optimized by ONNX Runtime 1.31.1, kept without weights."""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from graphmem.graph.model import Graph, TensorSpec
from graphmem.runtimes.onnxruntime.optimizer import OptimizedModel
from graphmem.sources.onnx_file import OnnxFile, read_onnx
from tests import places

EXECUTED = places.ONNXRUNTIME / "executed"


def keep(path: Path, level: str, name: str) -> None:
    """Optimize the model at ``path`` with the installed onnxruntime and keep the result for the tests."""
    file = read_onnx(path, level)
    assert file.optimized is not None
    assert not file.optimized.reason, file.optimized.reason
    document: dict[str, Any] = {
        "version": file.optimized.runtime_version,
        "symbolic": {spec.name: [spec.dtype, list(spec.shape)] for spec in file.optimized.symbolic.values()},
        "models": [model.SerializeToString().hex() for model in (file.optimized.source, file.optimized.model)],
    }
    EXECUTED.mkdir(exist_ok=True)
    data = json.dumps(document, separators=(",", ":")).encode()
    (EXECUTED / f"{name}-{level}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))


def executed_file(name: str, level: str) -> OnnxFile:
    """The kept model ``name`` at ``level``, as :func:`graphmem.sources.onnx_file.read_onnx` gives it."""
    document = json.loads(gzip.decompress((EXECUTED / f"{name}-{level}.json.gz").read_bytes()))
    source, model = (onnx.ModelProto.FromString(bytes.fromhex(text)) for text in document["models"])
    symbolic = {key: TensorSpec(key, dtype, tuple(shape)) for key, (dtype, shape) in document["symbolic"].items()}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{name}.onnx"
        path.write_bytes(source.SerializeToString())
        file = read_onnx(path)
    return replace(file, optimized=OptimizedModel(source, model, symbolic, level, document["version"]), model=model)


def executed_graph(name: str, level: str, batch: int) -> Graph:
    """The kept graph with its batch bound."""
    return executed_file(name, level).bind(batch=batch)
