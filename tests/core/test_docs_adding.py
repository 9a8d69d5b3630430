"""What docs/adding and docs/stability.md say of the code holds: fields, names, versions."""

from __future__ import annotations

import dataclasses
import json
import re
import typing

import pytest

from graphmem.base import versions
from graphmem.base.figures import Cause
from graphmem.reports import document
from graphmem.runtimes.base import Runtime, Taken
from tests import places

ADDING = places.ROOT / "docs" / "adding"
DEVICES = places.ROOT / "graphmem" / "devices"
if not ADDING.is_dir():
    pytest.skip("the installed package is tested, without the checkout", allow_module_level=True)


def page(name: str) -> str:
    return (ADDING / name).read_text(encoding="utf-8")


def first_column(text: str) -> set[str]:
    """The words in backticks of every table's first column."""
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}


def test_gpu_names_every_field_of_the_table_and_no_other() -> None:
    table = json.loads((DEVICES / "table.json").read_text(encoding="utf-8"))
    assert first_column(page("gpu.md")) == {field for card in table for field in card}


def test_the_example_of_gpu_is_an_entry_as_the_table_has_it() -> None:
    text = page("gpu.md")
    example = json.loads(text[text.index("    {") : text.index("    }") + 5])
    table = json.loads((DEVICES / "table.json").read_text(encoding="utf-8"))
    (card,) = (card for card in table if card["name"] == example["name"])
    assert {**card, "aliases": example["aliases"]} == example
    assert set(example["aliases"]) <= set(card["aliases"])


def test_kernel_rule_names_what_a_rule_has() -> None:
    script = pytest.importorskip("graphmem.capture.kernels.parts.script")
    text = page("kernel_rule.md")
    of_script, of_call = (set(re.findall(rf"\b{name}\.(\w+)", text)) for name in ("script", "call"))
    assert of_script <= set(dir(script.Script))
    arguments = {"self", "num_samples"}  # of the example's operator
    assert of_call - arguments <= set(dir(script.Call))
    assert {"card", "outputs", "get", "all_tensors"} <= of_call


def test_kernel_rule_names_what_a_recorded_case_has() -> None:
    registry = pytest.importorskip("tests.recorded.cases.functions.registry")
    options = set(re.findall(r"`(\w+)=True`", page("kernel_rule.md")))
    assert "true_values" in options
    assert options <= {field.name for field in dataclasses.fields(registry.Case)}


def test_runtime_names_every_part_of_what_a_runtime_takes() -> None:
    text = page("runtime.md")
    named = set(re.findall(r"\bTaken\.(\w+)", text))
    assert {"findings", "doubts"} <= named <= {field.name for field in dataclasses.fields(Taken)}
    assert "graphmem.base.figures.Cause" in text
    assert Cause.__module__ == "graphmem.base.figures"
    methods = set(re.findall(r"^        def (\w+)", text, re.MULTILINE))
    assert methods <= set(dir(Runtime))


def test_report_names_every_block_of_a_document() -> None:
    assert first_column(page("report.md")) == {block.__name__ for block in typing.get_args(document.Block)}


def test_stability_names_the_supported_versions() -> None:
    text = (places.ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    oldest, newest = versions.words(versions.OLDEST), versions.words(versions.NEWEST)
    installed = versions.words(versions.OLDEST_INSTALLED)
    assert f"PyTorch {installed} and later for captures, predicted for {oldest} to {newest}, a newer one" in text
    project = (places.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={installed}"' in project
