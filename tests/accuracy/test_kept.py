"""Answers that are kept in a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphmem.accuracy.compare import Predicted
from graphmem.accuracy.coverage import Interval
from graphmem.accuracy.kept import Keeper, digest_of_folder
from graphmem.accuracy.published.case import (
    ModelSpec,
    OwnLoop,
    PublishedCase,
    PublishedComparison,
    Script,
)
from graphmem.base.figures import Cause, Doubts, Spread
from graphmem.estimate import Peak
from graphmem.training import Inference, Training

TRAINED = OwnLoop(ModelSpec("torchvision", "vgg16"), Training(optimizer_args=(("lr", 0.1),), amp="fp16"), 8, 3)
CASE = PublishedCase("xMem", TRAINED, "T4-16GB", "2.6", "reserved", 1 << 30, (("xMem", 5),), beyond_model=True)
DOUBTS = Doubts((Cause("plans", "measured", "us", {"reserved": Spread(((0.0, -3), (1.0, 9)))}, 0.9, 12),))
COMPARISONS = [
    PublishedComparison(CASE, 1 << 30, context_bytes=4, asked_bytes=7, doubts=DOUBTS),
    PublishedComparison(replace(CASE, run=Script("a.py", ("b",)), cuda_version=(11, 2)), error="no"),
    PublishedComparison(replace(CASE, run=replace(TRAINED, step=Inference())), is_limited=True),
]
PREDICTED = Predicted(Peak(1, 2, 3, 4), 5, replayed=(6, 7), intervals={"device": Interval(None, 9, ("plans",))})


def _counted(result: Any) -> tuple[Callable[[object], Any], list[object]]:
    asked: list[object] = []

    def answer(item: object) -> Any:
        asked.append(item)
        return result

    return answer, asked


@pytest.mark.parametrize(
    ("result", "gives"),
    [(COMPARISONS, list[PublishedComparison]), (PREDICTED, Predicted), (Predicted(error="x"), Predicted)],
)
def test_a_kept_answer_comes_back_as_it_was(tmp_path: Path, result: Any, gives: Any) -> None:
    answer, asked = _counted(result)
    keeper: Keeper[Any, Any] = Keeper(answer, gives, tmp_path, "me")
    assert [keeper("item"), keeper("item"), keeper("other")] == [result] * 3
    assert asked == ["item", "other"]


def test_what_another_maker_said_or_what_cannot_be_read_is_asked_anew(tmp_path: Path) -> None:
    answer, asked = _counted(PREDICTED)
    first: Keeper[Any, Any] = Keeper(answer, Predicted, tmp_path, "me")
    first("item")
    replace(first, maker="another")("item")
    assert len(asked) == 2
    for content in ("", "[1]", "{}x", '{"peak": {"requested_bytes": "1"}}', '{"nobody": 1}'):
        for path in tmp_path.iterdir():
            path.write_text(content)
        assert first("item") == PREDICTED
    assert len(asked) == 7


def test_what_would_not_come_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError)):
        Keeper(_counted({1, 2})[0], list[int], tmp_path, "me")("item")


def test_the_digest_is_of_the_files() -> None:
    assert digest_of_folder() == digest_of_folder()
