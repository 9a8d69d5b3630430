"""The options of a load over time: where its requests come from, and what is wanted of the engines that carry it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from graphmem.base.options import Check, Whole, above_zero, check_values, option
from graphmem.errors import UsageError
from graphmem.serving.base import spelled
from graphmem.serving.lengths import Quantiles, quantiles_of
from graphmem.serving.loads import Load, drawn, read, shorter
from graphmem.serving.over_time import Speed

#: The part of prompts that may be shorter than the beginning which all should share: where nearly all are, the two
#: options do not speak of the same prompts.
_MOST_SHORTER = 0.9
#: Seconds that a trace is followed beyond its last request, in which most are answered.
_AFTER_A_TRACE = 60.0
#: Seconds of a unit of time, by the names that people write.
_UNITS = {
    **dict.fromkeys(("ms", "msec"), 0.001), **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0), **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}  # fmt: skip
_TIMES = "|".join(sorted(_UNITS, key=len, reverse=True))
_NUMBER = r"(\d{1,12}(?:\.\d{1,9})?)"
Time = TypeVar("Time", float, "float | None")


# --- how values are read ----------------------------------------------------------------------------------------------


def seconds_of(name: str, given: object, bare: bool = True) -> float:
    """``"1h"``, ``"90s"``, ``"25ms"`` or a number as seconds; a ``bare`` number as text too. Raises
    :class:`UsageError`."""
    if not isinstance(given, str):
        return float(above_zero(name, given))  # type: ignore[arg-type]
    match = re.fullmatch(rf"{_NUMBER}\s*({_TIMES}|)", given.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match and (match[2] or bare) else 0.0
    if not seconds:
        raise UsageError(f"{spelled(name)} {given!r} is no time; write for example 1h, 90s or 25ms")
    return seconds


def _with_unit(name: str, given: object) -> float:
    return seconds_of(name, given, bare=False)


def _rate(name: str, given: object) -> float:
    """``"5/s"``, ``"300/min"``, ``"20000/d"`` or a number as requests a second. Raises :class:`UsageError`."""
    if not isinstance(given, str):
        return float(above_zero(name, given))  # type: ignore[arg-type]
    match = re.fullmatch(rf"{_NUMBER}\s*(?:(?:requests?|req|r)?\s*/\s*({_TIMES})|[rq]ps)", given.strip().lower())
    rate = float(match[1]) / _UNITS[match[2] or "s"] if match else 0.0
    if not rate:
        raise UsageError(f"{spelled(name)} {given!r} is no rate; write for example 5/s, 300/min or 20000/d")
    return rate


def _links(name: str, given: object) -> object:
    """``"50,32"``, GB/s, as bytes a second; two numbers are these already. Raises :class:`UsageError`."""
    if not isinstance(given, str):
        return given
    match = re.fullmatch(rf"{_NUMBER}\s*,\s*{_NUMBER}", given.strip())
    rates = tuple(float(one) * 1e9 for one in match.groups()) if match else ()
    if not rates or not all(rates):
        raise UsageError(f"{spelled(name)} {given!r}; write GB/s of a card to other engines and to its host: 50,32")
    return rates


# --- the options ------------------------------------------------------------------------------------------------------


def _time(default: Time, help: str, check: Check = seconds_of) -> Time:
    """An option that is a time, with or without its unit."""
    return option(default, help, check, metavar="TIME", read=str)


@dataclass(frozen=True)
class OverTime:
    """A load over time, and what is wanted of the engines that carry it. Times are kept in seconds, ``arrivals`` a
    second, ``kv_links`` in bytes a second, to other engines and to the host: 50 GB/s are a port of 400 Gbit/s for every
    card, as of servers of H100s, and 32 those of PCIe 4.0 with 16 lanes, one way."""

    arrivals: float | None = option(
        None, "e.g. 5/s, 20000/d; --lengths are those of prompts then.", _rate, metavar="RATE", read=str
    )
    output_lengths: Quantiles = option(
        (), "Lengths of answers, e.g. p50=200,p99=1000.", quantiles_of, metavar="LIST", read=str
    )
    duration: float = _time(3600.0, "How long requests arrive. Default 1h.")
    trace: str | Path | None = option(
        None, "CSV instead: timestamp,prompt,output[,prefix,prefix_tokens], or Mooncake's JSON lines.", metavar="FILE"
    )
    shared_prefix: int = option(
        0, "Tokens that all prompts begin with, e.g. a system prompt. Default 0.", Whole(0), metavar="N"
    )
    step_time: float | None = _time(None, "Seconds of a step. Default: predicted, else 30ms.")
    tokens_per_second: float | None = option(None, "Of long prompts. Default: predicted, else 10000.", above_zero)
    max_wait: float = _time(10.0, "What 99 % of requests may wait. Default 10s.")
    max_tpot: float | None = _time(None, "What 99 % of them may take for a token, e.g. 50ms.", _with_unit)
    disaggregated: bool = option(False, "Also: engines that prefill, and others that decode.")
    autoscale: float | None = _time(None, "Also: copies that follow the load, e.g. every 1h.")
    startup: float = _time(300.0, "How long a copy takes to start. Default 5min, assumed.", _with_unit)
    kv_links: tuple[float, float] = option(
        (50e9, 32e9),
        "GB/s of a card to other engines (--disaggregated), to its host (--kv-offloading-size GiB, vLLM's); assumed. "
        "Default 50,32.",
        _links, metavar="A,B", read=str,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_values(self)
        if self.autoscale is not None and self.autoscale < self.startup:
            raise UsageError(
                f"--autoscale {self.autoscale:g}s is shorter than --startup {self.startup:g}s: a copy would not have "
                "started by then"
            )

    @property
    def speed(self) -> Speed | None:
        """The speed of a step, as far as it is given; None where nothing of it is."""
        if self.step_time is None and self.tokens_per_second is None:
            return None
        usual = Speed()
        return Speed(self.step_time or usual.step_seconds, self.tokens_per_second or usual.tokens_per_second, False)

    def load(self, prompts: Quantiles) -> Load | None:
        """The load, with ``prompts`` of such lengths where no file says them; None where none is asked for. Raises
        :class:`graphmem.errors.GraphmemError` for options that belong to another load, or to none."""
        if self.trace is not None:
            self._refuse(("arrivals", "output_lengths", "duration"), "and --trace: a load comes from one of them")
            return self._of_file(Path(self.trace))
        if self.arrivals is None:
            every = tuple(one.name for one in fields(self))
            self._refuse(every, "belongs to a load over time: give --arrivals, for example 5/s, or --trace")
            return None
        if not prompts or not self.output_lengths:
            raise UsageError(
                "--arrivals wants --lengths (of prompts) and --output-lengths, for example p50=800,p99=6000"
            )
        return self._drawn(self.arrivals, prompts)

    def _refuse(self, names: Sequence[str], why: str) -> None:
        """Raise :class:`UsageError` for the first of these options that is given."""
        usual = {one.name: one.default for one in fields(self)}
        given = [name for name in names if getattr(self, name) != usual[name]]
        if given:
            raise UsageError(f"{spelled(given[0])} {why}")

    def _of_file(self, trace: Path) -> Load:
        requests = read(trace, self.shared_prefix)
        described = f"{len(requests):,} requests of {trace.name}{self._alike}"
        return Load(requests[-1].arrival + _AFTER_A_TRACE, described, lambda longest: requests)

    def _drawn(self, rate: float, prompts: Quantiles) -> Load:
        seconds, prefix, outputs = self.duration, self.shared_prefix, self.output_lengths
        lasting = f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"
        described = f"{rate:g} requests a second over {lasting}, drawn at random (seed 0){self._alike}"
        if part := shorter(prompts, prefix):
            if part > _MOST_SHORTER:
                raise UsageError(
                    f"--shared-prefix {prefix} is longer than nearly all prompts; --lengths have it among them"
                )
            described += f", or of fewer as {part:.0%} of prompts are shorter"
        return Load(seconds, described, lambda longest: drawn(rate, seconds, prompts, outputs, longest, prefix))

    @property
    def _alike(self) -> str:
        return f", all of which begin with the same {self.shared_prefix:,} tokens" if self.shared_prefix else ""
