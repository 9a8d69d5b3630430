"""The serving engines there are: every module of this package that gives an ``ENGINE``, and those of other packages.

A package elsewhere names an object in the entry-point group :data:`GROUP`, under the engine's name. Both meet
:class:`graphmem.serving.base.Engine`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from graphmem.errors import UsageError

if TYPE_CHECKING:
    from graphmem.serving.base import Engine

#: Entry-point group of the engines of other packages.
GROUP = "graphmem.serving"
#: graphmem's own.
BUILT_IN = ("vllm", "llamacpp", "sglang", "tensorrtllm", "tgi", "onnxruntimegenai")


def engine_names() -> tuple[str, ...]:
    """The names of all engines, graphmem's own first."""
    return (*BUILT_IN, *sorted({entry.name for entry in entry_points(group=GROUP)} - set(BUILT_IN)))


def engine_named(name: str) -> Engine:
    """The engine of this name. Raises :class:`UsageError` listing the accepted ones, and for a plug-in that cannot be
    loaded or is none."""
    from graphmem.serving.base import Engine

    key = name.strip().lower()
    if key in BUILT_IN:
        engine: Engine = importlib.import_module(f"{__name__}.{key}").ENGINE
        return engine
    for entry in entry_points(group=GROUP):
        if entry.name == key:
            try:
                loaded = entry.load()
            except Exception as error:  # whatever the package raises
                raise UsageError(f"the engine {key!r} cannot be loaded: {type(error).__name__}: {error}") from error
            if not isinstance(loaded, Engine) or isinstance(loaded, type) or loaded.name != key:
                raise UsageError(
                    f"{entry.value} is no engine {key!r}, as graphmem.serving.base.Engine says what one is"
                )
            return loaded
    raise UsageError(f"unknown engine {name!r}; accepted: {', '.join(engine_names())}")
