"""``graphmem sweep``: every combination of some settings."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from graphmem.base.options import option
from graphmem.cli.completion import models
from graphmem.cli.fields import GroupedCommand, takes
from graphmem.cli.options import Request, device_of, form_options
from graphmem.cli.output import check_output, publish, working
from graphmem.devices.prices import card_prices
from graphmem.errors import UsageError
from graphmem.reports import Format
from graphmem.training import amp_named, dtype_named
from graphmem.training.data_parallel import DataParallel
from graphmem.training.optimizers import freeze
from graphmem.training.sharding import FullyShard
from graphmem.workers import Workers


@dataclass(frozen=True)
class Settings:
    """The settings that are varied."""

    vary: tuple[str, ...] = option(
        (),
        "Values of an option: batch, seq-len, gpu, dtype, amp, optimizer, grad-accum, checkpoint-activations "
        "(on,off), zero-grad, zero-grad-at, loop, last-batch, compile (on, off or a mode), ddp, fsdp and tp "
        "(processes or off), alloc-conf (divided by ';'), runtime, iterations, training (on,off), or dim:NAME. Of "
        "numbers also ranges, 1..64 or 128..4096:128. Repeatable.",
        metavar="NAME=V1,V2,...",
        repeated=True,
    )
    prices: str | None = option(
        None,
        "Name the cheapest card that fits, by a file of prices: TOML (T4 = 0.35) or CSV (gpu,count,price). Its "
        "cards, or those of --vary gpu, are tried.",
        metavar="FILE",
    )
    store: str | None = option(
        None,
        "Write rows to FILE as they come (JSON lines, figures alone); the same command goes on from them.",
        metavar="FILE",
    )


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19 or not 1 <= int(text) < 1 << 63:
        raise UsageError(f"{text!r} is no whole number of at least 1")
    return int(text)


#: More sizes than anybody looks at.
_MOST_SIZES = 100_000


def _range(text: str) -> Sequence[int]:
    """``8``, or a range with its last number, ``1..64``, ``128..4096:128``. Raises :class:`UsageError`."""
    first, dots, rest = text.partition("..")
    if not dots:
        return [_count(text)]
    last, colon, step = rest.partition(":")
    found = range(_count(first), _count(last) + 1, _count(step) if colon else 1)
    if not 1 <= len(found) <= _MOST_SIZES:
        raise UsageError(f"{text!r} is a range of {len(found)} numbers; accepted: 1 to {_MOST_SIZES}, as in 1..64")
    return found


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise UsageError(f"{text!r} is neither on nor off")
    return text == "on"


def _processes(make: Callable[[int], object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text == "on":
            raise UsageError("among how many processes: write a number, as in off,4")
        return None if text == "off" else make(_count(text))

    return read


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the name that was meant; empty where none is near."""
    close = difflib.get_close_matches(name.replace("_", "-"), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _compile_mode(text: str) -> object:
    return {"off": None, "on": "default"}.get(text, text)


#: Option -> (name in the library, how a value is read).
_READERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "batch": ("batch", _count),
    "seq-len": ("seq_len", _count),
    "gpu": ("device", lambda text: device_of(text, None)),
    "dtype": ("dtype", dtype_named),
    "amp": ("amp", amp_named),
    "optimizer": ("optimizer", str),
    "grad-accum": ("grad_accum", _count),
    "checkpoint-activations": ("checkpoint_activations", _switch),
    "zero-grad": ("zero_grad", str),
    "zero-grad-at": ("zero_grad_at", lambda text: text.replace("-", "_")),
    "loop": ("loop", str),
    "last-batch": ("last_batch", _count),
    "compile": ("compile", _compile_mode),
    "ddp": ("ddp", _processes(DataParallel)),
    "fsdp": ("fsdp", _processes(FullyShard)),
    "tp": ("tp", _processes(int)),
    "alloc-conf": ("alloc_conf", str),
    "runtime": ("runtime", str),
    "iterations": ("iterations", _count),
    "training": ("training", _switch),
}


def reader_of(name: str) -> tuple[str, Callable[[str], object]]:
    """The name in the library of an option that can be varied, and how its text is read. Raises :class:`UsageError`."""
    if name.startswith("dim:"):
        return name, _count
    found = _READERS.get(name.replace("_", "-"))
    if found is None:
        raise UsageError(f"no {name!r}{nearest(name, _READERS)}; accepted: {', '.join(_READERS)}, dim:NAME")
    return found


#: A key of tables alone, whose value is a table of its own.
_ARGUMENTS = "optimizer-args"


def settings_in(table: Mapping[str, Any], others: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a table of a TOML file, which has ``others`` besides, by their names in the library. Raises
    :class:`UsageError`."""
    found: dict[str, Any] = {}
    keys = (*others, *_READERS, _ARGUMENTS)
    for name, value in table.items():
        if name.replace("_", "-") not in keys and not name.startswith("dim:"):
            raise UsageError(f"no {name!r}{nearest(name, keys)}; accepted: {', '.join(keys)}, dim:NAME")
        if name.replace("_", "-") == _ARGUMENTS:
            if not isinstance(value, dict):
                raise UsageError(f"{name} is a table, as {{ momentum = 0.9 }}, not {value!r}")
            found["optimizer_args"] = tuple((key, freeze(one)) for key, one in value.items())
            continue
        known, read = reader_of(name)
        found[known] = read(("on" if value else "off") if isinstance(value, bool) else str(value))
    return found


class _SweepCommand(GroupedCommand):
    """A command that points to ``--vary`` where an option of one value is given a list."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, with that message."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            names = [
                one.lstrip("-") for one in (error.param.opts if error.param else ()) if one.lstrip("-") in _READERS
            ]
            if names and "," in error.message:
                said = f"{error.message} Several values are varied: --vary {names[0]}=V1,V2"
                raise click.BadParameter(said, ctx, error.param) from None
            raise


@click.command("sweep", cls=_SweepCommand)
@click.argument("model", shell_complete=models)
@takes("request", Request)
@takes("settings", Settings, "Settings")
@takes("workers", Workers, "Workers")
@form_options
def sweep_command(
    model: str, request: Request, settings: Settings, workers: Workers, form: Format, output: str | None
) -> None:
    """Analyse MODEL under every combination of the settings that --vary names.

    A step is captured once for all combinations that differ only in what a replay sees: alloc-conf, runtime, and the
    capacity of the card. MODEL and the other options are those of 'graphmem analyze'. For example:

    \b
      graphmem sweep hf:gpt2 --vary batch=1,2,4 --vary amp=off,bf16 \\
        --vary gpu=T4,A10G --seq-len 512 --format csv -o sweep.csv

    Memory in JSON and CSV is in bytes. Exit codes: 0 done, 1 error, a wrong value, or a combination that cannot be
    analysed, 2 options that cannot be read.
    """
    check_output(output)
    names, vary = _vary(settings.vary)
    prices = None if settings.prices is None else card_prices(Path(settings.prices))
    if not vary and not prices:
        raise UsageError("nothing is varied; write --vary batch=1,2,4, or --prices FILE for the cards in it")
    given = click.get_current_context().params
    for name in names:
        if given.get(name.replace("-", "_")):
            raise UsageError(f"--{name} and --vary {name} are given; leave one out")
    of_one_card = [name for name in ("already_used", "cuda", "capability") if given[name]]
    if ("gpu" in names or prices) and of_one_card:
        raise UsageError(
            f"--{of_one_card[0].replace('_', '-')} is said of one card; leave it, --vary gpu or --prices out"
        )
    with working() as progress:
        from graphmem.planning.sweep import sweep

        options = {**vars(workers), **vars(request)}
        rows = sweep(model, vary=vary, prices=prices, store=settings.store, say=progress, **options)
    publish(rows, form, output)
    if any(row.figures["error"] for row in rows):
        click.get_current_context().exit(1)


def _vary(texts: Sequence[str]) -> tuple[list[str], dict[str, list[object]]]:
    """The options as written, and library name -> values. Raises :class:`UsageError`."""
    names: list[str] = []
    vary: dict[str, list[object]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        if not separator or not values:
            raise UsageError(f"cannot read --vary {text!r}; write NAME=V1,V2, for example batch=1,2,4")
        try:
            known, read = reader_of(name)
        except UsageError as error:
            raise UsageError(f"--vary knows {error}") from None
        name = name if name.startswith("dim:") else name.replace("_", "-")
        if known in vary:
            raise UsageError(f"--vary {name} is given twice; write all its values in one")
        divider = ";" if name == "alloc-conf" else ","
        try:
            written = [value.strip() for value in values.split(divider)]
            vary[known] = [value for one in written for value in (_range(one) if read is _count else [read(one)])]
        except UsageError as error:
            raise UsageError(f"--vary {name}: {error}") from None
        names.append(name)
    return names, vary
