"""graphmem: how much GPU memory a deep-learning model will need, without a GPU.

Names are imported when they are first used: the command has to be ready for Ctrl-C before that, and ``--version`` needs
none of them.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # that of ``typing``, which takes longer to import than the rest of this file
if TYPE_CHECKING:
    from typing import Any

    from graphmem.analyze import analyze, operator_graph, replay_trace
    from graphmem.errors import GraphmemError
    from graphmem.estimate import Estimate
    from graphmem.integrations.watching import Watched, watch
    from graphmem.plan_memory.changes import Peak
    from graphmem.plan_memory.peaks import peak
    from graphmem.planning.advise import advise
    from graphmem.planning.compare import Comparison, compare
    from graphmem.planning.explaining import explain_oom
    from graphmem.planning.fit import fit
    from graphmem.planning.layouts.pack import Job, Packing, pack
    from graphmem.planning.layouts.plan import Plan, plan
    from graphmem.planning.recordings import replay
    from graphmem.planning.sweep import sweep
    from graphmem.serving.answer import ServingReport, serve
    from graphmem.training import Inference, Training

__all__ = [
    "Comparison",
    "Estimate",
    "GraphmemError",
    "Inference",
    "Job",
    "Packing",
    "Peak",
    "Plan",
    "ServingReport",
    "Training",
    "Watched",
    "advise",
    "analyze",
    "compare",
    "explain_oom",
    "fit",
    "operator_graph",
    "pack",
    "peak",
    "plan",
    "replay",
    "replay_trace",
    "serve",
    "sweep",
    "watch",
]
__version__ = "0.2.0"

_PLACES = {
    "Comparison": "planning.compare", "compare": "planning.compare", "replay": "planning.recordings",
    "Estimate": "estimate", "GraphmemError": "errors", "Inference": "training", "Plan": "planning.layouts.plan",
    "ServingReport": "serving.answer", "Training": "training", "advise": "planning.advise", "analyze": "analyze",
    "fit": "planning.fit", "operator_graph": "analyze", "plan": "planning.layouts.plan", "replay_trace": "analyze",
    "serve": "serving.answer", "sweep": "planning.sweep", "explain_oom": "planning.explaining",
    "Peak": "plan_memory.changes", "peak": "plan_memory.peaks",
    "load_ipython_extension": "integrations.notebook",
    "Watched": "integrations.watching", "watch": "integrations.watching",
    **dict.fromkeys(("Job", "Packing", "pack"), "planning.layouts.pack"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package, on its first use."""
    import importlib.util

    if name in _PLACES:
        found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(type(sys)):  # type: ignore[misc]
    """Imports put a module into its package by its name, where a function of that name (``analyze``) would be lost."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PLACES and isinstance(value, type(sys))):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
