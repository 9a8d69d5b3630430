"""The CUDA provider of ONNX Runtime, rule by rule; whole sessions are in ``test_onnxruntime_cuda_golden.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from graphmem import analyze
from graphmem.base.figures import MEASURED
from graphmem.errors import NotModelledError, SourceError
from graphmem.graph.asked import Asked
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.runtimes.onnxruntime import cuda_fusions, orders
from graphmem.runtimes.onnxruntime.kernels.cuda_provider import takes
from graphmem.runtimes.onnxruntime.options import parse_options
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.sources.onnx_file import load_onnx, read_onnx
from graphmem.trace import Category
from tests.recorded import onnx_cuda
from tests.support import onnx_samples as samples


def alone(node: Node, dtype: str) -> Graph:
    """A graph of one node, all of whose tensors are of one type."""
    names = [name for name in (*node.inputs, *node.outputs) if name]
    return Graph(
        "g", (node,), {name: TensorSpec(name, dtype, (2, 3)) for name in names}, ("x",), ("y",), (), (("", 17),)
    )


def test_an_unknown_mode_of_resize_is_refused(tmp_path: Path) -> None:
    sizes = helper.make_tensor("sizes", onnx.TensorProto.INT64, [4], [1, 1, 8, 8])
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], name="up", mode="bilinear")
    x, y = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1, 1, s, s]) for n, s in (("x", 4), ("y", 8)))
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y], [sizes])), tmp_path / "resize.onnx")
    with pytest.raises(SourceError, match=r"'up' \(Resize\): ONNX Runtime knows no mode 'bilinear'"):
        analyze(tmp_path / "resize.onnx", device="A10G", alloc_conf="graph_optimization_level:disabled")


@pytest.mark.parametrize(
    ("operator", "attributes", "dtype", "taken"),
    [
        ("Relu", {}, "float32", True),
        ("Relu", {}, "int32", False),
        ("Cast", {"to": onnx.TensorProto.STRING}, "float32", False),
        ("Cast", {"to": onnx.TensorProto.INT64}, "float32", True),
        ("ArgMax", {"select_last_index": 1}, "float32", False),
        ("GRU", {"linear_before_reset": 0}, "float32", False),
        ("GRU", {"linear_before_reset": 1}, "float32", True),
        ("LSTM", {"clip": 1.0}, "float32", False),
        ("DynamicQuantizeLinear", {}, "float32", False),
        ("Nobody", {}, "float32", False),
    ],
)
def test_a_node_is_taken_by_its_kernel_s_types_and_attributes(
    operator: str, attributes: dict[str, Any], dtype: str, taken: bool
) -> None:
    node = Node("n", operator, "", ("x",), ("y",), attributes=attributes)
    if operator in ("Cast", "ArgMax"):  # what they make has a type of its own
        node = replace(node, outputs=())
    assert takes(node, alone(node, dtype)) == taken


def test_recorded_nodes_on_the_cpu_are_the_predicted_ones(tmp_path: Path) -> None:
    onnx_cuda.kept_graphs(tmp_path)
    lines = [line for line in onnx_cuda.load() if line["on_cpu"] and "provider" not in line and "level" not in line]
    for line in lines[:: max(1, len(lines) // 4)]:
        file = read_onnx(tmp_path / line["graph"], "extended", "cuda")
        (graphs,) = file.model_of(Asked(), onnx_cuda.shapes(line)).sessions
        (made,) = plan([graphs[:1]], parse_options("")).plans
        if made.bodies:  # the log names nodes of every branch, the plan those that are followed
            continue
        found: dict[str, int] = {}
        for index in made.host_nodes:
            found[made.nodes[index].op_type] = found.get(made.nodes[index].op_type, 0) + 1
        assert found == line["on_cpu"], line["name"]


def test_hard_swish_stays_one_node_and_a_bias_joins_its_softmax(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("HardSwish", ["x"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Softmax", ["c"], ["d"], axis=-1),
        helper.make_node("Neg", ["d"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [samples.value("x", (2, 8))], [samples.value("y", None)],
        [onnx.numpy_helper.from_array(np.zeros(8, np.float32), "b")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path = samples.save(model, tmp_path)
    made = read_onnx(path, "extended", "cuda").model.graph.node
    assert [node.op_type for node in made] == ["HardSwish", "BiasSoftmax", "Neg"]
    assert [node.op_type for node in read_onnx(path, "basic", "cuda").model.graph.node][-3:] == [
        "Add",
        "Softmax",
        "Neg",
    ]


@pytest.mark.parametrize(
    ("data", "mask", "known"),
    [
        ((2, 4, 8), (8,), True),
        ((2, 4, 8), (2, 1, 8), True),
        ((2, 4, 8), (4, 8), True),
        ((2, 3, 4, 8), (2, 1, 4, 8), False),  # neither the innermost nor the outermost
        ((2, 4, 8), (2, 4, 1), False),  # broadcast along the axis
        (("", 8), ("", 8), False),
    ],
)
def test_broadcasts_that_bias_softmax_knows(data: tuple[int, ...], mask: tuple[int, ...], known: bool) -> None:
    assert cuda_fusions._is_known(data, mask, -1, 17) == known


def test_the_order_of_initializers_is_an_interval_and_none_where_they_are_reserved(tmp_path: Path) -> None:
    path = samples.unpack("unet", tmp_path)
    drawn = analyze(path, batch=4, cudnn="never")
    (cause,) = [cause for cause in drawn.doubts.causes if cause.name == "order of initializers"]
    assert cause.basis == MEASURED
    assert orders.DRAWS < cause.count <= orders.MOST_DRAWS  # they differ: more are drawn
    on_device = "session.use_device_allocator_for_initializers:1"
    reserved = analyze(path, batch=4, cudnn="never", alloc_conf=on_device)
    assert not [cause for cause in reserved.doubts.causes if cause.name == "order of initializers"]
    assert analyze(path, batch=4, cudnn="never").peak == drawn.peak  # the same orders every time


def test_recurrent_kernels_pack_their_weights_and_keep_generators(tmp_path: Path) -> None:
    hidden, inputs = 32, 16
    weights = [
        onnx.numpy_helper.from_array(np.zeros((1, 4 * hidden, width), np.float32), name)
        for name, width in (("w", inputs), ("r", hidden))
    ]
    graph = helper.make_graph(
        [helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=hidden)],
        "g", [samples.value("x", (5, 3, inputs))], [samples.value("y", None)], weights,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    trace = plan([[load_onnx(samples.save(model, tmp_path))]], parse_options("")).trace
    kept = {storage.label: storage.bytes for storage in trace.storages if storage.category == Category.BUFFER}
    packed = 4 * (4 * hidden * inputs + 4 * hidden * hidden + 2 * 4 * hidden)
    assert kept["w (packed)"] == packed
    assert kept["dropout states"] % (24 * 512) == 0


@pytest.mark.parametrize("provider", ["tensorrt", "TensorrtExecutionProvider", "openvino", "dml", "coreml"])
def test_other_providers_are_named_and_not_modelled(provider: str) -> None:
    with pytest.raises(NotModelledError, match="is not modelled"):
        parse_options(f"provider:{provider}")


def test_of_other_providers_weights_inputs_and_outputs_are_known(tmp_path: Path) -> None:
    path = samples.save(samples.perceptron(), tmp_path)
    with pytest.raises(NotModelledError, match="no peak: weights 768 B, inputs 96 B, outputs 48 B") as raised:
        analyze(path, batch=3, alloc_conf="provider:tensorrt")
    assert raised.value.known == {"weights": 768, "inputs": 96, "outputs": 48}


def test_options_that_are_not_followed_leave_no_figure_certain(tmp_path: Path) -> None:
    path = samples.unpack("unet", tmp_path)
    estimate = analyze(path, batch=1, cudnn="never", alloc_conf="prefer_nhwc:1")
    assert estimate.doubts.most("reserved") is None
    assert analyze(path, batch=1, cudnn="never", alloc_conf="prefer_nhwc:0").doubts.most("reserved") is not None


def test_a_pattern_that_the_card_refuses_does_not_end_the_session(tmp_path: Path) -> None:
    """As the real provider does on the stub driver with 14,753 MiB, which are a T4's less its context: it logs that the
    block of the second run was refused and goes on at 4,096, and fails in the first run from 4,097 on."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["c"], axis=1),
        helper.make_node("Tanh", ["c"], ["d"]),
        helper.make_node("Concat", ["c", "d"], ["e"], axis=1),
        helper.make_node("ReduceMean", ["e"], ["y"], axes=[1], keepdims=1),
    ]
    proto = samples.model(nodes, [samples.value("x", ["N", 1 << 16])], [samples.value("y", ["N", 1])], opset=13)
    path = samples.save(proto, tmp_path)
    most, more = (analyze(path, batch=batch, device="T4") for batch in (4096, 4097))
    assert most.fit is not None
    assert more.fit is not None
    assert most.fit.fits
    assert any("refuses a memory pattern's block of 8.00 GiB" in text for text in most.assumptions)
    assert more.fit.failed_at is not None
    assert more.fit.failed_at.phase == "iteration 1 run"
    roomy = analyze(path, batch=4096, device="A100-80GB")
    assert not any("refuses" in text for text in roomy.assumptions)


def test_either_end_of_what_plans_may_take_goes_on_without_the_refused_block_too(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], pads=[3, 3, 3, 3], strides=[2, 2]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w3", "b3"], ["y"]),
    ]
    shapes = {"w1": (64, 3, 7, 7), "w2": (128, 64, 3, 3), "w3": (128, 10), "b3": (10,)}
    weights = [onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in shapes.items()]
    inputs, outputs = samples.value("x", ["N", 3, "H", "W"]), samples.value("y", ["N", 10])
    path = samples.save(samples.model(nodes, [inputs], [outputs], weights), tmp_path)
    estimate = analyze(path, batch=335, dims={"H": 224, "W": 224}, device="T4", cudnn="never")
    assert any("refuses a memory pattern's block" in text for text in estimate.assumptions)
    assert any(cause.name == "cuDNN's plans" for cause in estimate.doubts.causes)
    assert estimate.fit is not None
    assert estimate.fit.verdict == "yes"
    most = estimate.interval("device")[1]
    assert most is not None
    assert most < estimate.fit.capacity_bytes, "a block of the pattern was in the end that takes more"
