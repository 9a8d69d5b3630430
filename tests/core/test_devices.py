"""The table of cards: names, sources, and the arithmetic of the context."""

from __future__ import annotations

import re

import pytest

from graphmem.devices import (
    DEFAULT_DEVICE,
    Device,
    Loads,
    all_devices,
    custom_device,
    device_named,
    estimated_context_bytes,
    with_capability,
)
from graphmem.errors import UsageError
from graphmem.units import GIB, MIB


def test_the_default_card_is_in_the_table() -> None:
    assert device_named(DEFAULT_DEVICE).name == DEFAULT_DEVICE


@pytest.mark.parametrize("device", all_devices(), ids=lambda device: device.name)
def test_every_card_is_plausible_and_has_its_sources(device: Device) -> None:
    assert 2 * GIB < device.capacity_bytes < 513 * GIB
    assert 0 < device.context_bytes < 2 * GIB
    assert device.capacity_source
    assert device.context_source
    assert device.vendor in ("NVIDIA", "AMD", "Intel", "Apple")
    if device.vendor == "NVIDIA":
        assert device.compute_capability is not None
        assert device.compute_capability >= (6, 0)
        assert 6 <= device.sm_count < 200
        assert device.max_threads_per_sm in (1024, 1536, 2048)


@pytest.mark.parametrize("device", all_devices(), ids=lambda device: device.name)
def test_a_card_never_reports_more_than_its_name_says(device: Device) -> None:
    size = re.search(r"(\d+)GB$", device.name)
    if size and device.vendor != "AMD":
        assert device.capacity_bytes <= int(size.group(1)) * GIB
        assert device.capacity_bytes > int(size.group(1)) * GIB * 0.6


def test_a_guessed_context_is_never_called_measured() -> None:
    for device in all_devices():
        assert not (device.context_measured and "assumed" in device.context_source)


def test_names_and_aliases_are_unique_however_they_are_written() -> None:
    for device in all_devices():
        for name in (device.name, *device.aliases):
            assert device_named(name) is device
            assert device_named(f" nvidia {name.lower().replace('-', ' ')} ") is device


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX-4060-Laptop"),
        ("NVIDIA GeForce RTX 3070 Ti", "RTX-3070-Ti"),
        ("NVIDIA GB200", "GB200-186GB"),
    ],
)
def test_the_names_drivers_print_are_understood(written: str, name: str) -> None:
    assert device_named(written).name == name


def test_a_name_that_leaves_the_size_open_means_the_smallest_card() -> None:
    assert device_named("A100").capacity_bytes < device_named("A100-80GB").capacity_bytes
    assert device_named("V100").capacity_bytes < device_named("V100-32GB").capacity_bytes


def test_an_unknown_name_lists_close_ones_and_the_way_out() -> None:
    with pytest.raises(UsageError) as caught:
        device_named("RTX-4091")
    assert "RTX-4090" in str(caught.value)
    assert "--gpu-memory 24GiB" in str(caught.value)


@pytest.mark.parametrize("name", ["", "no such card", "é", "--", "H" * 10_000])
def test_nonsense_names_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        device_named(name)
    assert "\n" not in str(caught.value)


def test_a_custom_card_changes_only_the_capacity() -> None:
    card = custom_device(24 * GIB, like="A100-80GB")
    assert card.capacity_bytes == 24 * GIB
    assert card.compute_capability == (8, 0)
    assert card.context_bytes == device_named("A100-80GB").context_bytes
    assert custom_device(GIB).sm_count == device_named(DEFAULT_DEVICE).sm_count
    assert custom_device(GIB, like=card).compute_capability == (8, 0)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_custom_card_has_memory(capacity: int) -> None:
    with pytest.raises(UsageError):
        custom_device(capacity)


@pytest.mark.parametrize(
    ("sms", "threads", "measured_mib"),
    [(142, 1536, 426), (82, 1536, 256), (80, 2048, 319), (188, 1536, 550)],
    ids=["RTX 6000 Ada", "RTX 3090", "Titan V", "RTX PRO 6000"],
)
def test_the_context_rule_meets_the_measured_empty_contexts(sms: int, threads: int, measured_mib: int) -> None:
    empty = estimated_context_bytes(sms, threads) - 70 * MIB
    assert abs(empty / MIB - measured_mib) <= 15


@pytest.mark.parametrize(
    ("written", "name"),
    [("M3-Max", "M3-Max-36GB"), ("apple m2 ultra", "M2-Ultra-64GB"), ("M4", "M4-16GB"), ("m1-max-64gb", "M1-Max-64GB"),
     ("Intel(R) Arc(TM) A770 Graphics", "Arc-A770-16GB"), ("Intel(R) Data Center GPU Max 1550", "Max-1550-64GB")],
)  # fmt: skip
def test_apples_and_intels_cards_are_known_by_their_names(written: str, name: str) -> None:
    assert device_named(written).name == name


@pytest.mark.parametrize("name", ["M9-Max", "apple m2 ultra 8GB", "mps", "Apple"])
def test_other_machines_of_apple_are_told_how_to_name_one(name: str) -> None:
    with pytest.raises(UsageError, match="such as M2-Max-64GB"):
        device_named(name)


def test_a_working_set_is_called_measured_only_on_chips_that_its_source_is_about() -> None:
    assert not device_named("M2-Max-96GB").capacity_assumed
    other = device_named("M3-Max-96GB")
    assert other.capacity_assumed
    assert other.capacity_source.startswith("assumed")


def test_no_name_stands_for_another_model() -> None:
    """The model's number is in every alias: nothing is replaced by its neighbour."""
    for device in all_devices():
        number = re.search(r"\d+", device.name)
        for alias in device.aliases if number and not device.unified_memory else ():
            assert number is not None
            assert number[0] in alias, (device.name, alias)


@pytest.mark.parametrize(
    ("name", "gibibytes", "sms"),
    [("A100-40GB:1g.5gb", 4.75, 14), ("h100:3g.40gb", 39.5, 60), ("A100-80GB:1g.10gb+me", 9.5, 14),
     ("NVIDIA A100-SXM4-40GB MIG 2g.10gb", 9.75, 28), ("A30:1g.6gb", 5.81, 14)],
)  # fmt: skip
def test_mig_instances_have_the_memory_and_multiprocessors_of_their_profile(
    name: str, gibibytes: float, sms: int
) -> None:
    part = device_named(name)
    assert abs(part.capacity_bytes - gibibytes * GIB) < MIB
    assert part.sm_count == sms
    assert sum(figure.bytes for figure in part.outside(Loads())) == part.context_bytes
    assert part.context_bytes < device_named("A100").context_bytes


def test_an_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"it has 1g\.5gb"):
        device_named("A100-40GB:1g.7gb")
    with pytest.raises(UsageError, match="no MIG profile"):
        device_named("RTX-4090:1g.5gb")


def test_a_vgpu_has_its_part_of_the_memory_and_all_multiprocessors() -> None:
    whole, part = device_named("A10"), device_named("A10-12Q")
    assert 11 * GIB < part.capacity_bytes < 12 * GIB
    assert part.sm_count == whole.sm_count
    with pytest.raises(UsageError, match="more than"):
        device_named("A10-48Q")


def test_a_capability_by_option_changes_the_limits() -> None:
    card = with_capability(custom_device(8 * GIB), (7, 5))
    assert card.limits.architecture == "Turing"
    with pytest.raises(UsageError):
        with_capability(card, (3, 0))
