"""Loading ONNX files: what binds a dimension, what is refused and in which words, and that weights are not read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from graphmem.errors import ShapeError, SourceError, UsageError
from graphmem.sources.onnx_file import load_onnx, parse_dim, parse_input_shape
from tests.support import onnx_samples as samples
from tests.support.onnx_samples import constant, model, save, value, weights


def relu_model(*inputs: onnx.ValueInfoProto) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", [i.name], [f"y{n}"], name=f"relu{n}") for n, i in enumerate(inputs)]
    return model(nodes, inputs, [value(f"y{n}", None) for n in range(len(inputs))])


def shapes_of(path: Path, **binding: object) -> dict[str, str]:
    graph = load_onnx(path, **binding)  # type: ignore[arg-type]
    return {name: str(spec) for name, spec in graph.tensors.items()}


# -- bad files --------------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"gone\.onnx does not exist$"):
        load_onnx(tmp_path / "gone.onnx")


def test_a_directory(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is a directory"):
        load_onnx(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello, world", b"\x00" * 99, b"\xff" * 99, b"PK\x03\x04a"], ids=range(5))
def test_not_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(content)
    with pytest.raises(SourceError, match="is not an ONNX model"):
        load_onnx(path)


def test_a_large_file_pointer(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(SourceError, match="Git LFS pointer: run git lfs pull"):
        load_onnx(path)


def test_every_truncation_is_one_clear_line(tmp_path: Path) -> None:
    proto = samples.perceptron()
    data = proto.SerializeToString()
    path = tmp_path / "x.onnx"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(SourceError) as caught:
            load_onnx(path, batch=1)
        assert "\n" not in str(caught.value)


def test_a_cut_in_the_graph_is_called_truncated(tmp_path: Path) -> None:
    data = samples.perceptron().SerializeToString()
    path = tmp_path / "x.onnx"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match="is truncated or damaged: a field at byte"):
        load_onnx(path, batch=1)


# -- binding ----------------------------------------------------------------------------------------------------------


def test_an_unbound_batch_names_every_way_to_bind_it(tmp_path: Path) -> None:
    path = save(relu_model(value("x", ["batch", 3, 4])), tmp_path)
    with pytest.raises(ShapeError) as caught:
        load_onnx(path)
    assert str(caught.value) == ("1 dimension is unbound: batch of x (batch x 3 x 4); this is answered: --batch 1")


def test_an_unbound_anonymous_dimension(tmp_path: Path) -> None:
    path = save(relu_model(value("x", [2, None])), tmp_path)
    with pytest.raises(ShapeError) as caught:
        load_onnx(path)
    assert str(caught.value) == (
        "1 dimension is unbound: dimension 1 of x (2 x ?); this is answered: --input-shape x:2x16000"
    )


@pytest.mark.parametrize(
    ("shapes", "binding", "expected"),
    [
        ([["batch", 3]], {"batch": 7}, ["7,3"]),
        ([["N", "seq"], ["N", 4]], {"batch": 7, "dims": {"seq": 5}}, ["7,5", "7,4"]),
        ([["s0", 3]], {"batch": 7}, ["7,3"]),
        ([[None, 3]], {"batch": 7}, ["7,3"]),
        ([[1, 3]], {"batch": 7}, ["7,3"]),
        ([[2, 3], [2, 5], [9, 5]], {"batch": 7}, ["7,3", "7,5", "9,5"]),
        ([["batch", "s"]], {"input_shapes": {"x0": (2, 9)}}, ["2,9"]),
        ([["batch", "s"], ["batch", "t"]], {"input_shapes": {"x0": (2, 9)}, "dims": {"t": 4}}, ["2,9", "2,4"]),
        ([[3, 4]], {"input_shapes": {"x0": (2, 9)}}, ["2,9"]),
        ([["a", "a"]], {"dims": {"a": 3}}, ["3,3"]),
        ([[-1, 3]], {"batch": 7}, ["7,3"]),
        ([["batch", 0]], {"batch": 7}, ["7,0"]),
        ([["batch", 3], []], {"batch": 7}, ["7,3", ""]),
        ([None], {"input_shapes": {"x0": (2, 9)}}, ["2,9"]),
    ],
)
def test_binding(tmp_path: Path, shapes: list[list[object]], binding: dict[str, object], expected: list[str]) -> None:
    path = save(relu_model(*(value(f"x{i}", shape) for i, shape in enumerate(shapes))), tmp_path)
    found = shapes_of(path, **binding)
    assert [found[f"y{i}"] for i in range(len(shapes))] == [f"float32[{dims}]" for dims in expected]


@pytest.mark.parametrize(
    ("binding", "error", "words"),
    [
        ({"batch": 0}, UsageError, "--batch is 0; accepted: 1 or more"),
        ({"dims": {"t": 1}}, UsageError, "no input has a dimension named 't'; named dimensions: batch, seq"),
        ({"dims": {"seq": -1}}, UsageError, "a dimension is 0 or more"),
        ({"input_shapes": {"z": (1, 2)}}, UsageError, "the model has no input 'z'; its inputs: x"),
        ({"input_shapes": {"x": (1,)}}, ShapeError, "has 1 dimensions; the input has 2: batch x seq"),
        ({"batch": 2, "dims": {"batch": 3, "seq": 1}}, ShapeError, "bound twice: to 3 by --dim batch=3 and to 2 by"),
        ({"batch": 2, "input_shapes": {"x": (3, 1)}}, ShapeError, "to 3 by --input-shape x:3x1 and to 2 by --batch 2"),
    ],
)
def test_bad_bindings(tmp_path: Path, binding: dict[str, object], error: type[Exception], words: str) -> None:
    path = save(relu_model(value("x", ["batch", "seq"])), tmp_path)
    with pytest.raises(error) as caught:
        load_onnx(path, **binding)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_an_input_without_a_shape(tmp_path: Path) -> None:
    path = save(relu_model(value("x", None)), tmp_path)
    with pytest.raises(ShapeError, match="the shape of input 'x' is not in the file; give it with --input-shape x:"):
        load_onnx(path, batch=2)


def test_the_notes_say_what_was_bound(tmp_path: Path) -> None:
    path = save(relu_model(value("x", ["batch", "seq"])), tmp_path)
    graph = load_onnx(path, batch=2, dims={"seq": 5})
    assert graph.notes == (("bound dimensions", "seq = 5 by --dim seq=5; batch = 2 by --batch 2"),)


def test_a_batch_fixed_in_the_file_is_replaced(tmp_path: Path) -> None:
    path = save(samples.perceptron(batch=1), tmp_path)
    graph = load_onnx(path, batch=16)
    assert str(graph.tensors["y"]) == "float32[16,4]"
    assert graph.notes[0][1] == "first dimension of x = 16 by --batch, 1 in the file"


def test_a_batch_baked_into_a_reshape_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"], name="flat")]
    path = save(model(nodes, [value("x", [1, 4, 4])], [value("y", [1, 16])], [constant("to", [1, 16])]), tmp_path)
    assert str(load_onnx(path, batch=1).tensors["y"]) == "float32[1,16]"
    with pytest.raises(ShapeError, match=r"node 'flat' \(Reshape\)"):
        load_onnx(path, batch=8)


def test_a_batch_that_does_not_reach_the_output_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"], name="flat")]
    path = save(model(nodes, [value("x", [1, 16])], [value("y", [1, 16])], [constant("to", [1, -1])]), tmp_path)
    with pytest.raises(ShapeError, match="the batch is fixed in the file: with 8 in place of 1, output 'y' is float32"):
        load_onnx(path, batch=8)


def test_option_texts() -> None:
    assert parse_dim("seq=128") == ("seq", 128)
    assert parse_input_shape("a:b:1x3x224") == ("a:b", (1, 3, 224))
    assert parse_input_shape("scale:") == ("scale", ())
    for text in ("seq", "=3", "seq=", "seq=-1", "seq=1.5", "seq=²"):
        with pytest.raises(UsageError, match="write --dim NAME=VALUE"):
            parse_dim(text)
    for text in ("x", "x:1x", "x:axb", ":1", "x:1,2", "x:-1"):
        with pytest.raises(UsageError, match="write --input-shape NAME:DIMS"):
            parse_input_shape(text)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_external_weights_may_be_missing(tmp_path: Path) -> None:
    proto = samples.perceptron()
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    expected = shapes_of(save(samples.perceptron(), tmp_path), batch=3)
    assert (tmp_path / "w.bin").stat().st_size > 0
    (tmp_path / "w.bin").unlink()
    assert shapes_of(tmp_path / "m.onnx", batch=3) == expected


def test_small_external_shapes_are_read(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"], name="r")]
    proto = model(nodes, [value("x", ["batch", 6])], [value("y", None)], [constant("to", [-1, 2])])
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    assert shapes_of(tmp_path / "m.onnx", batch=3)["y"] == "float32[9,2]"
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ShapeError, match="node 'r'"):
        load_onnx(tmp_path / "m.onnx", batch=3)


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def write_sparse_model(path: Path, payload: int) -> None:
    """The perceptron with ``payload`` bytes of raw data in its first weight: a hole in the file, no disk."""
    proto = samples.perceptron()
    tensor = proto.graph.initializer[0]
    tensor.dims[:] = [8, payload // 32]
    tensor.ClearField("raw_data")
    rest = onnx.GraphProto()
    rest.CopyFrom(proto.graph)
    del rest.initializer[:]
    second = proto.graph.initializer[1]
    second.dims[:] = [payload // 32, 4]
    second.ClearField("raw_data")
    rest.initializer.append(second)
    head = tensor.SerializeToString() + b"\x4a" + varint(payload)  # field 9, raw_data
    tail = rest.SerializeToString()
    graph_size = 1 + len(varint(len(head) + payload)) + len(head) + payload + len(tail)
    proto.ClearField("graph")
    with path.open("wb") as file:
        file.write(proto.SerializeToString() + b"\x3a" + varint(graph_size))
        file.write(b"\x2a" + varint(len(head) + payload) + head)
        file.truncate(file.tell() + payload)
        file.seek(0, 2)
        file.write(tail)


def test_a_huge_inline_weight_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.onnx"
    write_sparse_model(path, 3 << 30)
    code = (
        "import sys, resource\n"
        "from graphmem.sources.onnx_file import load_onnx\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "graph = load_onnx(sys.argv[1], batch=2)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(graph.tensors['w1'].nbytes, after - before, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    nbytes, growth, torch = done.stdout.split()
    assert int(nbytes) == 3 << 30
    assert int(growth) * 1024 < 64 << 20  # ru_maxrss is in KiB
    assert torch == "False"


def test_typed_weights_are_dropped_too(tmp_path: Path) -> None:
    big = helper.make_tensor("w1", TensorProto.FLOAT, (8, 16), np.zeros(128, np.float32))
    wide = helper.make_tensor("w2", TensorProto.FLOAT, (16, 400), np.zeros(6400, np.float32))
    proto = samples.perceptron()
    del proto.graph.initializer[:]
    proto.graph.initializer.extend([big, wide])
    proto.graph.ClearField("output")
    proto.graph.output.append(value("y", None))
    assert shapes_of(save(proto, tmp_path), batch=2)["y"] == "float32[2,400]"


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [
        (TensorProto.FLOAT, 60), (TensorProto.BFLOAT16, 30), (TensorProto.BOOL, 15), (TensorProto.DOUBLE, 120),
        (TensorProto.INT4, 8), (TensorProto.UINT4, 8), (TensorProto.FLOAT8E4M3FN, 15), (TensorProto.COMPLEX128, 240),
        (TensorProto.INT64, 120), (TensorProto.FLOAT8E5M2FNUZ, 15), (TensorProto.FLOAT4E2M1, 8),
    ],
)  # fmt: skip
def test_element_sizes(tmp_path: Path, dtype: int, nbytes: int) -> None:
    proto = model([], [value("x", [3, 5], dtype)], [value("x", [3, 5], dtype)])
    assert load_onnx(save(proto, tmp_path)).tensors["x"].nbytes == nbytes


def test_every_element_type_of_onnx_has_a_size(tmp_path: Path) -> None:
    for name, number in TensorProto.DataType.items():
        if name != "UNDEFINED":
            proto = model([], [value("x", [2, 4], number)], [value("x", [2, 4], number)])
            assert load_onnx(save(proto, tmp_path)).tensors["x"].nbytes > 0, name


def test_constant_nodes_become_initializers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Constant", [], ["c"], name="c", value_floats=[1.0, 2.0]),
        helper.make_node("Add", ["x", "c"], ["y"], name="add"),
    ]
    graph = load_onnx(save(model(nodes, [value("x", ["batch", 2])], [value("y", None)]), tmp_path), batch=3)
    assert graph.initializers == ("c",)
    assert [node.name for node in graph.nodes] == ["add"]


def test_shapes_are_computed_through_arithmetic(tmp_path: Path) -> None:
    assert shapes_of(save(samples.dynamic_reshape(), tmp_path), batch=8)["y"] == "float32[4,12]"


def test_initializers_listed_as_inputs_are_no_inputs(tmp_path: Path) -> None:
    proto = samples.perceptron()
    proto.graph.input.append(value("w1", [8, 16]))
    assert load_onnx(save(proto, tmp_path), batch=1).inputs == ("x",)


def test_local_functions_are_inlined(tmp_path: Path) -> None:
    body = [helper.make_node("Relu", ["a"], ["t"]), helper.make_node("Neg", ["t"], ["b"])]
    function = helper.make_function("mine", "F", ["a"], ["b"], body, [helper.make_opsetid("", 18)])
    proto = model([helper.make_node("F", ["x"], ["y"], domain="mine", name="f")], [value("x", ["batch", 2])],
                  [value("y", None)], domains=["mine"])  # fmt: skip
    proto.functions.append(function)
    graph = load_onnx(save(proto, tmp_path), batch=3)
    assert [node.op_type for node in graph.nodes] == ["Relu", "Neg"]
    assert str(graph.tensors["y"]) == "float32[3,2]"


def test_the_file_may_give_shapes_of_unknown_operators(tmp_path: Path) -> None:
    nodes = [helper.make_node("Odd", ["x"], ["h"], domain="mine", name="odd"), helper.make_node("Relu", ["h"], ["y"])]
    ends = [value("x", ["batch", 2])], [value("y", None)]
    with pytest.raises(ShapeError, match=r"node 'odd': operator Odd of domain 'mine' \(version 1\) is unknown"):
        load_onnx(save(model(nodes, *ends, domains=["mine"]), tmp_path), batch=3)
    proto = model(nodes, *ends, domains=["mine"], value_info=[value("h", ["batch", 5])])
    assert shapes_of(save(proto, tmp_path), batch=3)["y"] == "float32[3,5]"


def test_onnx_runtimes_own_operators(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["h"], domain="com.microsoft", name="matmul"),
        helper.make_node("BiasGelu", ["h", "b"], ["y"], domain="com.microsoft", name="gelu"),
    ]
    constants = [weights("w", (2, 300)), weights("b", (300,))]
    proto = model(nodes, [value("x", ["batch", 2])], [value("y", None)], constants, domains=["com.microsoft"])
    graph = load_onnx(save(proto, tmp_path), batch=3)
    assert str(graph.tensors["y"]) == "float32[3,300]"
    assert ("operators unknown to ONNX", "shapes by the rules of onnxruntime") in graph.notes


def branch(name: str) -> onnx.GraphProto:
    return helper.make_graph([helper.make_node("Identity", ["x"], [name])], name, [], [value(name, None)])


REFUSED = {
    "subgraph": (
        [helper.make_node("SequenceMap", ["c"], ["y"], name="map", body=branch("a"))],
        [value("x", [2]), value("c", [], TensorProto.BOOL)],
        r"node 'map' \(SequenceMap\) has subgraphs; of such operators If, Loop and Scan are planned",
    ),
    "data dependent": (
        [helper.make_node("Expand", ["x", "s"], ["y"], name="ex")],
        [value("x", [1]), value("s", [2], TensorProto.INT64)],
        r"node 'ex' \(Expand\): the shape of output 'y' .* depends on data",
    ),
    "mismatch": (
        [helper.make_node("MatMul", ["x", "x"], ["y"], name="mm")],
        [value("x", [2, 3])],
        r"node 'mm' \(MatMul\): .*Incompatible dimensions.* \(inputs: x float32\[2,3\], x float32\[2,3\]\)",
    ),
    "undefined": (
        [helper.make_node("Relu", ["z"], ["y"], name="r")],
        [value("x", [2])],
        r"node 'r' \(Relu\) reads 'z', which nothing produces",
    ),
    "twice": (
        [helper.make_node("Relu", ["x"], ["y"], name="r"), helper.make_node("Neg", ["x"], ["y"], name="n")],
        [value("x", [2])],
        r"node 'n' \(Neg\) produces 'y', which node 'r' \(Relu\) produces already",
    ),
    "over an input": (
        [helper.make_node("Relu", ["x"], ["x"], name="r"), helper.make_node("Relu", ["x"], ["y"])],
        [value("x", [2])],
        "cycle through node 'r'",
    ),
    "cycle": (
        [helper.make_node("Add", ["x", "b"], ["a"], name="p"), helper.make_node("Relu", ["a"], ["b"], name="q"),
         helper.make_node("Neg", ["b"], ["y"])],
        [value("x", [2])],
        "the graph has a cycle through node",
    ),
    "domain": (
        [helper.make_node("Relu", ["x"], ["y"], name="r", domain="nobody")],
        [value("x", [2])],
        "imports no operator set for domain 'nobody'",
    ),
    "too big": (
        [helper.make_node("Relu", ["x"], ["y"], name="r")],
        [value("x", [2**40, 2**40])],
        "more than any memory",
    ),
    "output": ([helper.make_node("Relu", ["x"], ["z"])], [value("x", [2])], "nothing produces the graph's output 'y'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_they_refuse(tmp_path: Path, case: str) -> None:
    nodes, inputs, words = REFUSED[case]
    path = save(model(nodes, inputs, [value("y", None)]), tmp_path)
    with pytest.raises(SourceError, match=words) as caught:
        load_onnx(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("name", samples.REAL_MODELS)
def test_real_models(tmp_path: Path, name: str, batch: int) -> None:
    graph = load_onnx(samples.unpack(name, tmp_path), batch=batch)
    outputs = {"resnet50": (1000,), "bert_mini": (2,), "unet": (4, 128, 128)}
    assert graph.tensors["output"].shape == (batch, *outputs[name])
