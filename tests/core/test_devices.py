"""The table of cards: names, sources, and the arithmetic of the context."""

from __future__ import annotations

import re

import pytest

from graphmem.devices import (
    DEFAULT_DEVICE,
    Device,
    all_devices,
    custom_device,
    device_named,
    estimated_context_bytes,
)
from graphmem.errors import UsageError
from graphmem.units import GIB, MIB


def test_the_default_card_is_in_the_table() -> None:
    assert device_named(DEFAULT_DEVICE).name == DEFAULT_DEVICE


@pytest.mark.parametrize("device", all_devices(), ids=lambda device: device.name)
def test_every_card_is_plausible_and_has_its_sources(device: Device) -> None:
    assert 8 * GIB < device.capacity_bytes < 513 * GIB
    assert 0 < device.context_bytes < 2 * GIB
    assert device.capacity_source
    assert device.context_source
    assert device.vendor in ("NVIDIA", "AMD", "Apple")
    if device.vendor == "NVIDIA":
        assert device.compute_capability is not None
        assert device.compute_capability >= (6, 0)
        assert 20 < device.sm_count < 200
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
        ("apple m2 ultra", "M2-Ultra-128GB"),
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
    empty = estimated_context_bytes(sms, threads) - 128 * MIB
    assert abs(empty / MIB - measured_mib) <= 15
