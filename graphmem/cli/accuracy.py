"""``graphmem accuracy``: records and published figures held against predictions made now, as a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphmem.base.options import Given, option
from graphmem.cli.fields import takes
from graphmem.cli.options import FORMAT, existing, existing_folder, folder, format_asked
from graphmem.cli.output import check_output, publish
from graphmem.cli.progress import progress_bar
from graphmem.errors import GraphmemError, UsageError
from graphmem.reports import Format, format_named
from graphmem.workers import Workers

if TYPE_CHECKING:
    from graphmem.accuracy.published.section import PublishedSection
    from graphmem.accuracy.record import Record

#: Runs of each source of published figures that are predicted unless all are asked for: a minute's work.
SAMPLE = 4
#: Names of the sections, in the order of the report; the last two are not made of records.
SECTIONS = ("gpu", "stub", "onnxruntime", "tensorflow", "published", "verdicts")


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in SECTIONS:
            raise UsageError(f"the report has no section {name!r}; accepted: {', '.join(SECTIONS)}")
    if not names:
        raise UsageError(f"name a section: {', '.join(SECTIONS)}")
    return names


def _share(given: Given) -> int:
    """The number of runs of each source; 0 for all."""
    text = str(given["published_runs"] or SAMPLE)
    if text == "all":
        return 0
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise UsageError(f"--published-runs is {text!r}; write a number above 0, or all")
    return int(text)


def _tables(given: Given) -> Path | None:
    named = given["published"] or os.environ.get("GRAPHMEM_PUBLISHED")
    return existing_folder(str(named)) if named else None


@dataclass(frozen=True)
class Report:
    """The report: the predictions that it holds, and its place."""

    form: Format | None = option(
        None, FORMAT, make=lambda given: format_asked(given["format"], None) if given["format"] else None
    )
    output: str = option("reports", "Where the report goes.", flags="-o --output", metavar="FOLDER")
    sections: tuple[str, ...] = option(
        SECTIONS,
        f"Which sections, in a list with commas. Default: {','.join(SECTIONS)}.",
        metavar="NAMES",
        read=_sections,
    )
    published: Path | None = option(
        None,
        "A folder with a table of published runs (cases.json) and their programs, as models_zoo/published of "
        "graphmem's source has them: they are run as 'graphmem run' would. Default: those, where there are any, and "
        "the small table that comes with graphmem.",
        metavar="DIRECTORY",
        make=_tables,
    )
    share: int = option(
        SAMPLE,
        "Published runs to predict of each source, or 'all'; a few seconds each.",
        flags="--published-runs",
        metavar="N",
        make=_share,
        read=str,
    )
    cudnn: Path | None = option(
        None,
        "Predict published runs with convolutions once more with this cuDNN asked for their workspaces.",
        metavar="PATH",
        read=existing,
    )
    resume: Path | None = option(
        None,
        "Keep every prediction there as it is made, and take those that this graphmem has made there already: a long "
        "run can be stopped and begun again.",
        metavar="FOLDER",
        read=folder,
    )


@click.command("accuracy")
@click.argument("records", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@takes("asked", Report)
@takes("workers", Workers)
def accuracy_command(records: tuple[Path, ...], asked: Report, workers: Workers) -> None:
    """Predict every case of RECORDS now and write accuracy.md and accuracy.html, or one file of another --format.

    RECORDS are files that 'graphmem measure' wrote, or folders of them, such as models_zoo/measured.
    """
    from graphmem.accuracy.compare import Predicted, compare, predict_record
    from graphmem.accuracy.document import document_of
    from graphmem.accuracy.published.cases import cited, verdicts
    from graphmem.accuracy.report import Contents

    place = Path(asked.output)
    place.mkdir(parents=True, exist_ok=True)
    forms = [asked.form] if asked.form is not None else [format_named("markdown"), format_named("html")]
    targets = {str(place / f"accuracy{(*one.suffixes, f'.{one.name}')[0]}"): one for one in forms}
    for target in targets:
        check_output(target)
    kinds = _kinds(asked.sections)
    found = [record for record in _read(records) if record.machine is None or record.machine.source in kinds]
    workers = workers.on_all_cores()
    with progress_bar("predicting", len(found)) as advance:
        predict = _keeping(predict_record, Predicted, asked.resume)
        comparisons = compare(found, workers, lambda done: advance(""), predict)
    runs = _published(asked, workers) if "published" in asked.sections else None
    judged = verdicts() if "verdicts" in asked.sections else ()
    document = document_of(Contents(comparisons, runs, cited(), _about(), kinds, judged))
    for target, one in targets.items():
        publish(document, one, target)


def _kinds(wanted: Sequence[str]) -> list[str]:
    """The kinds of records of the sections, in the order of the report."""
    from graphmem.accuracy.report import SOURCES

    return [kind for name, kind in zip(SECTIONS, SOURCES, strict=False) if name in wanted]


def _read(paths: Sequence[Path]) -> list[Record]:
    from graphmem.accuracy.record import read_folder, read_located

    found = [record for path in paths for record in (read_folder(path) if path.is_dir() else read_located(path))]
    if not found:
        raise UsageError(f"no record in {', '.join(map(str, paths))}")
    return found


def _keeping(function: Callable[[Any], Any], gives: Any, folder: Path | None, also: str = "") -> Callable[[Any], Any]:
    """The function, or one that keeps its results, of the type ``gives``, in ``folder``; ``also``: further values they
    depend on."""
    if folder is None:
        return function
    from graphmem.accuracy.kept import Keeper, digest_of_folder

    folder.mkdir(parents=True, exist_ok=True)
    return Keeper(function, gives, folder, "\n".join((digest_of_folder(), _about(), also)))


def _published(asked: Report, workers: Workers) -> PublishedSection:
    from functools import partial

    from graphmem.accuracy.kept import digest_of_folder
    from graphmem.accuracy.published.case import (
        PublishedCase,
        PublishedComparison,
        Skipped,
        predict_together,
        runs_of,
    )
    from graphmem.accuracy.published.cases import NOT_HERE, PROGRAMS, published_cases
    from graphmem.accuracy.published.section import published_section, sample

    rows = published_cases(asked.published)
    cases = [row for row in rows if isinstance(row, PublishedCase)]
    chosen = sample(cases, asked.share) if asked.share else cases
    predicted: list[PublishedComparison] = []
    cudnn = str(asked.cudnn.resolve()) if asked.cudnn else ""
    predict = partial(predict_together, cudnn=cudnn or None)
    together = _keeping(
        predict, list[PublishedComparison], asked.resume, cudnn + digest_of_folder(asked.published or PROGRAMS)
    )
    with progress_bar("predicting published runs", len(chosen)) as advance:
        runs = runs_of(chosen)
        for run, found in zip(runs, workers.map(together, runs), strict=True):
            if isinstance(found, GraphmemError):
                found = [PublishedComparison(case, error=str(found)) for case in run]
            comparisons: list[PublishedComparison] = found
            predicted += comparisons
            for comparison in comparisons:
                advance(comparison.case.name)
    skipped = [row for row in rows if isinstance(row, Skipped)]
    for row in skipped:
        if row.why == NOT_HERE:
            click.echo(f"graphmem: {row.source} are left out: {row.why}", err=True)
    words = f"{len(chosen)} of {len(cases)} runs that can be rebuilt are predicted, evenly spaced in each source"
    return published_section(predicted, skipped, words)


def _about() -> str:
    """Which versions made the predictions; nothing that changes from run to run."""
    from importlib.metadata import PackageNotFoundError, version

    packages = []
    for package in ("graphmem", "torch", "transformers", "timm", "torchvision", "onnxruntime", "keras"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Predictions by {', '.join(packages)}."
