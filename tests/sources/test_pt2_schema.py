"""Checks of exported programs that are made of PyTorch's own schema."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Annotated, Any

import pytest

pytest.importorskip("torch")

from graphmem.sources import pt2_schema
from graphmem.sources.pt2_schema import Refused, check_of


class Union:
    """Stands for ``_Union`` of PyTorch."""


@dataclasses.dataclass
class Newer:
    """A record with a text that nobody knows, which may be left out."""

    name: Annotated[str, 10]
    code: Annotated[str, 20] = ""
    count: Annotated[int, 30] = 0


@dataclasses.dataclass
class Needed:
    """A record with a text that nobody knows, which must be there."""

    code: Annotated[str, 10]


@dataclasses.dataclass
class Kinds(Union):
    """One of several kinds, of which one is not known."""

    as_name: Annotated[str, 10]
    as_code: Annotated[str, 20]
    as_needed: Annotated[Needed, 30]


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    schema: Any = SimpleNamespace(_Union=Union, Newer=Newer, Needed=Needed, Kinds=Kinds)
    made = pt2_schema._Schema(schema)
    monkeypatch.setattr(pt2_schema, "_schema", lambda: made)


@pytest.mark.usefixtures("newer")
def test_a_text_that_a_newer_schema_adds_is_left_out() -> None:
    assert check_of("Newer")({"name": "x", "code": "import os", "count": 2}) == {"name": "x", "count": 2}
    with pytest.raises(Refused, match="name: 'a b' is no identifier"):
        check_of("Newer")({"name": "a b"})


@pytest.mark.usefixtures("newer")
def test_a_text_that_a_newer_schema_needs_is_refused() -> None:
    with pytest.raises(Refused, match=r"this PyTorch's Needed of exported programs is not known: Needed\.code"):
        check_of("Needed")
    with pytest.raises(Refused, match="this PyTorch's Absent of exported programs is not known"):
        check_of("Absent")


@pytest.mark.usefixtures("newer")
def test_a_kind_that_a_newer_schema_adds_is_refused() -> None:
    check = check_of("Kinds")
    assert check({"as_name": "x"}) == {"as_name": "x"}
    for unknown in ({"as_code": "x"}, {"as_needed": {"code": "x"}}):
        with pytest.raises(Refused, match="is not of a known kind"):
            check(unknown)


def test_every_name_of_the_installed_schema_is_one_of_a_known_field() -> None:
    """Custom objects are refused by themselves, and calls of modules are left out; nothing else is unknown."""
    from torch._export.serde import schema

    for name in ("ExportedProgram", "Argument", "InputSpec", "OutputSpec", "ModuleCallSignature"):
        check = check_of(name)
        with pytest.raises(Refused):
            check("text")
    names = {
        field.name
        for kind in vars(schema).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        for field in dataclasses.fields(kind)
    }
    assert {name.rpartition(".")[2] for name in pt2_schema._TEXTS} <= names
