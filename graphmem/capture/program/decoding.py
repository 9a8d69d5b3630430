"""Long generations: a token is much like the one before, so not every one is followed.

``model.generate`` of transformers asks once a token whether it is long enough (``MaxLengthCriteria``); a ``for`` loop
over a range in the program's own files says itself how many tokens it makes. When four tokens in a row took and gave
back the same storages, whose sizes grow evenly (or, as matrices of scores do, with the square of the length), the rest
is *probed*: what the loop keeps (keys and values, ids, masks, lists of numbers) is stretched to another length, and one
token is followed there. Kernels change their mind with the length (how many parts an attention is split into), so the
last token of every block of :data:`BLOCK` is followed, and the first one where sizes do not go on as they began; where
a block's ends do not lie on one curve it is halved, down to single tokens. From the probes the allocations and frees of
all tokens are written, in the order and with the bytes of the full run.

Where tokens are not alike, or something of the loop cannot be stretched, every token is followed.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.program.loop_state import (
    GrowingShape,
    Lists,
    growing_shape,
    resize,
    shows_all,
    sized,
    tensors_over,
)
from graphmem.capture.program.tokens import ALIKE_TOKENS, Steady, Token, between, birth_of, grown, steady
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.values.callers import called_to_sample
from graphmem.errors import CannotShortenError
from graphmem.trace import EventKind, TraceBuilder

#: The fewest tokens that are worth probing.
FEWEST = 48
#: No kernel splits keys and values at other lengths than multiples of this.
BLOCK = 64
#: A loop that has made more tokens than this, and could not be probed, is followed to its end; so is one that could not
#: be stretched so often.
MOST_FOLLOWED, MOST_ATTEMPTS = 3 * BLOCK, 4
#: More probes than this are no gain.
MOST_PROBES = 96


class Decoding:
    """One generation, from its first token to its ``last``. Lengths count tokens, the prompt's included where it is
    known. ``lists``: those that may collect tokens, if it is a loop of the program's own, whose numbers are put forward
    with what it keeps; ``is_numbered``: whether it reads them."""

    def __init__(self, recorder: Recorder, last: int, lists: Lists | None = None, *, is_numbered: bool = False) -> None:
        self._recorder = recorder
        self._last = last
        self._lists = lists
        self._is_numbered = is_numbered
        self._backward_passes = recorder.phases.backward_passes
        self._begin_token()
        self._of: dict[int, tuple[int, int]] = {}  # storage -> (number of the followed token, its place among those)
        self._made: list[list[int]] = []  # by followed token, its storages
        self._tokens: list[Token] = []
        self._length = 0
        self._attempts = 0
        self.is_followed = False  # all of it, token by token; or it has been, as far as is needed
        self._real: TraceBuilder | None = None  # what the trace is written to, while probes are not
        self._memory: Any = None
        self._steady: Steady | None = None  # how tokens grow where probing begins
        self._made_before: dict[int, list[int]] = {}  # by length, the storages of the last tokens there
        self._found: dict[int, Token] = {}  # length -> what the token that makes it does
        self._following = 0  # the length that is probed now
        self._after_its_own = False  # whether the token before it is followed as well
        self._growing: set[GrowingShape] = set()
        self._count = 0
        self._gathers = False  # whether every token leaves something in a list
        self._reach = 1  # how many tokens ago that was made which a token gives back
        self._after = 0  # a block ends at the lengths that are as many more than a multiple of it

    @property
    def length(self) -> int:
        """How many tokens there are, for all that the loop can see."""
        return self._length

    @property
    def is_probing(self) -> bool:
        """Whether what is recorded now is thrown away."""
        return self._real is not None

    def note(self, length: int, lists: Iterable[list[Any]] = ()) -> None:
        """A token is there, and ``length`` of them; what the loop keeps may be of another length afterwards. Of the
        last length it is when all tokens are written. ``lists`` are those that the loop's function knows."""
        if self.is_followed:
            return
        self._length = length
        self._read()
        if self._real is not None:
            if length < self._following:
                return
            if not self._after_its_own and not self._tokens[-1].is_like(self._tokens[-2]):
                # What a token gives back was made by the one before, and that was another kind of token.
                self._after_its_own = True
                self._stretch(length - 1 - self._reach)
                self._begin_token()
                return
            self._found[length] = self._tokens[-1]
            self._go_on()
            return
        if self._lists is not None:
            self._lists.note(lists)
            self.is_followed |= self._recorder.phases.backward_passes != self._backward_passes
        if self.is_followed or self._last - length < FEWEST:
            return
        self._steady = steady(self._tokens, length)
        if self._steady is None:
            self.is_followed = self._lists is not None and len(self._tokens) > MOST_FOLLOWED
        elif self._begin(self._steady):
            self._go_on()

    def _begin_token(self) -> None:
        self._row, self._passes = len(self._recorder.builder.rows), len(self._recorder.phases.passes_aside)

    # --- following ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Append a token of the events since the last one."""
        builder, number = self._recorder.builder, len(self._tokens)
        token = Token(passes=[row - self._row for row in self._recorder.phases.passes_aside[self._passes :]])
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
                token.births.append(birth_of(builder, subject))
            of, place = self._of.get(subject, (-1, subject))
            token.events.append((kind, number - of if of >= 0 else -1, place, stream, positions[operator]))
        if self._tokens:
            now = [birth_of(builder, index) for index in self._made[-1]]
            before = self._tokens[-1].births
            token.renamed = [(place, birth) for place, birth in enumerate(now) if birth != before[place]]
        self._tokens.append(token)
        self._made.append(made)
        self._begin_token()

    # --- probing ------------------------------------------------------------------------------------------------------

    def _begin(self, steady: Steady) -> bool:
        """From here on what is recorded is thrown away, but for the probes. False where that cannot be."""
        self._reach = steady.token.reach
        shapes = self._shapes(steady) if self._collects(steady) else None
        if shapes is None:
            self._attempts += 1
            self.is_followed = self._lists is None or self._attempts >= MOST_ATTEMPTS
            return False
        self._growing = set(shapes)
        self._count = len(shapes)
        attended = [shape for shape in shapes if shape.is_attended]
        self._after = -attended[0].more if attended else 1 - shapes[0].more if shapes else 0
        self._made_before = {self._length - ago: list(self._made[-1 - ago]) for ago in range(ALIKE_TOKENS)}
        self._found = {self._length: self._tokens[-1]}
        recorder = self._recorder
        real = self._real = recorder.builder
        self._passes_before = len(recorder.phases.passes_aside)
        self._memory, recorder.storages.memory = recorder.storages.memory, None
        columns: dict[str, Any] = {field.name: copy.copy(getattr(real, field.name)) for field in fields(real)}
        recorder.builder = replace(real, **{**columns, "rows": []})
        recorder.is_probing = True
        return True

    def _shapes(self, steady: Steady) -> list[GrowingShape] | None:
        """The shapes of what grows from token to token; None where they cannot be told, or nothing grows."""
        first = len(self._tokens) - self._reach
        made = {index: self._of[index][1] for index in self._alive() if self._of[index][0] >= first}
        growing = {index: place for index, place in made.items() if steady.growth[place] or steady.bend[place]}
        if not growing and (self._lists is None or not (any(steady.growth) or self._gathers)):
            return None
        tensors = tensors_over(self._recorder.storages, set(growing))
        if set(tensors) != set(growing):
            return None
        shapes = [
            growing_shape(tensors[index], steady.growth[place], self._length)
            for index, place in growing.items()
            if shows_all(tensors[index])
        ]
        return None if None in shapes else [shape for shape in shapes if shape is not None]

    def _collects(self, steady: Steady) -> bool:
        """Sort the lists that grow; whether all that older tokens have left is in them, in items of one size."""
        number = len(self._tokens)
        left = {index for index in self._alive() if number - ALIKE_TOKENS < self._of[index][0] < number - self._reach}
        if self._lists is None:
            return not left
        if not self._lists.sort_growing():
            return False
        held = self._lists.held(self._recorder.storages)
        places = {self._of[index][1] for index in left}
        items = [self._recorder.storages.of(item) for item in self._lists.last_items()]
        made = {self._of[ref.index][1] for ref in items if ref is not None and ref.index in self._of}
        sizes_stay = not any(steady.growth[place] or steady.bend[place] for place in places)
        self._gathers = bool(places)
        return left <= held and sizes_stay and made == places and len(items) == len(places)

    def _go_on(self) -> None:
        """Stretch to before the next length that is to be followed; when all are, write the tokens."""
        following = self._next()
        if following is None:
            self._write()
            self.is_followed = True
            return
        if len(self._found) > MOST_PROBES:
            self._cannot(f"its tokens are not alike within blocks of {BLOCK}")
        self._following = following
        # A loop of the program's own may hold on to what it had, and remember its last number, which was not the one
        # before: after that token come as many of the right kind as give back what older ones made.
        is_end = self._lists is None and following in self._ends()
        self._after_its_own = self._length == following - 1 or not is_end
        if self._length != following - 1:
            self._stretch(following - 1 if is_end else following - 1 - self._reach - self._is_numbered)
        self._begin_token()

    def _next(self) -> int | None:
        """The next length to follow a token at; the last one comes last, as the program goes on from it."""
        for length in self._ends():
            if length not in self._found:
                return length
        for low, high in pairwise(sorted(self._found)):
            if high - low > 1 and (low - self._after) % BLOCK == 0 and not self._goes_on(low, high):
                return low + 1
            if high - low > 1 and self._is_first_of_another_kind(low):
                return low + 1  # perhaps the only one, and at the other end the next of them: every eighth, say
            if high - low > 1 and not self._on_one_curve(low, high):
                # The first token of its kind gives back what the last of another kind made; the next may be alike.
                return low + 1 if 1 <= (low - self._after) % BLOCK <= self._reach else (low + high) // 2
        return None if self._length == self._last else self._last

    def _ends(self) -> list[int]:
        """The last tokens of blocks after the start."""
        assert self._steady is not None
        start = self._steady.length
        ends = {length for length in range(start + 1, self._last) if (length - self._after) % BLOCK == 0}
        return sorted(ends | {start + 1, self._last})

    def _is_first_of_another_kind(self, length: int) -> bool:
        """Whether a token is not as they were at the start, and nothing tells that the one before was of its kind."""
        token, before, steady = self._found[length], self._found.get(length - 1), self._steady
        assert steady is not None
        return not token.is_like(steady.token) and not (before is not None and before.is_like(token))

    def _on_one_curve(self, low: int, high: int) -> bool:
        """Whether what lies between two lengths is told by the tokens that make them: sizes that go on as they began,
        or stay, as they do where a window is full."""
        first, second, steady = self._found[low], self._found[high], self._steady
        assert steady is not None
        if not first.is_like(second):
            return False
        if first.is_like(steady.token):
            return self._goes_on(low, high)
        return not any(steady.bend) and all(g % (high - low) == 0 for g in grown(first, second))

    def _goes_on(self, low: int, high: int) -> bool:
        """Whether tokens are as they were at the start, and have grown as then or not at all: where a new block begins
        between two lengths, it makes no difference."""
        first, second, steady = self._found[low], self._found[high], self._steady
        assert steady is not None
        if not first.is_like(steady.token) or not second.is_like(steady.token):
            return False
        return all(
            size in (0, usual) for size, usual in zip(grown(first, second), steady.expected(low, high), strict=True)
        )

    def _bend(self, low: int, high: int) -> list[int]:
        """How sizes bend between two lengths on one curve."""
        first, second, steady = self._found[low], self._found[high], self._steady
        assert steady is not None
        if not first.is_like(steady.token):
            return [0] * len(first.sizes)
        usual = zip(grown(first, second), steady.expected(low, high), steady.bend, strict=True)
        return [bend if size == expected else 0 for size, expected, bend in usual]

    # --- stretching ---------------------------------------------------------------------------------------------------

    def _alive(self) -> Iterator[int]:
        for ref in self._recorder.storages.live.values():
            if ref.index in self._of:
                yield ref.index

    def _stretch(self, length: int) -> None:
        """What the loop keeps has the sizes that it has after ``length`` tokens."""
        by, before = length - self._length, self._length
        self._length = length
        if not by:
            return
        stretched = 0
        for index, tensors in tensors_over(self._recorder.storages, set(self._alive())).items():
            found = sized(tensors, self._growing, before)
            if found is None:
                continue
            whole, size, shape = found
            grown = length + shape.more
            if size != before + shape.more:
                if self._lists is None:
                    continue
                grown = min(size, grown)
            stretched += 1
            if size == grown:
                continue
            ref = self._recorder.storages.of(resize(tensors, whole, shape.dim, grown))
            assert ref is not None
            number, place = self._of[ref.index] = self._of[index]
            self._made[number][place] = ref.index
            builder = self._recorder.builder
            builder.categories[ref.index], builder.labels[ref.index] = builder.categories[index], builder.labels[index]
        if stretched < self._count:
            self._cannot("what it keeps cannot be told")
        if self._lists is not None:
            self._lists.stretch(by)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """All tokens from the start to the last, as the probes say."""
        recorder, real, steady = self._recorder, self._real, self._steady
        assert real is not None
        assert steady is not None
        items, now = self._last_items(), recorder.builder.operators[recorder.storages.operator]
        probed = [ref for ref in recorder.storages.live.values() if ref.index in self._of]
        self._real = None
        recorder.is_probing = False
        base = len(real.storage_bytes)
        recorder.builder, recorder.storages.memory = real, self._memory
        del recorder.phases.passes_aside[self._passes_before :]
        made = dict(self._made_before)
        collected: list[list[Any]] = []
        numbers: dict[int, list[int]] = {}  # of the operators of a probe
        for low, high in pairwise(sorted(self._found)):
            bend = self._bend(low, high) if high - low > 1 else []
            for length in range(low + 1, high + 1):
                of = high if length == high else low
                token = self._found[of]
                if of not in numbers:
                    numbers[of] = _operators(real, token)
                whole, part = high - low, length - low
                sizes = between(token, self._found[high], whole, part, bend) if of == low else token.sizes
                made[length] = []
                self._write_token(token, sizes, numbers[of], made, length)
                if length < self._last:
                    collected.append([self._born_again(item, made[length][place]) for item, place in items])
                made.pop(length - ALIKE_TOKENS, None)
        real.operators.append(now)
        recorder.storages.operator = len(real.operators) - 1
        last = len(self._tokens) - 1
        for ref in probed:
            if ref.index >= base:
                number, place = self._of[ref.index]
                ref.index = made[self._last - (last - number)][place]
        if self._lists is not None:
            self._lists.insert(collected)

    def _write_token(
        self, token: Token, sizes: list[int], numbers: list[int], made: dict[int, list[int]], length: int
    ) -> None:
        storages, builder = self._recorder.storages, self._recorder.builder
        self._recorder.phases.passes_aside.extend(len(builder.rows) + before for before in token.passes)
        for place, birth in token.renamed:
            index = made[length - 1][place]
            builder.categories[index], builder.labels[index] = birth.category, birth.label
        for kind, lag, place, _, operator in token.events:
            storages.operator = numbers[operator]
            if kind == EventKind.FREE:
                builder.free(made[length - lag][place], numbers[operator])
                continue
            birth = token.births[place]
            made[length].append(storages.alloc(sizes[place], birth.category, birth.label, birth.place, birth.stream))

    def _last_items(self) -> list[tuple[Any, int]]:
        """What the last token has left in lists, and the places of its storages. Those of other probes are dropped."""
        if self._lists is None:
            return []
        self._lists.drop_probes()
        items = self._lists.last_items()
        refs = [self._recorder.storages.of(item) for item in items]
        return [(item, self._of[ref.index][1]) for item, ref in zip(items, refs, strict=True) if ref is not None]

    def _born_again(self, item: torch.Tensor, index: int) -> torch.Tensor:
        """A tensor like the last token's, over a storage of a token that was not followed."""
        with self._recorder.paused():
            made = torch.empty_like(item)
        self._recorder.storages.adopt(made, index)
        return made

    def _cannot(self, why: str) -> None:
        """Token by token from here on, while that is still possible."""
        self.is_followed = True
        if self._real is not None:
            raise CannotShortenError(f"{self._recorder.current_source()}: this generation cannot be shortened: {why}")


def _operators(builder: TraceBuilder, token: Token) -> list[int]:
    builder.operators.extend(token.operators)
    return list(range(len(builder.operators) - len(token.operators), len(builder.operators)))


@contextlib.contextmanager
def generations_shortened(recorder: Recorder) -> Iterator[None]:
    """Once a generation begins, its loop is patched, until the capture ends."""
    with Patches() as patches:
        recorder.phases.on_generation = lambda: _patch(patches, recorder)
        yield


def _patch(patches: Patches, recorder: Recorder) -> None:
    """Note every token where ``MaxLengthCriteria`` looks whether it is the last. The class is there when a model of
    transformers generates."""
    module = sys.modules.get("transformers.generation.stopping_criteria")
    if module is None:
        return
    running: weakref.WeakKeyDictionary[Any, Decoding] = weakref.WeakKeyDictionary()

    original = module.MaxLengthCriteria.__call__

    def call(self: Any, input_ids: Any, *args: object, **kwargs: object) -> object:
        if recorder.is_probing and self not in running:
            return original(self, input_ids, *args, **kwargs)
        if not called_to_sample():  # a beam search counts its tokens itself, and could not be put forward
            return original(self, input_ids, *args, **kwargs)
        decoding = running.get(self)
        if decoding is None:
            decoding = running[self] = Decoding(recorder, self.max_length)
        decoding.note(input_ids.shape[1])
        return original(self, input_ids, *args, **kwargs)

    patches.set(module.MaxLengthCriteria, "__call__", call)
