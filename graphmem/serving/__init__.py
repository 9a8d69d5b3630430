"""The serving engines there are: every module of this package that gives an ``ENGINE``, and those of other packages.

A package elsewhere names an object in the entry-point group :data:`GROUP`, under the engine's name. Both meet
:class:`graphmem.serving.base.Engine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphmem.plugins import Plugins

if TYPE_CHECKING:
    from graphmem.serving.base import Engine

#: Entry-point group of the engines of other packages.
GROUP = "graphmem.serving"
#: graphmem's own.
BUILT_IN = ("vllm", "llamacpp", "sglang", "tensorrtllm", "tgi", "onnxruntimegenai")


def engine_names() -> tuple[str, ...]:
    """The names of all engines, graphmem's own first. Raises :class:`UsageError` for one that is there twice."""
    return _ENGINES.names()


def engine_named(name: str, beside: Sequence[str] = ()) -> Engine:
    """The engine of this name; case, dashes and underscores do not matter. Raises :class:`UsageError` listing the
    accepted ones, with those ``beside`` that the caller knows, and for a plug-in that cannot be loaded or is none."""
    return _ENGINES.named(name, beside)


def _own(name: str) -> Engine:
    engine: Engine = importlib.import_module(f"{__name__}.{name}").ENGINE
    return engine


def _protocol() -> type:
    from graphmem.serving.base import Engine

    return Engine


_ENGINES: Plugins[Engine] = Plugins(GROUP, "engine", lambda: BUILT_IN, _own, _protocol)
