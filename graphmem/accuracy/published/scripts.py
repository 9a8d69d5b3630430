"""The runs that are rebuilt as programs: ``cases.json``, with the source, the card and the version of each.

A source has the fields of its runs, each of which may have its own instead: ``gpu``, ``torch``, ``level``, ``program``,
``unit``, ``digits`` that are printed behind the point, ``iterations``, ``processes`` (of which the first is predicted)
and ``alloc_conf``; a run has ``arguments`` and ``measured``, which is a number of units, or one for each of several
levels, and ``estimates_mib`` of other estimators. ``not_usable`` says of other figures why they are not rebuilt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from graphmem.accuracy.published.case import PublishedCase, Script, Skipped
from graphmem.units import GIB, MIB

#: Bytes of what figures are printed in.
UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "MiB": MIB, "GiB": GIB}


def cited_scripts() -> list[PublishedCase | Skipped]:
    """The cases of ``cases.json``, and what of the same sources is left out."""
    table = json.loads(files("graphmem.accuracy.published").joinpath("cases.json").read_text(encoding="utf-8"))
    found: list[PublishedCase | Skipped] = []
    for source in table["sources"]:
        found += [case for run in source["runs"] for case in _cases({**source, **run})]
    for left_out in table["not_usable"]:
        found += [Skipped(left_out["source"], left_out["why"])] * left_out["figures"]
    return found


def _cases(run: Mapping[str, Any]) -> Iterator[PublishedCase]:
    measured = run["measured"]
    by_level = measured if isinstance(measured, dict) else {run["level"]: measured}
    for level, figure in by_level.items():
        yield PublishedCase(
            source=run["name"],
            run=Script(
                run["program"],
                tuple(run["arguments"].split()),
                run.get("iterations", 3),
                run.get("processes", 1),
                run.get("alloc_conf", ""),
            ),
            gpu=run["gpu"],
            torch_version=run["torch"],
            level=level,
            measured_bytes=round(figure * UNITS[run["unit"]]),
            estimates=tuple((name, round(mib * MIB)) for name, mib in run.get("estimates_mib", {}).items()),
            context_bytes=_bytes_of_mib(run.get("context_mib")),
            others_bytes=_bytes_of_mib(run.get("others_mib")) or 0,
            cuda_version=tuple(run["cuda"]) if "cuda" in run else None,
            grown_bytes=_bytes_of_mib(run.get("grown_mib")) or 0,
            rounded_bytes=round(UNITS[run["unit"]] / 10 ** run["digits"] / 2) if "digits" in run else 0,
            why=run.get("why", ""),
        )


def _bytes_of_mib(figure: float | None) -> int | None:
    return None if figure is None else round(figure * MIB)
