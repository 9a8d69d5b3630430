"""PyTorch's global switches: a step's own, which end with it.

Scripts turn gradients off, choose a default dtype or device, seed, or enter autocast by hand and leave it so: in a
process of their own that harms nobody. A capture runs them inside its caller's process, beside other threads. Of three
kinds of switches

- those that PyTorch keeps for every thread are put back at the end;
- those of the process that only Python reads here, and the random numbers, are the capture's own while it lasts;
- those of the process that C++ reads everywhere, the default dtype, the choice of deterministic algorithms, and
  Python's limit of recursion, are seen by every thread, and put back at the end if the step has set them.

Additions of libraries to ``nn.Module`` while they build a model (transformers: ``smart_apply``) goes with the capture.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, SupportsInt

import torch

from graphmem.base import versions
from graphmem.capture.patches import Patches
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import default_context
from graphmem.capture.values import generators
from graphmem.torch_names import private, private_names

_LOST = "a switch that the step sets stays as it is after the analysis, and is seen by other threads"
#: What reads each switch, and what sets it.
_READ = private_names(
    _LOST,
    "torch._C._get_cudnn_enabled",
    "torch._C._get_cudnn_benchmark",
    "torch._C._get_cudnn_deterministic",
    "torch._C._get_cudnn_allow_tf32",
    "torch._C._get_cublas_allow_tf32",
    "torch._C._get_float32_matmul_precision",
    "torch._C._get_flash_sdp_enabled",
    "torch._C._get_mem_efficient_sdp_enabled",
    "torch._C._get_math_sdp_enabled",
    "torch._C._get_cudnn_sdp_enabled",
    "torch._C._get_blas_preferred_backend",
    "torch._C._get_linalg_preferred_backend",
)
_SET = private_names(
    _LOST,
    "torch._C._set_cudnn_enabled",
    "torch._C._set_cudnn_benchmark",
    "torch._C._set_cudnn_deterministic",
    "torch._C._set_cudnn_allow_tf32",
    "torch._C._set_cublas_allow_tf32",
    "torch._C._set_float32_matmul_precision",
    "torch._C._set_sdp_use_flash",
    "torch._C._set_sdp_use_mem_efficient",
    "torch._C._set_sdp_use_math",
    "torch._C._set_sdp_use_cudnn",
    "torch._C._set_blas_preferred_backend",
    "torch._C._set_linalg_preferred_backend",
)
_SEEN_BY_ALL = private_names(_LOST, "torch._C._set_default_dtype", "torch._C._set_deterministic_algorithms")
#: ``torch.backends.cudnn`` holds these C functions themselves.
_HELD = ("enabled", "benchmark", "deterministic", "allow_tf32")


@contextlib.contextmanager
def same_settings() -> Iterator[None]:
    """Restore the switches that exist at the start when the block ends, whatever happened inside."""
    patches = Patches()
    undo = [_setting(*pair) for pair in _of_thread()]
    seen_by_all = [_SeenByAll(*switch) for switch in _of_process()]
    device = getattr(default_context, "device_context", None)
    nesting = _autocast_nesting()
    methods = set(vars(torch.nn.Module))
    try:
        for switch in seen_by_all:
            switch.watch(patches)
        _keep_apart(patches)
        _patch_random_numbers(patches)
        yield
    finally:
        patches.undo()
        for put_back in (*undo, *(switch.put_back for switch in seen_by_all)):
            put_back()
        if getattr(default_context, "device_context", None) is not device:
            torch.set_default_device(device.device if device is not None else None)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        for name in set(vars(torch.nn.Module)) - methods:
            delattr(torch.nn.Module, name)


# --- of every thread --------------------------------------------------------------------------------------------------


def _of_thread() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """(getter, setter) of PyTorch's settings of a thread: gradients and autocast."""
    yield torch.is_grad_enabled, torch.set_grad_enabled
    for kind in ("cuda", "cpu"):
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)


def _setting(read: Callable[[], object], write: Callable[[object], object]) -> Callable[[], Any]:
    value = read()
    return lambda: write(value)


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


# --- of the process ---------------------------------------------------------------------------------------------------


_Noted = Callable[[Callable[..., Any]], Callable[..., Any]]
_Watch = Callable[[Patches, _Noted], None]


class _SeenByAll:
    """A switch of the process that C++ reads. Another thread may set it meanwhile: other values stay."""

    def __init__(self, read: Callable[[], object], write: Callable[[object], object], watch: _Watch) -> None:
        self._value, self._write, self._watch = read(), write, watch
        self._was_set = False

    def watch(self, patches: Patches) -> None:
        def noted(original: Callable[..., object]) -> Callable[..., Any]:
            def set_(*args: object, **kwargs: object) -> object:
                self._was_set = True
                return original(*args, **kwargs)

            return set_

        self._watch(patches, noted)

    def put_back(self) -> None:
        if self._was_set:
            self._write(self._value)


def _of_process() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any], _Watch]]:
    """(read, write, the replacement of its setter)."""

    def limit(patches: Patches, noted: _Noted) -> None:  # Inductor raises it
        patches.set(sys, "setrecursionlimit", noted(sys.setrecursionlimit))

    dtype, deterministic = (partial(_wrapped, path) for path in _SEEN_BY_ALL)
    yield sys.getrecursionlimit, sys.setrecursionlimit, limit
    yield torch.get_default_dtype, torch.set_default_dtype, dtype
    yield (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        deterministic,
    )


def _wrapped(path: str, patches: Patches, noted: _Noted) -> None:
    patches.wrap(path, _LOST, noted)


def _keep_apart(patches: Patches) -> None:
    """The switches of :data:`_READ` begin as they are, and the step's changes are seen by the step alone."""
    functions: dict[str, Any] = {}  # by the name of a switch of cuDNN
    for getter, setter in zip(_READ, _SET, strict=True):
        read = private(getter, _LOST, None)
        if read is None or private(setter, _LOST, None) is None:
            continue
        value = [read()]

        def get(value: list[object] = value) -> object:
            return value[0]

        def set_(new: object, value: list[object] = value) -> None:
            value[0] = new

        functions[getter.rpartition("_get_cudnn_")[2]] = get, set_
        patches.replace(getter, _LOST, get)
        patches.replace(setter, _LOST, set_)
    for name in set(_HELD) & set(functions):
        switch = vars(type(torch.backends.cudnn))[name]
        patches.set(switch, "getter", functions[name][0])
        patches.set(switch, "setter", functions[name][1])


def _patch_random_numbers(patches: Patches) -> None:
    """A generator of the capture's own, which begins as PyTorch's does in a new process: seeding disturbs no other
    thread, and numbers drawn on the host do not depend on earlier ones."""
    host = generators.new_generator()

    def manual_seed(seed: SupportsInt) -> object:
        generators.seed_device()
        return host.restart().manual_seed(int(seed))

    def seed() -> object:
        generators.seed_device()
        return host.restart().seed()

    functions: dict[str, Callable[..., Any]] = {
        "manual_seed": manual_seed,
        "seed": seed,
        "initial_seed": lambda: host.generator.initial_seed(),
        "get_rng_state": lambda: host.settled().get_state(),
        "set_rng_state": lambda new_state: host.restart().set_state(new_state),
    }
    for name, function in functions.items():
        for owner in (torch.random, torch):
            patches.set(owner, name, function)


class ProgramSettings:
    """Compares the environment of the first tensor on the card with that of the beginning.

    The allocator reads ``PYTORCH_CUDA_ALLOC_CONF`` while CUDA is initialised, at the latest for the first tensor on the
    card: settings made before that count, after ``import torch`` too, and later no more (seen on the stub driver,
    2.13).

    ``are_followed``: nobody gave the capture other settings to look at. ``differ``: the program has made its own.
    """

    def __init__(self, recorder: Recorder, torch_version: tuple[int, int], *, are_followed: bool) -> None:
        self._recorder = recorder
        self._version = torch_version
        self._are_followed = are_followed
        self._before = versions.allocator_settings(os.environ, torch_version)
        self.differ = False
        recorder.storages.on_first = self.read

    def read(self) -> None:
        """The first tensor is about to be on the card."""
        text = versions.allocator_settings(os.environ, self._version)
        if text == self._before:
            return
        self.differ = True
        if self._are_followed:
            self._recorder.builder.allocator_settings(text, self._recorder.storages.operator)
            self._recorder.note_once(f"PYTORCH_CUDA_ALLOC_CONF={text}, as the program sets it")
        else:
            self._recorder.note_once(
                f"the program's own PYTORCH_CUDA_ALLOC_CONF={text} is not followed: others are given"
            )
