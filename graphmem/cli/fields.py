"""Commands whose options are fields of dataclasses (:mod:`graphmem.base.options`): click's options made of the fields,
and objects made of the values on the command line."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, cast

import click

from graphmem.base.options import Given, Option, Whole, help_of, options_of
from graphmem.cli import completion, elsewhere
from graphmem.errors import UsageError
from graphmem.training import parse_optimizer_arg

Object = TypeVar("Object")
Command = TypeVar("Command", bound=Callable[..., object])

OTHER = "Options"
#: Options of a help that is short: those that most people need. ``--help-all`` has the others.
USUAL = frozenset((
    "--batch", "--seq-len", "--training", "--optimizer", "--amp", "--dtype", "--weights", "--grad-accum",
    "--checkpoint-activations", "--compile", "--world-size", "--fsdp", "--zero", "--tp", "--gpu", "--gpu-memory",
    "--alloc-conf", "--format", "--output", "--details", "--html", "--fail-on-oom", "--help", "--help-all",
))  # fmt: skip
#: A help of more options than this is short.
_MANY = 40
_ALL = "graphmem.help_all"  # where a click context keeps whether all options are shown


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings, in the order in which it has them. It answers from
    captures on the disk, unless it is told not to."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self._is_long = len(self.params) > _MANY
        if self._is_long:
            shows = "Show every option, and what it means."
            self.params.append(
                click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_all, help=shows)
            )
        if self.name in _KEEP_NOTHING:
            return
        help = "Capture anew, and keep nothing on the disk (see 'graphmem cache')."
        self.params.append(
            click.Option(["--no-cache"], is_flag=True, expose_value=False, callback=_keep_nothing, help=help)
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with elsewhere.explained():
            return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section a heading; options without one come last. Of many, those that few people need are named
        by their headings alone."""
        groups: dict[str, list[tuple[str, str]]] = {}
        others: dict[str, list[str]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                heading = getattr(parameter, "heading", None) or OTHER
                if self._is_long and not ctx.meta.get(_ALL) and USUAL.isdisjoint(parameter.opts):
                    others.setdefault(heading, []).append(max(parameter.opts, key=len))
                else:
                    groups.setdefault(heading, []).append(record)
        groups[OTHER] = groups.pop(OTHER, [])
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
        if others:
            with formatter.section("More (--help-all explains them)"):
                formatter.write_dl([(heading, _lines(names, formatter.width)) for heading, names in others.items()])


def _lines(names: list[str], width: int) -> str:
    """The names in lines that break none of them; ``\\b`` is click's word for text that is not folded again."""
    wrapped = textwrap.wrap(" ".join(names), max(20, width - 34), break_on_hyphens=False, break_long_words=False)
    return "\n".join(("\b", *wrapped))


def _all(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Show the whole help, and end."""
    if is_asked and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help())
        context.exit()


#: Where a click context keeps whether captures stay off the disk.
NO_CACHE = "graphmem.no_cache"


#: Commands of which nothing is kept.
_KEEP_NOTHING = ("run", "replay")


def _keep_nothing(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    context.meta[NO_CACHE] = is_asked


class FieldOption(click.Option):
    """A field as click's option, below a heading of the help."""

    heading = ""


def takes(name: str, kind: type, heading: str = "") -> Callable[[Command], Command]:
    """Decorate a command: the fields of ``kind`` are its options, and the function is given the object as ``name``, or
    without a name the fields as arguments."""

    def decorate(command: Command) -> Command:
        made = parameters(kind, heading)

        @functools.wraps(command)
        def taking(*arguments: object, **values: object) -> object:
            given = click.get_current_context().params
            others = {key: value for key, value in values.items() if key not in made}
            found: object = built(kind, given)
            return command(*arguments, **({name: found} if name else vars(found)), **others)

        taking.__click_params__ = [*getattr(command, "__click_params__", ()), *reversed(made.values())]  # type: ignore[attr-defined]
        return taking  # type: ignore[return-value]

    return decorate


def parameters(kind: type, heading: str = "", skipped: tuple[str, ...] = ()) -> dict[str, click.Option]:
    """click's options of a class by parameter name, in the order of its fields, but for the fields ``skipped``."""
    found: dict[str, click.Option] = {}
    for field, option in options_of(kind):
        heading = option.heading or heading
        if field.name in skipped:
            continue
        for one in (*(() if option.parts else (option,)), *option.also):
            found.setdefault(one.parameter, _parameter(kind, field, one, heading))
        for part in option.parts:
            more = parameters(part, heading, option.without)
            found |= {name: parameter for name, parameter in more.items() if name not in found}
    return found


def _parameter(kind: type, field: Field[object], option: Option, heading: str) -> click.Option:
    flags, help = list(option.flags), help_of(field, option)
    if option.keyed:
        help = ", ".join(other.name for other, one in options_of(kind) if one.flags == option.flags)
    elif field.type == "bool | None" or field.default is True:
        flags[0] = f"{flags[0]}/--no-{flags[0].removeprefix('--')}"
    required = field.default is MISSING and not option.opens
    attributes = _attributes(field, option) | ({"required": True} if required else {"default": None})  # 8.3 takes both
    completes = completion.of(option.parameter)
    made = FieldOption([*flags, option.parameter], help=help, shell_complete=completes, **attributes)
    made.heading = heading
    return made


def _attributes(field: Field[object], option: Option) -> dict[str, Any]:
    """click's arguments for the values of a field: nothing, a number, a word of a few, any text, several texts."""
    type_name, number = str(field.type).removesuffix(" | None"), option.check
    if option.keyed or option.repeated:
        return {"multiple": True, "metavar": option.metavar or "NAME=VALUE"}
    if option.is_flag or type_name == "bool":
        return {"is_flag": True} if option.is_flag or field.default is False else {}
    if option.choices:
        return {"type": click.Choice(option.choices)}
    if option.bare is not None:
        return {"type": click.IntRange(min=0), "is_flag": False, "flag_value": option.bare, "metavar": option.metavar}
    if option.read is not None or not (isinstance(number, Whole) or type_name in ("int", "float")):
        return {"metavar": option.metavar}
    if isinstance(number, Whole):
        return {"type": _Number(number.least, number.most), "metavar": option.metavar or "N"}
    least = 0 if field.default == 0 else 1
    return {"type": float if type_name == "float" else _Number(min=least), "metavar": option.metavar or "N"}


class _Number(click.IntRange):
    """A whole number, written out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. What is none is refused in plain words."""
        thousands = re.fullmatch(r"(\d{1,6})[kK]", value) if isinstance(value, str) else None
        if thousands is not None:
            number = int(thousands[1])
            self.fail(f"{value} may be {1024 * number} or {1000 * number}; write which of them.", param, ctx)
        try:
            int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


def is_given(value: object) -> bool:
    """True if the command line has a value for an option."""
    return value is not None and value != ()


def built(kind: type[Object], given: Given) -> Object:
    """The object that the command line describes. Raises :class:`UsageError`."""
    make: Callable[..., Object] = kind
    return make(**values_of(kind, given))


def values_of(kind: type, given: Given) -> dict[str, object]:
    """The fields that the command line gives, by name. Raises :class:`UsageError`."""
    found: dict[str, object] = {}
    for field, option in options_of(kind):
        value = _value(field, option, given)
        if value is not None:
            found[field.name] = value
    return found


def _value(field: Field[object], option: Option, given: Given) -> object:
    """The value of a field from the options that were given; None where its option was not."""
    if option.make is not None:
        return option.make(given)
    if option.parts:
        return _part(option.parts[0], given)
    value = given.get(option.parameter)
    if not is_given(value) or option.is_flag or (option.bare is not None and value == option.bare):
        return None
    texts = cast("Iterable[str]", value)
    if option.keyed:
        return _by_name(option, map(parse_optimizer_arg, texts)).get(field.name)
    if option.read is None:
        return value
    if not option.repeated:
        try:
            return option.read(str(value))
        except ValueError as error:  # a word where a number stands
            raise click.BadParameter(str(error)) from None
    found = tuple(map(option.read, texts))
    is_named = str(field.type).startswith("Mapping") or field.name == "optimizer_args"
    named = _by_name(option, cast("Iterable[tuple[str, object]]", found)) if is_named else {}
    return named if str(field.type).startswith("Mapping") else found


def _by_name(option: Option, pairs: Iterable[tuple[str, Object]]) -> dict[str, Object]:
    """The values by name. Raises :class:`UsageError` for a name that has two."""
    found: dict[str, Object] = {}
    for name, value in pairs:
        if name in found:
            raise UsageError(f"{option.flags[0]} {name} is given more than once; give it once")
        found[name] = value
    return found


def _part(kind: type, given: Given) -> object:
    """The object of a class within another; None where no option that opens it is given."""
    options = [one for _, option in options_of(kind) for one in (option, *option.also)]
    used = [option for option in options if is_given(given.get(option.parameter))]
    opening = [option for option in options if option.opens]
    if not any(option.opens for option in used):
        if used:
            raise UsageError(f"{used[0].flags[0]} needs {opening[0].flags[0]}")
        return None
    _check_keys(kind, given)
    values = values_of(kind, given)
    if any(field.name == "world_size" for field in fields(kind)) and "world_size" not in values:
        if not is_given(given["world_size"]):
            raise UsageError(f"{opening[0].flags[0]} needs --world-size, the number of processes")
        values["world_size"] = given["world_size"]
    return kind(**values)


def _check_keys(kind: type, given: Given) -> None:
    """Raise :class:`UsageError` for a name that no field has which shares the option."""
    keyed = {field.name: option for field, option in options_of(kind) if option.keyed}
    for option in list(keyed.values())[:1]:
        for name, _ in map(parse_optimizer_arg, cast("Iterable[str]", given[option.parameter])):
            if name not in keyed:
                raise UsageError(f"unknown {option.flags[0]} {name!r}; accepted: {', '.join(keyed)}")
