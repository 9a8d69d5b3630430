"""``graphmem accuracy``: records held against predictions made now, as a report."""

from __future__ import annotations

import os
from pathlib import Path

import click

from graphmem.cli.output import check_output, emit
from graphmem.cli.progress import progress_bar
from graphmem.errors import UsageError


@click.command("accuracy")
@click.argument("records", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("-o", "--output", default="reports", metavar="FOLDER", help="Where the report goes. Default reports.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Processes at a time. Default: the CPU's cores.")
def accuracy_command(records: tuple[Path, ...], output: str, jobs: int | None) -> None:
    """Predict every case of RECORDS now and write accuracy.md and accuracy.html.

    RECORDS are files that 'graphmem measure' wrote, or folders of them, such as models_zoo/measured.
    """
    from graphmem.accuracy.compare import compare
    from graphmem.accuracy.record import read_folder, read_records
    from graphmem.accuracy.report import published_figures, render_html, render_markdown

    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    targets = [folder / "accuracy.md", folder / "accuracy.html"]
    for target in targets:
        check_output(str(target))
    found = [record for path in records for record in (read_folder(path) if path.is_dir() else read_records(path))]
    if not found:
        raise UsageError(f"no record in {', '.join(map(str, records))}")
    with progress_bar("predicting", len(found)) as advance:
        comparisons = compare(found, jobs or os.cpu_count() or 1, lambda done: advance(""))
    published = published_figures()
    for target, render in zip(targets, (render_markdown, render_html), strict=True):
        emit(render(comparisons, published, _about()), str(target))


def _about() -> str:
    """Which versions made the predictions; nothing that changes from run to run."""
    from importlib.metadata import PackageNotFoundError, version

    packages = []
    for package in ("graphmem", "torch", "transformers", "timm"):
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Predictions by {', '.join(packages)}."
