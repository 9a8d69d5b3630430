"""The batches of a training loop: their sizes in order."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.answering.question import Question
from graphmem.errors import UsageError
from graphmem.training import Epoch, Training, parse_lengths
from graphmem.training.epochs import BatchSize


def test_without_options_one_batch_comes_again_and_again() -> None:
    assert not Training().epoch.varies
    assert not Training(grad_accum=4, loop="drop").epoch.varies


@given(
    lengths=st.lists(st.integers(1, 512), max_size=5).map(tuple),
    last=st.none() | st.integers(1, 4),
    evaluated=st.integers(0, 3),
    steps=st.none() | st.integers(1, 5),
    micro=st.integers(1, 3),
    count=st.none() | st.integers(1, 12),
)
def test_every_epoch_has_its_lengths_its_last_batch_and_its_evaluation(
    lengths: tuple[int, ...], last: int | None, evaluated: int, steps: int | None, micro: int, count: int | None
) -> None:
    if not (lengths or last or evaluated):
        return
    epoch = Epoch(lengths, last, evaluated, None, steps, micro)
    iterations = epoch.iterations(4, None, count)
    assert len(iterations) == (2 * epoch.steps if count is None else count)
    for number, step in enumerate(iterations):
        place = number % epoch.steps
        ends = place == epoch.steps - 1
        assert len(step.micro_batches) == micro
        assert len(step.evaluated) == (evaluated if ends else 0)
        wanted = list(islice(cycle(lengths or (None,)), epoch.steps * micro))[place * micro : (place + 1) * micro]
        assert [batch.seq_len for batch in step.micro_batches] == wanted
        rows = [batch.batch for batch in step.micro_batches]
        assert rows == [4] * (micro - 1) + [last if ends and last else 4]


def test_every_length_comes_in_an_epoch_unless_told_otherwise() -> None:
    seen = {batch.seq_len for one in Epoch((100, 128, 115)).iterations(8, None, None) for batch in one.micro_batches}
    assert seen == {100, 128, 115}
    assert Epoch((1, 2, 3, 4, 5), micro_batches=2).steps == 3


def test_the_evaluated_batches_have_a_size_of_their_own() -> None:
    last = Epoch(eval_batches=2, eval_batch_size=32, steps_per_epoch=1).iterations(8, 64, 1)[-1]
    assert last.evaluated == (BatchSize(32, 64), BatchSize(32, 64))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seq_lens": (0,)}, "100, 128, 115"),
        ({"seq_lens": "128"}, "list"),
        ({"last_batch": 0}, "last_batch"),
        ({"eval_batches": -1}, "eval_batches"),
        ({"eval_batch_size": 8}, "give both"),
        ({"steps_per_epoch": 3}, "with seq_lens"),
        ({"loop": "keep"}, "hold, drop"),
        ({"zero_grad_at": "never"}, "before_forward"),
        ({"lr_scheduler": "cosin"}, "did you mean"),
        ({"grad_scaler": "yes"}, "True, False or None"),
    ],
)
def test_a_refused_value_says_what_is_accepted(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Training(**fields)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"training": Training(seq_lens=(64,)), "seq_len": 64}, "give one of them"),
        ({"training": Training(last_batch=4)}, "give batch"),
        ({"training": Training(last_batch=4), "batch": 2}, "at most as many rows"),
        ({"training": Training(eval_batches=1), "build_on": "device"}, "build_on"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Question(lambda batch: None, **arguments)
    assert told in str(caught.value)


def test_names_of_schedulers_are_those_of_both_libraries() -> None:
    assert Training(lr_scheduler="cosineannealinglr").lr_scheduler == "CosineAnnealingLR"
    assert Training(lr_scheduler="linear") == Training(lr_scheduler="LambdaLR")
    assert Training(lr_scheduler="none") == Training()


def test_lengths_are_read() -> None:
    assert parse_lengths("100, 128,115") == (100, 128, 115)
    for text in ("", "a", "100;128", "1" * 12, "100,,128", "٣"):
        with pytest.raises(UsageError):
            parse_lengths(text)


def test_the_description_names_what_is_not_usual() -> None:
    step = Training(
        loop="drop", zero_grad_at="before_forward", grad_scaler=True, lr_scheduler="linear", seq_lens=(100, 128),
        last_batch=3, eval_batches=2, eval_batch_size=16,
    )  # fmt: skip
    text = step.describe()
    for words in (
        "output dropped", "cleared before the forward", "gradient scaler", "LambdaLR", "sequences of 100, 128",
        "last batch of 3", "evaluation of 2 batches of 16", "epochs of 2 steps",
    ):  # fmt: skip
        assert words in text
