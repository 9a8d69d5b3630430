"""Recurrent networks against the real CUDA build.

- ``ops/rnn.jsonl.gz``: 200 random LSTMs, GRUs and plain networks, moved to the device, forward and backward, with
  cuDNN and without; allocations and frees in order.
- ``ops/rnn_spaces.jsonl.gz``: what ``cudnnGetRNNTempSpaceSizes`` of cuDNN 9.20 answers to 1,153 networks on described
  cards: forward and backward, packed, projected, with dropout.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.session.session import Session, capture  # noqa: E402
from graphmem.cudnn.library import Cudnn  # noqa: E402
from graphmem.cudnn.predicted.recurrent import reserve_bytes, workspace_bytes  # noqa: E402
from graphmem.devices import described_device, device_named  # noqa: E402
from graphmem.trace import EventKind, Place  # noqa: E402
from tests import places  # noqa: E402
from tests.recorded import cudnn_plans  # noqa: E402
from tests.recorded.recurrent import DTYPES, network, warm_up  # noqa: E402
from tests.support.examples import first_quick  # noqa: E402

OPS = places.PYTORCH / "ops"
DEVICE = described_device("NVIDIA H200", (9, 0), 140 << 30, 132, 2048)


def _lines(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(OPS / name, "rt") as file:
        yield from map(json.loads, file)


# --- events -----------------------------------------------------------------------------------------------------------


def _warm_up() -> None:
    """Both threads' library workspaces exist before the recording starts."""
    square = torch.empty(64, 64, device="cuda")
    square @ square
    (torch.empty(64, 64, device="cuda", requires_grad=True) @ square).sum().backward()
    torch.addmm(torch.empty(64, device="cuda"), square, square)


def _captured(lines: list[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """The events of every network, one after the other in one capture, as they were recorded in one process."""
    spans: list[dict[str, tuple[int, int]]] = []

    def run(session: Session) -> None:
        _warm_up()
        warm_up()
        spans.extend(_run(line, session.recorder.builder.rows) for line in lines)

    trace = capture(run, source="rnn", device=DEVICE, torch_version=(2, 13)).trace
    events = list(zip(trace.kinds.tolist(), trace.subjects.tolist(), strict=True))
    return [
        {name: list(_sizes(trace, events[start:end])) for name, (start, end) in of_line.items()} for of_line in spans
    ]


def _run(line: dict[str, Any], rows: Any) -> dict[str, tuple[int, int]]:
    """Where in the rows the events of one network begin and end; what its step holds dies with this call."""
    module, start = network(line), len(rows)
    module = module.cuda()
    spans = {"to": (start, len(rows))}
    order = (line["B"], line["T"]) if line["bf"] else (line["T"], line["B"])
    steps = torch.empty(*order, line["I"], device="cuda", dtype=DTYPES[line["dt"]], requires_grad=bool(line["xgrad"]))
    start = len(rows)
    with torch.set_grad_enabled(bool(line["train"])):
        output, hidden = module(steps)
    spans["fwd"], spans["bwd"] = (start, len(rows)), (0, 0)
    if line["train"]:
        state = hidden[0] if isinstance(hidden, tuple) else hidden
        used = {"o": [output], "h": [state], "both": [output, state]}[line["use"]]
        gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in used]
        start = len(rows)
        torch.autograd.backward(used, gradients)
        spans["bwd"] = start, len(rows)
    return spans


def _sizes(trace: Any, events: list[tuple[int, int]]) -> Iterator[int]:
    for kind, subject in events:
        if kind in (EventKind.ALLOC, EventKind.FREE):
            storage = trace.storages[subject]
            if storage.place == Place.DEVICE and storage.bytes:
                yield storage.bytes if kind == EventKind.ALLOC else -storage.bytes


@pytest.fixture
def cudnn_switch() -> Iterator[None]:
    enabled = torch.backends.cudnn.enabled
    yield
    torch.backends.cudnn.enabled = enabled


@pytest.mark.parametrize("kind", first_quick(["LSTM", "GRU", "RNN", "RELU"], 2))
@pytest.mark.parametrize("cudnn", [True, False])
def test_events_are_those_of_the_cuda_build(kind: str, cudnn: bool, cudnn_switch: None) -> None:
    torch.backends.cudnn.enabled = cudnn
    lines = [line for line in _lines("rnn.jsonl.gz") if line["kind"] == kind and line["cudnn"] == cudnn]
    assert len(lines) >= 15
    for line, found in zip(lines, _captured(lines), strict=True):
        assert found == {name: line[name] for name in ("to", "fwd", "bwd")}, line


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_spaces_are_cudnns() -> None:
    lines = list(_lines("rnn_spaces.jsonl.gz"))
    assert len(lines) >= 1153
    for line in lines:
        asked, capability, training = cudnn_plans.network(line)
        assert workspace_bytes(asked, capability, training=training) == line["workspace"], line
        if training:
            assert reserve_bytes(asked) == line["reserve"], line


@pytest.mark.skipif("GRAPHMEM_CUDNN" not in os.environ, reason="GRAPHMEM_CUDNN names a cuDNN to ask")
def test_the_library_answers_as_recorded() -> None:
    lines = list(_lines("rnn_spaces.jsonl.gz"))[::10]
    assert cudnn_plans.spaces(lines, os.environ["GRAPHMEM_CUDNN"]) == lines
    h200 = [line for line in lines if line.get("card", "h200") == "h200"]
    with Cudnn(os.environ["GRAPHMEM_CUDNN"], device_named("H200")) as cudnn:
        for line in h200:
            asked, _, training = cudnn_plans.network(line)
            assert cudnn.recurrent_spaces(asked, training) == (line["workspace"], line["reserve"])


def test_moving_to_the_device_flattens_the_weights(cudnn_switch: None) -> None:
    """The flat buffer and the weights as they were exist together for a moment."""
    storages: list[int] = []

    def run(session: Session) -> None:
        module = torch.nn.LSTM(8, 16, 2).cuda()
        storages.extend({p.untyped_storage()._cdata for p in module.parameters()})
        assert sum(p.numel() for p in module.parameters()) * 4 == module.weight_ih_l0.untyped_storage().nbytes()

    torch.backends.cudnn.enabled = True
    capture(run, source="rnn", device=DEVICE, torch_version=(2, 13))
    assert len(storages) == 1
