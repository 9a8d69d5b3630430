"""JAX on one NVIDIA card: XLA's client, its allocator and how much of the card that takes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from graphmem.base.figures import MEASURED, Cause, seen, unknown
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.runtimes.base import Runs, Runtime, Setting, Taken
from graphmem.runtimes.bfc import BFCRuns, bfc_runs, driver_pool_runs, free_bytes
from graphmem.runtimes.jax.options import FRACTION, PREALLOCATE, JaxOptions, read_options
from graphmem.trace import Trace
from graphmem.units import format_bytes

#: Bytes by which more were in use, and by which regions were larger, where XLA tried out kernels for recorded steps
#: (docs/modeling/jax.md; a test holds them to the goldens).
TRIED_BYTES = (
    0, 0, 0, 0, 0, 0, 0, 16_776_704, 16_894_720, 44_645_632, 62_914_560, 67_116_544, 100_195_584, 103_811_328,
    108_193_792, 132_105_984, 405_238_272,
)  # fmt: skip
GROWN_BYTES = (
    0, 0, 0, 67_108_864, 67_108_864, 67_108_864, 134_217_728, 134_217_728, 134_217_728, 134_217_728, 134_217_728,
    134_217_728, 134_217_728, 218_103_808, 234_881_024, 301_989_888, 939_524_096,
)  # fmt: skip
_CAPTURED = "operators, their order, temporaries and library workspaces are PyTorch's, replayed in JAX's allocator"
_POOL = "rounding and fragmentation inside the driver's pool count as 0"
#: The driver's memory is mapped in pages of so many bytes; the limit is the next multiple (recorded of four
#: sizes of cards).
_PAGE_BYTES = 2 << 20


def trials(levels: Sequence[str], more: Sequence[int]) -> Cause:
    """What XLA takes while it compiles a function, on the card alone, at these levels."""
    source = f"{len(more)} recorded steps: what is tried is given back, and regions that grew for it stay"
    inside = round((len(more) - 1) / (len(more) + 1), 4)
    return Cause("kernels that XLA tries out", MEASURED, source, dict.fromkeys(levels, seen(more)), inside, len(more))


def limit_on(options: JaxOptions, device: Device) -> int:
    """Bytes that JAX's allocator may hold: a fraction of all the memory that the driver reports, in whole pages."""
    return -(-int(device.capacity_bytes * options.memory_fraction) // _PAGE_BYTES) * _PAGE_BYTES


class Jax(Runtime[JaxOptions]):
    """JAX's client for NVIDIA's cards."""

    name = "jax"
    title = "JAX"
    spellings = ("xla",)
    levels = (
        ("requested", "what XLA and the program asked for"),
        ("allocated", "chunks in use (Device.memory_stats: peak_bytes_in_use)"),
        ("reserved", "regions held from the driver (pool_bytes)"),
        ("device", "nvidia-smi's line of the process: reserved plus context"),
    )
    proven = "tests/golden/jax"

    def parse(self, text: str | None, setting: Setting) -> JaxOptions:
        """The options of a run on this machine: ``text`` and the environment. Raises
        :class:`~graphmem.errors.UsageError`."""
        return read_options(text or "", os.environ)

    def describe(self, options: JaxOptions, setting: Setting) -> str:
        """The allocator with its limit on the card."""
        limit = format_bytes(limit_on(options, setting.device))
        if options.allocator == "pool":
            return "JAX with a pool of the driver"
        way = f"preallocates {limit}" if options.preallocate else f"grows to {limit}"
        return f"JAX BFC, {way} ({options.memory_fraction:.0%} of the card)"

    def take(self, trace: Trace) -> Taken:
        """A captured trace as it is."""
        doubt = unknown("XLA's compiler", _CAPTURED, below=True)
        return Taken(trace, (_CAPTURED,), doubts=(doubt,), proven=self.proven)

    def run(self, trace: Trace, options: JaxOptions, setting: Setting) -> Runs:
        """Replayed under the limit that JAX sets itself on the card."""
        limit, room = limit_on(options, setting.device), free_bytes(setting.device)
        if options.allocator == "pool":
            held = limit if options.preallocate else 0
            return Runs(*driver_pool_runs(trace, held, room), (Diagnostic(Code.UNKNOWN, _POOL),))
        found = bfc_runs(trace, options.bfc(), limit, room)
        code = Code.NOTE if found.whole is None else Code.HEADLINE
        note = Diagnostic(code, _in_words(found, limit, setting.device))
        return Runs(found.main, found.limited, (note,), found.details(limit), tuple(_doubts(found, limit)))


def _doubts(found: BFCRuns, limit: int) -> Iterator[Cause]:
    if found.whole is None:
        yield trials(("reserved", "device"), GROWN_BYTES)
    elif found.enough_bytes is not None and limit - found.enough_bytes < GROWN_BYTES[-1]:
        yield unknown(
            "JAX's limit", f"it leaves {format_bytes(limit - found.enough_bytes)}, and what XLA tries out may take more"
        )


def _in_words(found: BFCRuns, limit: int, device: Device) -> str:
    if found.limited is not None:
        needed = found.main.peak_reserved_bytes
        fraction = _fraction(needed, device)
        fits = fraction * device.capacity_bytes <= free_bytes(device)
        return (
            f"JAX's limit on this card is {format_bytes(limit)} ({FRACTION}); the figures are those of one region as "
            f"large as the program needs, {format_bytes(needed)}: "
            + (f"{FRACTION}={fraction} gives as much" if fits else "no fraction gives as much beside the CUDA context")
        )
    if found.enough_bytes is None:
        sizes = ", ".join(format_bytes(segment.total_size) for segment in found.main.segments)
        return f"without preallocation regions are held until the process ends: {sizes or 'none'}"
    grown = found.grown
    held = grown.peak_reserved_bytes if grown is not None and grown.out_of_memory is None else None
    return (
        f"JAX takes {format_bytes(limit)} at its start, whatever the program needs; this one works with "
        f"{FRACTION}={_fraction(found.enough_bytes, device)}, and with {PREALLOCATE}=false it holds "
        + ("more than there is" if held is None else format_bytes(held))
    )


def _fraction(needed: int, device: Device) -> float:
    """The least fraction of the card, in hundredths, that is as much."""
    return max(1, -(-100 * needed // device.capacity_bytes)) / 100


RUNTIME = Jax()
