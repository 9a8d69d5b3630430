"""The help of a command: every option once, under the heading of what it is about."""

from __future__ import annotations

import re

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from graphmem.cli.fields import USUAL
from graphmem.cli.main import cli

HEADINGS = {
    "analyze": ["Sizes and inputs", "Step", "Card, runtime and allocator", "Output", "Options"],
    "replay": ["Card, runtime and allocator", "Output", "Options"],
    "export": ["Sizes and inputs", "Step", "Card, runtime and allocator", "Options"],
}


@pytest.mark.parametrize(("command", "headings"), HEADINGS.items())
def test_options_stand_under_headings(command: str, headings: list[str]) -> None:
    context = click.Context(cli.commands[command], info_name=command)
    context.meta["graphmem.help_all"] = True
    text = context.get_help()
    assert re.findall(r"^([A-Z][a-z, ]+):$", text, re.MULTILINE) == headings
    flags = re.findall(r"^  (?:-\w, )?(--[a-z_-]+)(?:, (--[a-z_-]+))?", text, re.MULTILINE)
    listed = [flag for pair in flags for flag in pair if flag]
    known = {flag for option in cli.commands[command].params for flag in option.opts if flag.startswith("--")}
    assert sorted(listed) == sorted(known | {"--help"})
    section = text.split("Card, runtime and allocator:")[1].split("\n\n")[0]
    assert all(flag in section for flag in ("--gpu ", "--runtime", "--alloc-conf", "--tf-option"))


def test_tensorflow_options_choose_the_runtime_and_join() -> None:
    from graphmem.cli.fields import built
    from graphmem.cli.options import Target

    unsaid = (
        "runtime", "gpu", "gpu_memory", "gpu_like", "capability", "cuda", "already_used", "torch_version", "margin",
    )  # fmt: skip
    asked = {**dict.fromkeys(unsaid), "alloc_conf": "allow_growth:true"}
    found = built(Target, {**asked, "tf_option": ("memory_limit=100", "TF_GPU_ALLOCATOR=")})
    assert found.runtime == "tensorflow"
    assert found.alloc_conf == "allow_growth:true,memory_limit=100,TF_GPU_ALLOCATOR="
    assert built(Target, {**asked, "tf_option": ()}).runtime is None


def test_tensorflow_options_are_for_tensorflow() -> None:
    result = CliRunner().invoke(cli, ["replay", "x.json", "--runtime", "pytorch", "--tf-option", "allow_growth=true"])
    assert result.exit_code == 1
    assert "--tf-option is for --runtime tensorflow, not pytorch" in result.output


@pytest.mark.parametrize("command", ["analyze", "fit"])
def test_the_help_explains_what_most_people_need_and_names_the_rest(command: str) -> None:
    text = CliRunner().invoke(cli, [command, "--help"]).output
    whole = CliRunner().invoke(cli, [command, "--help-all"]).output
    assert len(text.splitlines()) < 120 < 200 < len(whole.splitlines())
    explained, named = text.split("More (--help-all explains them):")
    assert not re.search(r"-$", named, re.MULTILINE)
    assert "--optimizer " in explained
    assert "--lr-scheduler" not in explained
    assert "--lr-scheduler" in named
    flags = {max(one.opts, key=len) for one in cli.commands[command].params if isinstance(one, click.Option)}
    assert {flag for flag in flags if flag not in text} == set()


def test_options_of_a_short_help_are_there() -> None:
    known = {flag for option in cli.commands["analyze"].params for flag in option.opts}
    assert known | {"--help"} >= USUAL


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["analyze", "--gpu", "T4"], "T4-16GB"),
        (["analyze", "--optimizer", "adamw8"], "adamw8bit"),
        (["analyze", "--runtime", "tens"], "tensorflow"),
        (["fit", "zoo:gpt2-m"], "zoo:gpt2-medium"),
        (["serve", "--engine", "ll"], "llamacpp"),
        (["export", "--format", "spe"], "speedscope"),
        (["analyze", "--format", "mark"], "markdown"),
        (["analyze", "--grad-"], "--grad-accum"),
    ],
)
def test_shells_complete_names(words: list[str], expected: str) -> None:
    found = ShellComplete(cli, {}, "graphmem", "_GRAPHMEM_COMPLETE").get_completions(words[:-1], words[-1])
    assert expected in {item.value for item in found}


def test_an_option_that_is_nearly_one_of_another_tool_is_answered_with_ours() -> None:
    refused = CliRunner().invoke(cli, ["fit", "zoo:mlp", "--precison", "bf16"])
    assert refused.exit_code == 2
    assert "no option --precison; here: --amp bf16" in refused.stderr
    assert "Did you mean" in CliRunner().invoke(cli, ["fit", "zoo:mlp", "--optimzer", "sgd"]).stderr
