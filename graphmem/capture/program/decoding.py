"""Long generations: a token is much like the one before, so not every one is followed.

``model.generate`` of transformers asks once a token whether it is long enough (``MaxLengthCriteria``). When four
tokens in a row took and gave back the same storages, whose sizes grow by the same bytes a token, the rest is *probed*:
what the loop keeps (keys and values, ids, masks) is stretched to another length, and one token is followed there.
Kernels change their mind with the length (how many parts an attention is split into), so tokens at both ends of every
block of :data:`BLOCK` are followed; where a block's ends do not lie on one line it is halved, down to single tokens.
From the probes the allocations and frees of all tokens are written, in the order and with the bytes of the full run.

Where tokens are not alike, or something of the loop cannot be stretched, every token is followed.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphmem.capture.patches import Patches
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.values.callers import called_to_sample
from graphmem.errors import CannotShortenError
from graphmem.trace import Category, EventKind, Operator, Place, TraceBuilder

#: Tokens in a row that have to be alike, and the fewest that are worth probing.
ALIKE, FEWEST = 4, 48
#: No kernel splits keys and values at other lengths than multiples of this.
BLOCK = 64
#: The token that makes the length L attends to L - 1: a block of keys ends one token later.
AFTER = 1
#: More probes than this are no gain.
MOST_PROBES = 96


@dataclass(frozen=True)
class _Birth:
    category: Category
    stream: int
    place: Place
    label: str
    pool: int


@dataclass
class _Token:
    """What one token does. ``events``: (kind, how many tokens ago, number of the storage among those of that token,
    stream, position in ``operators``)."""

    events: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    births: list[_Birth] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)  # events before which a forward pass began

    def is_like(self, other: _Token) -> bool:
        return self.events == other.events and self.births == other.births and self.operators == other.operators


@dataclass(frozen=True)
class _Kept:
    """The shape of something that the loop keeps: ``sizes`` without the dimension ``dim``, which is ``more`` than the
    tokens are."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    dim: int
    more: int


class Decoding:
    """One generation, from its first token to its ``last``. Lengths count tokens, the prompt's included."""

    def __init__(self, recorder: Recorder, last: int) -> None:
        self._recorder = recorder
        self._last = last
        self._begin_token()
        self._of: dict[int, tuple[int, int]] = {}  # storage -> (number of the followed token, its place among those)
        self._made: list[list[int]] = []  # by followed token, its storages
        self._tokens: list[_Token] = []
        self._length = 0
        self._is_followed = False  # all of it, token by token
        self._real: TraceBuilder | None = None  # what the trace is written to, while probes are not
        self._memory: Any = None
        self._start = self._at_start = 0  # where probing begins: the length, and the number of the token
        self._found: dict[int, _Token] = {}  # length -> what the token that makes it does
        self._following = 0  # the length that is probed now
        self._after_its_own = False  # whether the token before it is followed as well
        self._kept: set[_Kept] = set()
        self._count = 0

    def note(self, length: int) -> None:
        """A token is there, and ``length`` of them; what the loop keeps may be of another length afterwards. Of the
        last length it is when all tokens are written."""
        if self._is_followed:
            return
        self._length = length
        self._read()
        if self._real is not None:
            if length < self._following:
                return
            if not self._after_its_own and not self._tokens[-1].is_like(self._tokens[-2]):
                # What a token gives back was made by the one before, and that was another kind of token.
                self._after_its_own = True
                self._stretch(length - 2)
                self._begin_token()
                return
            self._found[length] = self._tokens[-1]
            self._go_on()
        elif not self._is_followed and self._last - length >= FEWEST and self._is_steady() and self._begin():
            self._go_on()

    def _begin_token(self) -> None:
        self._row, self._passes = len(self._recorder.builder.rows), len(self._recorder.passes_aside)

    # --- following ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """The events since the last token."""
        builder, number = self._recorder.builder, len(self._tokens)
        token = _Token(passes=[row - self._row for row in self._recorder.passes_aside[self._passes :]])
        made: list[int] = []
        positions: dict[int, int] = {}
        for kind, subject, operator, stream in builder.rows[self._row :]:
            if kind > EventKind.FREE:
                self._cannot("something else than storages is in its tokens")
                return
            if operator not in positions:
                positions[operator] = len(token.operators)
                token.operators.append(builder.operators[operator])
            if kind == EventKind.ALLOC:
                self._of[subject] = number, len(made)
                made.append(subject)
                token.sizes.append(builder.storage_bytes[subject])
                token.births.append(_birth(builder, subject))
            of, place = self._of.get(subject, (-1, subject))
            token.events.append((kind, number - of if of >= 0 else -1, place, stream, positions[operator]))
        self._tokens.append(token)
        self._made.append(made)
        self._begin_token()

    def _is_steady(self) -> bool:
        last = self._tokens[-ALIKE:]
        if len(self._tokens) <= ALIKE or not all(token.is_like(last[0]) for token in last):
            return False
        if any(not 0 <= lag <= 1 for _, lag, _, _, _ in last[0].events) or any(b.pool for b in last[0].births):
            return False
        steps = [_growth(a, b) for a, b in pairwise(last)]
        return all(step == steps[0] for step in steps)

    # --- probing ------------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """From here on what is recorded is thrown away, but for the probes. False where that cannot be."""
        growth = _growth(self._tokens[-2], self._tokens[-1])
        growing = {index for index in self._alive() if growth[self._of[index][1]]}
        tensors = self._tensors(growing)
        shapes = {index: _kept(over, growth[self._of[index][1]], self._length) for index, over in tensors.items()}
        if set(tensors) != growing or None in shapes.values():
            self._is_followed = True
            return False
        self._kept = {shape for shape in shapes.values() if shape is not None}
        self._count = len(growing)
        del tensors
        self._start, self._at_start = self._length, len(self._tokens) - 1
        self._found = {self._length: self._tokens[-1]}
        recorder = self._recorder
        real = self._real = recorder.builder
        self._passes_before = len(recorder.passes_aside)
        self._memory, recorder.storages.memory = recorder.storages.memory, None
        columns: dict[str, Any] = {
            field.name: list(getattr(real, field.name)) for field in fields(real) if field.name != "source"
        }
        recorder.builder = replace(real, **{**columns, "rows": []})
        return True

    def _go_on(self) -> None:
        """Stretch to before the next length that is to be followed; when all are, write the tokens."""
        following = self._next()
        if following is None:
            self._write()
            self._is_followed = True
            return
        if len(self._found) > MOST_PROBES:
            self._cannot(f"its tokens are not alike within blocks of {BLOCK}")
        self._following = following
        is_end = following in _ends(self._start, self._last)
        self._after_its_own = self._length == following - 1 or not is_end
        if self._length != following - 1:
            self._stretch(following - 1 if is_end else following - 2)
        self._begin_token()

    def _next(self) -> int | None:
        """The next length to follow a token at; the last one comes last, as the program goes on from it."""
        for length in _ends(self._start, self._last):
            if length not in self._found:
                return length
        known = sorted(self._found)
        for low, high in pairwise(known):
            if high - low > 1 and not self._on_one_line(low, high):
                # The first token of its kind gives back what the last of another kind made; the second may be alike.
                return low + 1 if low % BLOCK == AFTER + 1 else (low + high) // 2
        return None if self._length == self._last else self._last

    def _on_one_line(self, low: int, high: int) -> bool:
        first, second = self._found[low], self._found[high]
        if not first.is_like(second):
            return False
        steady = self._tokens[self._at_start]
        if first.is_like(steady):
            usual = _growth(self._tokens[self._at_start - 1], steady)
            return all(grown == (high - low) * g for grown, g in zip(_growth(first, second), usual, strict=True))
        return all(grown % (high - low) == 0 for grown in _growth(first, second))

    # --- stretching ---------------------------------------------------------------------------------------------------

    def _alive(self) -> Iterator[int]:
        for ref in self._recorder.storages.live.values():
            if ref.index in self._of:
                yield ref.index

    def _tensors(self, wanted: set[int]) -> dict[int, list[Any]]:
        """The tensors over storages of the trace."""
        keys = {ref.key: ref.index for ref in self._recorder.storages.live.values() if ref.index in wanted}
        found: dict[int, list[Any]] = {}
        for candidate in gc.get_objects():
            if type(candidate) is FakeTensor and candidate.layout is torch.strided:
                index = keys.get(candidate.untyped_storage()._cdata)
                if index is not None:
                    found.setdefault(index, []).append(candidate)
        return found

    def _stretch(self, length: int) -> None:
        """What the loop keeps has the sizes that it has after ``length`` tokens."""
        by, before = length - self._length, self._length
        self._length = length
        if not by:
            return
        stretched = 0
        for index, tensors in self._tensors(set(self._alive())).items():
            shape = _kept_as(tensors, self._kept, before)
            if shape is None:
                continue
            stretched += 1
            first = tensors[0]
            with torch.no_grad():
                if by > 0:
                    size = list(first.shape)
                    size[shape.dim] = by
                    longer = torch.cat([first, first.narrow(shape.dim, 0, 1).expand(size)], shape.dim)
                else:
                    longer = first.narrow(shape.dim, 0, first.shape[shape.dim] + by)
                    longer = longer.clone(memory_format=torch.contiguous_format)
                views = [longer, *(longer.detach() for _ in tensors[1:])]
            ref = self._recorder.storages.of(longer)
            assert ref is not None
            self._of[ref.index] = self._of[index]
            for old, new in zip(tensors, views, strict=True):
                torch.utils.swap_tensors(old, new)
        if stretched != self._count:
            self._cannot("what it keeps cannot be told")

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """All tokens from the start to the last, as the probes say."""
        recorder, real = self._recorder, self._real
        assert real is not None
        self._real = None
        base = len(real.storage_bytes)
        recorder.builder, recorder.storages.memory = real, self._memory
        del recorder.passes_aside[self._passes_before :]
        made = {self._start - ago: self._made[self._at_start - ago] for ago in range(ALIKE)}
        numbers: dict[int, list[int]] = {}  # of the operators of a probe
        known = sorted(self._found)
        for low, high in pairwise(known):
            for length in range(low + 1, high + 1):
                of = high if length == high else low
                token = self._found[of]
                if of not in numbers:
                    numbers[of] = _operators(real, token)
                growth = _growth(self._found[low], self._found[high]) if of == low else [0] * len(token.sizes)
                made[length] = []
                self._write_token(token, growth, length - low, high - low, numbers[of], made, length)
                made.pop(length - ALIKE, None)
        recorder.storages.operator = real.operator("(generate)", phase=real.operators[-1].phase)
        last = len(self._tokens) - 1
        for ref in recorder.storages.live.values():
            if ref.index >= base and ref.index in self._of:
                number, place = self._of[ref.index]
                ref.index = made[self._last - (last - number)][place]

    def _write_token(
        self,
        token: _Token,
        growth: list[int],
        part: int,
        whole: int,
        numbers: list[int],
        made: dict[int, list[int]],
        length: int,
    ) -> None:
        storages, builder = self._recorder.storages, self._recorder.builder
        self._recorder.passes_aside.extend(len(builder.rows) + before for before in token.passes)
        for kind, lag, place, _, operator in token.events:
            storages.operator = numbers[operator]
            if kind == EventKind.FREE:
                builder.free(made[length - lag][place], numbers[operator])
                continue
            birth = token.births[place]
            size = token.sizes[place] + growth[place] * part // whole
            made[length].append(storages.alloc(size, birth.category, birth.label, birth.place, birth.stream))

    def _cannot(self, why: str) -> None:
        """Token by token from here on, while that is still possible."""
        self._is_followed = True
        if self._real is not None:
            raise CannotShortenError(f"{self._recorder.current_source()}: this generation cannot be shortened: {why}")


def _ends(start: int, last: int) -> list[int]:
    """Both ends of every block after ``start``."""
    inner = [m + n for m in range(start - start % BLOCK + BLOCK, last, BLOCK) for n in (AFTER, AFTER + 1)]
    return sorted({length for length in (start + 1, *inner, last) if start < length <= last})


def _growth(first: _Token, second: _Token) -> list[int]:
    return [b - a for a, b in zip(first.sizes, second.sizes, strict=True)]


def _whole(tensors: list[Any]) -> Any:
    """The one shape of tensors that show all of their storage; None where they do not."""
    first = tensors[0]
    shows_all = first.is_contiguous() and first.numel() * first.element_size() == first.untyped_storage().nbytes()
    alike = all(t.shape == first.shape and t.stride() == first.stride() for t in tensors)
    return first if shows_all and alike and not first.requires_grad else None


def _kept(tensors: list[Any], growth: int, length: int) -> _Kept | None:
    first = _whole(tensors)
    if first is None:
        return None
    bytes_ = first.numel() * first.element_size()
    fitting = [dim for dim, size in enumerate(first.shape) if size > ALIKE and bytes_ // size == growth]
    if len(fitting) != 1:
        return None
    dim = fitting[0]
    sizes = (*first.shape[:dim], *first.shape[dim + 1 :])
    return _Kept(first.dtype, sizes, dim, first.shape[dim] - length)


def _kept_as(tensors: list[Any], kept: set[_Kept], length: int) -> _Kept | None:
    first = _whole(tensors)
    if first is None:
        return None
    for shape in kept:
        size = first.shape[shape.dim] if shape.dim < first.dim() else -1
        sizes = (*first.shape[: shape.dim], *first.shape[shape.dim + 1 :])
        if first.dtype is shape.dtype and size == length + shape.more and sizes == shape.sizes:
            return shape
    return None


def _operators(builder: TraceBuilder, token: _Token) -> list[int]:
    builder.operators.extend(token.operators)
    return list(range(len(builder.operators) - len(token.operators), len(builder.operators)))


def _birth(builder: TraceBuilder, index: int) -> _Birth:
    return _Birth(
        builder.categories[index],
        builder.streams[index],
        builder.places[index],
        builder.labels[index],
        builder.storage_pools[index],
    )


def patch_decoding(patches: Patches, recorder: Recorder) -> None:
    """Note every token where ``MaxLengthCriteria`` looks whether it is the last. The class is there when a model of
    transformers generates."""
    module = sys.modules.get("transformers.generation.stopping_criteria")
    if module is None:
        return
    running: weakref.WeakKeyDictionary[Any, Decoding] = weakref.WeakKeyDictionary()

    original = module.MaxLengthCriteria.__call__

    def call(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if not called_to_sample():  # a beam search counts its tokens itself, and could not be put forward
            return original(self, input_ids, *args, **kwargs)
        decoding = running.get(self)
        if decoding is None:
            decoding = running[self] = Decoding(recorder, self.max_length)
        decoding.note(input_ids.shape[1])
        return original(self, input_ids, *args, **kwargs)

    patches.set(module.MaxLengthCriteria, "__call__", call)
