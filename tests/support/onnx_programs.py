"""Small ONNX programs of nested branches, loops and scans, from a tree of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

ROWS, COLUMNS = 2, 64
_SHAPE = (ROWS, COLUMNS)
_PLAIN = st.sampled_from(("Relu", "Sigmoid", "Softmax", "Add", "MatMul"))

Step = Any


def _nested(inner: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    steps = st.lists(inner, min_size=1, max_size=3)
    return (
        st.tuples(st.just("If"), st.booleans(), steps, steps)
        | st.tuples(st.just("Loop"), st.integers(0, 3), st.booleans(), steps)
        | st.tuples(st.just("Scan"), st.just(0), steps)
    )


programs = st.lists(st.recursive(_PLAIN, _nested, max_leaves=8), min_size=1, max_size=4)


class _Writer:
    """Nodes of one graph after another, with names that are nowhere else."""

    def __init__(self) -> None:
        self.count = 0
        self.conditions: list[bool] = []

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def steps(self, steps: Sequence[Step], current: str, nodes: list[onnx.NodeProto], around: str) -> str:
        for step in steps:
            made = self.name()
            if isinstance(step, str):
                inputs = {"Add": [current, around], "MatMul": [current, "w"]}.get(step, [current])
                nodes.append(helper.make_node(step, inputs, [made], made))
            else:
                getattr(self, step[0].lower())(step, current, made, nodes, around)
            current = made
        return current

    def graph(self, steps: Sequence[Step], current: str, around: str, inputs: Any = (), extra: Any = ()) -> Any:
        nodes: list[onnx.NodeProto] = []
        last = self.steps(steps, current, nodes, around)
        out = self.name()
        nodes.append(helper.make_node("Neg", [last], [out], out))  # an output is made where it is
        nodes.extend(node for node, _ in extra)
        outputs = [value for _, value in extra]
        return nodes, out, outputs, inputs

    def if_(self, step: Step, current: str, made: str, nodes: list[onnx.NodeProto], around: str) -> None:
        condition = f"c{len(self.conditions)}"
        self.conditions.append(step[1])
        branches = []
        for steps in step[2:]:
            inner, out, _, _ = self.graph(steps, current, around)
            branches.append(helper.make_graph(inner, self.name(), [], [_value(out)]))
        nodes.append(
            helper.make_node("If", [condition], [made], made, then_branch=branches[0], else_branch=branches[1])
        )

    def loop(self, step: Step, current: str, made: str, nodes: list[onnx.NodeProto], around: str) -> None:
        number, going, carried, still = (self.name() for _ in range(4))
        inner, out, _, _ = self.graph(step[3], carried, around)
        inner.append(helper.make_node("Identity", [going], [still], still))
        inputs = [
            helper.make_tensor_value_info(number, TensorProto.INT64, []),
            helper.make_tensor_value_info(going, TensorProto.BOOL, []),
            _value(carried),
        ]
        outputs = [helper.make_tensor_value_info(still, TensorProto.BOOL, []), _value(out)]
        collected = []
        if step[2]:
            extra = self.name()
            inner.append(helper.make_node("Abs", [out], [extra], extra))
            outputs.append(_value(extra))
            collected = [self.name()]
        body = helper.make_graph(inner, self.name(), inputs, outputs)
        nodes.append(helper.make_node("Loop", [f"n{step[1]}", "yes", current], [made, *collected], made, body=body))

    def scan(self, step: Step, current: str, made: str, nodes: list[onnx.NodeProto], around: str) -> None:
        state, row, kept, wide = (self.name() for _ in range(4))
        inner = [helper.make_node("Add", [state, row], [wide], wide)]
        out = self.steps([s for s in step[2] if isinstance(s, str) and s not in ("Add", "MatMul")], wide, inner, around)
        last = self.name()
        inner += [helper.make_node("Neg", [out], [last], last), helper.make_node("Relu", [wide], [kept], kept)]
        body = helper.make_graph(
            inner, self.name(), [_value(state, (COLUMNS,)), _value(row, (COLUMNS,))],
            [_value(kept, (COLUMNS,)), _value(last, (COLUMNS,))],
        )  # fmt: skip
        nodes.append(
            helper.make_node("Scan", ["zeros", current], [self.name(), made], made, body=body, num_scan_inputs=1)
        )

    def __getattr__(self, name: str) -> Any:
        if name == "if":
            return self.if_
        raise AttributeError(name)


def _value(name: str, shape: tuple[int, ...] = _SHAPE) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def program_of(steps: Sequence[Step]) -> tuple[onnx.ModelProto, dict[str, bool]]:
    """The model of a program, whose input is ``x``, and the values of its conditions."""
    writer = _Writer()
    nodes, out, _, _ = writer.graph(steps, "x", "x")
    conditions = {f"c{index}": value for index, value in enumerate(writer.conditions)}
    inputs = [_value("x"), *(helper.make_tensor_value_info(name, TensorProto.BOOL, [1]) for name in conditions)]
    constants = [
        numpy_helper.from_array(np.ones((COLUMNS, COLUMNS), np.float32), "w"),
        numpy_helper.from_array(np.zeros(COLUMNS, np.float32), "zeros"),
        numpy_helper.from_array(np.array(True), "yes"),
        *(numpy_helper.from_array(np.array(count, np.int64), f"n{count}") for count in range(4)),
    ]
    graph = helper.make_graph(nodes, "program", inputs, [_value(out)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model, conditions
