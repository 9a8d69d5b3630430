"""An engine that sleeps beside a training: its memory is the card's for others, and comes back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import graphmem  # noqa: E402
from graphmem.devices import device_named  # noqa: E402
from graphmem.units import MIB  # noqa: E402

#: As much of vLLM's allocator of sleep mode as is replaced, and what is not: its pools by their tags.
_CUMEM = """
import contextlib
import torch

class CuMemAllocator:
    default_tag = "default"
    def __init__(self):
        self.allocator_and_pools = {}
    @contextlib.contextmanager
    def use_memory_pool(self, tag):
        with use_memory_pool_with_allocator(None, None) as data:
            self.allocator_and_pools.setdefault(tag, []).append(data)
            yield
            self._trim(data[0])
    def _trim(self, pool): raise AssertionError("an extension gives memory back")
    sleep = wake_up = discard = get_current_usage = _trim

def use_memory_pool_with_allocator(malloc, free): raise AssertionError("an extension takes memory")
get_pluggable_allocator = use_memory_pool_with_allocator
"""


@pytest.fixture(autouse=True)
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "vllm" / "device_allocator"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").write_text("")
    (folder / "cumem.py").write_text(_CUMEM)
    monkeypatch.syspath_prepend(tmp_path)
    _forget()
    yield
    _forget()


def _forget() -> None:
    """The stand-ins of other tests."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def _full(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")


def _levels(tags: tuple[str, ...], *, deleted: bool = False) -> list[int]:
    """MiB reserved: at the start, asleep, with another tensor of 100 MiB beside, and awake again."""
    from vllm.device_allocator.cumem import CuMemAllocator  # type: ignore[import-not-found,import-untyped,unused-ignore]

    found = []

    def note() -> None:
        found.append(torch.cuda.memory_reserved() // MIB)

    def step() -> None:
        allocator = CuMemAllocator()
        with allocator.use_memory_pool("weights"):
            scratch, weights = _full(60), _full(40)
            del scratch
        with allocator.use_memory_pool("kv_cache"):
            cache = _full(200)
        assert allocator.get_current_usage() == 240 * MIB
        note()
        allocator.sleep(tags)
        note()
        training = _full(100)
        note()
        del training
        if deleted:
            del weights, cache
        allocator.wake_up(["weights"])
        note()
        allocator.wake_up(None)
        note()

    estimate = graphmem.analyze(step, device="A100-80GB")
    found.append(estimate.pinned_bytes // MIB)
    return found


def test_memory_that_sleeps_is_the_cards_for_others() -> None:
    pinned = 64  # of 40: pinned memory comes in powers of two
    assert _levels(("weights",)) == [240, 0, 100, 40, 240, pinned]


def test_weights_that_are_thrown_away_are_not_kept_on_the_host() -> None:
    assert _levels(()) == [240, 0, 100, 40, 240, 0]


def test_what_ends_while_it_sleeps_does_not_wake() -> None:
    assert _levels((), deleted=True) == [240, 0, 100, 0, 0, 0]


def test_a_card_that_is_too_small_for_both_at_once_holds_one_after_the_other() -> None:
    from vllm.device_allocator.cumem import CuMemAllocator  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def step() -> None:
        allocator = CuMemAllocator()
        with allocator.use_memory_pool("kv_cache"):
            cache = _full(600)
        allocator.sleep(())
        training = _full(600)
        del training
        allocator.wake_up()
        assert cache.numel() == 600 * MIB

    card = replace(device_named("A100-80GB"), capacity_bytes=1500 * MIB)
    estimate = graphmem.analyze(step, device=card)
    assert estimate.fit is not None
    assert estimate.fit.fits
    assert estimate.peak.reserved_bytes == 600 * MIB
