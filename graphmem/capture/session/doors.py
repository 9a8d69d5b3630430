"""Layers of a capture that are installed when they are first needed.

A **door** stands where a step would first meet the layer: at a function of PyTorch, or at the import of a library. Who
comes through the door finds the layer installed, and goes on as if it had been there from the beginning. So a plain
step pays nothing for process groups, for the compiler, or for files, and a newer PyTorch that has changed them does not
stop it.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from graphmem.base import deferred
from graphmem.capture.patches import Patches
from graphmem.capture.threads import Threads
from graphmem.torch_names import owner

#: Whether a call of a door's function, with these arguments, needs the layer.
Asks = Callable[..., bool]


@contextlib.contextmanager
def doors(
    install: Callable[[], None], functions: Sequence[str], libraries: Sequence[str], asks: Asks, lost: str
) -> Iterator[None]:
    """Call ``install`` once, when one of the ``functions`` (paths of names of torch) is called in a way that ``asks``
    for the layer, or one of the ``libraries`` is imported, by a thread of the capture. ``lost``: the loss where a
    function is gone."""
    patches, is_open = Patches(), False

    def open_() -> None:
        nonlocal is_open
        if not is_open:
            is_open = True
            install()

    def door(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def made_of(found: Callable[..., object]) -> Callable[..., Any]:
            def enter(*args: object, **kwargs: object) -> object:
                if is_open or not asks(*args, **kwargs):
                    return found(*args, **kwargs)
                open_()
                return getattr(owner(path), path.rpartition(".")[2])(*args, **kwargs)  # the layer's, if it has one

            enter.__module__ = getattr(found, "__module__", None) or __name__  # by which pickle finds it
            return enter

        return made_of

    def put_up(path: str, _: object = None) -> None:
        patches.wrap(path, lost, door(path))

    finder = _Finder(patches.threads, libraries, open_)
    undone = contextlib.ExitStack()
    try:
        for path in functions:
            if waiting := deferred.module_of(path):
                undone.callback(deferred.afterwards(waiting, partial(put_up, path)))
            else:
                put_up(path)
        sys.meta_path.insert(0, finder)
        yield
    finally:
        sys.meta_path.remove(finder)
        undone.close()
        patches.undo()


class _Finder(importlib.abc.MetaPathFinder):
    """Opens when one of the libraries is looked for, and leaves the finding to the others."""

    def __init__(self, threads: Threads, libraries: Sequence[str], open_: Callable[[], None]) -> None:
        self._is_here = threads.only(lambda: True)
        self._libraries, self._open = frozenset(libraries), open_

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._libraries or not self._is_here():
            return None
        self._open()
        for finder in sys.meta_path:  # the layer may have put one of its own before this one
            if finder is self:
                return None
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None
