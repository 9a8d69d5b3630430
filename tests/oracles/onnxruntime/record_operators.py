"""Record what the kernels of ONNX's own test cases allocate on the CPU, each in a session of its own.

    python tests/oracles/onnxruntime/record_operators.py plain|between RESULT.json [PREFIX]
    python tests/oracles/onnxruntime/record_operators.py pack PLAIN.json BETWEEN.json GOLDEN.json.gz

``plain`` is the case as it is: its working buffers show. ``between`` puts the operator between two others that always
take new buffers, so that writing over an input shows too. Cases that ONNX Runtime refuses are left out, with its words.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).parent))
SMALL_BYTES = 1024


def cases() -> list[Any]:
    """ONNX's node test cases that come with data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases compute with overflow on purpose
        from onnx.backend.test.case.node import collect_testcases

        return [case for case in collect_testcases(None) if case.data_sets]


def prepared(case: Any, between: bool) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model with its small integer inputs as initializers, and the arrays of the other inputs."""
    proto = onnx.ModelProto()
    proto.CopyFrom(case.model)
    feeds: dict[str, Any] = {}
    kept = []
    for value, given in zip(case.model.graph.input, case.data_sets[0][0], strict=False):
        array = np.asarray(given) if isinstance(given, np.generic) else given
        is_array = isinstance(array, np.ndarray)
        if is_array and array.nbytes <= SMALL_BYTES and (array.dtype.kind in "iub" or not array.ndim) and len(feeds):
            proto.graph.initializer.append(numpy_helper.from_array(array, value.name))
            continue
        feeds[value.name] = array
        kept.append(value)
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    if between:
        _put_between(proto, feeds)
    return proto, feeds


def _put_between(proto: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    first, last = [], []
    renamed = {}
    for value in proto.graph.input:
        if isinstance(feeds[value.name], np.ndarray) and feeds[value.name].ndim:
            renamed[value.name] = f"{value.name} before"
            first.append(helper.make_node("Concat", [value.name], [renamed[value.name]], f"{value.name} in", axis=0))
    for value in proto.graph.output:
        shape = value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ()
        if len(shape):
            renamed[value.name] = f"{value.name} after"
            last.append(helper.make_node("Concat", [renamed[value.name]], [value.name], f"{value.name} out", axis=0))
    nodes = list(proto.graph.node)
    for node in nodes:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    del proto.graph.node[:]
    proto.graph.node.extend([*first, *nodes, *last])


def allocations(events: list[list[Any]]) -> Counter[tuple[int, bool, int]]:
    """How often each (run, reserved, bytes) is allocated."""
    return Counter(
        (0 if phase == "init" else int(phase.removeprefix("run")), kind == "reserve", size)
        for phase, kind, size, _ in events
        if kind != "free"
    )


def pack(plain: Path, between: Path, target: Path) -> None:
    """Keep the allocations of both recordings for the tests."""
    kept = {}
    for way, path in (("plain", plain), ("between", between)):
        results = json.loads(path.read_text())
        kept[way] = {
            name: [[*key, count] for key, count in sorted(allocations(result["events"]).items())]
            for name, result in results.items()
            if "events" in result
        }
    document = json.dumps({"onnx": onnx.__version__, "cases": kept}, separators=(",", ":")).encode()
    target.write_bytes(gzip.compress(document, 9, mtime=0))


def main() -> None:
    if sys.argv[1] == "pack":
        pack(*map(Path, sys.argv[2:5]))
        return
    from record_session import Environment, Recorder

    between, target = sys.argv[1] == "between", Path(sys.argv[2])
    prefix = sys.argv[3] if len(sys.argv) > 3 else ""
    environment = Environment("trace")
    results: dict[str, Any] = {}
    for case in cases():
        if not case.name.startswith(prefix):
            continue
        path = target.with_suffix(".onnx")
        try:
            proto, feeds = prepared(case, between)
            path.write_bytes(proto.SerializeToString())
            recorder = Recorder({"model": str(path), "level": "disabled", "mode": "trace"}, environment)
            for number in (1, 2):
                recorder.run(number, feeds)
            results[case.name] = {"events": recorder.events}
        except Exception as error:
            results[case.name] = {"error": str(error)[:200]}
    target.write_text(json.dumps(results))
    path.unlink(missing_ok=True)
    os._exit(0)


if __name__ == "__main__":
    main()
