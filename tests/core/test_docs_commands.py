"""docs/COMMANDS.md says what is there: its Python runs, its commands and options exist, its keys are written."""

from __future__ import annotations

import importlib
import re
import shlex

import click
import pytest

from graphmem.cli.main import COMMANDS, cli
from tests import places
from tests.support.estimates import training_estimate

TEXT = (places.ROOT / "docs" / "COMMANDS.md").read_text(encoding="utf-8")


def _programs() -> list[str]:
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", TEXT, re.MULTILINE)
    return [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks if "import" in block]


def test_the_example_of_a_trace_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(_programs()[1], {})
    first, second = (int(line) for line in capsys.readouterr().out.split())
    assert first == 80 << 20
    assert second >= 80 << 20


def test_the_examples_of_analyses_run() -> None:
    nn = pytest.importorskip("torch").nn
    import torch

    names = {"module": nn.Linear(4, 4), "example_inputs": torch.zeros(2, 4)}
    exec(
        _programs()[0].replace("graphmem.fit(module, example_inputs", "graphmem.fit(module, example_inputs, at_most=4"),
        names,
    )
    assert len(names["rows"]) == 4


def test_commands_and_options_are_there() -> None:
    found = re.findall(r"`graphmem ([a-z-]+ [^`]+)`", TEXT)
    assert len(found) >= 10
    for line in found:
        name, *words = shlex.split(line)
        theirs = (at for at, word in enumerate(words) if word == "--" or (name == "run" and word.endswith(".py")))
        words = words[: next(theirs, len(words))]  # what follows is another's command line
        known = {flag for parameter in cli.commands[name].params for flag in parameter.opts}
        if "--engine" in words:  # that engine's own options, by its names
            engine = importlib.import_module(f"graphmem.serving.{words[words.index('--engine') + 1]}")
            known |= {f"--{key.replace('_', '-')}" for key in engine.OPTIONS}
            known |= {f"-{key}" for key in getattr(engine, "SHORT", ())}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_every_key_of_an_estimate_is_explained() -> None:
    for key in training_estimate().to_dict():
        assert key in ("schema", "details") or f"`{key}`" in TEXT, key


def _records(name: str, command: click.Command) -> dict[str, str]:
    """What the help of a command shows of each option: how it is written -> what it means."""
    context = click.Context(command, info_name=name, terminal_width=1000)
    records = (one.get_help_record(context) for one in command.params if isinstance(one, click.Option))
    return dict(filter(None, records))


def _tables() -> str:
    """Every command's options, under the headings of its help; those that a command has of another are not repeated."""
    shared = _records("analyze", cli.commands["analyze"])
    made = "Made of the fields of the classes that the commands take; `graphmem COMMAND --help` shows the same."
    parts = [f"# Options\n\n{made}\n"]
    for name in COMMANDS.own():
        command = cli.commands[name]
        found = [(name, command), *((f"{name} {sub}", one) for sub, one in getattr(command, "commands", {}).items())]
        for title, one in found:
            records = _records(title, one)
            others = {w: m for w, m in records.items() if name == "analyze" or shared.get(w) != m}
            parts.append(f"\n## graphmem {title}\n\n{_words(one)}\n")
            if len(others) < len(records):
                parts.append(f"\n{len(records) - len(others)} options are those of `graphmem analyze`.\n")
            if others:
                cells = ((cell.replace("|", "\\|") for cell in row) for row in others.items())
                parts += ["\n| option | |\n|---|---|\n", *(f"| `{left}` | {right} |\n" for left, right in cells)]
    return "".join(parts)


def _words(command: click.Command) -> str:
    return (command.short_help or (command.help or "").split("\n\n")[0]).strip()


def test_the_page_of_options_is_made_of_the_fields(request: pytest.FixtureRequest) -> None:
    page = places.ROOT / "docs" / "OPTIONS.md"
    if request.config.getoption("--update-goldens"):
        page.write_text(_tables(), encoding="utf-8")
    assert page.read_text(encoding="utf-8") == _tables(), "run pytest --update-goldens and review docs/OPTIONS.md"
