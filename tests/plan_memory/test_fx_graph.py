"""Graphs of torch.fx read, annotated, and written back."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import fx, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import graphmem  # noqa: E402
from graphmem.errors import GraphError  # noqa: E402
from graphmem.plan_memory import (  # noqa: E402
    Buffer,
    Graph,
    NodeMemory,
    annotate,
    apply_offload,
    apply_order,
    apply_remat,
    checkpoint_modules,
    from_fx,
    join_partitions,
    joint_graph,
    offload,
    partition_within,
    remat,
)
from graphmem.plan_memory.peaks import peak  # noqa: E402
from tests.plan_memory.fx_of_tests import Net, inputs_of, partitioned, real_peak  # noqa: E402
from tests.plan_memory.graphs import peak_of  # noqa: E402
from tests.support.examples import examples  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def parts() -> list[fx.GraphModule]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return partitioned(Net(), torch.randn(32, 16))


def test_joint_graph_names_its_modules_and_lines(parts: list[fx.GraphModule]) -> None:
    graph = from_fx(parts[0])
    node = next(node for node in graph.nodes if node.name == "gelu_2")
    assert node.module == "blocks.2"
    assert node.source.split("/")[-1].startswith("fx_of_tests.py:")
    assert {one.name for one in graph.buffers if one.held} == {
        node.name for node in parts[0].graph.nodes if node.op == "placeholder" and node.name.startswith("primals")
    }
    product = next(node for node in graph.nodes if node.name == "addmm")
    assert product.cost == 2 * 32 * 16 * 64
    assert next(node for node in graph.nodes if node.name == "gelu").cost == 32 * 64


def test_annotations_are_the_bytes_of_the_trace(parts: list[fx.GraphModule]) -> None:
    module = parts[0]
    before = [set(node.meta) for node in module.graph.nodes]
    graph = annotate(module)
    memory = [node.meta["graphmem"] for node in module.graph.nodes if node.op != "output"]
    assert all(isinstance(one, NodeMemory) for one in memory)
    assert max(one.live_bytes for one in memory) == peak_of(graph)
    assert [one.is_peak for one in memory].count(True) >= 1
    births, deaths = (sum(size for one in memory for _, size in getattr(one, name)) for name in ("births", "deaths"))
    assert births - deaths == sum(graph.buffers[one].bytes for one, stays in enumerate(graph.stays) if stays)
    assert [set(node.meta) - {"graphmem"} for node in module.graph.nodes] == before


def test_partitions_joined_hold_what_the_joint_graph_does(parts: list[fx.GraphModule]) -> None:
    joined = join_partitions(*parts[1:])
    assert peak_of(from_fx(joined)) == peak_of(from_fx(parts[0]))
    assert "gelu" in joined.meta["saved"]
    with pytest.raises(GraphError, match="the backward graph takes"):
        join_partitions(parts[2], parts[2])


def test_rematerialised_graph_computes_the_same_within_the_plan(parts: list[fx.GraphModule]) -> None:
    module, inputs = parts[0], inputs_of(parts[0])
    graph = from_fx(module)
    found = remat(graph, int(peak_of(graph) * 0.85))
    again = apply_remat(module, found)
    assert peak_of(from_fx(again)) == found.peak
    assert _equal(module, again, inputs)
    with pytest.raises(GraphError, match="another graph"):
        apply_remat(parts[1], found)


def _equal(module: fx.GraphModule, other: fx.GraphModule, inputs: list[torch.Tensor]) -> bool:
    """Whether both compute the same, to the last bit."""
    results = [torch.utils._pytree.tree_leaves(fx.Interpreter(one).run(*inputs)) for one in (module, other)]
    one, other_one = ([tensor for tensor in result if tensor is not None] for result in results)
    return len(one) == len(other_one) > 0 and all(map(torch.equal, one, other_one))


def _plain(module: fx.GraphModule) -> fx.GraphModule:
    """Called with its inputs one by one."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _with_workspace(graph: Graph, size: int) -> Graph:
    """The graph with cuBLAS's workspace, which the first product makes and nobody frees: no operator of it does."""
    first = next(number for number, node in enumerate(graph.nodes) if node.name == "addmm")
    nodes = list(graph.nodes)
    nodes[first] = replace(nodes[first], makes=(*nodes[first].makes, len(graph.buffers)))
    buffers = (*graph.buffers, Buffer("workspace", size))
    return Graph(tuple(nodes), buffers, (*graph.outputs, len(graph.buffers)))


def test_plan_is_what_the_capture_finds_in_the_real_allocator() -> None:
    joint = joint_graph(Net(128, 6), torch.randn(512, 128))
    graph = from_fx(joint)
    again = apply_remat(joint, remat(graph, peak_of(graph) * 8 // 10))
    for module in (joint, again):
        captured = graphmem.analyze(
            _plain(module), tuple(inputs_of(module)), training=graphmem.Inference(), device="A100-80GB"
        )
        held = [node.name for node in module.graph.nodes if node.op == "placeholder"]  # by the caller of the capture
        planned = _with_workspace(from_fx(module, held=held), captured.breakdown["WORKSPACE"])
        assert captured.requested == peak(planned, "live")
        assert captured.reserved == peak(planned, "pytorch")


def test_partitioner_keeps_its_budget_and_the_gradients() -> None:
    model, x = Net(), torch.randn(32, 16)
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    rule = partition_within(peak_of(from_fx(joint_graph(Net(), x))) * 9 // 10)
    _, forward, backward = partitioned(model, x, partition=rule)
    assert peak_of(from_fx(join_partitions(forward, backward))) == rule.plans[0].peak <= rule.budget
    assert rule.plans[0].again
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


def test_offloaded_graph_holds_on_the_device_what_was_planned() -> None:
    pytest.importorskip("scipy")

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = [x]
        for _ in range(4):
            kept.append(torch.relu(kept[-1] @ w.t()).chunk(2)[0].repeat(2, 1))
        for one in reversed(kept):
            x = x * one + one.t()
        return x

    with FakeTensorMode():  # tensors on a card that is not there
        x, w = torch.empty(64, 64, device="cuda"), torch.empty(64, 64, device="cuda")
        module = make_fx(program)(x, w)
    graph = from_fx(module)
    found = offload(graph, peak_of(graph) - 20_000, bandwidth=1e9)
    assert found.moves
    moved = apply_offload(module, found)
    assert peak_of(from_fx(moved)) == peak_of(found.graph) == found.peak
    on_host = make_fx(program)(torch.empty(64, 64), torch.empty(64, 64))
    for node, other in zip(moved.graph.nodes, apply_offload(on_host, found).graph.nodes, strict=True):
        assert node.name == other.name
    inputs = [torch.randn(64, 64), torch.randn(64, 64)]
    assert torch.equal(apply_offload(on_host, found)(*inputs), program(*inputs))


def _captured(modules: Sequence[str]) -> int:
    """Requested bytes of a training step with these modules checkpointed."""
    model = Net(64, 4)
    for path in modules:
        module = model.get_submodule(path)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    training = graphmem.Training(optimizer="sgd")
    return graphmem.analyze(model, (torch.randn(512, 64),), training=training, device="A100-80GB").requested


def test_modules_to_checkpoint_save_what_the_capture_finds() -> None:
    joint = joint_graph(Net(64, 4), torch.randn(512, 64))
    peak = peak_of(from_fx(joint))
    found = checkpoint_modules(joint, peak * 8 // 10)
    assert peak_of(found.plan.graph) == found.plan.peak <= found.plan.budget
    assert 0 < len(found.modules) < 4
    assert _captured(()) - _captured(found.modules) == peak - found.plan.peak


@pytest.mark.parametrize(
    ("budget", "modules", "message"),
    [
        (-1, None, "a budget of -1; accepted"),
        ("much", None, "a budget of 'much'; accepted"),
        (1, None, "wrapping "),
        (1 << 30, ["lost"], "no node of this graph is of the module 'lost'"),
    ],
)
def test_bad_asks_for_checkpoints_are_one_line(
    parts: list[fx.GraphModule], budget: int, modules: list[str] | None, message: str
) -> None:
    with pytest.raises(GraphError) as caught:
        checkpoint_modules(parts[0], budget, modules)
    assert str(caught.value).startswith(message)
    with pytest.raises(GraphError, match="no nodes of a backward pass"):
        checkpoint_modules(parts[1], 1 << 30)


def test_orders_are_written_back(parts: list[fx.GraphModule]) -> None:
    module, inputs = parts[0], inputs_of(parts[0])
    graph = from_fx(module)
    late = list(range(len(graph.nodes)))
    free = next(number for number in reversed(late) if not graph.successors[number] and number != late[-1])
    late.remove(free)
    written = apply_order(module, [*late, free])
    calls = [node.name for node in written.graph.nodes if node.op == "call_function"]
    assert calls == [graph.nodes[number].name for number in [*late, free]]
    assert _equal(module, written, inputs)
    with pytest.raises(GraphError, match="runs node"):
        apply_order(module, [*late[::-1], free])


# --- programs of any operators: what their own code holds -------------------------------------------------------------

STEPS = {
    "add": lambda x: x + 1,
    "relu in place": lambda x: torch.relu_(x + 0),
    "view": lambda x: x.reshape(-1, 2).view(8, 8),
    "transposed copy": lambda x: x.t().reshape(64).view(8, 8),
    "product": lambda x: x @ x.t(),
    "halves": lambda x: torch.cat(x.chunk(2)[::-1]),
    "half": lambda x: x.chunk(2)[0].repeat(2, 1),
    "norm": lambda x: nn.functional.layer_norm(x, (8,)),
    "expand": lambda x: x[:1].expand(8, 8),
    "softmax": lambda x: x.softmax(-1),
    "largest": lambda x: x.max(0, keepdim=True).values + x,
    "add in place": lambda x: (x * 2).add_(x),
    "contiguous": lambda x: x.contiguous(),
}


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 20)), min_size=1, max_size=8), st.booleans())
def test_peak_is_that_of_the_code_that_runs(steps: list[tuple[str, int]], given_inputs: bool) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        values = [x]
        for name, index in steps:
            values.append(STEPS[name](values[-1 - index % min(3, len(values))]))
        return values[-2:]

    x = torch.randn(8, 8)
    module = make_fx(program, tracing_mode="fake")(x)
    graph = from_fx(module, x) if given_inputs else from_fx(module)
    assert peak_of(graph) == real_peak(module, [x])


def test_modules_and_functions_of_a_symbolic_trace() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.BatchNorm1d(4), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.act(self.norm(x)), 0.5) @ x.t()

    graph = from_fx(fx.symbolic_trace(Small()), torch.randn(3, 4))
    norm, act, dropout, transposed, product = graph.nodes
    assert [graph.buffers[one].name for one in norm.reads if graph.buffers[one].held] == [
        "x", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
    ]  # fmt: skip
    assert (act.makes, act.updates) == ((), norm.makes)
    assert not dropout.repeatable
    assert transposed.makes == ()
    assert (product.cost, product.after) == (2 * 3 * 4 * 3, (3,))


def test_exported_program_and_the_same_after_saving() -> None:
    program = torch.export.export(Net(depth=2), (torch.randn(32, 16),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert from_fx(torch.export.load(file)) == from_fx(program)


def test_graph_with_another_size() -> None:
    module = make_fx(lambda x: (x + 1).sum())(torch.randn(4))
    assert peak_of(from_fx(module, torch.randn(400))) == 1600 + 1600 + 4


def _graph(build: object) -> fx.Graph:
    graph = fx.Graph()
    graph.output(build(graph))  # type: ignore[operator]
    return graph


def _fails(*_: object) -> None:
    raise ValueError("broken\nin two lines")


HOSTILE = {
    "no graph": (lambda: nn.Linear(2, 2), (), "a Linear is no graph of torch.fx"),
    "None": (lambda: None, (), "a NoneType is no graph"),
    "no metadata": (
        lambda: fx.symbolic_trace(nn.Linear(2, 2)), (), "nothing says how large the input 'input_1' is; give example",
    ),
    "too many inputs": (lambda: fx.symbolic_trace(nn.ReLU()), (torch.ones(1),) * 2, "2 example inputs are given; the"),
    "wrong sizes": (lambda: fx.symbolic_trace(nn.Linear(2, 2)), (torch.ones(1, 3),), "node 'linear' (<built-in "),
    "inputs of no size": (lambda: fx.symbolic_trace(nn.ReLU()), ("text",), "node 'relu' "),
    "code that fails": (lambda: _graph(lambda g: g.call_function(_fails, (g.placeholder("x"),))), (torch.ones(1),),
                        "node '_fails' "),
    "no such attribute": (lambda: _graph(lambda g: g.get_attr("lost")), (), "node 'lost' (lost) does not run"),
    "no such module": (lambda: _graph(lambda g: g.call_module("lost", (g.placeholder("x"),))), (torch.ones(1),),
                       "node 'lost' "),
    "sparse": (lambda: fx.symbolic_trace(nn.Identity()), (torch.eye(2).to_sparse(),), ""),
    "data decide": (lambda: _graph(lambda g: g.call_method("nonzero", (g.placeholder("x"),))), (torch.ones(3),), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_graphs_are_one_line(case: str) -> None:
    make, inputs, message = HOSTILE[case]
    with pytest.raises(GraphError) as caught:
        from_fx(make(), *inputs)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    with pytest.raises(GraphError, match="held names"):
        from_fx(make_fx(lambda x: x + 1)(torch.ones(1)), held=["y"])


ORDERS: dict[str, Any] = {
    "none": [], "too short": [0, 1], "twice": [0, 0, 1, 2], "negative": [-1, 0, 1, 2], "too large": [0, 1, 2, 3],
    "backwards": [2, 1, 0], "names": ["add", "mul", "sum"], "fractions": [0.0, 1.0, 2.5], "nothing": [None] * 3,
    "nested": [[0], [1], [2]],
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_hostile_orders_are_one_line(case: str) -> None:
    module = make_fx(lambda x: ((x + 1) * 2).sum())(torch.ones(3))
    with pytest.raises(GraphError) as caught:
        apply_order(module, ORDERS[case])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("budget", [-1, 0, 1, 0.5, "1 GiB", None, float("nan"), [1], -(1 << 70), b"1"])
def test_hostile_budgets_of_a_partitioner_are_one_line(parts: list[fx.GraphModule], budget: int) -> None:
    with pytest.raises(GraphError) as caught:
        partition_within(budget)(parts[0], [], num_fwd_outputs=1)
    assert "\n" not in str(caught.value)


def test_modules_that_no_node_names_are_asked_for(parts: list[fx.GraphModule]) -> None:
    nameless = copy.deepcopy(parts[0])
    for node in nameless.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if not key.endswith("nn_module_stack")}
    with pytest.raises(GraphError, match="modules="):
        checkpoint_modules(nameless, 1)


def test_a_joint_graph_leaves_its_step_as_it_was(parts: list[fx.GraphModule]) -> None:
    step, x = Net(), torch.randn(32, 16)
    joint = joint_graph(step, x)
    assert [node.target for node in joint.graph.nodes] == [node.target for node in parts[0].graph.nodes]
    assert joint.meta["partition"]["num_fwd_outputs"] == 1
    step(x).backward()
    assert all(parameter.grad is not None for parameter in step.parameters())


@torch.no_grad()
def _broken(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


def _of_values(x: torch.Tensor) -> torch.Tensor:
    return (x.square() if x.sum() > 0 else x).sum()


@pytest.mark.parametrize(("step", "why"), [(_broken, "requires gradients"), (_of_values, "Data-dependent"), (len, "")])
def test_a_step_without_a_joint_graph_says_why(step: Any, why: str) -> None:
    with pytest.raises(GraphError, match=f"no joint graph.*{why}") as caught:
        joint_graph(step, torch.randn(3, requires_grad=True))
    assert "\n" not in str(caught.value)
