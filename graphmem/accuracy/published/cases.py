"""Published peaks as cases, from tables: ``cases.json``, with the source, the card and the version of each.

Other people's programs, rebuilt, are no part of the installed package: they and their table lie in
``models_zoo/published`` of graphmem's source, which :data:`PROGRAMS` finds from a checkout. ``cited.json`` comes with
the package: a source whose runs are graphmem's own loop around a library's model.

A source has the fields of its runs, each of which may have its own instead: ``gpu``, ``torch``, ``level``, ``unit``,
``digits`` that are printed behind the point, ``iterations``; a run has ``measured``, which is a number of units, or one
for each of several levels, and ``estimates_mib`` of other estimators. A program is ``program`` with ``arguments``,
``processes`` (of which the first is predicted) and ``alloc_conf``; a loop is ``model`` (:class:`ModelSpec`), ``batch``
and ``training`` (fields of :class:`graphmem.training.Training`). ``not_usable``: the reasons why other figures are not
rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import graphmem
from graphmem.accuracy.published.case import ModelSpec, OwnLoop, PublishedCase, Script, Skipped
from graphmem.base.documents import parse_json, read_json
from graphmem.base.options import of_json
from graphmem.errors import SourceError
from graphmem.training import Training
from graphmem.units import GIB, MIB

#: The folder of ``cases.json`` and ``programs`` where graphmem runs from its source; an installed one has none.
PROGRAMS = Path(graphmem.__file__).parents[1] / "models_zoo" / "published"
#: What is reported in the place of the programs where they are not.
NOT_HERE = "they lie in models_zoo/published of graphmem's source, not in the installed package: give it by --published"

#: Bytes of what figures are printed in.
UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "MiB": MIB, "GiB": GIB}

Found = PublishedCase | Skipped


def published_cases(folder: Path | None = None) -> list[Found]:
    """The cases of the table in ``folder``, or those that come with graphmem; and the reasons why others are left out.
    Raises :class:`SourceError` for a folder without a table, and for one that cannot be read."""
    if folder is not None:
        if not (folder / "cases.json").exists():
            raise SourceError(f"{folder} holds no table, cases.json")
        return programs_in(folder)
    return [*programs_in(PROGRAMS), *_cases_of(cited(), Path())]


def programs_in(folder: Path) -> list[Found]:
    """The cases of ``cases.json`` in ``folder``; their absence as a reason where it has no such file."""
    path = folder / "cases.json"
    if not path.exists():
        return [Skipped("runs rebuilt as programs", NOT_HERE)]
    try:
        return _cases_of(read_json(path), folder / "programs")
    except KeyError as error:
        raise SourceError(f"{path} is not a table of published runs: it lacks {error}") from None
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"{path} is not a table of published runs: {error}") from None


def cited() -> Any:
    """The table that comes with graphmem; its ``estimators`` are the figures that their authors reported of theirs."""
    return parse_json(files("graphmem.accuracy.published").joinpath("cited.json").read_text(encoding="utf-8"))


def verdicts() -> Any:
    """Rows of verdicts against truth on recorded whole programs, which come with graphmem: the words of a row, and its
    numbers, as :data:`graphmem.accuracy.report.VERDICTS` names them."""
    return parse_json(files("graphmem.accuracy.published").joinpath("verdicts.json").read_text(encoding="utf-8"))[
        "rows"
    ]


def _cases_of(table: Mapping[str, Any], programs: Path) -> list[Found]:
    found: list[Found] = []
    for source in table["sources"]:
        found += [case for run in source["runs"] for case in _cases({**source, **run}, programs)]
    for left_out in table["not_usable"]:
        found += [Skipped(left_out["source"], left_out["why"])] * left_out["figures"]
    return found


def _cases(run: Mapping[str, Any], programs: Path) -> Iterator[PublishedCase]:
    """A case for each level that was measured of one run of the table, sizes converted to bytes."""
    measured = run["measured"]
    by_level = measured if isinstance(measured, dict) else {run["level"]: measured}
    for level, figure in by_level.items():
        yield PublishedCase(
            source=run["name"],
            run=_run(run, programs),
            gpu=run["gpu"],
            torch_version=run["torch"],
            level=level,
            measured_bytes=round(figure * UNITS[run["unit"]]),
            estimates=tuple((name, round(mib * MIB)) for name, mib in run.get("estimates_mib", {}).items()),
            context_bytes=_bytes_of_mib(run.get("context_mib")),
            others_bytes=_bytes_of_mib(run.get("others_mib")) or 0,
            cuda_version=tuple(run["cuda"]) if "cuda" in run else None,
            beyond_model=run.get("beyond_model", False),
            grown_bytes=_bytes_of_mib(run.get("grown_mib")) or 0,
            rounded_bytes=round(UNITS[run["unit"]] / 10 ** run["digits"] / 2) if "digits" in run else 0,
            why=run.get("why", ""),
        )


def _run(run: Mapping[str, Any], programs: Path) -> OwnLoop | Script:
    iterations = run.get("iterations", 3)
    if "model" in run:
        step = Training(**of_json(Training, run["training"]))
        return OwnLoop(ModelSpec(**run["model"]), step, run["batch"], iterations)
    program, arguments = str(programs / Path(run["program"]).name), tuple(run["arguments"].split())
    return Script(program, arguments, iterations, run.get("processes", 1), run.get("alloc_conf", ""))


def _bytes_of_mib(figure: float | None) -> int | None:
    return None if figure is None else round(figure * MIB)
