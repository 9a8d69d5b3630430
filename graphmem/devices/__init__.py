"""The table of cards: the memory that the driver reports, and a process's memory outside its allocator.

Every figure carries its source; a capacity that is a guess is marked as one. Capacities are those of Linux drivers
(they differ by some tens of MiB between driver versions; Windows reports the nominal size)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from graphmem.base.figures import Figure
from graphmem.base.figures import Loads as Loads
from graphmem.base.records import public_value
from graphmem.base.tables import read_table
from graphmem.devices import apple, context, nccl
from graphmem.devices.capabilities import Capability, is_capability, limits_of
from graphmem.devices.parts import part_named
from graphmem.devices.user_table import FIELDS, read_user_table
from graphmem.errors import UsageError
from graphmem.units import format_bytes

#: The card assumed when the user names none. It is an assumption, which every report made with it names.
DEFAULT_DEVICE = "H100-80GB"

_PREFIXES = re.compile(r"^(nvidia|geforce|tesla|amd|instinct|apple|intel)+")
#: Keys of Apple's machines, those that the table does not have among them.
_APPLE = re.compile(r"^m[1-9](pro|max|ultra|$|\d+gb|\d+core)|^apple|^mps$")
#: Cards of a linked architecture that have PCIe, or a bridge to one other card.
_BRIDGED = re.compile(r"PCIE|-NVL|A30|TITAN")
#: A name with a number of cards before or after it.
_COUNTED = re.compile(r"(?P<n>\d{1,4})x(?P<first>.+)|(?P<name>.+)x(?P<m>\d{1,4})")
#: Longer text is no name.
_LONGEST_NAME = 100


@public_value(frozen=True, slots=True)
class Device:
    """A card. ``compute_capability`` is None where CUDA's does not apply; ``sm_count`` and ``max_threads_per_sm`` are 0
    where unknown.

    ``capacity_bytes``: as the driver reports it (``cudaDeviceProp.totalGlobalMem``; of Apple's machines Metal's
    recommended working set). ``context_bytes`` are held by a
    PyTorch process outside its allocator once a step has run (context, kernels loaded lazily, cuBLAS's handle);
    :meth:`outside` has further libraries it may load. ``context_measured`` is true when the whole of it was measured on
    this card, cuDNN's engines included.
    """

    name: str
    aliases: tuple[str, ...]
    vendor: str
    capacity_bytes: int
    capacity_source: str
    compute_capability: tuple[int, int] | None
    sm_count: int
    max_threads_per_sm: int
    context_bytes: int
    context_source: str
    context_measured: bool = False
    unified_memory: bool = False
    #: Bytes of one workspace of cuBLAS where the user measured it, else None: the rule for the capability holds. On
    #: AMD's cards of rocBLAS, 128 MiB from MI300 on, else 32 (docs/source/notes/hip.rst of PyTorch); 0: there is none.
    cublas_workspace_bytes: int | None = None
    #: Highest clocks of (multiprocessors, memory) in kHz as CUDA reports them, where a rule asks for them.
    clocks_khz: tuple[int, int] | None = None
    #: Bytes of the second-level cache as CUDA reports them, None where unknown: libraries ask. Source: NVIDIA's
    #: whitepapers of the architectures (P100 to RTX Blackwell).
    l2_cache_bytes: int | None = None
    #: Bytes a second of the memory, and the boost clock in kHz, None where unknown: XLA's cost model asks. Source: for
    #: A100-80GB, H100, B200, B300, RTX PRO 6000 and RTX A6000 XLA's own descriptions of cards
    #: (xla/backends/gpu/target_config/specs); for the others data-sheet figures that were not looked up one by one.
    memory_bandwidth: int | None = None
    boost_khz: int | None = None
    #: Products of matrices of 16 bits with sums in 32, dense, in 10^12 operations a second, and bytes a second to
    #: another card of a machine one way (NVLink, else PCIe), None where unknown. Figures of NVIDIA's data sheets, half
    #: of those with sparsity, that were not looked up one by one.
    tensor_teraflops: float | None = None
    link_bandwidth: int | None = None
    #: Whether servers have it: a card of the data centre, none of desktops, laptops or single boards.
    is_server: bool = False
    #: Bytes of an empty context where they were measured on this card, with the source.
    empty_context_bytes: int | None = None
    empty_context_source: str = ""
    #: Bytes that nvidia-smi calls the total, None where unknown; the driver keeps what CUDA's total lacks.
    board_bytes: int | None = None
    #: Bytes of the card that others hold.
    others_bytes: int = 0
    #: The version of CUDA that programs use on it, where it is given; None: one of today.
    cuda_version: tuple[int, int] | None = None
    #: Whether the capacity is a guess.
    capacity_assumed: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of a CUDA card. Raises :class:`UsageError` for another."""
        if self.compute_capability is None:
            raise UsageError(f"{self.name} is no CUDA card")
        return self.compute_capability

    @property
    def limits(self) -> Capability:
        """The limits that follow from a CUDA card's compute capability. Raises :class:`UsageError` for another."""
        return limits_of(self.capability)

    @property
    def taken_bytes(self) -> int:
        """Bytes of the capacity that are not the allocator's: the context's and others'."""
        return self.context_bytes + self.others_bytes

    @property
    def driver_bytes(self) -> int | None:
        """Bytes that the driver keeps of the board, None where unknown."""
        return None if self.board_bytes is None else max(0, self.board_bytes - self.capacity_bytes)

    def outside(self, loads: Loads) -> tuple[Figure, ...]:
        """The memory of a process outside its allocator, part by part, with these loads; without any they sum to
        :attr:`context_bytes`."""
        figures = self._plain_context()
        if self.vendor != "NVIDIA":
            return tuple(figures)
        if context.loads_at_once(loads):
            figures[1:] = [context.all_kernels(self.name)]
        elif loads.cudnn and not self.context_measured:
            figures.append(context.cudnn_engines(self.limits))
        if loads.communicators:
            figures.extend(nccl.figures(loads, self.limits.links, bridged=_BRIDGED.search(self.name) is not None))
        return tuple(figures)

    def empty_context(self) -> Figure:
        """The context of a process on this NVIDIA card before it loads anything: as measured, else estimated."""
        return context.bare_context(
            self.sm_count, self.max_threads_per_sm, self.empty_context_bytes, self.empty_context_source
        )

    def context_for(self, sms: int) -> dict[str, Any]:
        """The context's fields for a part of this NVIDIA card (MIG, vGPU) with so many multiprocessors."""
        threads = self.max_threads_per_sm
        return {
            "context_bytes": estimated_context_bytes(sms, threads),
            "context_source": _estimate_source(sms, threads),
            "context_measured": False,
            "empty_context_bytes": None,
            "empty_context_source": "",
        }

    def _plain_context(self) -> list[Figure]:
        size = self.context_bytes
        if self.context_measured:
            return [Figure("CUDA context and libraries", size, size, size, self.context_source)]
        if self.vendor != "NVIDIA":
            return [context.of_other_maker(self.vendor, size, self.context_source)]
        estimated = [self.empty_context(), context.kernels()]
        if sum(figure.bytes for figure in estimated) == size:
            return estimated
        return [Figure("CUDA context and libraries", size, size, size, self.context_source)]


def estimated_context_bytes(sm_count: int, max_threads_per_sm: int) -> int:
    """Bytes a PyTorch process holds outside its allocator on an NVIDIA card of this size, when nobody measured it."""
    return sm_count * max_threads_per_sm * context.CONTEXT_BYTES_PER_THREAD + context.LIBRARY_BYTES


def all_devices() -> tuple[Device, ...]:
    """Every known card, in the order of the table; those that the user measured take the place of the table's."""
    return (*_devices(False), *_devices(True))


@cache
def _devices(are_apple: bool) -> tuple[Device, ...]:
    """Apple's machines, which are worked out when somebody asks for one, or all other cards."""
    table = apple.rows() if are_apple else read_table("graphmem.devices", "table.json")
    rows = {row["name"]: row for row in table}
    for row in read_user_table():
        if bool(_APPLE.match(_key(row["name"]))) is are_apple:
            known = rows.get(row["name"], {})
            aliases = [*known.get("aliases", []), *row.get("aliases", [])]
            rows[row["name"]] = {**known, "capacity_assumed": False, **row, "aliases": aliases}
    return tuple(_device(row) for row in rows.values())


def device_named(name: str) -> Device:
    """The card of this name or alias; case, spaces, dashes and the maker's name do not matter.

    A name that leaves the size open (``A100``) means the smallest card of that name. ``A100-40GB:1g.5gb`` is a MIG
    instance, ``A10-12Q`` a vGPU (:mod:`graphmem.devices.parts`). No name stands for another card than its own. Raises
    :class:`UsageError` listing close names and how to give a size instead.
    """
    key = _key(name)
    index = _index(bool(_APPLE.match(key)))
    if key in index:
        return index[key]
    part = part_named(str(name), device_named) if len(str(name)) <= _LONGEST_NAME else None
    if part is not None:
        return part
    other = "--gpu NAME --gpu-memory 24GiB (one of that size, else like the known NAME)"
    if _APPLE.match(key):
        raise UsageError(
            f"{name!r} is Apple's, and not in the table: give the chip and its memory, such as M2-Max-64GB or M4-16GB, "
            f"or {other}"
        )
    count = _COUNTED.fullmatch(key)
    if count is not None and (count["name"] or count["first"]) in index:  # H100x4, 4xH100
        one = index[count["name"] or count["first"]].name
        raise UsageError(
            f"{name!r} is several cards, and here one is named: {one}. How many there are is said elsewhere: --tp of "
            f"'graphmem serve', --world-size, 'graphmem plan --gpus {count['n'] or count['m']}x{one}'"
        )
    several = [part.strip() for part in str(name).split(",")]
    if len(several) > 1 and all(_key(one) in index for one in several):
        raise UsageError(
            f"{name!r} is several cards: graphmem sweep MODEL --vary gpu={','.join(several)} asks for each"
        )
    close = _close_names(key)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise UsageError(
        f"unknown GPU {name!r}{hint}; 'graphmem gpus' lists all names, and {other} stands for any other card"
    )


def custom_device(capacity_bytes: int, like: str | Device | None = None) -> Device:
    """A card of ``capacity_bytes``, otherwise as ``like`` (default :data:`DEFAULT_DEVICE`).

    Raises :class:`UsageError` when the capacity is not positive or ``like`` is unknown.
    """
    if capacity_bytes <= 0:
        raise UsageError(f"a GPU has more than 0 bytes of memory, not {capacity_bytes}")
    model = like if isinstance(like, Device) else device_named(like or DEFAULT_DEVICE)
    return replace(
        model,
        name=f"{format_bytes(capacity_bytes)} card, else like {model.name}",
        aliases=(),
        capacity_bytes=capacity_bytes,
        capacity_source="given by the user",
        capacity_assumed=False,
        board_bytes=None,
    )


def with_capability(device: Device, compute_capability: tuple[int, int]) -> Device:
    """The card with another compute capability, otherwise as it is: for cards that are not in the table.

    Raises :class:`UsageError` for one that no CUDA card has.
    """
    written = ".".join(map(str, compute_capability))
    if not is_capability(compute_capability):
        raise UsageError(f"no CUDA card has the compute capability {written}")
    name = f"{device.name} of capability {written}"
    return replace(device, name=name, aliases=(), vendor="NVIDIA", compute_capability=compute_capability)


def described_device(
    name: str, compute_capability: tuple[int, int], capacity_bytes: int, sm_count: int, max_threads_per_sm: int
) -> Device:
    """A CUDA card that is known by these numbers alone; its context is estimated from them."""
    return Device(
        name=name,
        aliases=(),
        vendor="NVIDIA",
        capacity_bytes=capacity_bytes,
        capacity_source="given by the user",
        compute_capability=compute_capability,
        sm_count=sm_count,
        max_threads_per_sm=max_threads_per_sm,
        context_bytes=estimated_context_bytes(sm_count, max_threads_per_sm),
        context_source=_estimate_source(sm_count, max_threads_per_sm),
    )


def as_cuda(device: Device) -> Device:
    """The card as a CUDA program sees it: one that is no CUDA card has the multiprocessors of the default one."""
    if device.compute_capability is not None:
        return device
    like = device_named(DEFAULT_DEVICE)
    threads = like.max_threads_per_sm
    return replace(
        device, compute_capability=like.compute_capability, sm_count=like.sm_count, max_threads_per_sm=threads
    )


def _device(row: Mapping[str, Any]) -> Device:
    """The card of a row of the table, or of the user's, without the names that this version does not know."""
    sms, threads, empty = row["sm_count"], row["max_threads_per_sm"], row.get("empty_context_bytes")
    known = {name: tuple(row[name]) if isinstance(row[name], list) else row[name] for name in FIELDS if name in row}
    estimated = estimated_context_bytes(sms, threads) if empty is None else empty + context.LIBRARY_BYTES
    defaults: dict[str, Any] = {
        "vendor": "NVIDIA",
        "capacity_source": "given by the user",
        "context_bytes": estimated,
        "context_source": _estimate_source(sms, threads, row.get("empty_context_source")),
    }
    return Device(**{**defaults, **known})


def _estimate_source(sms: int, threads: int, measured: str | None = None) -> str:
    bare, kernels = context.bare_context(sms, threads, None, ""), context.kernels()
    return f"{measured or bare.source}, plus {format_bytes(kernels.bytes)} for kernels and the handle of cuBLAS"


def _key(name: str) -> str:
    """Lower case, letters and digits only, without the maker's name, its marks, ``GPU`` and ``Graphics``."""
    plain = re.sub(r"\(r\)|\(tm\)|[^a-z0-9]", "", str(name).lower()).removesuffix("gpu").removesuffix("graphics")
    return _PREFIXES.sub("", plain) or plain


@cache
def _index(are_apple: bool) -> dict[str, Device]:
    return {_key(name): device for device in _devices(are_apple) for name in (device.name, *device.aliases)}


def _close_names(key: str) -> list[str]:
    """At most three names of cards whose key resembles ``key`` or contains it."""
    index = _index(False) | _index(True)
    keys = [known for known in index if key and key in known]
    keys += difflib.get_close_matches(key, index, n=6, cutoff=0.6)
    return list(dict.fromkeys(index[known].name for known in keys))[:3]
