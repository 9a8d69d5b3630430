"""Sessions of the real CUDA provider beside their predictions, no cuDNN asked (``tests/recorded/onnx_cuda.py``).

``onnxruntime/cuda_ratchet.json`` lists those whose most in use or total is off, each with its shares; a session that is
not listed is equal, and stays so. Where the order of initializers matters, equal means that the predicted interval and
the recorded processes meet.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import places
from tests.recorded import onnx_cuda
from tests.support import ratchet

RATCHET = places.ONNXRUNTIME / "cuda_ratchet.json"
#: Of so many sessions one is compared every time, the others with ``-m slow``.
QUICK = 6
LINES = onnx_cuda.load()
REFUSED: list[float] = []  # in place of two shares


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    onnx_cuda.kept_graphs(folder)
    return folder


def cases() -> list[object]:
    return [
        pytest.param(line, id=line["name"], marks=() if index % QUICK == 0 else pytest.mark.slow)
        for index, line in enumerate(LINES)
    ]


@pytest.mark.parametrize("line", cases())
def test_a_session_is_predicted_as_well_as_before(
    line: onnx_cuda.Line, graphs: Path, request: pytest.FixtureRequest
) -> None:
    row = onnx_cuda.row_of(line, graphs)
    reached = REFUSED if row.off is None else [round(off, 4) for off in row.off]
    kept = ratchet.read(RATCHET)
    is_equal = row.off == (0, 0)
    if request.config.getoption("--update-goldens"):
        entries = {name: entry for name, entry in kept.items() if name != row.name}
        ratchet.write(RATCHET, entries if is_equal else entries | {row.name: reached})
        return
    if is_equal:
        return
    assert row.name in kept, f"{row.text()} was equal"
    before = kept[row.name]
    if before == REFUSED:
        return  # an answer is better than none
    assert reached != REFUSED, row.text()
    assert all(abs(now) <= abs(then) for now, then in zip(reached, before, strict=True)), row.text()


def test_processes_differ_by_the_order_of_initializers_alone() -> None:
    """Chunks are handed out in another order: what was asked for is the same, and so is the number of requests."""
    answered = [line for line in LINES if "answers" in line]
    assert any(len(line["answers"]) > 1 for line in answered)
    for line in answered:
        loads = {answer[0] for answer in line["answers"]}
        rises = {tuple(most - answer[0] >= 0 for most, _ in answer[1]) for answer in line["answers"]}
        assert rises == {(True,) * len(line["runs"])}, (line["name"], loads)


def test_at_most_one_of_six_answered_sessions_is_off_by_more_than_five_percent() -> None:
    entries = json.loads(RATCHET.read_text(encoding="utf-8"))
    answered = [line["name"] for line in LINES if entries.get(line["name"]) != REFUSED]
    far = [name for name in answered if max(map(abs, entries.get(name, [0])), default=0) > 0.05]
    assert len(far) * 6 <= len(answered), far
