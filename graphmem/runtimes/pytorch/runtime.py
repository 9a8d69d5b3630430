"""PyTorch: its caching allocator, by the configuration and the version that shape it."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from graphmem.allocators.alloc_conf import UNLIMITED, AllocConf, parse_alloc_conf
from graphmem.allocators.cuda_driver import CudaDriver
from graphmem.allocators.mps_heaps import Watermarks
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.allocators.pytorch_caching.blocks import get_allocation_size, round_size
from graphmem.base import versions
from graphmem.base.figures import BOUNDS, Cause, bounded
from graphmem.devices import Device
from graphmem.errors import UsageError
from graphmem.replay import replay
from graphmem.runtimes.base import Change, Graphs, Runs, Runtime, Setting, Taken, within_card
from graphmem.runtimes.pytorch import makers
from graphmem.runtimes.pytorch.live import LiveMemory
from graphmem.trace import EventKind, Place, Trace


@dataclass(frozen=True)
class PyTorchOptions:
    """``PYTORCH_ALLOC_CONF`` as text, the same read, and the version that reads it; on Apple's cards the watermarks,
    which take its place there."""

    text: str
    conf: AllocConf
    version: tuple[int, int]
    watermarks: Watermarks | None = None


class PyTorch(Runtime[PyTorchOptions]):
    """Eager PyTorch, the runtime of the captured step itself."""

    name = "pytorch"
    title = "PyTorch"
    spellings = ("torch",)
    levels = (
        ("requested", "what the tensors asked for"),
        ("allocated", "blocks handed out for them (max_memory_allocated)"),
        ("reserved", "segments held from the driver (max_memory_reserved)"),
        ("device", "nvidia-smi's line of the process: reserved plus context"),
    )
    graphs = Graphs.CAPTURED
    step_advice = True
    proven = "tests/golden/pytorch"

    def parse(self, text: str | None, setting: Setting) -> PyTorchOptions:
        """``PYTORCH_ALLOC_CONF`` text, on Apple's cards ``PYTORCH_MPS_HIGH_WATERMARK_RATIO=...`` too; None: the
        environment's. Raises :class:`~graphmem.errors.UsageError` for what this version of PyTorch would refuse."""
        if text is None and _UNCACHED in os.environ:
            raise UsageError(
                f"{_UNCACHED} is set: PyTorch then takes every tensor from the driver, which is not modelled; unset it "
                "for the caching allocator's figures"
            )
        version, vendor = setting.torch_version, setting.device.vendor
        chosen = configuration_text(text, version)
        if vendor == "Apple":
            conf = AllocConf() if makers.is_mps_text(chosen) else parse_alloc_conf(chosen, version)
            return PyTorchOptions(chosen, conf, version, makers.read_watermarks(chosen, os.environ))
        options = _options(chosen, version)
        return replace(options, conf=makers.xpu_conf(options.conf, version)) if vendor == "Intel" else options

    def describe(self, options: PyTorchOptions, setting: Setting) -> str:
        """The version and the configuration as given."""
        version, marks = ".".join(map(str, options.version)), options.watermarks
        if marks is not None:
            return f"PyTorch {version} {makers.METAL_HEAPS} (watermarks: low {marks.low}, high {marks.high})"
        if setting.device.vendor == "Intel" and options.text:
            read = "expandable_segments:True" if options.conf.expandable_segments else "nothing"
            return f"PyTorch {version} caching allocator (of {options.text} it reads {read} on Intel's cards)"
        return f"PyTorch {version} caching allocator ({options.text or 'default configuration'})"

    def take(self, trace: Trace) -> Taken:
        """The trace as it is: captured steps and operators are recorded beside the allocator."""
        return Taken(trace, proven=self.proven)

    def run(self, trace: Trace, options: PyTorchOptions, setting: Setting) -> Runs:
        """Replayed without a limit and, where that exceeds the card, within it."""
        card = setting.device
        if options.watermarks is not None:
            runs = makers.run_on_heaps(trace, options.watermarks, options.version, card)
        else:
            rules = self.told_apart(trace, options)
            runs = within_card(
                trace, lambda room: _on_card(options, card, room=0 if room is None else 1), card, rules=rules
            )
        if card.vendor != "NVIDIA":
            runs = replace(runs, doubts=tuple(makers.doubts(trace, card)))
        if options.watermarks is not None or not (trace.kinds == EventKind.RECORD_STREAM).any():
            return runs
        return replace(runs, find_doubts=partial(_late_events, runs.main.peak_reserved_bytes, trace, options))

    def told_apart(self, trace: Trace, options: PyTorchOptions) -> Hashable:
        """Only a full card has garbage collected, or an allocation refused at once. ``max_split_size`` parts requests
        in those below it and the others, whose segments stay whole: values with the same parts are one."""
        if options.watermarks is not None:
            return None
        conf = replace(options.conf, throw_on_cudamalloc_oom=False, ignored=(), remarks=())
        if not trace.settings and conf.per_process_memory_fraction == 1:
            conf = replace(conf, garbage_collection_threshold=0.0)
            least = conf.max_split_size_bytes
            if least < UNLIMITED and least > conf.large_segment_size_bytes and not conf.expandable_segments:
                below, others = _parted(trace, conf, least)
                rounding = conf.max_non_split_rounding_bytes if others < UNLIMITED else conf.large_segment_size_bytes
                if below < least:
                    conf = replace(conf, max_split_size_bytes=others, max_non_split_rounding_bytes=rounding)
        return "pytorch", conf, options.version

    def live(self, options: PyTorchOptions, setting: Setting, *, room: int) -> LiveMemory | None:
        """The allocator that a captured program finds; none on Apple's cards, which ``torch.cuda`` knows nothing of."""
        if options.watermarks is not None:
            return None

        def make(is_limited: bool, tracks: bool) -> PyTorchCachingAllocator:
            return _on_card(options, setting.device, room=room if is_limited else 0, track_stats=tracks)

        def record(trace: Trace, is_limited: bool) -> dict[str, Any]:
            from graphmem.runtimes.pytorch.snapshot import recorded

            return recorded(trace, options.text, options.version, _driver(setting.device, room if is_limited else 0))

        return LiveMemory(make, record, setting.device, limited=room > 0)

    def recorded_options(self, notes: Mapping[str, str]) -> str | None:
        """Those in the snapshot, none where it has none: the environment is that of another machine."""
        return notes.get("allocator settings", "")

    def changes(self, alloc_conf: str | None, device: Device) -> Iterator[Change]:
        """Segments that grow instead of leaving gaps; Metal's heaps do not."""
        already = configuration_text(alloc_conf)
        if "expandable_segments" not in already and device.vendor != "Apple":
            joined = ",".join(filter(None, (already, "expandable_segments:True")))
            yield Change("expandable segments", joined)


RUNTIME = PyTorch()


@lru_cache(maxsize=256)
def _options(text: str, version: tuple[int, int]) -> PyTorchOptions:
    """Read once: a sweep asks for the same ones at every size."""
    options = PyTorchOptions(text, parse_alloc_conf(text, version), version)
    PyTorchCachingAllocator(None, options.conf, options.version)  # refuses backends that are not simulated
    return options


def _late_events(reserved_bytes: int, trace: Trace, options: PyTorchOptions) -> Iterator[Cause]:
    """More than ``reserved_bytes`` are reserved where events of other streams are late: up to what it is if none were
    ready before the program synchronizes.

    A tensor that another stream uses (``record_stream``) is freed when that stream's work is done, which takes time
    that a trace does not have: in the runs it is done at once. How late it is depends on the card; this is the worst.
    The program synchronizes where it waits for the device, a stream or an event, as FSDP's limit of all-gathers does.
    """
    driver = CudaDriver(event_lag=None)
    late = replay(trace, PyTorchCachingAllocator(None, options.conf, options.version, driver=driver))
    more = late.peak_reserved_bytes - reserved_bytes
    if more > 0:
        source = "taken to be done at once; the most, if none were done before the program waits for it"
        spreads = dict.fromkeys(("reserved", "device"), bounded(0, more))
        yield Cause("work of other streams", BOUNDS, source, spreads)


def _parted(trace: Trace, conf: AllocConf, size: int) -> tuple[int, int]:
    """Bytes of the largest segment that is made for a request of less than ``size``, and of the smallest other request,
    as they are rounded."""
    kept: dict[Hashable, tuple[list[int], list[int]]] = trace.kept.setdefault("requests", {})
    key = conf.roundup_power2_divisions, conf.large_segment_size_bytes
    if key not in kept:
        sizes = set(trace.columns.bytes[trace.columns.places == Place.DEVICE].tolist())
        rounded = sorted({round_size(one, conf.roundup_power2_divisions) for one in sizes if one})
        kept[key] = rounded, [get_allocation_size(one, conf.large_segment_size_bytes) for one in rounded]
    rounded, segments = kept[key]
    place = bisect_left(rounded, size)
    return max(segments[:place], default=0), rounded[place] if place < len(rounded) else UNLIMITED


def _on_card(options: PyTorchOptions, card: Device, *, room: int, track_stats: bool = False) -> PyTorchCachingAllocator:
    """A fresh allocator on ``room`` times the memory of the card, of which its context and others take a part; or
    without any limit."""
    driver = _driver(card, room)
    return PyTorchCachingAllocator(None, options.conf, options.version, driver=driver, track_stats=track_stats)


def _driver(card: Device, room: int) -> CudaDriver:
    return CudaDriver(room * card.capacity_bytes, other_bytes=card.taken_bytes) if room else CudaDriver()


#: ``forceUncachedAllocator`` (c10/cuda/CUDACachingAllocator.cpp): set to anything, even to nothing.
_UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def configuration_text(given: str | None, torch_version: tuple[int, int] = versions.NEWEST) -> str:
    """The allocator configuration: the given one, else that of the environment."""
    return versions.allocator_settings(os.environ, torch_version) if given is None else given


def default_allocator(text: str, capacity_bytes: int | None, torch_version: tuple[int, int]) -> PyTorchCachingAllocator:
    """A fresh caching allocator. ``capacity_bytes`` is what the card has left for it, None for no limit.

    Raises :class:`~graphmem.errors.UsageError` for a configuration that this version of PyTorch would refuse.
    """
    return PyTorchCachingAllocator(capacity_bytes, parse_alloc_conf(text, torch_version), torch_version)
