"""``graphmem accuracy``: records and published figures held against predictions made now, as a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphmem.cli.options import FORM_OPTION
from graphmem.cli.output import check_output, publish
from graphmem.cli.progress import progress_bar
from graphmem.errors import UsageError
from graphmem.reports import Format, format_named

if TYPE_CHECKING:
    from graphmem.accuracy.published.section import PublishedSection
    from graphmem.accuracy.record import Record

#: Runs of each source of published figures that are predicted unless all are asked for: a minute's work.
SAMPLE = 4
#: Names of the sections, in the order of the report; the last is not made of records.
SECTIONS = ("gpu", "stub", "onnxruntime", "tensorflow", "published")


@click.command("accuracy", short_help="Compare measurements with predictions; write the report.")
@click.argument("records", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@FORM_OPTION
@click.option("-o", "--output", default="reports", metavar="FOLDER", help="Where the report goes. Default reports.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes at a time. Default: the CPU's cores.")
@click.option(
    "--sections",
    metavar="NAMES",
    default=",".join(SECTIONS),
    help=f"Which sections, in a list with commas. Default: {','.join(SECTIONS)}.",
)
@click.option(
    "--published",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="GRAPHMEM_PUBLISHED",
    help="A folder with tables of published figures, or with programs of published runs, as models_zoo/published of "
    "graphmem's source has them: they are run as 'graphmem run' would. Default: those, where there are any, and the "
    "small table that comes with graphmem.",
)
@click.option(
    "--published-runs",
    default=str(SAMPLE),
    metavar="N",
    help=f"Published runs to predict of each source, or 'all'; a few seconds each. Default {SAMPLE}.",
)
@click.option(
    "--cudnn",
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Predict published runs with convolutions once more with this cuDNN asked for their workspaces.",
)
@click.option(
    "--resume",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Keep every prediction there as it is made, and take those that this graphmem has made there already: "
    "a long run can be stopped and begun again.",
)
def accuracy_command(
    records: tuple[Path, ...],
    form: Format | None,
    output: str,
    jobs: int | None,
    sections: str,
    published: Path | None,
    published_runs: str,
    cudnn: Path | None,
    resume: Path | None,
) -> None:
    """Predict every case of RECORDS now and write accuracy.md and accuracy.html, or one file of another --format.

    RECORDS are files that 'graphmem measure' wrote, or folders of them, such as models_zoo/measured.
    """
    from graphmem.accuracy.compare import Predicted, compare, predict_record
    from graphmem.accuracy.document import document_of
    from graphmem.accuracy.report import Contents, published_figures

    wanted, share = _sections(sections), _share(published_runs)
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    forms = [form] if form is not None else [format_named("markdown"), format_named("html")]
    targets = {str(folder / f"accuracy{(*one.suffixes, f'.{one.name}')[0]}"): one for one in forms}
    for target in targets:
        check_output(target)
    kinds = _kinds(wanted)
    found = [record for record in _read(records) if record.machine is None or record.machine.source in kinds]
    workers = jobs or os.cpu_count() or 1
    with progress_bar("predicting", len(found)) as advance:
        predict = _keeping(predict_record, Predicted, resume)
        comparisons = compare(found, workers, lambda done: advance(""), predict)
    runs = _published(published, share, workers, cudnn, resume) if "published" in wanted else None
    document = document_of(Contents(comparisons, runs, published_figures(), _about(), kinds))
    for target, one in targets.items():
        publish(document, one, target)


def _sections(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SECTIONS:
            raise UsageError(f"the report has no section {name!r}; accepted: {', '.join(SECTIONS)}")
    if not names:
        raise UsageError(f"name a section: {', '.join(SECTIONS)}")
    return names


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


def _share(text: str) -> int | None:
    """How many runs of each source; None for all."""
    if text == "all":
        return None
    if not text.isdecimal() or len(text) > 18 or int(text) < 1:
        raise UsageError(f"--published-runs is {text!r}; write a number above 0, or all")
    return int(text)


def _keeping(function: Callable[[Any], Any], gives: Any, folder: Path | None, also: str = "") -> Callable[[Any], Any]:
    """The function, or one that keeps its results, of the type ``gives``, in ``folder``; ``also``: what else they
    depend on."""
    if folder is None:
        return function
    from graphmem.accuracy.kept import Keeper, digest_of_folder

    folder.mkdir(parents=True, exist_ok=True)
    return Keeper(function, gives, folder, "\n".join((digest_of_folder(), _about(), also)))


def _published(
    folder: Path | None, share: int | None, jobs: int, cudnn: Path | None, resume: Path | None
) -> PublishedSection:
    from functools import partial

    from graphmem.accuracy.kept import digest_of_folder
    from graphmem.accuracy.published.case import (
        PublishedCase,
        PublishedComparison,
        Skipped,
        predict_together,
        runs_of,
    )
    from graphmem.accuracy.published.rows import published_rows
    from graphmem.accuracy.published.scripts import NOT_HERE, PROGRAMS
    from graphmem.accuracy.published.section import published_section, sample
    from graphmem.accuracy.workers import side_by_side

    rows = published_rows(folder)
    cases = [row for row in rows if isinstance(row, PublishedCase)]
    chosen = cases if share is None else sample(cases, share)
    predicted = []
    asked = str(cudnn.resolve()) if cudnn else ""
    predict = partial(predict_together, cudnn=asked or None)
    together = _keeping(predict, list[PublishedComparison], resume, asked + digest_of_folder(folder or PROGRAMS))
    with progress_bar("predicting published runs", len(chosen)) as advance:
        for comparisons in side_by_side(together, runs_of(chosen), jobs):
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
