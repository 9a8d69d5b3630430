"""The serving engines there are: every module of this package that gives an ``ENGINE``, and those of other packages.

A package elsewhere names an object in the entry-point group :data:`GROUP`, under the engine's name. Both meet
:class:`graphmem.serving.base.Engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphmem.plugins import Kind

if TYPE_CHECKING:
    from graphmem.serving.base import Engine

#: graphmem's own.
BUILT_IN = ("vllm", "llamacpp", "sglang", "tensorrtllm", "tgi", "onnxruntimegenai")
ENGINES: Kind[Engine] = Kind(
    "engine", "graphmem.serving", package=__name__, attribute="ENGINE", protocol=f"{__name__}.base:Engine",
    order=BUILT_IN,
)  # fmt: skip


#: The names of all engines, graphmem's own first; the one of a name.
engine_names, engine_named = ENGINES.names, ENGINES.named
