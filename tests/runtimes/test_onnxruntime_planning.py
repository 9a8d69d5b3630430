"""ONNX Runtime's planner on small graphs: buffers, patterns and their keys, options, sessions, half precision."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphmem import analyze
from graphmem.errors import UsageError
from graphmem.graph.model import Node
from graphmem.replay import replay
from graphmem.runtimes.onnxruntime.arenas import default_allocator, reserved_allocations
from graphmem.runtimes.onnxruntime.kernels.tables import TABLES
from graphmem.runtimes.onnxruntime.options import parse_options
from graphmem.runtimes.onnxruntime.plan.pattern import MemoryPatternPlanner, pattern_key
from graphmem.runtimes.onnxruntime.plan.process import plan
from graphmem.runtimes.onnxruntime.plan.reuse import AllocKind, Value, reuse_plan
from graphmem.sources.onnx_file import load_onnx, parse_shapes, read_onnx
from graphmem.trace import Category, EventKind, Place
from tests.support import onnx_samples as samples

CPU = TABLES["cpu"]


def chain(*operators: str) -> list[Node]:
    """x -> operators[0] -> t0 -> operators[1] -> t1 ..."""
    names = ["x", *(f"t{index}" for index in range(len(operators)))]
    return [Node(kind, kind, "", (names[i],), (names[i + 1],)) for i, kind in enumerate(operators)]


def plan_of(nodes: list[Node], shapes: dict[str, Any], **options: Any) -> Any:
    names = {"x", *(name for node in nodes for name in node.outputs)}
    values = {name: Value("float32", shapes.get(name, ("N", 8))) for name in names}
    output = nodes[-1].outputs[0]
    return reuse_plan(
        nodes,
        range(len(nodes)),
        values,
        inputs=["x"],
        initializers=[],
        outputs=[output],
        table=CPU,
        **options,
    )


def test_an_activation_writes_over_its_input() -> None:
    found = plan_of(chain("Neg", "Relu", "Neg", "Neg"), {})
    assert found.buffer["t1"] == "t0"
    assert found.kind["t2"] is AllocKind.kAllocate  # t0 is still read by the node that makes t2
    assert found.kind["t3"] is AllocKind.kAllocateOutput
    assert found.releases == ((), (), ("t0",), ("t2",))


def test_an_input_of_the_graph_is_never_written_over() -> None:
    assert plan_of(chain("Relu", "Neg"), {}).kind["t0"] is AllocKind.kAllocate


def test_freed_buffers_are_reused_by_symbolic_shape() -> None:
    nodes = chain("Neg", "Neg", "Neg", "Neg", "Neg")
    assert plan_of(nodes, {}).buffer["t2"] == "t0"
    assert plan_of(nodes, {"t2": ("M", 8)}).buffer["t2"] == "t2"
    assert plan_of(nodes, {"t2": ("", 8), "t0": ("", 8)}).buffer["t2"] == "t2"  # a nameless dimension equals none
    assert plan_of(nodes, {"t2": None}).buffer["t2"] == "t2"
    assert plan_of(nodes, {}, enable_mem_reuse=False).buffer["t2"] == "t2"


def test_the_newest_freed_buffer_comes_first() -> None:
    nodes = [
        Node("a", "Neg", "", ("x",), ("a",)),
        Node("b", "Neg", "", ("x",), ("b",)),
        Node("c", "Add", "", ("a", "b"), ("c",)),
        Node("d", "Neg", "", ("c",), ("d",)),
        Node("y", "Neg", "", ("d",), ("y",)),
    ]
    assert plan_of(nodes, {}).buffer["d"] == "b"


def test_a_pattern_fills_the_smallest_gap() -> None:
    planner = MemoryPatternPlanner()
    for name, size in (("a", 512), ("b", 256), ("c", 300), ("d", 256)):
        planner.trace_allocation(name, size)
    planner.trace_free("a")
    planner.trace_free("c")
    planner.trace_allocation("e", 200)
    pattern = planner.pattern()
    assert pattern.peak_bytes == 512 + 256 + 512 + 256
    assert pattern.blocks["e"] == (0, 256)  # gaps of 512 before b and before d: the first
    planner.trace_free("d")
    planner.trace_allocation("f", 700)  # 768 from the end of b to the end of the block, which no live block bounds
    assert planner.blocks["f"] == (768, 768)
    assert planner.peak_bytes == pattern.peak_bytes


def convolutions() -> onnx.ModelProto:
    """Three convolutions and a Transpose, height and width free: what the pattern keys were measured with."""
    nodes = [
        helper.make_node("Conv", [source, weight], [target], pads=[1] * 4)
        for source, weight, target in (("x", "w1", "a"), ("a", "w2", "b"), ("b", "w3", "c"))
    ]
    nodes.append(helper.make_node("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]))
    weights = [
        samples.weights("w1", (8, 3, 3, 3)),
        samples.weights("w2", (8, 8, 3, 3)),
        samples.weights("w3", (8, 8, 3, 3)),
    ]
    return samples.model(nodes, [samples.value("x", ["N", 3, "H", "W"])], [samples.value("y", None)], weights, opset=17)


#: (shape of the input, bytes allocated in that run), recorded with onnxruntime 1.31.1 in one session in this order.
MEASURED = (
    ((2, 3, 64, 64), [262144, 65536, 262144, 65536, 262144, 65536, 262144]),
    ((2, 3, 64, 64), [524288, 65536, 65536, 65536, 262144]),
    ((2, 3, 32, 32), [524288, 65536, 65536, 65536, 65536, 65536, 65536, 65536]),
    ((2, 3, 32, 32), [524288, 65536, 65536, 65536, 65536, 65536, 65536, 65536]),
    ((2, 3, 128, 64), [524288, 65536, 524288, 65536, 524288, 65536, 524288]),
    ((2, 3, 128, 64), [1048576, 65536, 65536, 65536, 524288]),
    ((4, 3, 64, 64), [524288, 65536, 524288, 65536, 524288, 65536, 524288]),
    ((4, 3, 64, 64), [1048576, 65536, 65536, 65536, 524288]),
    ((2, 3, 64, 64), [524288, 65536, 65536, 65536, 262144]),
)


def test_patterns_are_kept_by_a_key_that_collides(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    file = read_onnx(samples.save(convolutions(), tmp_path), "disabled")
    graphs = [file.bind(input_shapes={"x": shape}) for shape, _ in MEASURED]
    trace = plan([graphs], parse_options("provider:cpu")).trace
    runs: dict[int, list[int]] = {}
    for event in trace.events():
        run = trace.phases[trace.operators[event.operator].phase].iteration
        if run and event.kind == 0:
            runs.setdefault(run, []).append(trace.storages[event.subject].bytes)
    assert [runs[number] for number in range(1, len(MEASURED) + 1)] == [sizes for _, sizes in MEASURED]
    assert pattern_key([(2, 3, 64, 64)]) == pattern_key([(2, 3, 32, 32)])
    estimate = analyze(file.path, shapes="x:2x3x64x64;x:2x3x32x32")
    assert any("finds the memory pattern of run 1" in d.message for d in estimate.diagnostics)


def test_the_second_run_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    estimate = analyze(samples.unpack("unet", tmp_path), batch=16)
    said = [diagnostic.message for diagnostic in estimate.diagnostics]
    assert any(text.startswith("run 2 holds 128.00 MiB more than run 1: with enable_mem_pattern") for text in said)
    with_options = estimate.details["reserved_bytes_with"]
    assert with_options["enable_mem_pattern:0"] < estimate.reserved
    assert estimate.details["reserved_bytes_by_run"]["run 2"] == estimate.reserved


def test_shapes_in_order(tmp_path: Path) -> None:
    path = samples.save(samples.perceptron(), tmp_path)
    estimate = analyze(path, shapes="batch=1; batch=16; batch=1")
    assert [phase.iteration for phase in estimate.phases] == [0, 1, 2, 3]
    assert [run.batch for run in parse_shapes("batch=1;batch=16,seq=3")] == [1, 16]
    assert parse_shapes("x:1x3")[0].input_shapes == {"x": (1, 3)}
    for text in ("", "batch=1;;", "batch", "batch=x"):
        with pytest.raises(UsageError):
            parse_shapes(text)


def test_several_sessions_add_up(tmp_path: Path) -> None:
    first = samples.save(samples.perceptron(), tmp_path, "first.onnx")
    second = samples.unpack("unet", tmp_path)
    both = analyze([first, second], batch=4)
    alone = [analyze(path, batch=4).reserved for path in (first, second)]
    assert both.reserved == sum(alone)
    assert both.model == "first.onnx, unet.onnx"


def test_io_binding_leaves_inputs_and_outputs_to_the_caller(tmp_path: Path) -> None:
    graph = load_onnx(samples.save(samples.perceptron(), tmp_path), batch=2)
    trace = plan([[graph]], parse_options("io_binding:1")).trace
    assert not any(storage.category == Category.INPUT for storage in trace.storages)
    assert "y" not in [storage.label for storage in trace.storages]


def test_what_is_bound_in_the_arena_lives_from_run_to_run(tmp_path: Path) -> None:
    graph = load_onnx(samples.save(samples.perceptron(), tmp_path), batch=2)
    trace = plan([[graph] * 3], parse_options("io_binding:host/session")).trace
    born = {index: storage.label for index, storage in enumerate(trace.storages)}
    order = [
        (kind.name, born[subject])
        for kind, subject in zip(map(EventKind, trace.kinds.tolist()), trace.subjects.tolist(), strict=True)
        if kind in (EventKind.ALLOC, EventKind.FREE) and born[subject] in ("x", "y")
    ]
    bound = [("ALLOC", "x"), ("FREE", "x"), ("FREE", "y"), ("ALLOC", "y")]
    assert order == [("ALLOC", "x"), ("ALLOC", "y"), *bound, *bound]


def test_tensors_of_the_caller_are_on_the_card_and_not_in_the_arena(tmp_path: Path) -> None:
    path = samples.save(samples.perceptron(), tmp_path)
    tensors = load_onnx(path, batch=2).tensors
    card = analyze(str(path), batch=2, alloc_conf="io_binding:1", device="T4").card
    assert card is not None
    (bound,) = (figure for figure in card.context if figure.name == "bound by the caller")
    assert bound.bytes == tensors["x"].nbytes + tensors["y"].nbytes
    assert bound.least_bytes == bound.bytes <= bound.most_bytes == 1 << 20


def test_a_captured_graph_runs_twice_and_is_replayed_without_the_arena(tmp_path: Path) -> None:
    graph = load_onnx(samples.save(samples.perceptron(), tmp_path), batch=2)
    once, often = (plan([[graph] * runs], parse_options("enable_cuda_graph:1")) for runs in (1, 5))
    assert len(once.trace.storages) == len(often.trace.storages)
    plain = plan([[graph] * 2], parse_options(""))
    assert [storage.bytes for storage in once.trace.storages] == [storage.bytes for storage in plain.trace.storages]


def test_sessions_share_the_arena_of_the_environment(tmp_path: Path) -> None:
    path = str(samples.save(samples.perceptron(), tmp_path))
    apart, shared = (analyze([path, path], batch=2, alloc_conf=conf) for conf in ("", "session.use_env_allocators:1"))
    assert shared.reserved < apart.reserved == 2 * analyze(path, batch=2).reserved


def test_an_option_that_is_not_followed_is_unknown_where_it_matters(tmp_path: Path) -> None:
    path = str(samples.save(samples.perceptron(), tmp_path))
    for option, is_unknown in (("sdpa_kernel:8", False), ("fuse_conv_bias:1", False), ("gpu_external_alloc:1", True)):
        doubts = analyze(path, batch=2, alloc_conf=option).doubts.causes
        assert (option.partition(":")[0] in [cause.name for cause in doubts]) == is_unknown
    with pytest.raises(UsageError, match="accepted"):
        parse_options("sdpa_kernel:fast")
    with pytest.raises(UsageError, match="two of them"):
        parse_options("io_binding:caller/session/host")


def test_initializers_in_one_block_without_prepacking(tmp_path: Path) -> None:
    graph = load_onnx(samples.save(samples.perceptron(), tmp_path), batch=2)
    trace = plan([[graph]], parse_options("session.disable_prepacking:1")).trace
    assert [(s.label, s.bytes) for s in trace.storages if s.category == Category.PARAMETER] == [
        ("all initializers", 512 + 256)
    ]


def test_a_stream_tagged_arena_keeps_used_chunks_apart() -> None:
    sizes = (300 << 20, 400 << 20)
    held = {}
    for provider in ("cpu", "cuda"):
        allocator = default_allocator(parse_options(f"provider:{provider}"))
        for size in sizes:
            allocator.free(allocator.malloc(size))
        held[provider] = allocator.reserved_bytes
        allocator.synchronize()
        assert allocator.malloc(500 << 20) is not None
        assert allocator.reserved_bytes == held[provider]  # merged again after the run
    assert held == {"cpu": 512 << 20, "cuda": 1024 << 20}


def half(nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    weights = [samples.constant("w", np.ones((16, 16)), np.float16)]
    ends = [samples.value("x", ["N", 16], TensorProto.FLOAT16)], [samples.value("y", None, TensorProto.FLOAT16)]
    return samples.model(nodes, *ends, weights, opset=17)


@pytest.mark.parametrize("level", ["disabled", "extended"])
def test_half_precision_stays_half_on_a_gpu(tmp_path: Path, level: str) -> None:
    pytest.importorskip("onnxruntime")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["y"]),
    ]
    path = samples.save(half(nodes), tmp_path)
    graph = read_onnx(path, level, "cuda").bind(batch=2)
    assert {str(graph.tensors[name].dtype) for name in graph.tensors} == {"float16"}
    assert "Cast" not in [node.op_type for node in graph.nodes]
    mixed = [nodes[0], helper.make_node("Cast", ["a"], ["b"], to=1), helper.make_node("Exp", ["b"], ["c"]),
             helper.make_node("Cast", ["c"], ["d"], to=10), helper.make_node("MatMul", ["d", "w"], ["y"])]  # fmt: skip
    graph = read_onnx(samples.save(half(mixed), tmp_path), level, "cuda").bind(batch=2)
    assert [node.op_type for node in graph.nodes].count("Cast") == 2
    assert {name: graph.tensors[name].dtype for name in "abcd"} == {
        "a": "float16", "b": "float32", "c": "float32", "d": "float16",
    }  # fmt: skip


def test_half_precision_weights_may_lie_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = half([helper.make_node("MatMul", ["x", "w"], ["y"])])
    path = samples.save(model, tmp_path)
    inside = analyze(path, batch=2, cudnn="never")
    onnx.save_model(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    assert analyze(path, batch=2, cudnn="never").peak == inside.peak


def test_without_onnxruntime_the_graph_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name == "onnxruntime":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    estimate = analyze(samples.unpack("unet", tmp_path), batch=2)
    assert any(
        "level disabled, the graph as in the file: onnxruntime is not installed" in a for a in estimate.assumptions
    )


def test_constants_that_are_outputs_are_copied(tmp_path: Path) -> None:
    proto = samples.model([], [], [samples.value("w", (4, 4))], [samples.weights("w", (4, 4))])
    trace = plan([[load_onnx(samples.save(proto, tmp_path))]], parse_options("provider:cpu")).trace
    made = [(s.bytes, s.category) for s in trace.storages if s.place == Place.DEVICE and s.bytes]
    assert (64, Category.ACTIVATION) in made
    assert (
        replay(
            trace,
            default_allocator("provider:cpu", reserved=reserved_allocations(trace, parse_options("provider:cpu"))),
        ).out_of_memory
        is None
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("provider:tpu", "provider is 'tpu'; accepted: cuda,"),
        ("enable_mem_pattern:maybe", "enable_mem_pattern is 'maybe'; accepted: 1, 0, true, false"),
        ("graph_optimization_level:turbo", "accepted: disabled, basic, extended, layout, all"),
        ("cudnn_conv_algo_search:FAST", "accepted: EXHAUSTIVE, HEURISTIC, DEFAULT"),
        ("intra_op_num_threads:0", "intra_op_num_threads is '0'; accepted: 1 to 4096"),
    ],
)
def test_bad_session_options(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options(text)
    assert words in str(caught.value)


def test_shapes_are_for_onnx_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--shapes gives the runs of an ONNX session"):
        analyze("timm:resnet18", shapes="batch=1")


def test_a_buffer_taken_over_after_its_release_is_allocated_again(tmp_path: Path) -> None:
    # "c" has no reader and takes over the buffer of "a", which went after "b": recorded with 1.31.1 in onnx's own cases
    nodes = [
        helper.make_node("Neg", ["x"], ["c"]),  # runs last: the walk begins at the last leaf
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    proto = samples.model(nodes, [samples.value("x", [4, 8])], [samples.value("y", None)])
    trace = plan([[load_onnx(samples.save(proto, tmp_path))]], parse_options("provider:cpu")).trace
    assert [storage.label for storage in trace.storages].count("a") == 2


def test_huge_weights_are_not_computed_with(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    side = 1 << 14  # a weight of 1 GiB, in a file that does not exist
    weights = []
    nodes = []
    for index in range(3):
        tensor = onnx.TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[side, side])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "missing"), ("offset", "0"), ("length", str(4 * side * side))):
            tensor.external_data.add(key=key, value=value)
        weights.append(tensor)
        before = f"y{index - 1}" if index else "x"
        nodes.append(helper.make_node("Transpose", [f"w{index}"], [f"t{index}"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", [before, f"t{index}"], [f"y{index}"]))
    proto = samples.model(nodes, [samples.value("x", ["N", side])], [samples.value("y2", None)], weights)
    estimate = analyze(samples.save(proto, tmp_path), batch=1)
    assert any("constants are not folded" in assumption for assumption in estimate.assumptions)
    assert estimate.reserved > 3 << 30


def test_a_limit_of_the_session_stops_the_run(tmp_path: Path) -> None:
    estimate = analyze(samples.unpack("resnet50", tmp_path), batch=4, alloc_conf="gpu_mem_limit:150MiB")
    assert estimate.fit is not None
    assert not estimate.fit.fits
    assert estimate.fit.failed_at is not None
    assert estimate.fit.failed_at.phase == "iteration 1 run"
