"""The runs that are rebuilt as programs: ``cases.json``, with the source, the card and the version of each.

Other people's programs, rebuilt, are no part of the installed package: they and ``cases.json`` lie in
``models_zoo/published`` of graphmem's source, which :data:`PROGRAMS` finds from a checkout.

A source has the fields of its runs, each of which may have its own instead: ``gpu``, ``torch``, ``level``, ``program``,
``unit``, ``digits`` that are printed behind the point, ``iterations``, ``processes`` (of which the first is predicted)
and ``alloc_conf``; a run has ``arguments`` and ``measured``, which is a number of units, or one for each of several
levels, and ``estimates_mib`` of other estimators. ``not_usable`` says of other figures why they are not rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import graphmem
from graphmem.accuracy.published.case import PublishedCase, Script, Skipped
from graphmem.base.documents import read_json
from graphmem.errors import SourceError
from graphmem.units import GIB, MIB

#: The folder of ``cases.json`` and ``programs`` where graphmem runs from its source; an installed one has none.
PROGRAMS = Path(graphmem.__file__).parents[1] / "models_zoo" / "published"
#: What is reported in the place of the programs where they are not.
NOT_HERE = "they lie in models_zoo/published of graphmem's source, not in the installed package: give it by --published"

#: Bytes of what figures are printed in.
UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "MiB": MIB, "GiB": GIB}


def cited_scripts(folder: Path = PROGRAMS) -> list[PublishedCase | Skipped]:
    """The cases of ``cases.json`` in ``folder``, and what of the same sources is left out: all, where the folder has no
    such file. Raises :class:`SourceError` for a file that cannot be read."""
    path = folder / "cases.json"
    if not path.exists():
        return [Skipped("runs rebuilt as programs", NOT_HERE)]
    found: list[PublishedCase | Skipped] = []
    try:
        table = read_json(path)
        for source in table["sources"]:
            found += [case for run in source["runs"] for case in _cases({**source, **run}, folder / "programs")]
        for left_out in table["not_usable"]:
            found += [Skipped(left_out["source"], left_out["why"])] * left_out["figures"]
    except KeyError as error:
        raise SourceError(f"{path} is not a table of published runs: it lacks {error}") from None
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"{path} is not a table of published runs: {error}") from None
    return found


def _cases(run: Mapping[str, Any], programs: Path) -> Iterator[PublishedCase]:
    """A case for each level that was measured of one run of the table, sizes converted to bytes."""
    measured = run["measured"]
    by_level = measured if isinstance(measured, dict) else {run["level"]: measured}
    for level, figure in by_level.items():
        yield PublishedCase(
            source=run["name"],
            run=Script(
                str(programs / Path(run["program"]).name),
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
