"""Modules that wait until somebody uses them (``graphmem.base.deferred``)."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from graphmem.base import deferred
from graphmem.base.deferred import Waiting

#: A package whose modules say that they have run.
_FILES = {
    "heavy/__init__.py": "import ran\nran.names.append(__name__)\nfrom heavy.parts import Part\ndef four(): return 4\n",
    "heavy/parts.py": "import ran\nran.names.append(__name__)\nclass Part:\n    def __init__(self, n=0): self.n = n\n",
    "heavy/settings.py": "import ran\nran.names.append(__name__)\nfast = True\n",
    "heavy/broken.py": "import ran\nran.no_such_name\n",
    "library.py": "from heavy import Part, four\nimport heavy.parts\ndef is_part(x): return isinstance(x, Part)\n",
    "ran.py": "names = []\n",
}


@pytest.fixture
def let_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Lets the package wait as it is told; the names of its modules that have run."""
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def wait(**facts: Any) -> list[str]:
        deferred.defer([Waiting("heavy", **facts)])
        names: list[str] = importlib.import_module("ran").names
        return names

    yield wait
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("heavy", "library", "ran"):
            del sys.modules[name]
    deferred.run_all()


def heavy() -> Any:
    return importlib.import_module("heavy")


def test_an_import_runs_nothing_and_a_name_does(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait()
    module = heavy()
    assert not ran
    assert deferred.is_waiting("heavy")
    assert module.__path__
    assert module.four() == 4
    assert ran == ["heavy", "heavy.parts"]
    assert type(module) is ModuleType


def test_a_module_below_waits_too_and_its_package_runs_first(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait()
    parts = importlib.import_module("heavy.parts")
    assert not ran
    assert parts.Part().n == 0
    assert ran == ["heavy", "heavy.parts"]
    assert heavy().Part is parts.Part


def test_what_needs_nothing_runs_at_once(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait(ready=("heavy.settings",))
    assert importlib.import_module("heavy.settings").fast
    assert ran == ["heavy.settings"]
    assert heavy().settings.fast
    assert deferred.is_waiting("heavy")


def test_a_library_takes_names_without_running(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait(taken=frozenset(("Part", "four")))
    library: Any = importlib.import_module("library")
    assert not library.is_part(3)
    assert not library.is_part(heavy)
    assert not ran
    assert library.four() == 4
    assert ran
    assert library.Part is heavy().Part, "the object itself, once it has run"
    assert library.is_part(heavy().Part())


def test_an_instance_of_a_class_of_that_name_is_looked_at(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait(taken=frozenset(("Part", "four")))
    library: Any = importlib.import_module("library")
    assert not library.is_part(type("Part", (), {})())
    assert ran


def test_a_class_can_be_derived_from(let_wait: Callable[..., list[str]]) -> None:
    let_wait(taken=frozenset(("Part",)))
    taken = heavy().Part

    class Mine(taken):  # type: ignore[misc, valid-type]
        pass

    assert issubclass(Mine, heavy().Part)
    assert Mine(3).n == 3


def test_objects_are_made_when_they_are_used(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait(taken=frozenset(("Part",)), made=frozenset(("Part",)))
    part = heavy().Part(5)
    assert part
    assert not ran
    assert part.n == 5
    assert ran
    assert isinstance(part, heavy().Part)


def test_what_stands_meanwhile(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait(meanwhile={"four": lambda: 5})
    assert heavy().four() == 5
    assert not ran
    assert heavy().Part
    assert heavy().four() == 4


def test_assigning_a_name_runs(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait()
    heavy().four = None
    assert ran
    assert heavy().four is None


def test_an_error_is_not_taken_for_a_name_that_is_missing(let_wait: Callable[..., list[str]]) -> None:
    let_wait()
    broken = importlib.import_module("heavy.broken")
    with pytest.raises(ImportError, match=r"heavy\.broken did not run: .*no_such_name"):
        _ = broken.anything
    assert "heavy.broken" not in sys.modules


def test_a_name_that_no_module_has(let_wait: Callable[..., list[str]]) -> None:
    let_wait(taken=frozenset(("nothing",)))
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = heavy().other
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = heavy().nothing


def test_code_runs_apart(let_wait: Callable[..., list[str]]) -> None:
    let_wait()
    entered = []

    @contextlib.contextmanager
    def apart() -> Iterator[None]:
        entered.append(True)
        yield

    module = heavy()
    with deferred.running(apart):
        assert not entered
        assert module.four() == 4
    assert entered == [True]


def test_afterwards(let_wait: Callable[..., list[str]]) -> None:
    let_wait()
    heard: list[ModuleType] = []
    module = heavy()
    deferred.afterwards("heavy", heard.append)
    deferred.afterwards("heavy", heard.append)()  # taken back
    assert not heard
    assert module.four() == 4
    assert heard == [module]


def test_everything_runs(let_wait: Callable[..., list[str]]) -> None:
    ran = let_wait()
    module = heavy()
    deferred.run_all()
    assert ran == ["heavy", "heavy.parts"]
    assert type(module) is ModuleType
    assert type(importlib.import_module("heavy.settings")) is ModuleType
