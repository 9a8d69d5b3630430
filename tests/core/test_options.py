"""Options are fields: the command line's options, their help and their checks, and JSON follow from one declaration."""

from __future__ import annotations

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from graphmem.accuracy.case import Case, case_of
from graphmem.base.options import Whole, check_values, documented, option
from graphmem.cli.fields import built, parameters, takes
from graphmem.cli.options import step_of
from graphmem.errors import UsageError
from graphmem.training import DataParallel, FullyShard, Generation, Inference, PipelineParallel, Training, ZeRO


@documented
@dataclass(frozen=True)
class Loop:
    """A loop."""

    steps: int = option(3, "Steps to run.", Whole())
    sizes: tuple[int, ...] = option((), "Sizes of each.", flags="--size", read=int, repeated=True)

    def __post_init__(self) -> None:
        check_values(self)


def test_a_field_is_an_option_its_help_its_check_and_its_documentation() -> None:
    @click.command()
    @takes("loop", Loop)
    def command(loop: Loop) -> None:
        click.echo(f"{loop.steps} {loop.sizes}")

    run = CliRunner()
    assert run.invoke(command, []).output == "3 ()\n"
    assert run.invoke(command, ["--steps", "5", "--size", "7", "--size", "8"]).output == "5 (7, 8)\n"
    assert run.invoke(command, ["--steps", "0"]).exit_code == 2
    assert "--steps N" in run.invoke(command, ["--help"]).output
    assert "Steps to run. Default 3." in run.invoke(command, ["--help"]).output
    assert "steps: Steps to run. Default 3." in str(Loop.__doc__)
    with pytest.raises(UsageError, match="steps is a whole number of at least 1, not 0"):
        Loop(0)


def _given(*arguments: str) -> dict[str, object]:
    names = ("training", *parameters(Training), *parameters(Inference))
    given: dict[str, object] = dict.fromkeys(names)
    return given | dict(zip(arguments[::2], arguments[1::2], strict=True))


def test_a_part_is_made_where_an_option_opens_it() -> None:
    given = _given() | {"ddp": True, "world_size": 4, "ddp_option": ("static_graph=true",)}
    assert built(Training, given).ddp == DataParallel(4, static_graph=True)
    assert built(Training, _given() | {"fsdp": 0, "world_size": 4}).fsdp == FullyShard(4)
    assert built(Training, _given() | {"fsdp": 2, "fsdp_shard": "grad-op"}).fsdp == FullyShard(2, "grad-op")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ddp_option": ("static_graph=true",)}, "--ddp-option needs --ddp"),
        ({"fsdp_offload": True}, "--fsdp-offload needs --fsdp"),
        ({"zero": 2}, "--zero needs --world-size, the number of processes"),
        (
            {"ddp": True, "world_size": 2, "ddp_option": ("colour=1",)},
            "unknown --ddp-option 'colour'; accepted: bucket",
        ),
        ({"schedule": "gpipe"}, "--schedule needs --pp"),
        ({"do_sample": False}, "--do-sample needs --generate"),
        ({"training": False, "prefetch": 1}, "--prefetch is an option of training"),
    ],
)
def test_options_that_lack_another_name_it(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        step_of("hf:gpt2", _given() | given)


@pytest.mark.parametrize(
    "step",
    [
        Training(ddp=DataParallel(2, bucket_cap_mb=8), seq_lens=(1, 2), optimizer_args=(("betas", (0.9, 0.95)),)),
        Training(zero=ZeRO(4, 2), assume=(("train.py:3", True),)),
        Training(pp=PipelineParallel(2, "gpipe", 4, (3, 3)), dtype="bf16"),
        Inference(generate=Generation(8, arguments=(("top_k", 20),))),
    ],
)
def test_a_step_comes_back_from_json(step: Training | Inference) -> None:
    import json

    case = case_of("hf:gpt2", step)
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
