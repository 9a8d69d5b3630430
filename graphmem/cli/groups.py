"""Help in groups: options under headings, in the order in which the command lists them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

OTHER = "Options"


class GroupedCommand(click.Command):
    """A command whose help shows its options under the headings that :func:`grouped` gave them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section a heading; options without one come last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "heading", OTHER), []).append(record)
        groups[OTHER] = groups.pop(OTHER, [])
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def grouped(heading: str, options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """Decorate a command with ``options``, to be shown under ``heading``."""

    def decorate(command: Command) -> Command:
        known = {id(parameter) for parameter in getattr(command, "__click_params__", ())}
        for option in reversed(options):
            command = option(command)
        for parameter in getattr(command, "__click_params__", ()):
            if id(parameter) not in known:
                parameter.heading = heading
        return command

    return decorate
