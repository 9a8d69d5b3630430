"""Random numbers of the host: PyTorch's own generator with the program's seeds, without drawing what nobody reads.

``at::mt19937`` (ATen/core/MT19937RNGEngine.h) gives one 32-bit word a draw. How many words an initializer takes follows
from its shape, so the generator is set ahead by that many: over short distances by drawing them, over long ones by the
recurrence itself, which is linear over GF(2): the state after n steps is t**n modulo the characteristic polynomial,
applied to the state (Matsumoto, Nishimura: Mersenne Twister, ACM TOMACS 8, 1998, with the polynomial on page 19;
Haramoto et al.: Efficient jump ahead for F2-linear random number generators, INFORMS J. on Computing 20, 2008).
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graphmem.capture.torch_internals import disable_current_modes, unset_fake_temporarily
from graphmem.capture.values.tensors import HALF_TYPES

#: What PyTorch's generator begins with where nobody seeds it (``default_rng_seed_val``, c10/core/GeneratorImpl.h).
DEFAULT_SEED = 67280421310721
#: Bound before it is replaced.
_GENERATOR: Any = torch.Generator
#: Draws in place of PyTorch's default generator, which belongs to the process.
_generator: torch.Generator = _GENERATOR("cpu")

#: Bound before a library puts its own there (``deepspeed.zero.Init``).
_empty = torch.empty
_WORDS, _MIDDLE, _LOW_BITS = 624, 397, 31
_TWIST = 0x9908B0DF
_DEGREE = _WORDS * 32 - _LOW_BITS
#: Words that are drawn rather than computed: so many take as long as a jump, less than a tenth of a second.
_FAR = 1 << 22
_CHUNK = 1 << 16
#: Points of a sequence that are kept, of 5 KB each.
_MOST_POINTS = 128
#: Where the words left in the block, the position in it and the block stand in a generator's state
#: (``CPUGeneratorImplStateLegacy``, ATen/CPUGeneratorImpl.cpp).
_LEFT, _NEXT, _BLOCK = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)


class _Stretch:
    """Draws that were counted and not made, one after the other: where they begin, and some points where somebody has
    looked, which is not in order: batches are read ahead."""

    __slots__ = ("_points",)

    def __init__(self, begin: torch.Tensor) -> None:
        self._points: list[tuple[int, torch.Tensor]] = [(0, begin)]  # words behind the beginning, and the state there

    def generator_at(self, words: int) -> torch.Generator:
        """A generator that stands ``words`` behind the beginning."""
        place = bisect.bisect_right(self._points, words, key=lambda point: point[0])
        before, state = self._points[place - 1]
        generator: torch.Generator = _GENERATOR("cpu")
        generator.set_state(state)
        if before < words:
            advance(generator, words - before)
            self._points.insert(place, (words, generator.get_state()))
            if len(self._points) > _MOST_POINTS:
                del self._points[1::2]
        return generator


class Mark(NamedTuple):
    """A point in a generator's sequence."""

    stretch: _Stretch
    words: int

    def generator(self) -> torch.Generator:
        """A generator that stands there."""
        return self.stretch.generator_at(self.words)


class HostGenerator:
    """The capture's default generator, and how far it is behind the program's."""

    def __init__(self) -> None:
        self._behind = 0
        self._stretch: _Stretch | None = None
        #: How often the program has set the state of the device's generator, which it never draws from here.
        self.device_seedings = 0
        self.generator = _generator
        self.generator.manual_seed(DEFAULT_SEED)

    @property
    def is_far_behind(self) -> bool:
        """Whether to draw now takes long: what is drawn should wait until it is read."""
        return self._behind > _CHUNK

    def settled(self) -> torch.Generator:
        """The generator where the program's stands now, to be drawn from."""
        if self._behind and self._stretch is not None:
            self.generator.set_state(self._stretch.generator_at(self._behind).get_state())
        return self.restart()

    def skip(self, words: int) -> None:
        """The program draws so many words that nobody looks at."""
        self.mark()
        self._behind += words

    def mark(self) -> Mark:
        """Where the program's generator stands now."""
        if self._stretch is None:
            self._stretch = _Stretch(self.generator.get_state())
        return Mark(self._stretch, self._behind)

    def restart(self) -> torch.Generator:
        """The generator, for somebody who sets its state, or draws."""
        self._behind, self._stretch = 0, None
        return self.generator


_current: list[HostGenerator] = [HostGenerator()]


def new_generator() -> HostGenerator:
    """The generator of the capture that begins; it draws the same numbers in every capture."""
    _current[0] = HostGenerator()
    return _current[0]


def seed_device() -> None:
    """The program sets the state of the device's generator."""
    _current[0].device_seedings += 1


def current() -> HostGenerator:
    """The generator of the running capture."""
    return _current[0]


@contextlib.contextmanager
def in_place_of_default(generator: torch.Generator) -> Iterator[None]:
    """For operators that take no generator: PyTorch's default one stands where ``generator`` does, and what is drawn
    moves that one on. No mode may be on."""
    default = torch.default_generator
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)


def named(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator that an operator is given, None for the program's default one: functions hold the process's as the
    default of an argument (``torch.utils.data.random_split``)."""
    if generator is None or generator._cdata in (torch.default_generator._cdata, current().generator._cdata):
        return None  # the same one may have several Python objects
    return generator


# --- how much operators draw ------------------------------------------------------------------------------------------


def words_of_uniform(numel: int, dtype: torch.dtype) -> int:
    """Words that ``uniform_`` draws: one an element, two for a double (``uniform_real_distribution``,
    ATen/core/DistributionsHelper.h)."""
    return numel * (2 if dtype is torch.float64 else 1)


def words_of_normal(numel: int, dtype: torch.dtype) -> int | None:
    """Words that ``normal_`` draws for a contiguous tensor: as uniform ones, and the last 16 once more where their
    number is not a multiple of 16 (``normal_fill``, ATen/native/cpu/DistributionTemplates.h; of 16-bit floats the first
    time without the incomplete block). None below 16 elements, which are drawn one by one, every second from what the
    first left."""
    if numel < 16:
        return None if numel else 0
    rest = numel % 16
    if rest:
        numel += 16 - (rest if dtype in HALF_TYPES else 0)
    return words_of_uniform(numel, dtype)


# --- setting a generator ahead ----------------------------------------------------------------------------------------


def advance(generator: torch.Generator, words: int) -> None:
    """Set a CPU generator ahead by ``words`` draws of 32 bits."""
    with disable_current_modes(), unset_fake_temporarily():
        state = generator.get_state().numpy()
        in_block = int(state[_LEFT].view(np.int32)[0]) - 1
        if words - in_block > _FAR:
            blocks = (words - in_block - 1) // _WORDS
            _to_end_of_block(state, blocks)
            generator.set_state(torch.from_numpy(state))
            words -= in_block + blocks * _WORDS
        scratch = _empty(min(words, _CHUNK))
        while words > 0:
            count = min(words, _CHUNK)
            scratch[:count].uniform_(generator=generator)
            words -= count


def _to_end_of_block(state: NDArray[np.uint8], blocks: int) -> None:
    """The state after all of ``blocks`` further blocks has been drawn."""
    block = state[_BLOCK].view(np.uint64)
    # The first word's low bits are none of the recurrence's: the last block is made by it.
    jumped = _jumped(block.astype(np.uint32), (blocks - 1) * _WORDS)
    block[:] = _sequence(jumped, 2 * _WORDS)[_WORDS:]
    state[_LEFT].view(np.int32)[0] = 1
    state[_NEXT].view(np.uint64)[0] = _WORDS


def _jumped(block: NDArray[np.uint32], steps: int) -> NDArray[np.uint32]:
    power = _power_of_t(steps)
    sequence = _sequence(block, _DEGREE + _WORDS)
    bits = np.unpackbits(np.frombuffer(power.to_bytes(_DEGREE // 8 + 1, "little"), np.uint8), bitorder="little")
    result = np.zeros(_WORDS, np.uint32)
    windows = np.lib.stride_tricks.sliding_window_view(sequence, _WORDS)
    for some in np.array_split(np.flatnonzero(bits), 16):
        result ^= np.bitwise_xor.reduce(windows[some], axis=0)
    return result


def _sequence(block: NDArray[np.uint32], length: int) -> NDArray[np.uint32]:
    """``length`` words of the recurrence, the block's first, before they are tempered."""
    words = np.empty(length, np.uint32)
    words[:_WORDS] = block
    reach = _WORDS - _MIDDLE  # so many words follow from those that are there
    for start in range(_WORDS, length, reach):
        count = min(reach, length - start)
        oldest = words[start - _WORDS : start - _WORDS + count + 1]
        mixed = (oldest[:-1] & np.uint32(0x80000000)) | (oldest[1:] & np.uint32(0x7FFFFFFF))
        twisted = (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), np.uint32(_TWIST), np.uint32(0))
        words[start : start + count] = words[start - reach : start - reach + count] ^ twisted
    return words


# --- polynomials over GF(2), as integers whose bits are the coefficients ----------------------------------------------

#: Exponents of the characteristic polynomial, its leading one left out (the formula on page 19 of the paper of 1998,
#: multiplied out).
_LOWER_TERMS = (
    0, 1189, 1416, 1585, 1643, 1870, 2493, 2773, 3000, 3227, 3454, 3681, 3908, 4135, 4362, 4753, 5661, 6337,
    6569, 7129, 7477, 7525, 7583, 7752, 7979, 8206, 9505, 9901, 9969, 10128, 10693, 10761, 10920, 11089,
    11147, 11157, 11215, 11321, 11374, 11384, 11485, 11611, 11712, 11717, 11838, 11881, 11944, 11997, 12277,
    12335, 12393, 12504, 12509, 12620, 12673, 12731, 12736, 12789, 12905, 12958, 12963, 13137, 13185, 13190,
    13243, 13301, 13412, 13528, 13533, 13639, 13697, 13760, 13813, 13866, 14093, 14151, 14209, 14320, 14325,
    14436, 14547, 14552, 14605, 14721, 14774, 14779, 14953, 15001, 15006, 15059, 15117, 15228, 15344, 15349,
    15455, 15513, 15576, 15629, 15682, 15909, 15967, 16025, 16136, 16141, 16252, 16363, 16368, 16421, 16537,
    16590, 16595, 16817, 16822, 16875, 16933, 17044, 17160, 17271, 17329, 17445, 17498, 17725, 17783, 17841,
    17952, 18068, 18179, 18237, 18406, 18633, 18691, 18860, 19087, 19314,
)  # fmt: skip


def _power_of_t(exponent: int) -> int:
    """t**exponent modulo the characteristic polynomial."""
    squarings = max(0, exponent.bit_length() - _DEGREE.bit_length() + 1)
    power = 1 << (exponent >> squarings)
    for position in reversed(range(squarings)):
        square = int(f"{power:b}", 4)  # a zero between every two coefficients
        power = _reduced(square << (exponent >> position & 1))
    return power


def _reduced(polynomial: int) -> int:
    while polynomial >> _DEGREE:
        high = polynomial >> _DEGREE
        polynomial &= (1 << _DEGREE) - 1
        for exponent in _LOWER_TERMS:
            polynomial ^= high << exponent
    return polynomial
