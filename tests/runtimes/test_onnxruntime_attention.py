"""What attention takes on a card, by card, type and shapes: requests seen in real sessions of 1.31.1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from graphmem.cudnn.descriptors import Descriptor, Kind, Type
from graphmem.cudnn.plans import Convolution, _convolution
from graphmem.devices import device_named
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.runtimes.onnxruntime.half_precision import widened
from graphmem.runtimes.onnxruntime.kernels.context import OUTPUTS, Context
from graphmem.runtimes.onnxruntime.kernels.cuda_buffers import RULES
from graphmem.runtimes.onnxruntime.kernels.libraries import Libraries

MULTI_HEAD, ATTENTION, ONNX = "com.microsoft.MultiHeadAttention", "com.microsoft.Attention", "Attention"
Shape = tuple[int, ...]


def taken(kind: str, card: str, dtype: str, *shapes: Shape, **attributes: Any) -> tuple[int, ...] | None:
    """What the kernel of one node asks for beside its output."""
    names = [f"x{i}" for i in range(len(shapes))]
    specs = {name: TensorSpec(name, dtype, shape) for name, shape in zip(names, shapes, strict=True)}
    specs["y"] = TensorSpec("y", dtype, shapes[0])
    domain, _, operator = kind.rpartition(".")
    node = Node("n", operator, domain, tuple(names), ("y",), attributes={"num_heads": 4} | attributes)
    graph = Graph("g", (node,), specs, tuple(names), ("y",), (), (("", 23),))
    steps = RULES[kind](Context(node, graph), Libraries(device_named(card)))
    return None if steps is None else tuple(step for step in steps if step != OUTPUTS)


ROWS, LONG, HEADS, FEW = (2, 64, 256), (2, 640, 256), (2, 4, 64, 64), (2, 2, 64, 64)
WEIGHTS = ((256, 768), (768,))


@pytest.mark.parametrize(
    ("kind", "card", "dtype", "shapes", "expected"),
    [
        (MULTI_HEAD, "H200", "float32", (ROWS,) * 3, (655360,)),
        (MULTI_HEAD, "H200", "float16", (ROWS,) * 3, (256,)),
        (MULTI_HEAD, "A100", "float16", (LONG,) * 3, (20480,)),
        (MULTI_HEAD, "T4", "float16", (ROWS,) * 3, (197120,)),
        (MULTI_HEAD, "T4", "float16", (LONG,) * 3, (1966336,)),
        (MULTI_HEAD, "T4", "float16", ((2, 64, 4, 3, 64),), (256,)),
        (MULTI_HEAD, "T4", "float16", (ROWS, (2, 64, 4, 2, 64)), (512,)),
        (MULTI_HEAD, "A100", "float16", ((2, 8, 256), LONG, LONG), (256, 768, 49152)),
        (MULTI_HEAD, "T4", "float16", ((2, 64, 1024),) * 3, (524288,)),
        (MULTI_HEAD, "H200", "float16", ((2, 64, 80),) * 3, (192512,)),
        (MULTI_HEAD, "H200", "float16", ((2, 1, 256), LONG, LONG), None),
        (ATTENTION, "A100", "float16", (ROWS, *WEIGHTS), (196608, 196864)),
        (ATTENTION, "A100", "float16", (LONG, *WEIGHTS), (20480, 1966080, 1966080)),
        (ATTENTION, "H200", "float16", (ROWS, *WEIGHTS), (196608, 196608, 256)),
        (ONNX, "A100", "float16", (HEADS,) * 3, (2048, 65536, 65536)),
        (ONNX, "T4", "float16", (HEADS, FEW, FEW), (65536, 65536, 65536, 65536)),
        (ONNX, "H200", "float32", (HEADS, FEW, FEW), (262144,)),
    ],
)
def test_the_room_of_attention_is_that_of_the_implementation_that_runs(
    kind: str, card: str, dtype: str, shapes: tuple[Shape, ...], expected: tuple[int, ...] | None
) -> None:
    assert taken(kind, card, dtype, *shapes) == expected


def test_paddings_before_and_after_a_convolution_are_not_turned_around() -> None:
    class Written:
        def __init__(self) -> None:
            self.values: dict[int, Any] = {}

        def make(self, kind: Kind) -> Descriptor:
            return Descriptor(0)

        def set(self, made: Descriptor, attribute: int, kind: Type, values: Any) -> None:
            self.values[attribute] = tuple(values)

        def finalize(self, made: Descriptor) -> None:
            """Nothing is checked."""

    even = Convolution("forward", "float32", (1, 1, 1, 9), (1, 1, 1, 3), (1, 1, 1, 10), (1, 1), (0, 1), (1, 1), False)
    written: Any = Written()
    _convolution(written, replace(even, padding_after=(0, 2)))
    post, pre = 104, 105  # CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, ..._PRE_PADDINGS
    assert (written.values[pre], written.values[post]) == ((0, 1), (0, 2))


def test_a_constant_of_a_formula_is_itself_in_single_precision() -> None:
    values = {"root": np.float16(2**0.5), "other": np.float16(1.4)}
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    half = onnx.TensorProto.FLOAT16
    graph = helper.make_graph(
        [helper.make_node("Div", ["x", "root"], ["a"]), helper.make_node("Mul", ["a", "other"], ["y"])], "g",
        [helper.make_tensor_value_info("x", half, [4])], [helper.make_tensor_value_info("y", half, [4])], weights,
    )  # fmt: skip
    wide = widened(helper.make_model(graph))
    assert wide is not None
    root, other = (float(numpy_helper.to_array(tensor)) for tensor in wide.graph.initializer)
    assert root == np.float32(2**0.5)
    assert other == np.float32(np.float16(1.4))
