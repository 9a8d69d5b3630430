"""Likely numbers for dimensions that nothing binds, tried on the graph before they are named.

A guess comes from the file's metadata, the dimension's name and the dimensions beside it; a dimension may also be what
two others make (``past + seq``), whatever an exporter called it. The graph's own nodes then show whether a guess fits:
a ``Reshape``, a ``Conv`` or a ``Concat`` that cannot take it refuses it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from graphmem.base.records import dataclass
from graphmem.graph.asked import Asked
from graphmem.graph.binding import ANONYMOUS, Free, UnboundError, is_sequence
from graphmem.graph.model import TensorSpec

#: Seconds of processor time after which no further guess is tried.
LONGEST_SEARCH = 1.2
_AUDIO = re.compile(r"audio|wav|signal|speech|sample|pcm", re.IGNORECASE)
_MASK = re.compile(r"mask", re.IGNORECASE)
_PAST = re.compile(r"past|cache", re.IGNORECASE)
_STATE = re.compile(r"state|hidden|^[hc]n?_?0?$", re.IGNORECASE)
_SIDES = ("height", "width")
#: Numbers of the metadata that exporters write under these names, by what they are of.
_METADATA = {
    "image": ("imgsz", "image_size", "input_size", "img_size", "shape"),
    "height": ("height", "input_height"),
    "width": ("width", "input_width"),
    "audio": ("sample_rate", "window_size_samples", "chunk_size"),
    "sequence": ("sequence_length", "max_length", "max_seq_len", "seq_len"),
}
#: Inputs longer than this make loops whose planning takes long.
_LONG_LOOP = 1024
#: What to try, the likeliest first: sides of images and of lines of text, samples of sound, lengths of sequences.
_IMAGE = (640, 224, 320, 256, 512, 32, 1024)
_LINE = (320, 160, 640, 100)
_LINE_HEIGHTS = (48, 32)
_SOUND = (16000, 512, 1280, 576, 256, 48000)
_LENGTH = (128, 16, 64, 512, 8, 100, 300, 3000, 32, 256, 1024, 80, 2, 1)


def suggested(
    error: UnboundError,
    asked: Asked,
    metadata: Mapping[str, str],
    implied: Mapping[tuple[str, int], int],
    *,
    loops: bool = False,
) -> Iterator[Asked]:
    """Questions to ask instead, the likeliest first. ``implied`` are dimensions that weights fix, by input and
    position; of a graph that ``loops`` short inputs are tried first, as every run is planned."""
    search = _Search(error, asked, metadata, implied, loops)
    return map(search.asked_with, search.attempts())


def first_of_each_first(searches: Sequence[Iterator[Asked]]) -> Iterator[Asked]:
    """The first question of every search, so that one that cannot be answered is given up, then all others of the
    first, of the second, until :data:`LONGEST_SEARCH`."""
    until = time.process_time() + LONGEST_SEARCH
    for wanted in chain((one for search in searches for one in islice(search, 1)), chain.from_iterable(searches)):
        yield wanted
        if time.process_time() > until:
            return


@dataclass
class _Search:
    """Numbers for the free dimensions, the likeliest of each first, then one of them another."""

    error: UnboundError
    asked: Asked
    metadata: Mapping[str, str]
    implied: Mapping[tuple[str, int], int]
    loops: bool

    def __post_init__(self) -> None:
        self.candidates = [self._candidates(free) for free in self.error.free]

    def _candidates(self, free: Free) -> list[int]:
        places = [(spec.name, p) for spec, at in free.places for p in (at, at - len(spec.shape))]
        fixed = [self.implied[place] for place in places if place in self.implied]
        candidates = fixed[:1] or _candidates(free, self.asked, self.metadata)
        return sorted(candidates, key=lambda number: number > _LONG_LOOP) if self.loops else candidates

    def attempts(self) -> Iterator[list[int]]:
        """Each attempt has a number for every free dimension."""
        first = [candidates[0] for candidates in self.candidates]
        seen: set[tuple[int, ...]] = set()
        alike = self._alike()
        tried = (self._related(first), first, *islice(alike, 1), *self._lines(), *alike, *self._others(first))
        for numbers in tried:
            if tuple(numbers) not in seen:
                seen.add(tuple(numbers))
                yield numbers

    def _lines(self) -> Iterator[list[int]]:
        """Images of a line of text, where both sides are free."""
        sides = [_side(free) for free in self.error.free]
        if {2, 3} <= set(sides):
            for height in _LINE_HEIGHTS:
                size = {2: height, 3: _LINE[0]}
                yield [size.get(side, one[0]) for side, one in zip(sides, self.candidates, strict=True)]

    def _alike(self) -> Iterator[list[int]]:
        for rank in range(1, max(map(len, self.candidates))):
            yield [one[min(rank, len(one) - 1)] if len(one) > 2 else one[0] for one in self.candidates]

    def _others(self, first: Sequence[int]) -> Iterator[list[int]]:
        known = {int(d) for spec in self.error.inputs for d in spec.shape if isinstance(d, int)}
        for position, candidates in enumerate(self.candidates):
            for number in dict.fromkeys((*candidates[1:], *sorted(known), sum(first) - first[position])):
                yield [*first[:position], number, *first[position + 1 :]]
                changed = [*first[:position], number, *first[position + 1 :]]
                related = self._related(changed)
                if related != changed:
                    yield related

    def _related(self, numbers: Sequence[int]) -> list[int]:
        """The numbers; where there is a past, that of a mask is the sum of past and tokens."""
        by_kind: dict[str, int] = {}
        for free, number in zip(self.error.free, numbers, strict=True):
            by_kind.setdefault(_role(free), number)
        if "past" not in by_kind:
            return list(numbers)
        sequence = by_kind.get("tokens", self._bound_tokens())
        whole = by_kind["past"] + sequence
        return [whole if _role(free) == "mask" else n for free, n in zip(self.error.free, numbers, strict=True)]

    def _bound_tokens(self) -> int:
        for spec in self.error.inputs:
            if _is_tokens(spec) and not _MASK.search(spec.name) and isinstance(spec.shape[1], int):
                return spec.shape[1]
        return 1

    def asked_with(self, numbers: Sequence[int]) -> Asked:
        """The question with these numbers for the free dimensions."""
        dims, shapes = dict(self.asked.dims), {k: tuple(v) for k, v in self.asked.input_shapes.items()}
        nameless: dict[str, list[int | str]] = {}
        bound = {free.name: n for free, n in zip(self.error.free, numbers, strict=True) if free.name != ANONYMOUS}
        for free, number in zip(self.error.free, numbers, strict=True):
            spec, position = free.places[0]
            if free.name == ANONYMOUS:
                nameless.setdefault(spec.name, [bound.get(str(d), d) for d in spec.shape])[position] = number
            else:
                dims[free.name] = number
        for name, shape in nameless.items():
            shapes[name] = tuple(int(dimension) for dimension in shape)
        return replace(self.asked, dims=dims, input_shapes=shapes)


def _is_tokens(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.dtype.startswith("int")


def _role(free: Free) -> str:
    """How a dimension takes part in a decoder's step: tokens, past, the mask over both, or not at all."""
    if _PAST.search(free.name) or any(_PAST.search(spec.name) for spec, _ in free.places):
        return "past" if not re.search("batch", free.name, re.IGNORECASE) else ""
    if all(position == 1 and _is_tokens(spec) for spec, position in free.places):
        is_mask = all(_MASK.search(spec.name) for spec, _ in free.places)
        return "mask" if is_mask and not is_sequence(free.name) else "tokens"
    return ""


def _side(free: Free) -> int:
    """2 and 3 for the height and the width of images whose channels come first, else 0."""
    spec, position = free.places[0]
    return position if position > 1 and _kind(spec, position, free.name) == "image" else 0


def _candidates(free: Free, asked: Asked, metadata: Mapping[str, str]) -> list[int]:
    spec, position = free.places[0]
    kind = _kind(spec, position, free.name)
    from_file = [number for key in _keys(kind, free.name) for number in _numbers(metadata.get(key, ""))]
    if kind == "image":
        others = [d for d in spec.shape[1:] if isinstance(d, int)]
        sides = [d for d in others if d > 4]
        usual = (*(_LINE if sides and sides[0] <= 64 else sides), *_IMAGE)
    else:
        usual = {"audio": (*_SOUND, *_LENGTH), "channels": (3, 1), "batch": (1,)}.get(kind, (*_LENGTH, *_SOUND))
    given = [asked.batch] if kind == "state" and asked.batch else []
    return list(dict.fromkeys((*from_file, *given, *usual)))


def _kind(spec: TensorSpec, position: int, name: str) -> str:
    if position == 0 and len(spec.shape) > 1:
        return "batch"
    if _PAST.search(name) or _PAST.search(spec.name):
        return "sequence"
    if position == 1 and len(spec.shape) == 3 and _STATE.search(spec.name):
        return "state"
    if len(spec.shape) == 4 and spec.dtype.startswith(("float", "uint8")):
        is_channel = "channel" in name.lower() or (position == 1 and spec.shape[3] not in (1, 3))
        return "channels" if is_channel else "image"
    is_sound = bool(_AUDIO.search(spec.name) or _AUDIO.search(name)) or len(spec.shape) == 2
    if spec.dtype.startswith("float") and is_sound and len(spec.shape) <= 3 and not is_sequence(name):
        return "audio"
    return "sequence"


def _keys(kind: str, name: str) -> Iterator[str]:
    side = next((side for side in _SIDES if side in name.lower()), "")
    yield from _METADATA.get(side, ())
    yield from _METADATA.get(kind, ())


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,6}", text) if 0 < int(number) < 1 << 17]


def options_of(wanted: Asked, asked: Asked) -> tuple[str, ...]:
    """The options that ask for ``wanted`` beside those that asked for ``asked``."""
    dims = [("--dim", f"{name}={value}") for name, value in wanted.dims.items() if name not in asked.dims]
    shapes = [
        ("--input-shape", f"{name}:{'x'.join(map(str, shape))}")
        for name, shape in wanted.input_shapes.items()
        if name not in asked.input_shapes
    ]
    trips = [("--trip-count", str(wanted.trip_count))] if wanted.trip_count != asked.trip_count else []
    batch = [("--batch", str(wanted.batch))] if wanted.batch != asked.batch else []
    return tuple(word for pair in (*batch, *dims, *shapes, *trips) for word in pair)
