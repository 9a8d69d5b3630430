"""Byte units, used only where text is rendered or user text is read. Everywhere else bytes are plain ``int``."""

from __future__ import annotations

import re
from fractions import Fraction

from graphmem.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

#: Sizes are held as signed 64-bit numbers of bytes.
_ADDRESSABLE = 1 << 63
_MOST_DIGITS = 40

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": TIB, "tib": TIB, "tb": 1000**4,
}  # fmt: skip


def format_bytes(count: int) -> str:
    """Render ``count`` bytes with a binary unit: ``1.50 GiB``, ``512 B``. Negative counts keep their sign."""
    magnitude = abs(count)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if magnitude >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count} B"


def format_alike(*counts: int) -> list[str]:
    """The same of several: where all have one unit, the last one alone says it."""
    words = [format_bytes(count) for count in counts]
    if len({word.rpartition(" ")[2] for word in words}) > 1:
        return words
    return [*(word.rpartition(" ")[0] for word in words[:-1]), words[-1]]


def format_enough(count: int) -> str:
    """As :func:`format_bytes`, rounded up: this much read back is not less than ``count``."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= factor:
            return f"{-(-100 * count // factor) / 100:,.2f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """A time in the unit that suits it: ``35 ms``, ``2.1 s``, ``5 min``, ``3.5 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def parse_bytes(text: str) -> int:
    """Read ``"80GiB"``, ``"24G"`` or ``"1073741824"`` as bytes. ``K M G T`` are binary; ``KB MB GB TB`` decimal."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match.group(2).lower() not in _FACTORS:
        raise UsageError(f"cannot read {text!r} as a memory size; write for example 24GiB, 80G or 1073741824")
    digits, factor = match.group(1), _FACTORS[match.group(2).lower()]
    count = int(Fraction(digits) * factor) if len(digits) <= _MOST_DIGITS else _ADDRESSABLE
    if count >= _ADDRESSABLE:
        raise UsageError(f"no GPU has {text if len(text) <= _MOST_DIGITS else text[:20] + '...'} of memory")
    return count


def parse_size(text: str) -> int:
    """:func:`parse_bytes` for memory of a card, where a small number without a unit was meant to have one."""
    count = parse_bytes(text)
    if text.strip().replace(".", "", 1).isdigit() and 0 < count < MIB:
        raise UsageError(f"{text.strip()} bytes are less than any card's; write a unit: {text.strip()}GiB")
    return count
