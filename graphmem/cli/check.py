"""``graphmem check``: budgets of a project in CI, by a table of its ``pyproject.toml``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphmem.base.documents import read_json
from graphmem.base.files import write_whole
from graphmem.base.options import option
from graphmem.base.tables import toml_in
from graphmem.cli.compare import read_growth
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import form_options
from graphmem.cli.output import DOES_NOT_FIT, check_output, publish, working
from graphmem.cli.sweep import settings_in
from graphmem.errors import UsageError
from graphmem.reports import Format
from graphmem.units import parse_size

if TYPE_CHECKING:
    from graphmem.planning.check import Watch

_SCHEMA = "graphmem.lock/1"
_LOCK = "graphmem.lock.json"
#: Keys of ``[tool.graphmem]`` that are no settings.
_OWN = ("watch", "lock", "growth")


@dataclass(frozen=True)
class Checked:
    """Where the table is, and whether the figures are committed anew."""

    config: str = option("pyproject.toml", "The file with the table [tool.graphmem].", metavar="FILE.toml")
    update: bool = option(False, "Write the figures into the lock file, to be committed; growth is no failure then.")


@dataclass(frozen=True)
class Project:
    """``[tool.graphmem]`` as read: what is watched, the lock file, and the growth allowed (bytes or a share)."""

    watches: tuple[Watch, ...]
    lock: Path
    growth: int | float = 0.0
    locked: dict[str, int] = field(default_factory=dict)


@click.command("check", cls=GroupedCommand, short_help="Budgets of a project in CI.")
@click.argument("names", nargs=-1, metavar="[WATCH]...")
@takes("checked", Checked, "Project")
@form_options
def check_command(names: tuple[str, ...], checked: Checked, form: Format, output: str | None) -> None:
    """Analyse what a project watches, all of it or the WATCHes named, and print one table.

    The table [tool.graphmem] of pyproject.toml names models as 'graphmem analyze' takes them, with options that --vary
    of 'graphmem sweep' knows; those above hold for every watch:

    \b
      [tool.graphmem]
      gpu = "A10G"
      growth = "2%"                 # more than committed: fails
      lock = "graphmem.lock.json"   # the committed figures
    \b
      [tool.graphmem.watch.train]
      model = "train.py:build"
      batch = 8
      amp = "bf16"
      optimizer = "sgd"
      optimizer-args = { momentum = 0.9 }
      budget = "20GiB"              # training = false is inference

    A watch fails where it does not fit its card, exceeds its budget, has grown, or its step fails. --update writes the
    lock file. Exit codes: 0 all pass, 1 error or a wrong value, 2 options that cannot be read, 3 where one fails.
    """
    check_output(output)
    project = read_project(Path(checked.config), names)
    with working() as progress:
        from graphmem.planning.check import check

        locked = {} if checked.update else project.locked
        found = check(project.watches, locked=locked, growth=project.growth, say=progress)
    publish(found, form, output)
    if checked.update:
        figures = {**project.locked, **found.lock}
        write_whole(project.lock, json.dumps({"schema": _SCHEMA, "device_bytes": figures}, indent=2) + "\n")
        click.echo(f"wrote {project.lock}", err=True)
    if not found.passes:
        click.get_current_context().exit(DOES_NOT_FIT)


def read_project(path: Path, names: tuple[str, ...] = ()) -> Project:
    """``[tool.graphmem]`` of a TOML file, of its watches those ``names``, else all, with the figures of its lock file.
    Raises :class:`UsageError`."""
    if not path.exists():
        raise UsageError(f"there is no {path}; its table [tool.graphmem] says what is watched (graphmem check --help)")
    tool = toml_in(path).get("tool")
    table = tool.get("graphmem") if isinstance(tool, dict) else None
    if not isinstance(table, dict) or not isinstance(table.get("watch"), dict):
        raise UsageError(f"{path} watches nothing: it has no table [tool.graphmem.watch.NAME] (graphmem check --help)")
    unknown = next((name for name in names if name not in table["watch"]), None)
    if unknown is not None:
        raise UsageError(f"{path} has no watch {unknown!r}; it has {', '.join(table['watch'])}")
    shared = {name: value for name, value in table.items() if name not in _OWN}
    try:
        settings_in(shared, (*_OWN, "budget"))
    except UsageError as error:
        raise UsageError(f"{path}, [tool.graphmem]: {error}") from None
    watches = tuple(
        _watch(path, name, one, shared) for name, one in table["watch"].items() if not names or name in names
    )
    lock = path.parent / str(table.get("lock", _LOCK))
    try:
        growth = read_growth(str(table.get("growth", "0%")))
    except UsageError as error:
        raise UsageError(f"{path}, growth: {error}") from None
    return Project(watches, lock, growth, _locked(lock))


def _watch(path: Path, name: str, table: object, shared: dict[str, Any]) -> Watch:
    from graphmem.planning.check import Watch

    if not isinstance(table, dict) or not isinstance(table.get("model"), str):
        raise UsageError(f"{path}, watch {name!r}: it has no model")
    settings = {**shared, **table}
    model, budget = settings.pop("model"), settings.pop("budget", None)
    try:
        return Watch(
            name, model, settings_in(settings, ("model", "budget")), None if budget is None else parse_size(str(budget))
        )
    except UsageError as error:
        raise UsageError(f"{path}, watch {name!r}: {error}") from None


def _locked(path: Path) -> dict[str, int]:
    """The committed figures; none where there is no file yet."""
    if not path.exists():
        return {}
    try:
        document = read_json(path)
        figures = document["device_bytes"] if document["schema"] == _SCHEMA else None
        if not isinstance(figures, dict) or not all(type(size) is int and size >= 0 for size in figures.values()):
            raise ValueError("it has no device bytes by name")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no lock file of graphmem check: {error}") from None
    return figures
