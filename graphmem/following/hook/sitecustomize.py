"""The first lines of every Python process below ``graphmem run``. The environment's own ``sitecustomize`` runs too."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder


class _Borrowed:
    """Finds packages of the process that follows this one, and no others."""

    def __init__(self, places: dict[str, str]) -> None:
        self.places = places

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        del path, target
        place = self.places.get(name)
        return None if place is None else PathFinder.find_spec(name, [place])


def _own() -> None:
    """The environment's own file of this name, which this one stands before."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [one for one in sys.path if os.path.abspath(one) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_own()
if os.environ.get("GRAPHMEM_FOLLOW"):
    packages = json.loads(os.environ["GRAPHMEM_FOLLOW"])["packages"]
    sys.meta_path.insert(0, _Borrowed({"graphmem": packages.pop("graphmem")}))  # the one that follows, whatever is here
    sys.meta_path.append(_Borrowed(packages))
    from graphmem.following.children import begin

    begin()
