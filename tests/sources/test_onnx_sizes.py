"""What binds the inputs of ONNX files: batch, sequences, formulas, ranges, values; and the command that is named."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from graphmem.cli.main import cli
from graphmem.errors import ShapeError, UsageError
from graphmem.graph.asked import Asked
from graphmem.graph.binding import evaluated, is_sequence
from graphmem.sources.onnx_file import read_onnx
from tests.support.onnx_samples import constant, model, save, value, weights

INT = TensorProto.INT64


def decoder(whole: str) -> onnx.ModelProto:
    """A step of a decoder, as far as its sizes go: what a mask covers is as long as the past and the tokens."""
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["past", "ids"], ["keys"], axis=1),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["keys", "mask"], ["y"]),
    ]
    inputs = [
        value("input_ids", ["batch", "sequence_length"], INT),
        value("attention_mask", ["batch", whole], INT),
        value("past", ["batch", "past_sequence_length"]),
    ]
    return model(nodes, inputs, [value("y", None)])


def text_line() -> onnx.ModelProto:
    """A convolution over lines of text, 48 pixels high."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], name="conv", strides=[2, 2])]
    return model(nodes, [value("x", ["n", "c", 48, "width"])], [value("y", None)], [weights("w", (8, 3, 5, 5))])


def branching() -> onnx.ModelProto:
    """A model that upsamples one rate and leaves the other."""

    def branch(name: str, nodes: list[onnx.NodeProto]) -> onnx.GraphProto:
        return helper.make_graph(nodes, name, [], [value(name, None)])

    twice = branch("twice", [helper.make_node("Concat", ["x", "x"], ["twice"], axis=1)])
    once = branch("once", [helper.make_node("Neg", ["x"], ["once"])])
    nodes = [
        helper.make_node("Equal", ["sr", "rate"], ["is_low"]),
        helper.make_node("If", ["is_low"], ["y"], name="resample", then_branch=twice, else_branch=once),
    ]
    inputs = [value("x", ["batch", 512]), value("sr", [], INT)]
    return model(nodes, inputs, [value("y", None)], [constant("rate", np.array(8000))])


def looping() -> onnx.ModelProto:
    """A model that appends as many columns as its input ``n`` says."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("Concat", ["before", "x"], ["after"], axis=1),
        ],
        "body",
        [value("i", [], INT), value("going", [], TensorProto.BOOL), value("before", ["batch", None])],
        [value("still", [], TensorProto.BOOL), value("after", None)],
    )
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], name="grow", body=body)]
    return model(nodes, [value("x", ["batch", 4]), value("n", [], INT)], [value("y", None)])


def shapes(proto: onnx.ModelProto, directory: Path, **sizes: Any) -> dict[str, tuple[Any, ...]]:
    graph = read_onnx(save(proto, directory)).bind(Asked(**sizes))
    return {name: graph.tensors[name].shape for name in (*graph.inputs, *graph.outputs)}


def test_a_formula_is_bound_by_its_parts(tmp_path: Path) -> None:
    found = shapes(
        decoder("past_sequence_length + sequence_length"),
        tmp_path,
        batch=2,
        dims={"past_sequence_length": 7},
        seq_len=3,
    )
    assert found["attention_mask"] == (2, 10)


@pytest.mark.parametrize(
    ("formula", "number"),
    [
        ("a + b", 5),
        ("a*b - 1", 5),
        ("(a + b) // 2", 2),
        ("a", None),
        ("a + c", None),
        ("a ** b", None),
        ("a + b +", None),
    ],
)
def test_formulas(formula: str, number: int | None) -> None:
    assert evaluated(formula, {"a": 2, "b": 3}) == number


def test_names_of_sequences() -> None:
    assert all(map(is_sequence, ("seq", "seq_len", "encoder_sequence_length", "T", "time", "sequence length")))
    assert not any(map(is_sequence, ("past_sequence_length", "a_seq + b", "height", "s64", "N", "batch", "max_length")))


def test_a_sequence_length_is_bound_or_refused(tmp_path: Path) -> None:
    assert shapes(decoder("total"), tmp_path, batch=2, seq_len=3, dims={"total": 8, "past_sequence_length": 5})[
        "y"
    ] == (2, 8)
    with pytest.raises(
        UsageError, match=r"no sequence whose length --seq-len could set; .* free dimensions: n, c, width"
    ):
        shapes(text_line(), tmp_path, seq_len=3)


@pytest.mark.parametrize("whole", ["past_sequence_length + sequence_length", "s64"])
def test_a_decoder_is_answered_by_the_command_that_is_named(tmp_path: Path, whole: str) -> None:
    path = save(decoder(whole), tmp_path)
    refused = CliRunner().invoke(cli, ["analyze", str(path), "--batch", "16"])
    assert refused.exit_code == 1
    line = refused.output.strip()
    assert line.startswith(f"graphmem: {2 + (whole == 's64')} dimensions are unbound: sequence_length of input_ids")
    words = shlex.split(line.partition("this is answered: graphmem ")[2])
    answered = CliRunner().invoke(cli, words)
    assert answered.exit_code == 0, answered.output
    assert "s64=256" in words or whole != "s64"


def test_weights_and_neighbours_say_what_is_likely(tmp_path: Path) -> None:
    with pytest.raises(ShapeError) as caught:
        read_onnx(save(text_line(), tmp_path)).bind(Asked(batch=2))
    assert caught.value.options == ("--dim", "c=3", "--dim", "width=320")


def test_metadata_says_what_is_likely(tmp_path: Path) -> None:
    proto = text_line()
    helper.set_model_props(proto, {"imgsz": "[96, 96]"})
    with pytest.raises(ShapeError) as caught:
        read_onnx(save(proto, tmp_path)).bind(Asked(batch=2))
    assert "width=96" in caught.value.options


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"node 'conv' \(Conv\): its kernel 5x5 does not fit float32\[2,3,48,4\]"):
        read_onnx(save(text_line(), tmp_path)).bind(Asked(batch=2, dims={"c": 3, "width": 4}))
    with pytest.raises(ShapeError, match=r"its kernel takes 3 channels; x float32\[2,4,48,9\] has 4"):
        read_onnx(save(text_line(), tmp_path)).bind(Asked(batch=2, dims={"c": 4, "width": 9}))


def test_a_range_is_analysed_at_both_ends(tmp_path: Path) -> None:
    path = save(text_line(), tmp_path)
    words = ["analyze", str(path), "--batch", "2", "--dim", "c=3", "--format", "json", "--alloc-conf", "provider:cpu"]
    runs = read_onnx(path).model_of(Asked(batch=2, dims={"c": 3, "width": (64, 640)})).sessions[0]
    assert [graph.tensors["x"].shape[3] for graph in runs] == [64, 64, 640, 640]
    assert CliRunner().invoke(cli, [*words, "--dim", "width=64..640"]).exit_code == 0
    backwards = CliRunner().invoke(cli, [*words, "--dim", "width=640..64"])
    assert "ends before it begins; write NAME=64..640" in backwards.output


def test_an_input_decides_a_branch(tmp_path: Path) -> None:
    assert shapes(branching(), tmp_path, batch=2, input_values={"sr": (8000,)})["y"] == (2, 1024)
    assert shapes(branching(), tmp_path, batch=2, input_values={"sr": (16000,)})["y"] == (2, 512)
    notes = dict(read_onnx(save(branching(), tmp_path)).bind(Asked(batch=2)).notes)
    assert notes["branches taken as the larger (decide with --input-value sr=VALUE)"] == (
        "resample: then_branch (8.00 KiB at once), not else_branch (4.00 KiB)"
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rate": (1,)}, "the model has no input 'rate'; its inputs: x, sr"),
        ({"x": (1,)}, r"--input-value x: 1 values for float32\[2,512\]"),
        ({"sr": (1, 2)}, r"--input-value sr: 2 values for int64\[\]"),
    ],
)
def test_values_that_are_refused(tmp_path: Path, values: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shapes(branching(), tmp_path, batch=2, input_values=values)


def test_a_loop_is_followed_or_bounded(tmp_path: Path) -> None:
    assert shapes(looping(), tmp_path, batch=2, input_values={"n": (5,)})["y"] == (2, 24)
    assert shapes(looping(), tmp_path, batch=2, input_values={"n": (0,)})["y"] == (2, 4)
    assert shapes(looping(), tmp_path, batch=2, trip_count=3)["y"] == (2, 16)
    with pytest.raises(ShapeError) as caught:
        shapes(looping(), tmp_path, batch=2)
    assert str(caught.value) == (
        "node 'grow' (Loop): how often it runs depends on data; bound it with --trip-count N, or decide it with "
        "--input-value n=VALUE; this is answered: --trip-count 10"
    )


def test_values_and_trip_counts_are_for_onnx_files() -> None:
    refused = CliRunner().invoke(cli, ["analyze", "hf:gpt2", "--trip-count", "3"])
    assert "--input-value and --trip-count are for ONNX files" in refused.output
