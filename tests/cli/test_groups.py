"""The help of a command: every option once, under the heading of what it is about."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from graphmem.cli.main import cli

HEADINGS = {
    "analyze": ["Sizes and inputs", "Step", "Card, runtime and allocator", "Output", "Options"],
    "replay": ["Card, runtime and allocator", "Output", "Options"],
    "export": ["Sizes and inputs", "Step", "Card, runtime and allocator", "Options"],
}


@pytest.mark.parametrize(("command", "headings"), HEADINGS.items())
def test_options_stand_under_headings(command: str, headings: list[str]) -> None:
    text = CliRunner().invoke(cli, [command, "--help"]).output
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
