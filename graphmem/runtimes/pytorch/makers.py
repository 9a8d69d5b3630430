"""PyTorch on cards that are not NVIDIA's: which allocator serves them, by which settings, and what is not known.

- AMD: the CUDA allocator itself (c10/hip is made of c10/cuda), by the same settings.
- Intel: ``c10/xpu/XPUCachingAllocator.cpp``. Rounding, pools, segments, splits, merges and retries are the CUDA
  allocator's with default settings; of the settings it reads ``expandable_segments`` alone.
- Apple: heaps of its own (:mod:`graphmem.allocators.mps_heaps`), by two variables of the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from graphmem.allocators.alloc_conf import AllocConf
from graphmem.allocators.mps_heaps import MPSHeaps, Watermarks
from graphmem.base import versions
from graphmem.base.figures import BOUNDS, UNKNOWN, Cause, Spread, bounded, unknown
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import UsageError
from graphmem.runtimes.base import Runs, within_card
from graphmem.trace import Trace
from graphmem.units import MIB, format_bytes

#: Environment variable of ``MPSHeapAllocatorImpl::init_allocator`` -> field of :class:`Watermarks`.
VARIABLES = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "high", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "low"}
#: The allocator of Apple's machines, as estimates name it.
METAL_HEAPS = "Metal heaps"
#: Bytes of one workspace of hipBLASLt, at most: 76 MiB (``parseCUDABlasLtWorkspaceSize``), 80 MiB in ROCm's releases of
#: 2.13 and 2.14 (pytorch pull request 197201). cuBLAS's is not shared with it on ROCm.
HIPBLASLT_BYTES = 80 * MIB
#: Labels of the workspaces that a captured step has in place of rocBLAS's and hipBLASLt's.
_WORKSPACES = ("cuBLAS ", "cublasLt ")
_CONVOLUTIONS = re.compile(r"aten\.(\w*convolution|cudnn_\w*rnn|miopen_)")


def is_mps_text(text: str) -> bool:
    """Whether allocator settings are variables of MPS, and not PyTorch's ``key:value``."""
    return "=" in text


def read_watermarks(text: str, environment: Mapping[str, str]) -> Watermarks:
    """The ratios of ``text``, such as ``PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.8``, and of the environment, where ``text``
    wins. Raises :class:`UsageError` listing what is accepted."""
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    for entry in filter(None, (part.strip() for part in text.split(","))) if is_mps_text(text) else ():
        name, _, value = (part.strip() for part in entry.partition("="))
        if name not in VARIABLES:
            raise UsageError(
                f"cannot read {entry!r} as a setting of MPS; accepted: {', '.join(VARIABLES)}, each =RATIO"
            )
        given[name] = value
    return Watermarks(**{VARIABLES[name]: _ratio(name, value) for name, value in given.items()})


def _ratio(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{name} is {value!r}; accepted: a number from 0 to 2") from None


def run_on_heaps(trace: Trace, watermarks: Watermarks, version: tuple[int, int], card: Device) -> Runs:
    """The run on an Apple machine, without its limits where it stays below all of them, watermarks included.

    It fits where it stays within the working set that macOS recommends, and not up to the high watermark, which by
    default is more than the machine has.
    """
    apart = not versions.MPS_TENSORS_SHARED.holds(version)

    def make(room: int | None) -> MPSHeaps:
        if room is None:
            return MPSHeaps(None, watermarks, scalars_apart=apart)
        return MPSHeaps(card.capacity_bytes, watermarks, other_bytes=card.taken_bytes, scalars_apart=apart)

    limits = make(0)
    least = min(one for one in (card.capacity_bytes, limits.low_limit, limits.high_limit) if one is not None)
    runs = within_card(trace, make, replace(card, capacity_bytes=least), rules=("pytorch on MPS", apart))
    if runs.limited is not None and runs.limited.out_of_memory is None:
        held = runs.limited.peak_reserved_bytes + card.taken_bytes
        if held > card.capacity_bytes:
            runs = Runs(runs.limited, diagnostics=(_beyond(held, card, watermarks),))
    return runs if limits.high_limit is None else replace(runs, details={"memory_limit_bytes": limits.high_limit})


def _beyond(held: int, card: Device, watermarks: Watermarks) -> Diagnostic:
    """Of a run that PyTorch allows and macOS does not recommend."""
    allowed = f"up to {watermarks.high} times as much" if watermarks.high else "without a limit"
    text = (
        f"{format_bytes(held)} are more than the {format_bytes(card.capacity_bytes)} that macOS recommends: PyTorch "
        f"goes on {allowed}, while macOS compresses and swaps"
    )
    return Diagnostic(Code.HEADLINE, text)


def xpu_conf(conf: AllocConf, version: tuple[int, int]) -> AllocConf:
    """The settings as the allocator for Intel's cards takes them: all but ``expandable_segments`` are not read."""
    expandable = conf.expandable_segments and versions.XPU_EXPANDABLE_SEGMENTS.holds(version)
    return AllocConf(expandable_segments=expandable, text=conf.text)


def doubts(trace: Trace, card: Device) -> Iterator[Cause]:
    """What a card of another maker than NVIDIA takes beside what was captured, as far as anybody can say."""
    if card.vendor == "AMD":
        yield from _of_rocm(trace)
    if card.vendor == "Intel":
        yield unknown("libraries of oneAPI", "scratch of oneDNN and oneMKL is not in PyTorch's source")
    if card.vendor == "Apple":
        source = "MPSGraph allocates beside PyTorch's heaps, by rules that are not public"
        yield Cause("Metal's other allocations", UNKNOWN, source, {"device": Spread(above=True)})


def _of_rocm(trace: Trace) -> Iterator[Cause]:
    sizes = trace.columns.bytes
    workspaces = [int(sizes[found[0]]) for label, found in trace.labelled.items() if label.startswith(_WORKSPACES)]
    if workspaces:
        # Whether hipBLASLt or rocBLAS multiplies depends on the card and on shapes: either alone, or both.
        asked = versions.lt_workspace_bytes(os.environ, is_rocm=True)
        most = HIPBLASLT_BYTES if asked is None else asked
        spread = bounded(-sum(workspaces), len(workspaces) * most)
        source = f"{format_bytes(most)} of hipBLASLt's for each counted one, which is missing where it multiplies alone"
        yield Cause("workspaces of ROCm", BOUNDS, source, dict.fromkeys(("allocated", "reserved", "device"), spread))
    if any(_CONVOLUTIONS.match(name) for name in trace.operator_names):
        yield unknown("MIOpen's workspaces", "its solvers are chosen by measuring on the card")
