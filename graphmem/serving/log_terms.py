"""Figures of a log beside others: those that an engine's prediction has, or those that its other lines come to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphmem.serving.base import Served
from graphmem.serving.logs import Log, Printed, Reader
from graphmem.units import MIB, format_bytes

#: The figures that decide, the first that a log has.
DECIDE = ("KV cache", "tokens", "blocks", "KV buffer", "concurrency", "longest request")
#: What is derived of two of them.
TOKEN = "a token"


@dataclass(frozen=True)
class Term:
    """A figure of the log and the prediction's. Bytes where it is a size; ``difference`` is predicted less printed, 0
    where the printed digits hold no more."""

    name: str
    printed: float
    predicted: float
    step: float
    is_size: bool
    note: str = ""

    @property
    def difference(self) -> float:
        """Predicted less printed."""
        off = self.predicted - self.printed
        return 0.0 if abs(off) <= self.step else off

    @property
    def share(self) -> float | None:
        """The same as a part of the printed figure; None where that is nothing, or less."""
        return self.difference / self.printed if self.printed > 0 else None


def predicted_terms(reader: Reader, log: Log, served: Served) -> Iterator[Term]:
    """The printed figures that are predicted too."""
    for name, printed in with_token(reader, log).items():
        found = predicted(reader, served, name)
        if found is not None:
            yield term_of(printed, found)


def own_terms(reader: Reader, log: Log) -> Iterator[Term]:
    """The printed figures that the log's other lines come to."""
    for name, value in reader.adds_up(log).items():
        if name in log.printed:
            yield term_of(log.printed[name], value)


def tokens_in(reader: Reader, log: Log) -> float:
    """The tokens of the cache, printed or by its blocks; 0 where neither is."""
    return log.printed["tokens"].value if "tokens" in log.printed else reader.adds_up(log).get("tokens", 0)


def with_token(reader: Reader, log: Log) -> dict[str, Printed]:
    """The printed figures, and bytes of a token: they are the model's, whatever else the card holds."""
    whole = log.printed.get("KV buffer") or log.printed.get("KV cache")
    tokens = tokens_in(reader, log)
    if whole is None or tokens <= 0 or whole.value <= 0:
        return dict(log.printed)
    value = whole.value / tokens
    return {**log.printed, TOKEN: Printed(TOKEN, value, value, value, (whole.step + value) / tokens * 2)}


def term_of(printed: Printed, value: float) -> Term:
    """A printed figure beside another."""
    note = ""
    if printed.lowest != printed.highest:
        low, high = (size_words(one, printed.is_size) for one in (printed.lowest, printed.highest))
        note = f"of all ranks {low} to {high}"
    step = printed.step + (0 if printed.is_size else 0.005 if printed.name == "concurrency" else 0)
    return Term(printed.name, printed.value, value, step, printed.is_size, note)


def predicted(reader: Reader, served: Served, name: str) -> float | None:
    """The prediction's figure of this name; None where it has none."""
    cache = served.kv_cache
    whole = cache.blocks * cache.block_bytes
    known: dict[str, float] = {
        "KV cache": cache.available_bytes, "KV buffer": whole, "blocks": cache.blocks,
        "tokens": cache.tokens, "concurrency": cache.concurrency, "weights": served.weights_bytes,
        "longest request": cache.longest,
    }  # fmt: skip
    if cache.tokens:
        known[TOKEN] = whole / cache.tokens
    if served.graphs_bytes:  # else they are not predicted
        known["CUDA graphs"] = served.graphs_bytes
    parts = {part.name: part.bytes for part in served.parts}
    if name in reader.sums:
        return sum(parts.get(one, 0) for one in reader.sums[name])
    return known.get(name, parts.get(name))


def off_words(term: Term) -> str:
    """The difference in words."""
    if not term.difference:
        return "as printed"
    share = "" if term.share is None or abs(term.share) > 9.99 else f" ({term.share:+.1%})"
    if term.is_size:
        sign = "+" if term.difference > 0 else "-"
        return f"{sign}{format_bytes(round(abs(term.difference)))}{share}"
    digits = 2 if abs(term.difference) < 100 else 0
    return f"{term.difference:+,.{digits}f}{share}"


def size_words(value: float, is_size: bool) -> str:
    """A figure as text."""
    if not is_size:
        return f"{value:,.2f}" if value % 1 else f"{value:,.0f}"
    text = format_bytes(round(abs(value))) if abs(value) >= MIB else f"{abs(value) / 1024:.2f} KiB"
    return f"-{text}" if value < 0 else text
