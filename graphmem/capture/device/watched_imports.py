"""Modules of libraries in which a capture replaces names once they are imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

from graphmem.base.imports import watched_imports
from graphmem.capture.patches import Patches


@contextlib.contextmanager
def patched_imports(followed: Mapping[str, Callable[[Patches, ModuleType], None]]) -> Iterator[None]:
    """Until the end, modules of these full names are patched by their functions: those that are there now, others once
    this capture imports them."""

    def execute(module: ModuleType, run: Callable[[], None]) -> None:
        run()
        followed[module.__name__](patches, module)

    with Patches() as patches:
        for name, follow in followed.items():
            if name in sys.modules:
                follow(patches, sys.modules[name])
        with watched_imports(dict.fromkeys(followed, execute), patches.threads.only(lambda: True)):
            yield
