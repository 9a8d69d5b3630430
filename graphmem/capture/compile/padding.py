"""Padded matrix products: Inductor tries both on the card, and the memory of the trial is part of the run.

A product whose sides are not a multiple of 16 bytes may be faster with zeros around it. Inductor makes both operands
anew, runs the product with and without padding, and keeps the faster one (``torch/_inductor/fx_passes/pad_mm.py`` of
2.13). Here the trial runs under the recorder, for its buffers; its outcome is not known, and taken to be that nothing
is padded.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphmem.capture.patches import Patches, constant
from graphmem.capture.record.dispatch import RecordingMode
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import FakeTensorMode, disable_current_modes
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"

_ASSUMED = Code.PADDING_NOT_TIMED.about()


class _Results:
    """Outcomes of the trials of this capture; Inductor's own table (``LocalCache``) is a file of the user's."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def lookup(self, *keys: str) -> object:
        return self._values.get(keys)

    def set_value(self, *keys: str, value: object) -> None:
        self._values[keys] = value


def follow_padding(patches: Patches, device: Device, recorder: Recorder, assumed: Counter[Diagnostic]) -> None:
    """Record the trials of padded matrix products; ``assumed`` counts their outcomes."""
    pad_mm = private("torch._inductor.fx_passes.pad_mm", _LOST)
    # Names before 2.11 are the second ones.
    judge, tried = (
        next(name for name in names if hasattr(pad_mm, name))
        for names in (("is_padded_faster", "should_pad"), ("_should_pad", "_should_pad_bench"))
    )

    @contextlib.contextmanager
    def recorded() -> Iterator[None]:
        with disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), RecordingMode(recorder):
            yield

    def outcome(original: Callable[..., object], *args: object) -> object:
        assumed[_ASSUMED] += 1
        return original(*args)

    patches.set(pad_mm, tried, inspect.unwrap(getattr(pad_mm, tried)))  # the wrapper remembers for good
    patches.table(pad_mm, {"get_pad_cache": constant(_Results()), "no_dispatch": recorded})
    patches.around(pad_mm, {judge: outcome})
    if hasattr(pad_mm, "get_do_bench"):
        patches.set(pad_mm, "get_do_bench", lambda: _trial(device.limits.l2_bytes))
    else:  # 2.6
        benchmarker = private("torch._inductor.runtime.benchmarking.TritonBenchmarker", _LOST)

        trial = _trial(device.limits.l2_bytes)
        patches.set(benchmarker, "benchmark_gpu", lambda _, function, *args, **kwargs: trial(function))


def _trial(l2_bytes: int) -> Callable[[Callable[[], None]], float]:
    """``InductorBenchmarker.benchmark_gpu`` (``torch/_inductor/runtime/benchmarking.py``): one run, then many with a
    buffer that clears the second-level cache between them."""

    def run(function: Callable[[], None]) -> float:
        function()
        buffer = torch.empty(l2_bytes // 4, dtype=torch.int, device="cuda")
        function()
        del buffer
        return 1.0

    return run
