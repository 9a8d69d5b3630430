"""Modules that are executed by a function of ours when somebody imports them."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

#: Is given the module before its code has run, and what runs it.
Execute = Callable[[ModuleType, Callable[[], None]], None]


@contextlib.contextmanager
def watched_imports(executed: Mapping[str, Execute], applies: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Until the end, a module that is imported where it ``applies`` is executed by the function of its full name."""
    finder = _Finder(executed, applies)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def is_watched(name: str) -> bool:
    """True for a module that a function of ours would execute if it were imported now."""
    return any(isinstance(finder, _Finder) and finder.watches(name) for finder in sys.meta_path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that the other finders find, and has them loaded by :class:`_Loader`."""

    def __init__(self, executed: Mapping[str, Execute], applies: Callable[[], object]) -> None:
        self._executed, self._applies = executed, applies
        self._asked: set[str] = set()

    def watches(self, name: str) -> bool:
        """True for a module that is executed by a function, unless it is being found for that."""
        return name in self._executed and name not in self._asked and bool(self._applies())

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.watches(name):
            return None
        execute = self._executed[name]
        self._asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, execute)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, original: importlib.abc.Loader, execute: Execute) -> None:
        self._original, self._execute = original, execute

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._execute(module, lambda: self._original.exec_module(module))

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


@cache
def library_folder(file: str) -> str:
    """The folder of installed packages that a file lies in, "" for none: ``site-packages``, ``dist-packages``, or one
    that ``pip install --target`` filled and ``PYTHONPATH`` names, where packages have a ``*.dist-info`` beside them."""
    for name in ("site-packages", "dist-packages"):
        head, separator, _ = file.rpartition(f"{os.sep}{name}{os.sep}")
        if separator:
            return f"{head}{os.sep}{name}"
    inside = (os.path.abspath(entry) for entry in sys.path[1:] if entry)  # the first is the program's own
    return next((entry for entry in inside if file.startswith(entry + os.sep) and _has_packages(entry)), "")


@cache
def _has_packages(folder: str) -> bool:
    return any(Path(folder).glob("*.dist-info"))
