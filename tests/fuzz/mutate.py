"""Damage: to bytes, to text, to JSON documents. Everything comes from the given random generator."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

#: Numbers at which programs go wrong.
INTEGERS = (
    0, 1, -1, 2, 3, 5, 7, 8, 15, 127, 128, 255, 256, 512, 1 << 20, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**53,
    2**62, 2**63 - 2, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30, -(10**30), 10**400,
)  # fmt: skip
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e18, 1e300, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "", " ", "\n", "a\nb", "\0", "\x1b[31m", "\u202e", "\ud800", "ünï", "x" * 5000, "-", "--help", "../../etc/passwd",
    "/etc/passwd", "{}", "[]", "null", "nan", "inf", "1e999", "9" * 5000, "0x10", "1_000", "١٢", "%s%n", "'", '"', "\\",
    "__class__", "None", "True", "$(id)", "a,b", "a:b", "a=b", ";", ",,", "::", "batch", "float16", "cuda", "-1", "5",
)  # fmt: skip
#: Stands for digits that Python would refuse to print; put in after the document is text.
_HUGE = "@@HUGE@@"
_DEPTH = 3000


def data(rng: random.Random, sound: bytes, *others: bytes) -> bytes:
    """``sound`` with one to four pieces of damage, now and then with a piece of another file."""
    damaged = bytearray(sound)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(_DAMAGES)(rng, damaged)
        if others and rng.random() < 0.05:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            at = rng.randrange(len(damaged) + 1)
            damaged[at:at] = other[start : start + rng.randrange(64)]
    return bytes(damaged)


def _position(rng: random.Random, damaged: bytearray) -> int:
    return rng.randrange(len(damaged)) if damaged else 0


def _flip(rng: random.Random, damaged: bytearray) -> None:
    if damaged:
        damaged[_position(rng, damaged)] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, damaged: bytearray) -> None:
    if damaged:
        damaged[_position(rng, damaged)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _cut(rng: random.Random, damaged: bytearray) -> None:
    del damaged[_position(rng, damaged) :]


def _remove(rng: random.Random, damaged: bytearray) -> None:
    start = _position(rng, damaged)
    del damaged[start : start + rng.choice((1, 2, 4, 8, 64))]


def _repeat(rng: random.Random, damaged: bytearray) -> None:
    start = _position(rng, damaged)
    piece = damaged[start : start + rng.choice((1, 2, 4, 16, 64, 300))]
    at = _position(rng, damaged)
    damaged[at:at] = piece * rng.choice((1, 1, 2, 8, 100))


def _insert(rng: random.Random, damaged: bytearray) -> None:
    at = _position(rng, damaged)
    damaged[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))


def _number(rng: random.Random, damaged: bytearray) -> None:
    size = rng.choice((1, 2, 4, 8))
    value = rng.choice(INTEGERS) % (1 << 8 * size)
    at = _position(rng, damaged)
    damaged[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))


_DAMAGES: Sequence[Callable[[random.Random, bytearray], None]] = (
    _flip, _flip, _set, _set, _cut, _remove, _repeat, _insert, _number,
)  # fmt: skip


def text(rng: random.Random, sound: str) -> str:
    """A line of an option with damage: parts swapped, doubled, replaced by what programs stumble over."""
    damaged = sound
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(damaged) + 1)
        end = min(len(damaged), at + rng.choice((0, 1, 1, 2, 5)))
        piece = rng.choice(
            (rng.choice(TEXTS), str(rng.choice(INTEGERS[:-1])), str(rng.choice(FLOATS)), damaged[at:end] * 2)
        )
        damaged = damaged[:at] + piece + damaged[end:]
    return damaged.replace("\0", "") if rng.random() < 0.9 else damaged


def number(rng: random.Random) -> str:
    """What somebody may write where a number is wanted."""
    kind = rng.random()
    if kind < 0.4:
        return str(rng.choice(INTEGERS[:-1]))
    if kind < 0.5:
        return str(rng.choice(FLOATS))
    if kind < 0.6:
        return str(rng.randrange(1, 65))
    if kind < 0.7:
        return "9" * rng.choice((19, 20, 40, 400, 4299, 4301, 6000))
    return rng.choice(TEXTS).replace("\0", "")


def document(rng: random.Random, sound: Any) -> bytes:
    """``sound`` as JSON text with one to three values replaced, removed, doubled or nested deeply."""
    value = copy.deepcopy(sound)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(rng, value)
    written = json.dumps(value).replace(f'"{_HUGE}"', "9" * rng.choice((400, 4299, 4301, 20_000)))
    encoded = written.encode("utf-8", "surrogatepass")
    return data(rng, encoded) if rng.random() < 0.1 else encoded


def junk(rng: random.Random) -> Any:
    """A value of some other kind than the one expected."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(INTEGERS)
    if kind == 1:
        return rng.choice(FLOATS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice((None, True, False))
    if kind == 4:
        return [rng.choice(INTEGERS) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {rng.choice(TEXTS): rng.choice(INTEGERS)}
    if kind == 6:
        return _HUGE
    if kind == 7:
        return rng.choice(([], {}, [[]], [None], [{}], {"a": {}}, ["x"], [5], [[1, 2], [3, 4]]))
    nested: Any = []
    for _ in range(rng.choice((10, 200))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside ``value``."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


def _changed(rng: random.Random, value: Any) -> Any:
    paths = [path for path in places(value) if path]
    if not paths or rng.random() < 0.02:
        return junk(rng)
    path = rng.choice(paths)
    target = value
    for key in path[:-1]:
        target = target[key]
    last, what = path[-1], rng.random()
    if what < 0.6:
        target[last] = _near(rng, target[last]) if rng.random() < 0.4 else junk(rng)
    elif what < 0.75:
        del target[last]
    elif isinstance(target, list):
        target.insert(last, copy.deepcopy(rng.choice(target)))
    elif what < 0.9:
        target[rng.choice((rng.choice(TEXTS), f"{last}s", rng.choice(list(target))))] = copy.deepcopy(target[last])
    else:
        other = rng.choice(paths)
        found = value
        try:
            for key in other:
                found = found[key]
        except (KeyError, IndexError, TypeError):
            return value
        target[last] = copy.deepcopy(found)
    return value


def _near(rng: random.Random, value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*INTEGERS, value + 1, value - 1, -value, value * 2))
    if isinstance(value, float):
        return rng.choice((*FLOATS, -value, value * 1e9))
    if isinstance(value, str):
        return text(rng, value)
    if isinstance(value, list):
        return value * 2 if rng.random() < 0.5 else value[: len(value) // 2]
    return value


def deep(rng: random.Random) -> bytes:
    """JSON nested deeper than a parser's stack."""
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    count = rng.choice((_DEPTH, 100_000))
    return opening * count + b"1" + closing * count
