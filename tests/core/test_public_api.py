"""The public names exist, are documented, and keep their signatures: docs/stability.md promises them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import graphmem
from tests import places

COMMANDS = (places.ROOT / "docs" / "COMMANDS.md").read_text(encoding="utf-8")


def _signature(name: str, function: Callable[..., Any]) -> str:
    """One parameter a line, so that a change shows as what it is; annotations as they are written."""
    lines, seen_keyword = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_keyword:
            lines.append("    *")
            seen_keyword = True
        many: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        stars = many.get(parameter.kind, "")
        written = "" if parameter.annotation is parameter.empty else f": {_written(parameter.annotation)}"
        given = parameter.default
        shown = given.__name__ if inspect.isfunction(given) else repr(given)
        default = "" if given is parameter.empty else f" = {shown}"
        lines.append(f"    {stars}{parameter.name}{written}{default}")
    returned = inspect.signature(function).return_annotation
    arrow = "" if returned is inspect.Signature.empty else f" -> {_written(returned)}"
    return "\n".join([f"{name}{arrow}", *lines])


def _written(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _members(kind: type) -> Iterator[str]:
    """Fields, methods and properties of a class that are its own."""
    if dataclasses.is_dataclass(kind):
        for field in dataclasses.fields(kind):
            default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
            yield f"    {field.name}: {_written(field.type)}{default}"
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"    {name}: property -> {_written(inspect.signature(member.fget).return_annotation)}"  # type: ignore[arg-type]
        elif inspect.isfunction(member):
            yield f"    {_signature(name, member)}".replace("\n", "\n    ")


def _described() -> Iterator[str]:
    for name in sorted(graphmem.__all__):
        value = getattr(graphmem, name)
        if isinstance(value, type):
            yield "\n".join([f"class {name}({', '.join(base.__name__ for base in value.__bases__)})", *_members(value)])
        else:
            yield _signature(name, value)


def test_signatures_are_those_that_were_promised(golden: Callable[[str, str], None]) -> None:
    golden("public_api.txt", "\n\n".join(_described()) + "\n")


def test_every_public_name_is_documented() -> None:
    for name in graphmem.__all__:
        assert getattr(graphmem, name).__doc__, name
        written = f"graphmem.{name}" in COMMANDS or f"import {name}" in COMMANDS
        assert written, f"docs/COMMANDS.md does not show {name}"


def test_every_name_that_the_docs_import_exists() -> None:
    pages = [places.ROOT / "README.md", *sorted((places.ROOT / "docs").rglob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    imports = [found for text in texts for found in re.findall(r"from (graphmem[\w.]*) import ([\w, ]+)", text)]
    assert {module for module, _ in imports} >= {"graphmem", "graphmem.trace"}
    for module, names in imports:
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()) or importlib.import_module(
                f"{module}.{name.strip()}"
            )
    for name in re.findall(r"\bgraphmem\.([a-z_]+)\(", COMMANDS):
        assert name in graphmem.__all__, f"docs/COMMANDS.md calls graphmem.{name}, which is not public"


def test_importing_graphmem_imports_no_framework() -> None:
    import subprocess
    import sys

    code = "import sys, graphmem; print(sorted({'torch', 'transformers', 'onnxruntime', 'keras'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=places.ROOT)
    assert done.stdout.strip() == "[]"
