"""What kernels of the CPU provider take beside their outputs, against sessions of the installed onnxruntime.

Each case is one operator in a session of its own, traced in an allocator of ours (``tests/oracles/onnxruntime``): the
bytes of all allocations of a run in order, and those of loading.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphmem.runtimes.onnxruntime.options import parse_options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.sources.onnx_file import read_onnx
from graphmem.trace import EventKind
from tests import places

pytest.importorskip("onnxruntime")

_TRACED = """
import json, os, sys
from tests.oracles.onnxruntime import record_session
environment = record_session.Environment("trace")
for path, shapes in json.load(sys.stdin):
    recorder = record_session.Recorder({"model": path, "mode": "trace"}, environment)
    recorder.run(1, shapes)
    print(json.dumps([[phase, size] for phase, kind, size, _ in recorder.events if kind != "free"]), flush=True)
os._exit(0)
"""
_DTYPES = {"f": TensorProto.FLOAT, "u8": TensorProto.UINT8, "i32": TensorProto.INT32}
Case = tuple[list[Any], dict[str, tuple[str, list[int]]], dict[str, tuple[str, list[int]]], dict[str, Any], int]


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def recurrent(kind: str, direction: str, asked: Sequence[bool], **weights: Any) -> Case:
    """5 steps of 3 sequences, 24 inputs and 40 states."""
    sides = 2 if direction == "bidirectional" else 1
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    constants = {"W": zeros(sides, gates * 40, 24), "R": zeros(sides, gates * 40, 40), "B": zeros(sides, 80 * gates)}
    constants = {name: array for name, array in (constants | weights).items() if array is not None}
    shapes = {"Y": [5, sides, 3, 40], "H": [sides, 3, 40], "C": [sides, 3, 40]}
    names = [name if is_asked else "" for name, is_asked in zip(shapes, asked, strict=False)]
    inputs = ["x", *(name if name in constants else "" for name in ("W", "R", "B", "L"))]
    node = helper.make_node(kind, inputs, names, hidden_size=40, direction=direction)
    return [node], {"x": ("f", [5, 3, 24])}, {name: ("f", shapes[name]) for name in names if name}, constants, 17


def quantized_lstm(direction: str) -> Case:
    sides = 2 if direction == "bidirectional" else 1
    constants = {
        "W": zeros(sides, 24, 160, dtype=np.int8), "R": zeros(sides, 40, 160, dtype=np.int8), "B": zeros(sides, 320),
        "ws": zeros(sides), "wz": zeros(sides, dtype=np.int8), "rs": zeros(sides), "rz": zeros(sides, dtype=np.int8),
    }  # fmt: skip
    inputs = ["x", "W", "R", "B", "", "", "", "", "ws", "wz", "rs", "rz"]
    node = microsoft("DynamicQuantizeLSTM", inputs, hidden_size=40, direction=direction)
    return [node], {"x": ("f", [5, 3, 24])}, {"y": ("f", [5, sides, 3, 40])}, constants, 17


def quantized_conv(weight: Sequence[int], output: Sequence[int], dtype: Any, **attributes: Any) -> Case:
    """On an image of 20 x 20."""
    channels = weight[1] * attributes.get("group", 1)
    constants = {
        "xs": np.float32(0.1), "xz": np.array(0, np.uint8), "w": zeros(*weight, dtype=dtype), "ws": np.float32(0.1),
        "wz": np.array(0, dtype), "ys": np.float32(0.1), "yz": np.array(0, np.uint8),
    }  # fmt: skip
    node = helper.make_node("QLinearConv", ["x", *constants], ["y"], **attributes)
    constants = dict(sorted(constants.items()))
    return [node], {"x": ("u8", [2, channels, 20, 20])}, {"y": ("u8", list(output))}, constants, 17


def microsoft(kind: str, inputs: Sequence[str], **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, ["y"], domain="com.microsoft", **attributes)


_SIDES: dict[str, tuple[str, list[int]]] = {"x": ("f", [3, 10, 16]), "k": ("f", [3, 14, 16]), "v": ("f", [3, 14, 24])}
_ATTENDED: dict[str, tuple[str, list[int]]] = {"y": ("f", [3, 10, 24])}
_PACKED: dict[str, Any] = {"w": zeros(16, 48), "b": zeros(48)}
_X: dict[str, tuple[str, list[int]]] = {"x": ("f", [3, 10, 16])}
_Y: dict[str, tuple[str, list[int]]] = {"y": ("f", [3, 10, 16])}
_LENGTHS = np.full(3, 5, np.int32)
_MASK: dict[str, tuple[str, list[int]]] = {"m": ("i32", [3, 14])}
CASES: dict[str, Case] = {
    "BiasGelu": ([microsoft("BiasGelu", ["x", "b"])], _X, _Y, {"b": zeros(16)}, 17),
    "FastGelu": ([microsoft("FastGelu", ["x", "b"])], _X, _Y, {"b": zeros(16)}, 17),
    "FastGelu without a bias": ([microsoft("FastGelu", ["x"])], _X, _Y, {}, 17),
    "LSTM": recurrent("LSTM", "reverse", (True, False, False)),
    "LSTM without biases": recurrent("LSTM", "bidirectional", (False, True, False), B=None),
    "LSTM with lengths": recurrent("LSTM", "forward", (True, True, True), L=_LENGTHS),
    "GRU": recurrent("GRU", "bidirectional", (True, False)),
    "GRU without biases": recurrent("GRU", "reverse", (False, True), B=None),
    "RNN": recurrent("RNN", "bidirectional", (False, True)),
    "DynamicQuantizeLSTM": quantized_lstm("reverse"),
    "DynamicQuantizeLSTM, both ways": quantized_lstm("bidirectional"),
    "QLinearConv": quantized_conv((32, 16, 3, 3), (2, 32, 18, 18), np.int8),
    "QLinearConv, pointwise": quantized_conv((32, 16, 1, 1), (2, 32, 20, 20), np.int8),
    "QLinearConv, depthwise": quantized_conv((32, 1, 3, 3), (2, 32, 18, 18), np.int8, group=32),
    "QLinearConv, groups": quantized_conv((64, 8, 3, 3), (2, 64, 18, 18), np.int8, group=4),
    "QLinearConv, unsigned": quantized_conv((32, 16, 3, 3), (2, 32, 18, 18), np.uint8),
    "Attention": ([microsoft("Attention", ["x", "w", "b"], num_heads=2)], _X, _Y, _PACKED, 17),
    "Attention, causal": (
        [microsoft("Attention", ["x", "w", "b"], num_heads=2, unidirectional=1)], _X, _Y, _PACKED, 17,
    ),
    "MultiHeadAttention": ([microsoft("MultiHeadAttention", ["x", "k", "v"], num_heads=2)], _SIDES, _ATTENDED, {}, 17),
    "MultiHeadAttention with biases": (
        [microsoft("MultiHeadAttention", ["x", "k", "v", "b"], num_heads=2)], _SIDES, _ATTENDED, {"b": zeros(56)}, 17,
    ),
    "MultiHeadAttention with a mask": (
        [microsoft("MultiHeadAttention", ["x", "k", "v", "", "m"], num_heads=2)], _SIDES | _MASK, _ATTENDED, {}, 17,
    ),
    "Attention of opset 23": (
        [helper.make_node("Attention", ["x", "k", "v"], ["y"], q_num_heads=2, kv_num_heads=2, is_causal=1)],
        _SIDES, _ATTENDED, {}, 23,
    ),
}  # fmt: skip


def written(case: Case, path: Path) -> Path:
    nodes, inputs, outputs, constants, opset = case
    ends = [
        [helper.make_tensor_value_info(name, _DTYPES[dtype], shape) for name, (dtype, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "case", *ends, weights)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), str(path))
    return path


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, list[list[Any]]]]:
    """The file of each case, and (phase, bytes) of the allocations of a real session of it."""
    folder = tmp_path_factory.mktemp("cases")
    paths = {name: written(case, folder / f"{index}.onnx") for index, (name, case) in enumerate(CASES.items())}
    asked = [[str(paths[name]), {n: shape for n, (_, shape) in case[1].items()}] for name, case in CASES.items()]
    command = [sys.executable, "-c", _TRACED]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, cwd=places.ROOT, check=False
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CASES), done.stderr[-500:]
    return {name: (paths[name], answer) for name, answer in zip(CASES, answers, strict=True)}


#: Cases whose 8-bit matrices MLAS packs; on a processor with tiles (AMX) for those (mlas/lib/qgemm_kernel_amx.cpp).
_PACKED_FOR_TILES = ("DynamicQuantizeLSTM", "DynamicQuantizeLSTM, both ways", "QLinearConv, groups")


def _has_tiles() -> bool:
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "amx_int8" in processor.read_text()


@pytest.mark.parametrize("name", CASES)
def test_allocations_are_those_of_a_real_session(name: str, traced: Mapping[str, tuple[Path, list[list[Any]]]]) -> None:
    if name in _PACKED_FOR_TILES and _has_tiles():
        pytest.skip("MLAS packs 8-bit matrices another way for AMX tiles, which is not modelled")
    path, events = traced[name]
    trace = plan([[read_onnx(path, "all").bind()]], parse_options("provider:cpu")).trace
    found: dict[int, list[int]] = {0: [], 1: []}
    for event in trace.events():
        if event.kind == EventKind.ALLOC and trace.storages[event.subject].bytes:
            phase = trace.phases[trace.operators[event.operator].phase].iteration
            found[phase].append(trace.storages[event.subject].bytes)
    assert sorted(found[0]) == sorted(size for phase, size in events if phase == "init")
    assert found[1] == [size for phase, size in events if phase == "run1"]
