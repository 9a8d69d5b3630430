"""PyTorch's global switches, put back after a step that set them.

Scripts turn gradients off, choose a default dtype or device, seed, or enter autocast by hand and leave it so: in a
process of their own that harms nobody. A capture runs them inside its caller's process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


@contextlib.contextmanager
def same_settings() -> Iterator[None]:
    """Restore the switches that exist at the start when the block ends, whatever happened inside."""
    undo = [_setting(*pair) for pair in _settings()]
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    nesting = _autocast_nesting()
    try:
        yield
    finally:
        for put_back in undo:
            put_back()
        if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not device:
            torch.set_default_device(device.device if device is not None else None)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """(read, write) of every switch."""
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_rng_state, torch.set_rng_state
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield _deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    for kind in ("cuda", "cpu"):
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    cuda = torch.backends.cuda
    yield cuda.flash_sdp_enabled, cuda.enable_flash_sdp
    yield cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
    yield cuda.math_sdp_enabled, cuda.enable_math_sdp
    yield cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp
    for owner, names in (
        (torch.backends.cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (cuda.matmul, ("allow_tf32",)),
    ):
        for name in names:
            yield partial(getattr, owner, name), partial(setattr, owner, name)


def _setting(read: Callable[[], Any], write: Callable[[Any], Any]) -> Callable[[], Any]:
    value = read()
    return lambda: write(value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
