"""The plain liveness plan: who lives when, what shares storage, what stays on the host."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from graphmem.graph.liveness import live_plan, plan_liveness
from graphmem.graph.model import Graph, Node, TensorSpec
from graphmem.graph.order import execution_order
from graphmem.sources.onnx_file import load_onnx
from graphmem.trace import Category, EventKind, Place, Trace
from tests.support import onnx_samples as samples
from tests.support.examples import examples
from tests.support.onnx_samples import constant, model, save, value, weights


def rows(trace: Trace, iteration: int) -> list[str]:
    """The events of an iteration as text: ``+h 64 first`` is born at node first, ``-h first`` dies there."""
    out = []
    for event in trace.events():
        operator = trace.operators[event.operator]
        if trace.phases[operator.phase].iteration == iteration:
            storage = trace.storages[event.subject]
            where = operator.module or operator.name
            host = " host" if storage.place == Place.HOST else ""
            born = event.kind == EventKind.ALLOC
            out.append(f"+{storage.label} {storage.bytes}{host} {where}" if born else f"-{storage.label} {where}")
    return out


def test_the_perceptron(tmp_path: Path) -> None:
    trace = plan_liveness(load_onnx(save(samples.perceptron(), tmp_path), batch=2))
    assert [str(phase) for phase in trace.phases] == ["load", "iteration 1 run", "iteration 2 run"]
    assert rows(trace, 0) == ["+w1 512 initializers", "+w2 256 initializers"]
    run = [
        "+x 64 inputs",
        "+h 128 first",
        "+r 128 relu",
        "-h relu",
        "+y 32 second",
        "-r second",
        "-x end of run",
        "-y end of run",
    ]
    assert rows(trace, 1) == run
    assert rows(trace, 2) == run
    assert [s.category for s in trace.storages[:4]] == [Category.PARAMETER] * 2 + [Category.INPUT, Category.ACTIVATION]
    assert dict(trace.notes)["plan"].startswith("plain liveness plan, not ONNX Runtime's planner")
    assert dict(trace.notes)["bound dimensions"] == "batch = 2 by --batch 2"


def test_shape_arithmetic_stays_on_the_host_and_reshape_shares(tmp_path: Path) -> None:
    trace = plan_liveness(load_onnx(save(samples.dynamic_reshape(), tmp_path), batch=2), iterations=1)
    assert rows(trace, 0) == ["+zero 8 host initializers", "+two 8 host initializers", "+minus 8 host initializers"]
    assert sorted(row for row in rows(trace, 1) if row.startswith("+")) == [
        "+half 8 host div",
        "+n 8 host gather",
        "+r 48 relu",
        "+s 16 host shape",
        "+target 16 host concat",
        "+x 48 inputs",
        "+y 48 neg",
    ]
    assert [row for row in rows(trace, 1) if row.startswith("-r")] == ["-r neg"]  # v is r under another shape


def planned(
    tmp_path: Path, nodes: list[object], outputs: list[str], initializers: object = (), **opts: object
) -> Trace:
    proto = model(nodes, [value("x", [4])], [value(name, None) for name in outputs], initializers, **opts)  # type: ignore[arg-type]
    return plan_liveness(load_onnx(save(proto, tmp_path)), iterations=1)


def test_an_output_never_shares(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["r"], name="relu"), helper.make_node("Identity", ["r"], ["y"], name="id")]
    assert rows(planned(tmp_path, nodes, ["y"]), 1) == [
        "+x 16 inputs", "+r 16 relu", "+y 16 id", "-r id", "-x end of run", "-y end of run",
    ]  # fmt: skip


def test_an_alias_of_an_input_or_weight_owns_nothing(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Identity", ["x"], ["a"], name="a"),
        helper.make_node("Identity", ["w"], ["b"], name="b"),
        helper.make_node("Add", ["a", "b"], ["y"], name="add"),
    ]
    trace = planned(tmp_path, nodes, ["y"], [weights("w", (4,))])
    assert rows(trace, 0) == ["+w 16 initializers"]
    assert rows(trace, 1) == ["+x 16 inputs", "+y 16 add", "-x end of run", "-y end of run"]


def test_what_nobody_reads_lives_to_the_end(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["z"], name="idle"), helper.make_node("Relu", ["x"], ["y"], name="relu")]
    assert rows(planned(tmp_path, nodes, ["y"]), 1)[-3:] == ["-x end of run", "-y end of run", "-z end of run"]


def test_an_input_that_is_an_output_and_one_that_is_unused(tmp_path: Path) -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"], name="relu")], [value("x", [4]), value("idle", [9])],
                  [value("y", None), value("x", [4])])  # fmt: skip
    trace = plan_liveness(load_onnx(save(proto, tmp_path)), iterations=1)
    assert rows(trace, 1) == [
        "+x 16 inputs", "+idle 36 host inputs", "+y 16 relu",
        "-x end of run", "-idle end of run", "-y end of run",
    ]  # fmt: skip


def test_a_tensor_needed_on_both_sides_exists_twice(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Cast", ["s"], ["f"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Neg", ["x"], ["n"], name="neg"),
        helper.make_node("Add", ["n", "f"], ["y"], name="add"),
        helper.make_node("Reshape", ["x", "w"], ["v"], name="reshape"),
        helper.make_node("Cast", ["w"], ["u"], name="castw", to=TensorProto.FLOAT),
    ]
    trace = planned(tmp_path, nodes, ["y", "v", "u"], [constant("w", [2, 2])])
    assert rows(trace, 0) == ["+w 16 initializers", "+w (copy) 16 host initializers"]
    made = [row for row in rows(trace, 1) if row.startswith("+")]
    # Cast of Shape runs on the CPU; Add reads n on the GPU, so its other operand is copied there
    assert "+f 4 host cast" in made
    assert "+f (copy) 4 cast" in made
    assert "-f cast" in rows(trace, 1)
    assert "-f (copy) add" in rows(trace, 1)


def test_a_kernel_that_wants_its_shape_on_the_host_stays_on_the_gpu(tmp_path: Path) -> None:
    # both inputs of Reshape would do for the CPU, a graph input and a CPU tensor, but its GPU kernel reads the latter
    nodes = [
        helper.make_node("Neg", ["x"], ["n"], name="neg"),
        helper.make_node("Shape", ["n"], ["s"], name="shape"),
        helper.make_node("Reshape", ["x", "s"], ["v"], name="reshape"),
        helper.make_node("Neg", ["v"], ["y"], name="last"),
    ]
    made = [row for row in rows(planned(tmp_path, nodes, ["y"]), 1) if row.startswith("+")]
    assert made == ["+x 16 inputs", "+n 16 neg", "+s 8 host shape", "+y 16 last"]


def test_float16_is_not_sent_to_the_host(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Cast", ["s"], ["h"], name="half", to=TensorProto.FLOAT16),
        helper.make_node("Neg", ["h"], ["y"], name="neg"),
    ]
    made = [row for row in rows(planned(tmp_path, nodes, ["y"]), 1) if row.startswith("+")]
    assert made == ["+x 16 inputs", "+s 8 host shape", "+h 2 host half", "+h (copy) 2 half", "+y 2 neg"]


def test_strings_stay_on_the_host(tmp_path: Path) -> None:
    proto = model([helper.make_node("Identity", ["t"], ["y"], name="id")], [value("t", [3], TensorProto.STRING)],
                  [value("y", [3], TensorProto.STRING)])  # fmt: skip
    trace = plan_liveness(load_onnx(save(proto, tmp_path)))
    assert {storage.place for storage in trace.storages} == {Place.HOST}


def test_empty_graphs_and_empty_tensors(tmp_path: Path) -> None:
    proto = model([], [value("x", ["batch", 0])], [value("x", ["batch", 0])])
    trace = plan_liveness(load_onnx(save(proto, tmp_path), batch=2), iterations=1)
    assert [storage.bytes for storage in trace.storages] == [0]


# -- random graphs ----------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A random graph of float32 vectors; every tensor has its own size but aliases."""
    tensors = {name: TensorSpec(name, "float32", (10 + i,)) for i, name in enumerate(("x0", "x1", "w0"))}
    nodes = []
    for index in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from(["Sum", "Sum", "Sum", "Identity", "Split"]))
        count = draw(st.integers(1, 3)) if kind == "Sum" else 1
        inputs = tuple(draw(st.sampled_from(sorted(tensors))) for _ in range(count))
        outputs = tuple(f"n{index}_{o}" for o in range(2 if kind == "Split" else 1))
        for position, name in enumerate(outputs):
            size = tensors[inputs[0]].shape if kind == "Identity" else (100 + 10 * index + position,)
            tensors[name] = TensorSpec(name, "float32", size)
        nodes.append(Node(f"node{index}", kind, "", inputs, outputs))
    order = draw(st.permutations(range(len(nodes))))
    outputs = tuple(draw(st.lists(st.sampled_from(sorted(tensors)), unique=True, max_size=4)))
    return Graph("random", tuple(nodes[i] for i in order), tensors, ("x0", "x1"), outputs, ("w0",))


@settings(max_examples=examples(300), deadline=None)
@given(graphs())
def test_order_is_topological(graph: Graph) -> None:
    order = execution_order(graph.nodes)
    assert sorted(order) == list(range(len(graph.nodes)))
    known = {*graph.inputs, *graph.initializers}
    for index in order:
        assert known.issuperset(graph.nodes[index].inputs)
        known.update(graph.nodes[index].outputs)


@settings(max_examples=examples(300), deadline=None)
@given(graphs())
def test_every_storage_lives_exactly_as_long_as_it_is_needed(graph: Graph) -> None:
    """Recomputed from the definition, one tensor group at a time, without the planner's own bookkeeping."""
    trace = plan_liveness(graph, iterations=1)
    order = execution_order(graph.nodes)
    root: dict[str, str] = {name: name for name in (*graph.inputs, *graph.initializers)}
    for index in order:
        node = graph.nodes[index]
        for output in node.outputs:
            shares = node.op_type == "Identity" and output not in graph.outputs
            root[output] = root[node.inputs[0]] if shares else output
    kept = {root[name] for name in (*graph.inputs, *graph.initializers, *graph.outputs)}
    readers: dict[str, list[str]] = {name: [] for name in root.values()}
    for index in order:
        for name in graph.nodes[index].inputs:
            readers[root[name]].append(graph.nodes[index].name)
    died = {}
    for event in trace.events():
        if event.kind == EventKind.FREE:
            operator = trace.operators[event.operator]
            died[trace.storages[event.subject].label] = operator.module or operator.name
    device = {storage.label for storage in trace.storages}
    assert device == set(root.values())
    for name in device - set(graph.initializers):
        needed = "end of run" if name in kept or not readers[name] else readers[name][-1]
        assert died[name] == needed, name
    assert "w0" not in died


@settings(max_examples=examples(100), deadline=None)
@given(graphs(), st.integers(1, 3))
def test_runs_repeat_and_leave_only_initializers(graph: Graph, iterations: int) -> None:
    trace = plan_liveness(graph, iterations=iterations)
    assert all(rows(trace, i) == rows(trace, 1) for i in range(1, iterations + 1))
    left = trace.live_at(len(trace) - 1)
    assert [trace.storages[index].label for index in left] == ["w0"]
    assert set(live_plan(graph).last_step.values()) <= set(range(len(graph.nodes)))
