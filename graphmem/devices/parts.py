"""Parts of a card that a program sees as a card: MIG instances and vGPUs.

MIG: a profile that ``mig.toml`` does not list is refused. The second-level cache is divided as the memory is (MIG User
Guide: eighths). vGPU: time slices of all multiprocessors with a fixed part of the memory, named after its gigabytes
(Virtual GPU Software User Guide: ``A100-10C``, ``A10-12Q``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from graphmem.base.tables import read_table
from graphmem.errors import UsageError
from graphmem.units import GIB, MIB

if TYPE_CHECKING:
    from graphmem.devices import Device


def _read() -> dict[str, dict[str, tuple[float, int]]]:
    found = {}
    for profiles in read_table("graphmem.devices", "mig.toml")["card"]:
        found.update(dict.fromkeys(profiles.pop("names"), profiles))
    return found


#: Card -> profile -> (GiB, multiprocessors).
MIG_PROFILES = _read()

_MIG = re.compile(r"(?P<card>.+?)[:/ ]+(?:MIG[ -])?(?P<profile>[0-9]g\.[0-9]{1,3}gb)(?:\+me)?", re.IGNORECASE)
_VGPU = re.compile(r"(?:GRID )?(?P<card>.+)-(?P<gigabytes>[0-9]{1,3})[ABCQ]", re.IGNORECASE)


def part_named(name: str, card_named: Callable[[str], Device]) -> Device | None:
    """The part of a card that ``name`` means (``A100-40GB:1g.5gb``, ``A10-12Q``), None for a name of another form.

    Raises :class:`UsageError` for a profile that the card does not have.
    """
    if (match := _MIG.fullmatch(name.strip())) is not None:
        return _instance(card_named(match["card"]), match["profile"].lower())
    if (match := _VGPU.fullmatch(name.strip())) is not None:
        return _time_slice(card_named(match["card"]), int(match["gigabytes"]), name.strip())
    return None


def _instance(card: Device, profile: str) -> Device:
    """A MIG instance of the card as a card of its own. Raises :class:`UsageError` for a profile that is not known."""
    profiles = MIG_PROFILES.get(card.name, {})
    if profile not in profiles:
        known = f"it has {', '.join(profiles)}" if profiles else f"known for {', '.join(MIG_PROFILES)}"
        raise UsageError(f"{card.name} has no MIG profile {profile!r} that is known here; {known}")
    gibibytes, sms = profiles[profile]
    capacity = min(int(gibibytes * GIB) // MIB * MIB, card.capacity_bytes)
    eighths = max(1, round(8 * capacity / card.capacity_bytes))
    return replace(
        card,
        name=f"{card.name}:{profile}",
        aliases=(),
        capacity_bytes=capacity,
        capacity_source=f"{gibibytes} GiB, as nvidia-smi lists this MIG profile",
        capacity_assumed=False,
        sm_count=sms,
        l2_cache_bytes=None if card.l2_cache_bytes is None else card.l2_cache_bytes * eighths // 8,
        board_bytes=None,
        tensor_teraflops=None,
        **card.context_for(sms),
    )


def _time_slice(card: Device, gigabytes: int, name: str) -> Device:
    whole = card.board_bytes or card.capacity_bytes
    if not 0 < gigabytes * GIB <= whole + GIB:
        raise UsageError(f"{name}: a vGPU of {gigabytes} GB is more than {card.name} has")
    kept = card.driver_bytes or 0
    return replace(
        card,
        name=f"{card.name} vGPU of {gigabytes} GB",
        aliases=(),
        capacity_bytes=max(MIB, min(gigabytes * GIB, whole) - kept),
        capacity_source=f"assumed: {gigabytes} GiB less the {kept // MIB} MiB that the driver keeps of the whole card",
        capacity_assumed=True,
        board_bytes=None,
        tensor_teraflops=None,
    )
