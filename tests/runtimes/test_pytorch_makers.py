"""PyTorch on AMD's, Intel's and Apple's cards: settings, limits, and what is said of what nobody knows."""

from __future__ import annotations

import pytest

from graphmem import advise, analyze, replay_trace
from graphmem.allocators.alloc_conf import AllocConf, parse_alloc_conf
from graphmem.allocators.mps_heaps import Watermarks
from graphmem.devices import all_devices, device_named
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.exports import EXPORTS, Asked, trace_of
from graphmem.runtimes.base import Setting
from graphmem.runtimes.pytorch import RUNTIME, makers
from graphmem.trace import Category, Trace, TraceBuilder
from graphmem.units import GIB, MIB
from tests.support.examples import first_quick


def _trace(*sizes: int, operator: str = "aten.empty.memory_format", label: str = "") -> Trace:
    builder = TraceBuilder("made by hand")
    made = builder.operator(operator, phase=builder.phase(0, "forward"))
    for size in sizes:
        builder.alloc(size, made, Category.WORKSPACE if label else Category.ACTIVATION, label=label)
    return builder.build()


def _on(card: str, trace: Trace, alloc_conf: str = "", version: str = "2.13") -> Estimate:
    return replay_trace(trace, device=card, alloc_conf=alloc_conf, torch_version=version)


def test_an_apple_machine_has_metal_heaps() -> None:
    estimate = _on("M2-Max-64GB", _trace(20 * MIB))
    assert estimate.reserved == GIB
    assert "Metal heaps (watermarks: low 1.4, high 1.7)" in estimate.allocator


def _verdict(count: int, text: str = "") -> tuple[bool, bool, bool]:
    """Of so many GiB on a machine with 5.33 GiB for its card: whether they fit, run out, and are said to be swapped."""
    estimate = _on("M1-8GB", _trace(*[GIB] * count), text)
    assert estimate.fit is not None
    report = " ".join(estimate.report().split())
    return estimate.fit.fits, "Runs out of memory" in report, "macOS compresses and swaps" in report


def test_what_fits_an_apple_machine_stays_within_the_working_set() -> None:
    """1.7 times as much is allowed, beyond what the machine has; then PyTorch stops."""
    assert _verdict(5) == (True, False, False)
    assert _verdict(6) == (False, False, True)
    assert _verdict(8) == (False, False, True)
    assert _verdict(9) == (False, True, False)


def test_a_lower_watermark_stops_below_the_working_set_and_none_never() -> None:
    low = "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.5,PYTORCH_MPS_LOW_WATERMARK_RATIO=0.4"
    assert _verdict(2, low) == (True, False, False)
    assert _verdict(3, low) == (False, True, False)
    assert _verdict(30, "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0") == (False, False, True)


@pytest.mark.parametrize("version", ["2.11", "2.12"])
def test_small_tensors_have_a_heap_apart_before_all_memory_was_shared(version: str) -> None:
    assert _on("M4-16GB", _trace(8, 512), version=version).reserved == (16 if version == "2.11" else 8) * MIB


def test_ratios_come_from_the_environment_and_text_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0", "PYTORCH_MPS_LOW_WATERMARK_RATIO": "1.0"}
    assert makers.read_watermarks("", found) == Watermarks(0.0, 1.0)
    assert makers.read_watermarks("PYTORCH_MPS_LOW_WATERMARK_RATIO = 0.5", found) == Watermarks(0.0, 0.5)
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.5")
    assert "high 1.5" in _on("M4-16GB", _trace(1)).allocator


@pytest.mark.parametrize(
    ("text", "reason"),
    [("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.8", "LOW_WATERMARK_RATIO is 1.4"), ("HIGH=1", "accepted: PYTORCH_MPS_HIGH"),
     ("PYTORCH_MPS_HIGH_WATERMARK_RATIO=much", "accepted: a number"), ("max_split_size:3", "Unrecognized key")],
)  # fmt: skip
def test_settings_that_mps_does_not_take_are_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        _on("M4-16GB", _trace(1), text)
    assert "\n" not in str(caught.value)


def test_intels_cards_have_the_cuda_allocator_and_one_of_its_settings() -> None:
    text = "max_split_size_mb:64,roundup_power2_divisions:4,expandable_segments:True,garbage_collection_threshold:0.5"
    conf = parse_alloc_conf(text, (2, 13))
    assert makers.xpu_conf(conf, (2, 13)) == AllocConf(expandable_segments=True)
    assert makers.xpu_conf(conf, (2, 9)) == AllocConf()


@pytest.mark.parametrize(("size", "reserved"), [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB, 10), (21 * MIB + 1, 22)])
def test_intels_segments_are_those_of_the_source(size: int, reserved: int) -> None:
    """``get_allocation_size`` of c10/xpu/XPUCachingAllocator.cpp: 2 MiB, 20 MiB, or rounded to 2 MiB."""
    assert _on("B580", _trace(size)).reserved == reserved * MIB


def test_settings_that_intels_allocator_does_not_read_are_named() -> None:
    assert "reads nothing" in _on("A770", _trace(1), "max_split_size_mb:64").allocator
    assert _on("A770", _trace(3 * MIB), "roundup_power2_divisions:1,max_split_size_mb:64").reserved == 20 * MIB


def _bounds(card: str, trace: Trace) -> dict[str, tuple[int | None, int | None]]:
    found = {one.name: one.spread("reserved") for one in makers.doubts(trace, device_named(card))}
    return {name: (spread.least, spread.most) for name, spread in found.items()}


def test_hipblaslt_is_an_interval_around_rocblas(monkeypatch: pytest.MonkeyPatch) -> None:
    with_products = _trace(128 * MIB, label="cuBLAS workspace")
    assert _bounds("MI300X", with_products) == {"workspaces of ROCm": (-128 * MIB, 80 * MIB)}
    with_bias = _trace(MIB, label="cublasLt workspace")
    assert _bounds("MI300X", with_bias) == {"workspaces of ROCm": (-MIB, 80 * MIB)}
    assert _bounds("MI300X", _trace(MIB)) == {}
    assert _bounds("A100", with_products) == {}
    monkeypatch.setenv("HIPBLASLT_WORKSPACE_SIZE", "1024")
    assert _bounds("MI300X", with_products) == {"workspaces of ROCm": (-128 * MIB, MIB)}


def test_miopen_is_not_bounded_where_something_is_convolved() -> None:
    assert _bounds("MI300X", _trace(MIB, operator="aten.convolution.default")) == {"MIOpen's workspaces": (0, None)}


def test_what_nobody_knows_of_intels_and_apples_libraries_is_said() -> None:
    assert _bounds("B580", _trace(MIB)) == {"libraries of oneAPI": (0, None)}
    (cause,) = makers.doubts(_trace(MIB), device_named("M1"))
    assert cause.spread("device").most is None
    assert cause.spread("reserved").most == 0


@pytest.mark.parametrize("vendor", ["AMD", "Intel", "Apple"])
def test_every_card_of_another_maker_says_first_what_is_by_source(vendor: str) -> None:
    card = next(one for one in all_devices() if one.vendor == vendor)
    first = " ".join(_on(card.name, _trace(MIB)).report().split("Peak memory")[0].split())
    assert "PyTorch's source" in first
    assert "not known" in first


def test_rocblas_takes_what_the_source_says_and_other_makers_have_no_cublas() -> None:
    for device in all_devices():
        if device.vendor == "AMD":
            assert device.cublas_workspace_bytes == (128 if device.name.startswith("MI3") else 32) * MIB
        elif device.vendor in ("Intel", "Apple"):
            assert device.cublas_workspace_bytes == 0


def test_a_snapshot_of_metal_heaps_is_refused() -> None:
    with pytest.raises(UsageError, match="Metal heaps on M1-8GB"):
        EXPORTS.named("snapshot").render(_on("M1", _trace(MIB)), Asked())


def test_a_program_on_an_apple_machine_finds_no_allocator_of_cuda() -> None:
    setting = Setting(device_named("M1"), (2, 13))
    assert RUNTIME.live(RUNTIME.parse("", setting), setting, room=1) is None


@pytest.mark.parametrize("version", first_quick(["2.13", "2.11", "2.15"], 1))
def test_a_step_takes_workspaces_by_the_maker_of_the_card(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cards without cuBLAS none, whatever a variable of cuBLAS says; on AMD's rocBLAS's size."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def workspaces(card: str) -> set[int]:
        model, rows = torch.nn.Linear(8, 8, bias=False), torch.randn(4, 8)
        estimate = analyze(model, rows, device=card, torch_version=version, training=False)
        trace = trace_of(estimate)
        return {one.bytes for one in trace.storages if one.category == Category.WORKSPACE}

    assert workspaces("M1") == workspaces("B580") == set()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert 128 * MIB in workspaces("MI300X")
    assert 32 * MIB in workspaces("MI210")
    monkeypatch.setenv("HIPBLAS_WORKSPACE_CONFIG", ":1024:3")
    assert 3 * MIB in workspaces("MI210")
    assert 3 * MIB not in workspaces("A100")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:5")  # wins
    assert 5 * MIB in workspaces("MI210")


def test_an_answer_for_a_mac_speaks_of_macs_alone() -> None:
    torch = pytest.importorskip("torch")
    model, x = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)), torch.zeros(256, 512)
    advised = advise(model, x, device="Apple M2 Max", batch=256)
    said = " ".join(advised.base.report(details=True).split())
    assert "--gpu M2-Max-64GB or M2-Max-96GB" in said
    assert "nvidia-smi" not in said
    assert not any("expandable_segments" in text for text in (said, *(one.options for one in advised.advice)))
