"""ONNX graphs as PyTorch modules: what each operator computes, and what a training step of one takes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

torch = pytest.importorskip("torch")

from graphmem.analyze import analyze  # noqa: E402
from graphmem.capture.session.run import Subject, capture_subject  # noqa: E402
from graphmem.errors import GraphmemError, UsageError  # noqa: E402
from graphmem.graph.asked import Asked  # noqa: E402
from graphmem.sources.base import Sizes  # noqa: E402
from graphmem.sources.onnx_file import load_onnx, read_onnx  # noqa: E402
from graphmem.sources.onnx_module.gelu import with_whole_gelus  # noqa: E402
from graphmem.sources.onnx_module.module import OnnxModule  # noqa: E402
from graphmem.sources.onnx_module.registry import OPERATORS  # noqa: E402
from graphmem.sources.onnx_training import as_torch_model  # noqa: E402
from graphmem.trace import Category, Trace  # noqa: E402
from graphmem.training import Training  # noqa: E402
from tests.support import onnx_samples  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION, births, of  # noqa: E402

#: Cases whose values PyTorch's kernels give otherwise, and that are compared in shapes and element types only.
OTHER_VALUES = re.compile(
    "test_resize_"  # coordinates between pixels; the module's docstring says so
    "|test_training_dropout"  # random
    "|test_top_k_same_values"  # the order among equal values
)
#: PyTorch reduces nothing to no maximum.
NO_KERNEL = re.compile("test_reduce_(max|min)_empty_set")


def with_known_settings(case: Any) -> onnx.ModelProto:
    """The case's model with those inputs that its operator takes as settings as initializers."""
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    settings: set[Any] = set()
    for node in proto.graph.node:
        chosen = OPERATORS.get(node.op_type)
        settings.update(name for i, name in enumerate(node.input) if chosen and i in chosen.known)
    for value, array in zip(proto.graph.input, case.data_sets[0][0], strict=False):
        if value.name in settings and isinstance(array, (np.ndarray, np.generic)):
            proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), value.name))
    return proto


def run(case: Any, path: Path) -> tuple[torch.Tensor, ...]:
    proto = with_known_settings(case)
    path.write_bytes(proto.SerializeToString())
    graph = load_onnx(path)
    given = {v.name: a for v, a in zip(proto.graph.input, case.data_sets[0][0], strict=False)}
    module = OnnxModule(graph).train(case.name.startswith("test_training_dropout"))
    with torch.no_grad():
        return module(*(torch.from_numpy(np.array(given[name])) for name in graph.inputs))


def difference(found: torch.Tensor, expected: Any, *, values: bool) -> str:
    expected = np.asarray(expected)
    if str(found.dtype).removeprefix("torch.") != str(expected.dtype):
        return f"{found.dtype} for {expected.dtype}"
    if tuple(found.shape) != expected.shape:
        return f"shape {tuple(found.shape)} for {expected.shape}"
    rtol = 1e-2 if expected.dtype == np.float16 else 1e-3
    if expected.dtype.kind == "c":
        return ""
    near = np.allclose(found.numpy().astype(np.float64), expected.astype(np.float64), rtol, 1e-4, equal_nan=True)
    return "" if near or not values else "values"


def cases() -> Iterator[Any]:
    """ONNX's own test cases of the operators that are translated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases compute with overflow on purpose
        from onnx.backend.test.case.node import collect_testcases

        for case in collect_testcases(None):
            nodes = case.model.graph.node
            if case.data_sets and all(node.op_type in OPERATORS and not node.domain for node in nodes):
                yield case


def is_readable(case: Any) -> bool:
    """Whether torch takes the inputs from NumPy, and has kernels for them on the CPU."""
    return all(
        isinstance(array, (np.ndarray, np.generic)) and (array.dtype.kind in "bifc" or array.dtype == np.uint8)
        for array in case.data_sets[0][0]
    )


def test_operators_compute_what_onnx_says(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {}
    checked = 0
    covered: set[str] = set()
    for case in cases():
        if NO_KERNEL.search(case.name) or not is_readable(case):
            continue
        try:
            found = run(case, tmp_path / "case.onnx")
        except GraphmemError:
            continue
        expected = zip(found, case.data_sets[0][1], strict=True)
        differences = [difference(*pair, values=not OTHER_VALUES.match(case.name)) for pair in expected]
        if any(differences):
            wrong[case.name] = differences
        checked += 1
        covered.update(node.op_type for node in case.model.graph.node)
    assert not wrong, wrong
    assert checked > 800
    assert OPERATORS.keys() - covered == set()


def training_trace(path: Path, batch: int) -> Trace:
    loaded = as_torch_model(read_onnx(path).model_of(Asked(batch)))
    subject = Subject(loaded.build, Sizes(), Training("adam"), "sample", iterations=2)
    return capture_subject(subject, device=H100, torch_version=TORCH_VERSION).trace


def test_training_a_graph_is_a_training_step_of_its_operators(tmp_path: Path) -> None:
    path = onnx_samples.save(onnx_samples.perceptron(), tmp_path)
    estimate = analyze(path, batch=16, training=Training("adam"))
    assert (estimate.runtime, estimate.step.split(",")[0]) == ("pytorch", "training")
    weights = 4 * (8 * 16 + 16 * 4)
    trace = training_trace(path, 16)
    assert sum(born.bytes for born in of(trace, Category.PARAMETER)) == weights
    assert sum(born.bytes for born in of(trace, Category.OPTIMIZER_STATE) if born.bytes > 4) == 2 * weights
    assert {born.label for born in of(trace, Category.PARAMETER)} == {"w1", "w2"}
    # relu's output is kept for the backward pass, its input dies when it has been read
    forward = {born.module: born for born in births(trace) if "forward" in born.phase.name}
    first, relu, second = (forward[name] for name in ("first", "relu", "second"))
    assert first.freed is not None
    assert relu.freed is not None
    assert relu.event < first.freed < second.event < relu.freed
    assert any("loss: the mean" in sentence for sentence in estimate.assumptions)
    assert any("Dropout" in sentence for sentence in estimate.assumptions)


def test_shapes_are_computed_and_not_run(tmp_path: Path) -> None:
    module = OnnxModule(load_onnx(onnx_samples.save(onnx_samples.dynamic_reshape(), tmp_path), batch=4))
    assert [name for name, _ in module.named_children()] == ["relu", "reshape", "neg"]
    assert [tuple(tensor.shape) for tensor in module(torch.ones(4, 6))] == [(2, 12)]


def test_running_statistics_are_buffers_and_scalars_are_numbers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["n"], name="norm"),
        helper.make_node("Mul", ["n", "half"], ["y"], name="half"),
    ]
    weights = [onnx_samples.weights(name, (3,)) for name in ("scale", "bias", "mean", "var")]
    half = onnx_samples.constant("half", 0.5, np.float32)
    ends = [onnx_samples.value("x", ["batch", 3, 4, 4])], [onnx_samples.value("y", ["batch", 3, 4, 4])]
    path = onnx_samples.save(onnx_samples.model(nodes, *ends, [*weights, half]), tmp_path)
    module = OnnxModule(load_onnx(path, batch=2))
    assert {name for name, _ in module.named_parameters()} == {"scale", "bias"}
    assert {"mean", "var"} <= {name for name, _ in module.named_buffers()}
    assert "half" not in dict(module.named_parameters())
    y = module.train()(torch.randn(2, 3, 4, 4))[0]
    assert tuple(y.shape) == (2, 3, 4, 4)


def test_statistics_merged_with_a_bias_are_buffers_of_their_own(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Identity", ["bias"], ["mean"], name="same"),
        helper.make_node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["y"], name="norm"),
    ]
    weights = [onnx_samples.weights(name, (3,)) for name in ("scale", "bias", "var")]
    ends = [onnx_samples.value("x", ["batch", 3, 4, 4])], [onnx_samples.value("y", ["batch", 3, 4, 4])]
    path = onnx_samples.save(onnx_samples.model(nodes, *ends, weights), tmp_path)
    module = OnnxModule(load_onnx(path, batch=2))
    assert {name for name, _ in module.named_parameters()} == {"scale", "bias"}
    assert {name for name, _ in module.named_buffers()} == {"mean", "var"}
    module.train()(torch.randn(2, 3, 4, 4))[0].sum().backward()


def gelu(scale: str, order: tuple[str, str, str]) -> onnx.ModelProto:
    """``0.5 * x * (1 + erf(x / sqrt(2)))``, the division as ``scale`` and the three factors in the ``order`` given."""
    nodes = [
        helper.make_node(scale, ["x", "root"], ["s"]),
        helper.make_node("Erf", ["s"], ["e"]),
        helper.make_node("Add", ["e", "one"], ["p"]),
        helper.make_node("Mul", order[:2], ["h"]),
        helper.make_node("Mul", ["h", order[2]], ["y"]),
    ]
    root = 2**0.5 if scale == "Div" else 0.5**0.5
    constants = [onnx_samples.constant(n, v, np.float32) for n, v in (("root", root), ("one", 1.0), ("half", 0.5))]
    ends = [onnx_samples.value("x", ["batch", 8])], [onnx_samples.value("y", ["batch", 8])]
    return onnx_samples.model(nodes, *ends, constants)


@pytest.mark.parametrize("scale", ["Div", "Mul"])
@pytest.mark.parametrize("order", [("x", "half", "p"), ("x", "p", "half"), ("half", "p", "x")])
def test_a_gelu_taken_apart_is_put_together(tmp_path: Path, scale: str, order: tuple[str, str, str]) -> None:
    graph = load_onnx(onnx_samples.save(gelu(scale, order), tmp_path), batch=4)
    whole = with_whole_gelus(graph)
    assert [node.op_type for node in whole.nodes] == ["Gelu"]
    x = torch.randn(4, 8)
    torch.testing.assert_close(OnnxModule(whole)(x), OnnxModule(graph)(x))


def test_what_is_no_gelu_stays(tmp_path: Path) -> None:
    proto = gelu("Div", ("x", "p", "half"))
    proto.graph.output.append(onnx_samples.value("p", ["batch", 8]))
    graph = load_onnx(onnx_samples.save(proto, tmp_path), batch=4)
    assert with_whole_gelus(graph) is graph


def test_all_missing_operators_are_listed_at_once(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["a"]),
        helper.make_node("Det", ["x"], ["b"]),
        helper.make_node("GlobalLpPool", ["x"], ["c"]),
    ]
    ends = [onnx_samples.value("x", ["batch", 3, 4, 4])], [onnx_samples.value(name, None) for name in "abc"]
    path = onnx_samples.save(onnx_samples.model(nodes, *ends), tmp_path)
    with pytest.raises(GraphmemError, match=r"Det \(2\), GlobalLpPool \(1\)"):
        analyze(path, batch=2, training=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"training": Training(dtype="bf16")}, "drop --dtype"),
        ({"training": Training(checkpoint_activations=True)}, "drop --checkpoint-activations"),
        ({"training": True, "runtime": "onnxruntime"}, "--runtime pytorch"),
    ],
)
def test_what_a_graph_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    path = onnx_samples.save(onnx_samples.perceptron(), tmp_path)
    with pytest.raises(UsageError, match=said):
        analyze(path, batch=2, **options)


@pytest.mark.parametrize("name", onnx_samples.REAL_MODELS)
@pytest.mark.slow
def test_real_exports_train(tmp_path: Path, name: str) -> None:
    path = onnx_samples.unpack(name, tmp_path)
    estimate = analyze(path, batch=2, training=Training("adam"))
    inference = analyze(path, batch=2, runtime="pytorch")
    assert estimate.peak.requested_bytes > inference.peak.requested_bytes > 0
