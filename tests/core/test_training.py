"""What a step is: accepted values, refused values, and the reading of options."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.errors import UsageError
from graphmem.training import OPTIMIZERS, Inference, Training, amp_named, dtype_named, parse_optimizer_arg


def test_the_default_step_is_adamw_in_fp32() -> None:
    step = Training()
    assert (step.optimizer, step.optimizer_class, step.dtype, step.amp) == ("adamw", "AdamW", "fp32", None)
    assert step.describe() == "training, adamw, fp32 weights"


def test_spellings_become_canonical_so_that_equal_steps_are_equal() -> None:
    written = Training(optimizer="AdamW", dtype="bfloat16", amp="off")
    assert written == Training(dtype="bf16")
    assert hash(written) == hash(Training(dtype="torch.bfloat16"))
    assert Inference(dtype="half") == Inference(dtype="fp16")


def test_options_may_be_a_mapping_and_lists_become_tuples() -> None:
    step = Training(optimizer="adam", optimizer_args={"betas": [0.9, 0.95], "foreach": False})  # type: ignore[arg-type]
    assert step.optimizer_args == (("betas", (0.9, 0.95)), ("foreach", False))


def test_the_description_names_everything_that_is_not_the_default() -> None:
    step = Training(
        optimizer="sgd",
        optimizer_args=(("momentum", 0.9),),
        amp="bf16",
        checkpoint_activations=True,
        grad_accum=4,
        clip_grad_norm=1.0,
        zero_grad="zeros",
    )
    text = step.describe()
    for word in ("sgd(momentum=0.9)", "bf16 autocast", "checkpointing", "4 micro-batches", "clipped to 1", "zeroed"):
        assert word in text


@pytest.mark.parametrize(
    ("fields", "listed"),
    [
        ({"optimizer": "adamm"}, "adam"),
        ({"optimizer": ""}, "sgd"),
        ({"optimizer_args": (("momentun", 0.9),)}, "betas"),
        ({"optimizer_args": (1, 2)}, "pairs"),
        ({"optimizer_args": (("lr", object()),)}, "pairs"),
        ({"dtype": "fp8"}, "bf16"),
        ({"amp": "fp32"}, "fp16"),
        ({"grad_accum": 0}, "at least 1"),
        ({"grad_accum": 1.5}, "at least 1"),
        ({"grad_accum": True}, "at least 1"),
        ({"clip_grad_norm": 0}, "above 0"),
        ({"clip_grad_norm": float("nan")}, "above 0"),
        ({"zero_grad": "never"}, "set_to_none"),
    ],
)
def test_a_refused_value_says_what_is_accepted(fields: dict[str, object], listed: str) -> None:
    with pytest.raises(UsageError) as caught:
        Training(**fields)  # type: ignore[arg-type]
    assert listed in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("momentum=0.9", ("momentum", 0.9)),
        ("foreach=false", ("foreach", False)),
        ("fused=True", ("fused", True)),
        ("foreach=None", ("foreach", None)),
        ("betas=0.9,0.95", ("betas", (0.9, 0.95))),
        ("betas=(0.9, 0.95)", ("betas", (0.9, 0.95))),
        ("max_iter=20", ("max_iter", 20)),
        ("line_search_fn=strong_wolfe", ("line_search_fn", "strong_wolfe")),
        ("eps=1e-6", ("eps", 1e-6)),
    ],
)
def test_optimizer_arguments_are_read_as_python_literals(text: str, expected: tuple[str, object]) -> None:
    assert parse_optimizer_arg(text) == expected


@pytest.mark.parametrize("text", ["", "momentum", "=0.9", "a b=1", "1=2"])
def test_an_optimizer_argument_without_a_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_optimizer_arg(text)


@given(st.text())
def test_reading_any_text_gives_a_pair_or_a_usage_error(text: str) -> None:
    try:
        name, value = parse_optimizer_arg(text)
    except UsageError:
        return
    assert name.isidentifier()
    hash(value)


@given(st.text())
def test_any_precision_is_accepted_or_refused_with_a_usage_error(text: str) -> None:
    for named in (dtype_named, amp_named):
        with contextlib.suppress(UsageError):
            named(text)


def test_the_options_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    import inspect

    for named in OPTIMIZERS.values():
        if named.library == "torch.optim" and hasattr(torch.optim, named.class_name):
            parameters = list(inspect.signature(getattr(torch.optim, named.class_name).__init__).parameters)[2:]
            assert set(parameters) <= set(named.options), named.class_name


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("paged_adamw_8bit", "pagedadamw8bit"),
        ("PagedAdamW", "pagedadamw32bit"),
        ("adamw_bnb_8bit", "adamw8bit"),
        ("rmsprop_bnb", "rmsprop32bit"),
        ("adamw_torch", "adamw"),
        ("Lion", "lion"),
    ],
)
def test_names_that_trainers_use_are_read(written: str, read: str) -> None:
    assert Training(optimizer=written).optimizer == read
