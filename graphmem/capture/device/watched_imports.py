"""Modules of libraries that a capture has a hand in while they are imported."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from graphmem.capture.patches import Patches
from graphmem.capture.threads import Threads

#: Executes a module's code, around which something else may be done.
Execute = Callable[[Callable[[], None]], None]


@contextlib.contextmanager
def watched_imports(threads: Threads, executed: dict[str, Execute]) -> Iterator[None]:
    """Until the end, a module that one of ``threads`` imports is executed by the function of its full name."""
    finder = _Finder(threads, executed)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def patched_imports(followed: Mapping[str, Callable[[Patches, Any], None]]) -> Iterator[None]:
    """Until the end, modules of these full names are patched by their functions: those that are there now, others once
    this capture imports them."""
    patches = Patches()

    def execute(name: str, run: Callable[[], None]) -> None:
        run()
        followed[name](patches, sys.modules[name])

    try:
        for name, follow in followed.items():
            if name in sys.modules:
                follow(patches, sys.modules[name])
        with watched_imports(patches.threads, {name: partial(execute, name) for name in followed}):
            yield
    finally:
        patches.undo()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as usual, and loads them under :class:`_Loader`."""

    def __init__(self, threads: Threads, executed: dict[str, Execute]) -> None:
        self._is_here = threads.only(lambda: True)
        self._executed = executed

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        execute = self._executed.get(name)
        if execute is None or not self._is_here():
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, execute)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, original: importlib.abc.Loader, execute: Execute) -> None:
        self._original = original
        self._execute = execute

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._execute(lambda: self._original.exec_module(module))

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)
