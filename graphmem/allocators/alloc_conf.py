"""Read ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``) the way PyTorch itself does.

From torch 2.9 on the text is read by ``c10/core/AllocatorConfig.cpp`` and ``c10/cuda/CUDAAllocatorConfig.cpp``, which
are lenient: separators are skipped without a look (``max_split_size_mb,128`` works) and numbers are read as
``std::stoull`` reads them (``128MB`` is 128, ``1.9`` is 1). Up to 2.8 separators are checked. Both are followed here,
because what PyTorch accepts decides what the program gets; a surprising reading is put into ``AllocConf.remarks``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from graphmem.base import versions
from graphmem.errors import UsageError
from graphmem.units import MIB

#: ``std::numeric_limits<size_t>::max()``: no limit.
UNLIMITED = 2**64 - 1
#: ``large_segment_size_`` (``kLargeBuffer`` up to 2.10), bytes; ``c10/core/AllocatorConfig.h``.
DEFAULT_LARGE_SEGMENT_BYTES = 20 * MIB
#: ``kMinLargeAlloc``, bytes: requests from this size on get a segment of their own; same file.
MIN_LARGE_ALLOC_BYTES = 10 * MIB
#: ``kRoundUpPowerOfTwoIntervals``: slots for sizes below 2 MiB, 2 to 4 MiB, ... from 32 GiB on.
ROUNDUP_SLOTS = 16
#: ``pinned_max_register_threads``; ``c10/cuda/CUDAAllocatorConfig.h``.
MAX_REGISTER_THREADS = 128

#: Names for the same keys on ROCm, which a CUDA build takes too.
ALIASES = {
    "release_lock_on_hipmalloc": "release_lock_on_cudamalloc",
    "pinned_use_hip_host_register": "pinned_use_cuda_host_register",
}


@dataclass(frozen=True)
class AllocConf:
    """The settings of the CUDA caching allocator. Sizes are bytes; the defaults are PyTorch's.

    ``roundup_power2_divisions`` has one entry per slot (0: off). ``ignored`` lists the keys that do not change device
    memory, with their values. ``remarks``: where PyTorch reads something else than a person would.
    """

    backend: str = "native"
    expandable_segments: bool = False
    max_split_size_bytes: int = UNLIMITED
    max_non_split_rounding_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES
    large_segment_size_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_SLOTS
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    ignored: tuple[tuple[str, str], ...] = ()
    remarks: tuple[str, ...] = ()
    text: str = field(default="", compare=False)


def parse_alloc_conf(text: str, torch_version: tuple[int, int] = versions.NEWEST) -> AllocConf:
    """The settings that ``text`` gives in that version of torch.

    Raises :class:`graphmem.errors.UsageError` with PyTorch's reason, the key and what is accepted.
    """
    return _Reader(text, torch_version).read()


class _Reader:
    """One pass over the tokens of one text; lives inside :func:`parse_alloc_conf`."""

    def __init__(self, text: str, torch_version: tuple[int, int]) -> None:
        self.text = text
        self.version = torch_version
        self.lenient = versions.LENIENT_OPTIONS.holds(torch_version)
        self.tokens = _tokenize(text)
        self.position = 0
        self.key = ""
        self.large_segment_mb = DEFAULT_LARGE_SEGMENT_BYTES // MIB
        self.non_split_rounding_mb: int | None = None
        self.split_bytes = UNLIMITED
        self.threshold = 0.0
        self.fraction = 1.0
        self.divisions = [0] * ROUNDUP_SLOTS
        self.backend = "native"
        self.flags: dict[str, bool] = {}
        self.ignored: list[tuple[str, str]] = []
        self.remarks: list[str] = []
        self.readers: dict[str, Callable[[], None]] = {
            "backend": self.read_backend,
            "expandable_segments_reserve": self.read_reserve,
            "expandable_segments_reserve_by_class": self.read_reserves,
            "garbage_collection_threshold": self.read_threshold,
            "large_segment_size_mb": self.read_large_segment,
            "max_non_split_rounding_mb": self.read_non_split_rounding,
            "max_split_size_mb": self.read_split,
            "per_process_memory_fraction": self.read_fraction,
            "pinned_num_register_threads": self.read_register_threads,
            "roundup_power2_divisions": self.read_divisions,
        }

    def read(self) -> AllocConf:
        """Go through all settings of the text, which uses up the reader. Raises :class:`UsageError`."""
        # large_segment_size_mb is read first: the other sizes are compared with it (parseArgs).
        if "large_segment_size_mb" in self.tokens and self.accepts("large_segment_size_mb"):
            self.pass_over_tokens(only="large_segment_size_mb")
        self.pass_over_tokens()
        large = self.large_segment_mb * MIB
        rounding = self.non_split_rounding_mb
        return AllocConf(
            backend=self.backend,
            expandable_segments=self.flags.get("expandable_segments", False),
            max_split_size_bytes=self.split_bytes,
            max_non_split_rounding_bytes=large if rounding is None else rounding * MIB,
            large_segment_size_bytes=large,
            garbage_collection_threshold=self.threshold,
            roundup_power2_divisions=tuple(self.divisions),
            per_process_memory_fraction=self.fraction,
            throw_on_cudamalloc_oom=self.flags.get("throw_on_cudamalloc_oom", False),
            ignored=tuple(self.ignored),
            remarks=tuple(dict.fromkeys(self.remarks)),
            text=self.text,
        )

    def pass_over_tokens(self, only: str = "") -> None:
        self.position = 0
        while self.position < len(self.tokens):
            name = self.tokens[self.position]
            self.key = ALIASES.get(name, name)
            if only and self.key != only:
                # The pass for the large segment looks for its key at every token, as parseArgs does.
                self.position += 1
                continue
            if not self.accepts(self.key):
                raise self.unknown(name)
            self.separator(":")
            self.readers.get(self.key, self.read_other)()
            if self.position + 1 < len(self.tokens):
                self.separator(",")
            self.position += 1

    def accepts(self, key: str) -> bool:
        return key in versions.ALLOCATOR_OPTIONS and versions.ALLOCATOR_OPTIONS[key] <= self.version

    # --- one method a key ---

    def read_backend(self) -> None:
        self.backend = self.value()
        if self.backend not in ("native", "cudaMallocAsync"):
            raise self.refused("Unknown allocator backend, options are native and cudaMallocAsync")

    def read_large_segment(self) -> None:
        megabytes = self.size()
        if megabytes <= MIN_LARGE_ALLOC_BYTES // MIB:
            raise self.refused("CachingAllocator option large_segment_size_mb must be > 10 MB")
        self.large_segment_mb = min(megabytes, UNLIMITED // MIB)

    def read_split(self) -> None:
        self.split_bytes = self.at_least_a_segment() * MIB

    def read_non_split_rounding(self) -> None:
        self.non_split_rounding_mb = self.at_least_a_segment()

    def at_least_a_segment(self) -> int:
        megabytes, least = self.size(), self.large_segment_mb
        # Up to 2.8 the segment's own size is refused too (`val1 > kLargeBuffer / mb`).
        if megabytes < least or (megabytes == least and not self.lenient):
            bound = f"must be {'>=' if self.lenient else '>'} {least}"
            raise self.refused(f"CachingAllocator option {self.key} too small, {bound}")
        return min(megabytes, UNLIMITED // MIB)

    def read_threshold(self) -> None:
        self.threshold = self.real()
        if not 0.0 < self.threshold < 1.0:
            raise self.refused("garbage_collect_threshold is invalid, set it in (0.0, 1.0)")

    def read_fraction(self) -> None:
        self.fraction = self.real()
        if not 0.0 <= self.fraction <= 1.0:
            raise self.refused("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")

    def read_register_threads(self) -> None:
        threads = self.size()
        if not _is_power_of_two(threads) or threads > MAX_REGISTER_THREADS:
            raise self.refused(
                f"Number of register threads has to be power of 2 and at most {MAX_REGISTER_THREADS}, got {threads}"
            )
        self.ignored.append((self.key, str(threads)))

    def read_reserve(self) -> None:
        """Addresses that a growing segment claims: a share of the card's memory, or GiB such as 40G. No memory; what is
        unreadable is left out with a warning (``parseReserveSpec``, c10/cuda/CUDAAllocatorConfig.cpp)."""
        self.ignored.append((self.key, self.value()))

    def read_reserves(self) -> None:
        """The same by class of stream, in brackets."""
        start = self.position + 2
        while self.value() != "]":
            pass
        self.ignored.append((self.key, "".join(self.tokens[start - 1 : self.position + 1])))

    def read_other(self) -> None:
        """A key with True or False, or one with a size that concerns pinned host memory only."""
        if self.key.endswith("_mb"):
            self.ignored.append((self.key, str(self.size())))
            return
        flag = self.flag()
        self.flags[self.key] = flag
        if self.key not in ("expandable_segments", "throw_on_cudamalloc_oom"):
            self.ignored.append((self.key, str(flag)))

    def read_divisions(self) -> None:
        if self.peek(1) != "[":
            divisions = self.size()
            if not _is_power_of_two(divisions):
                raise self.refused("For roundups, the divisions has to be power of 2")
            self.divisions = [divisions] * ROUNDUP_SLOTS
            return
        self.position += 1
        first, last = True, 0
        while self.peek(1) != "]":
            slot, divisions = self.read_interval()
            if slot is None:  # '>': everything above the last interval named
                self.divisions[last + 1 :] = [divisions] * (ROUNDUP_SLOTS - last - 1)
            else:
                if first:
                    self.divisions[:slot] = [divisions] * slot
                first, last = False, slot
                self.divisions[slot] = divisions
            if self.peek(1) != "]":
                self.separator(",")
        self.position += 1

    def read_interval(self) -> tuple[int | None, int]:
        boundary_at = self.position + 1
        boundary = self.value()
        self.separator(":")
        divisions = self.size()
        if divisions and not _is_power_of_two(divisions):
            raise self.refused("For roundups, the divisions has to be power of 2 or 0 to disable roundup")
        if boundary == ">":
            return None, divisions
        megabytes = self.whole_number(boundary_at)
        if not _is_power_of_two(megabytes):
            raise self.refused("For roundups, the intervals have to be power of 2")
        return min(megabytes.bit_length() - 1, ROUNDUP_SLOTS - 1), divisions

    # --- tokens ---

    def peek(self, ahead: int) -> str:
        if self.position + ahead >= len(self.tokens):
            raise self.refused("the text ends where a value is expected")
        return self.tokens[self.position + ahead]

    def separator(self, expected: str) -> None:
        found = self.peek(1)
        self.position += 1
        if found == expected:
            return
        if not self.lenient:
            raise self.refused(f"Error parsing CachingAllocator settings, expected {expected!r}, found {found!r}")
        self.remarks.append(f"{self.key}: PyTorch takes {found!r} where {expected!r} belongs")

    def value(self) -> str:
        found = self.peek(1)
        self.position += 1
        return found

    def size(self) -> int:
        self.peek(1)
        self.position += 1
        return self.whole_number(self.position)

    def whole_number(self, position: int) -> int:
        """``std::stoull``: the digits in front count, the rest is dropped, a minus sign wraps around 2**64."""
        token = self.tokens[position]
        match = re.match(r"([+-]?)(\d+)", token, re.ASCII)
        if match is None:
            raise self.refused(f"{token!r} is not a whole number")
        number = int(match.group(2).lstrip("0")[:40] or "0")
        if number > UNLIMITED:
            raise self.refused(f"{token!r} is out of range")
        if match.group(1) == "-":
            number = -number % (UNLIMITED + 1)
        if match.end() != len(token) or match.group(1) == "-":
            self.remarks.append(f"{self.key}: PyTorch reads {token!r} as {number}")
        return number

    def real(self) -> float:
        """``std::stod``: the longest number in front counts."""
        token = self.value()
        match = _REAL.match(token)
        if match is None:
            raise self.refused(f"{token!r} is not a number")
        found = match.group(0)
        try:
            number = float.fromhex(found) if "x" in found.lower() else float(found)
        except OverflowError:
            raise self.refused(f"{token!r} is out of range") from None
        if match.end() != len(token):
            self.remarks.append(f"{self.key}: PyTorch reads {token!r} as {number}")
        return number

    def flag(self) -> bool:
        token = self.value()
        if token not in ("True", "False"):
            raise self.refused(f"Expected 'True' or 'False' but got {token!r}")
        return token == "True"

    # --- errors ---

    def refused(self, reason: str) -> UsageError:
        accepted = f"; accepted: {_ACCEPTED[self.key]}" if self.key in _ACCEPTED else ""
        return UsageError(f"allocator settings {self.text!r}, key {self.key!r}: {reason.rstrip()}{accepted}")

    def unknown(self, name: str) -> UsageError:
        """The error, to be raised, for a setting that this version of PyTorch does not have."""
        known = ", ".join(key for key in versions.ALLOCATOR_OPTIONS if self.accepts(key))
        version = ".".join(map(str, self.version))
        first = versions.ALLOCATOR_OPTIONS.get(name)
        since = f" (it came with torch {versions.words(first)})" if first else ""
        return UsageError(
            f"allocator settings {self.text!r}: Unrecognized key {name!r} in CUDA allocator config"
            f" of torch {version}{since}; accepted: {known}"
        )


#: What ``std::stod`` takes.
_REAL = re.compile(
    r"[+-]?(?:0x(?:[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?\d+)?|(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?|nan)",
    re.ASCII | re.IGNORECASE,
)

_BOOLEAN = "True or False"
_ACCEPTED = {
    "backend": "native, cudaMallocAsync",
    "expandable_segments": _BOOLEAN,
    "expandable_segments_reserve": "a share of the card's memory such as 0.5, or GiB such as 40G",
    "expandable_segments_reserve_by_class": "a list such as [serving:0.5,loading:40G]",
    "garbage_collection_threshold": "a number between 0 and 1, both excluded",
    "graph_capture_record_stream_reuse": _BOOLEAN,
    "large_segment_size_mb": "whole MiB above 10",
    "max_non_split_rounding_mb": "whole MiB, at least large_segment_size_mb (20)",
    "max_split_size_mb": "whole MiB, at least large_segment_size_mb (20)",
    "per_process_memory_fraction": "a number from 0 to 1",
    "pinned_free_catch_all": _BOOLEAN,
    "pinned_max_cached_size_mb": "whole MiB",
    "pinned_max_round_threshold_mb": "whole MiB",
    "pinned_num_register_threads": f"a power of two up to {MAX_REGISTER_THREADS}",
    "pinned_reserve_segment_size_mb": "whole MiB",
    "pinned_use_background_threads": _BOOLEAN,
    "pinned_use_cuda_host_register": _BOOLEAN,
    "release_lock_on_cudamalloc": _BOOLEAN,
    "roundup_power2_divisions": "a power of two, or a list such as [256:1,512:2,1024:4,>:8] of MiB:divisions",
    "throw_on_cudamalloc_oom": _BOOLEAN,
}


def _tokenize(text: str) -> list[str]:
    """``ConfigTokenizer``: ``, : [ ]`` stand alone, white space vanishes (also inside a word)."""
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"[ \t\n\v\f\r]+", "", text))


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
