"""Parts of a card that a program sees as a card: MIG instances and vGPUs.

MIG: memory and multiprocessors of every profile as ``nvidia-smi mig -lgip`` lists them (MIG User Guide, and public logs
of A100-40GB, A100-80GB, H100 PCIe and SXM, H200, A30); a profile that is not listed here is refused. The second-level
cache is divided as the memory is (MIG User Guide: eighths). vGPU: time slices of all multiprocessors with a fixed
part of the memory, named after its gigabytes (Virtual GPU Software User Guide: ``A100-10C``, ``A10-12Q``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from graphmem.errors import UsageError
from graphmem.units import GIB, MIB

if TYPE_CHECKING:
    from graphmem.devices import Device

_A100_40 = {
    "1g.5gb": (4.75, 14), "1g.10gb": (9.75, 14), "2g.10gb": (9.75, 28), "3g.20gb": (19.62, 42),
    "4g.20gb": (19.62, 56), "7g.40gb": (39.5, 98),
}  # fmt: skip
_A100_80 = {
    "1g.10gb": (9.5, 14), "1g.20gb": (19.5, 14), "2g.20gb": (19.5, 28), "3g.40gb": (39.25, 42),
    "4g.40gb": (39.25, 56), "7g.80gb": (78.75, 98),
}  # fmt: skip
_H100_SXM = {
    "1g.10gb": (9.75, 16), "1g.20gb": (19.62, 26), "2g.20gb": (19.62, 32), "3g.40gb": (39.5, 60),
    "4g.40gb": (39.5, 64), "7g.80gb": (79.25, 132),
}  # fmt: skip
_H100_PCIE = {
    "1g.10gb": (9.75, 14), "1g.20gb": (19.62, 14), "2g.20gb": (19.62, 30), "3g.40gb": (39.5, 46),
    "4g.40gb": (39.5, 62), "7g.80gb": (79.25, 114),
}  # fmt: skip
_H200 = {"1g.18gb": (16.0, 16), "2g.35gb": (32.5, 32), "7g.141gb": (140.0, 132)}
_A30 = {"1g.6gb": (5.81, 14), "2g.12gb": (11.69, 28), "4g.24gb": (23.5, 56)}

#: Card -> profile -> (GiB, multiprocessors).
MIG_PROFILES: dict[str, dict[str, tuple[float, int]]] = {
    "A100-40GB": _A100_40, "A100-PCIE-40GB": _A100_40, "A100-80GB": _A100_80, "A100-PCIE-80GB": _A100_80,
    "A800-80GB": _A100_80, "A800-PCIE-80GB": _A100_80, "H100-80GB": _H100_SXM, "H800-80GB": _H100_SXM,
    "H100-PCIE-80GB": _H100_PCIE, "H200-141GB": _H200, "A30-24GB": _A30,
}  # fmt: skip

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
        sm_count=sms,
        l2_cache_bytes=None if card.l2_cache_bytes is None else card.l2_cache_bytes * eighths // 8,
        board_bytes=None,
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
        board_bytes=None,
    )
