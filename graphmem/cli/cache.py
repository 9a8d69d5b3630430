"""``graphmem cache``: the captures that are kept on the disk for further questions."""

from __future__ import annotations

from dataclasses import asdict

import click

from graphmem.answering.capture_cache import FOLDER, CaptureCache, Contents, default_folder
from graphmem.cli.options import form_options
from graphmem.cli.output import check_output, emit, publish
from graphmem.reports import Format
from graphmem.reports.document import Document, Facts, section
from graphmem.units import format_bytes

SCHEMA = "graphmem.cache/1"


@click.command("cache")
@click.argument("action", required=False, type=click.Choice(["clear", "path"]))
@form_options
def cache_command(action: str | None, form: Format, output: str | None) -> None:
    """Show how many captures are kept on the disk, how large they are, and how many questions they answered. "clear"
    removes them, "path" prints their folder.

    GRAPHMEM_CACHE names another folder, or is "off"; GRAPHMEM_CACHE_LIMIT is the most that they may take (1GiB): those
    that were not used for longest go first.
    """
    check_output(output)
    folder = default_folder()
    cache = None if folder is None else CaptureCache(folder)
    if action == "path":
        emit(f"{'off' if folder is None else folder}\n", output)
        return
    if cache is not None and action == "clear":
        cache.clear()
    publish(_document(cache), form, output)


def _document(cache: CaptureCache | None) -> Document:
    if cache is None:
        facts = [("folder", f"none: {FOLDER} says so")]
        return Document("cache", "Captures on the disk", (section("", Facts(tuple(facts))),), lambda: _data(None, None))
    found = cache.contents()
    facts = [
        ("folder", str(cache.folder)),
        ("entries", f"{found.entries:,}"),
        ("size", f"{format_bytes(found.bytes)} of {format_bytes(found.limit_bytes)}"),
        ("hits", f"{found.hits:,}"),
    ]
    title = "Captures on the disk"
    return Document("cache", title, (section("", Facts(tuple(facts))),), lambda: _data(str(cache.folder), found))


def _data(folder: str | None, found: Contents | None) -> dict[str, object]:
    return {"schema": SCHEMA, "folder": folder, **({} if found is None else asdict(found))}
