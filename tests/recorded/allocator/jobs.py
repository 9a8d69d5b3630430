"""Which sequences are recorded under which configuration. Groups: a default, b options, c streams, d out of memory,
e address policies of the driver, f expandable segments switched on and off in mid-run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphmem.units import MIB
from tests.recorded.allocator.traces import Event, Wanted, make, peak_bytes

_KINDS = (
    *("net", "random", "net", "random", "grow", "net", "random", "net", "random", "net"),
    *("random", "net", "random", "net", "grow", "net", "random", "net", "random", "net"),
)
_MIXES = (
    *("net", "net", "large", "large", "net", "small", "small", "net", "edge", "net"),
    *("net", "net", "large", "edge", "large", "net", "net", "large", "net", "net"),
)
_LENGTHS = (
    *(2000, 2000, 3000, 3000, 2500, 4000, 4000, 6000, 2000, 10000),
    *(8000, 3000, 3000, 2500, 2500, 4000, 5000, 5000, 3000, 5000),
)
_CAPS = (
    *(4000, 6000, 30000, 30000, 6000, 900, 300, 20000, 5000, 30000),
    *(40000, 2000, 60000, 5000, 40000, 12000, 3000, 50000, 1500, 8000),
)


@dataclass(frozen=True)
class Job:
    """``total``: the card's MiB, or, not a whole number, a factor on the sequence's own peak."""

    name: str
    wanted: Wanted
    conf: str = ""
    total: float = 81920
    environment: dict[str, str] = field(default_factory=dict)

    def events(self) -> list[Event]:
        return make(self.wanted)

    def total_mib(self, events: list[Event]) -> int:
        if isinstance(self.total, int):
            return self.total
        return max(24, int(peak_bytes(events) / MIB * self.total))


JOBS: dict[str, Job] = {}


def _add(
    index: int,
    name: str,
    conf: str = "",
    total: float = 81920,
    most: int = 10_000,
    environment: dict[str, str] | None = None,
    exactly: int | None = None,
    **options: Any,
) -> None:
    group, _, rest = name.partition("_")
    length = exactly or min(_LENGTHS[index], most)
    wanted = Wanted(_KINDS[index], index, length, _CAPS[index], _MIXES[index], **options)
    job = Job(f"{group}{index:02d}_{rest}", wanted, conf, total, environment or {})
    JOBS[job.name] = job


for _i in range(20):
    _add(_i, "a_default")
    _add(_i, "b_expandable", "expandable_segments:True", most=5000)
for _i in range(0, 20, 2):
    _add(_i, "b_maxsplit128", "max_split_size_mb:128", most=4000)
    _add(_i, "b_gc08_fraction", "garbage_collection_threshold:0.8", 1.3, 4000, fraction=0.99)
    _add(_i, "d_oom", total=0.85, most=4000, empty=0.0005)
for _i in range(2, 20, 3):
    _add(_i, "b_maxsplit128_tight", "max_split_size_mb:128", 1.25, 4000)
for _i in range(1, 20, 2):
    _add(_i, "b_pow2div8", "roundup_power2_divisions:8", most=4000)
for _i in range(0, 20, 4):
    _add(_i, "b_pow2list", "roundup_power2_divisions:[1:8,64:4,256:2,>:1]", most=3000)
for _i in (0, 4, 16):  # a fraction of 1.0 leaves the collection off
    _add(_i, "b_gc08_fracone", "garbage_collection_threshold:0.8", 1.3, exactly=2000, fraction=1.0)
for _i in range(1, 20, 4):
    _add(_i, "b_gc08_nofraction", "garbage_collection_threshold:0.8", 1.2, 3000)
    _add(_i, "d_oom_expandable", "expandable_segments:True", 0.85, 4000, empty=0.0005)
for _i in (0, 3, 7, 12):
    _add(_i, "b_gc06_split64", "garbage_collection_threshold:0.6,max_split_size_mb:64", 1.3, 4000, fraction=0.95)
for _i in (1, 3, 9, 12):
    _conf = "expandable_segments:True,garbage_collection_threshold:0.8"
    _add(_i, "b_expandable_gc08", _conf, 1.2, 3000, fraction=0.99)
for _i in (2, 3, 14):
    _add(_i, "b_nonsplit500", "max_non_split_rounding_mb:500,max_split_size_mb:200", exactly=3000)
for _i in (0, 1, 7, 12):
    _add(_i, "b_largeseg", "large_segment_size_mb:64", exactly=3000)
for _i, _count in ((0, 2), (1, 3), (3, 2), (6, 4), (7, 3), (10, 4), (11, 2), (16, 3)):
    _options: dict[str, Any] = {"streams": _count, "record": 0.3, "sync": 0.002}
    _add(_i, f"c_streams{_count}", most=4000, **_options)
    _add(_i, f"c_streams{_count}_lag4", most=4000, environment={"FAKE_CUDA_EVENT_LAG": "4"}, **_options)
for _i, _count in ((1, 3), (7, 2), (16, 3)):
    _options = {"streams": _count, "record": 0.2, "sync": 0.002}
    _add(_i, f"c_streams{_count}_expandable", "expandable_segments:True", most=3000, **_options)
for _i in (1, 3, 7):
    _late = {"FAKE_CUDA_EVENT_LAG": "3"}
    _add(_i, "d_oom_streams", total=0.85, exactly=3000, environment=_late, streams=3, record=0.2)
    _add(_i, "e_va_bump", most=3000, environment={"FAKE_CUDA_VA": "bump"})
    _add(_i, "e_va_down", most=3000, environment={"FAKE_CUDA_VA": "down"})
for _i in (2, 10):
    _add(_i, "d_oom_fraction", total=2.0, exactly=3000, fraction=0.43)
for _i in (3, 9):
    _add(_i, "d_tight_maxsplit", "max_split_size_mb:64", 0.95, exactly=3000, empty=0.0005)
_ON_AND_OFF = ("expandable_segments:True", "expandable_segments:False")
_OFF_AND_ON = ("expandable_segments:False", "expandable_segments:True")
for _i in (0, 1, 3, 10):
    _add(_i, "f_switched", most=3000, change=0.004, settings=_ON_AND_OFF, empty=0.0005)
for _i in (2, 5, 7, 16):
    _add(_i, "f_switched_off", _OFF_AND_ON[1], most=3000, change=0.004, settings=_OFF_AND_ON, empty=0.0005)
for _i in (3, 9):
    _texts = tuple(f"{text},max_split_size_mb:64" for text in _ON_AND_OFF)
    _add(_i, "f_switched_maxsplit", "max_split_size_mb:64", 1.3, 3000, change=0.004, settings=_texts)
for _i in (1, 12):
    _texts = tuple(f"{text},garbage_collection_threshold:0.6" for text in _OFF_AND_ON)
    _add(_i, "f_switched_gc06", _texts[1], 1.3, 3000, change=0.004, settings=_texts, fraction=0.95)
for _i in (5, 8):
    _add(_i, "f_switched_oom", total=0.9, most=3000, change=0.004, settings=_ON_AND_OFF)
for _i in (7, 11):
    _options = {"streams": 3, "record": 0.2, "sync": 0.002}
    _add(_i, "f_switched_streams", total=1.5, most=3000, change=0.004, settings=_ON_AND_OFF, **_options)
