"""An analysis gives the same figures whatever modes its caller has on, and leaves them as they were."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from graphmem import analyze  # noqa: E402
from graphmem.errors import CaptureError  # noqa: E402


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _factory() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1000)), torch.zeros(4096, 2048)


def _peaks() -> tuple[int, int]:
    estimate = analyze(_factory)
    return estimate.allocated, estimate.reserved


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())],
        [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())],
        getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        torch._C._is_torch_function_enabled(),
        torch._C._functorch.maybe_current_level(),
    )


@pytest.fixture(scope="module")
def outside() -> tuple[int, int]:
    return _peaks()


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.set_grad_enabled(False),
        _Function,
        _Dispatch,
        FakeTensorMode,
        lambda: torch.device("meta"),
        lambda: _default_device("meta"),
        lambda: _default_device("cpu"),
        torch._C.DisableTorchFunction,
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch.autograd.forward_ad.dual_level,
    ],
    ids=[
        "no_grad", "inference", "set_grad_enabled", "function mode", "dispatch mode", "fake mode", "meta",
        "default meta", "default cpu", "no torch function", "one thread", "dual level",
    ],
)  # fmt: skip
def test_the_callers_modes_are_set_aside(mode: Callable[[], Any], outside: tuple[int, int]) -> None:
    with mode():
        before = _modes()
        assert _peaks() == outside
        assert _modes() == before
    assert torch.is_grad_enabled()


def test_inside_transforms_and_loops(outside: tuple[int, int]) -> None:
    found = []

    def asks(value: Any) -> Any:
        before = _modes()
        found.append(_peaks())
        assert _modes() == before
        return value

    torch.func.vmap(asks)(torch.zeros(2))
    torch.func.grad(lambda value: asks(value).sum())(torch.zeros(2))

    async def on_a_loop() -> tuple[int, int]:
        with torch.inference_mode():
            return _peaks()

    found.append(asyncio.run(on_a_loop()))
    assert found == [outside] * 3


def test_modes_are_back_after_an_error() -> None:
    def fails() -> None:
        raise ValueError("of the user")

    with torch.inference_mode(), _Function(), torch.device("meta"):
        before = _modes()
        with pytest.raises(CaptureError, match="of the user"):
            analyze(fails)
        assert _modes() == before


def test_settings_of_the_caller_are_the_steps() -> None:
    """A default device that computes is where a factory builds, and hooks of saved tensors move what is saved."""
    plain = analyze(_factory)
    with torch.autograd.graph.save_on_cpu():
        assert analyze(_factory).allocated < plain.allocated
    torch.set_default_dtype(torch.float64)
    try:
        assert analyze(_factory).allocated > plain.allocated
    finally:
        torch.set_default_dtype(torch.float32)


class _Asks(nn.Module):
    def forward(self, value: Any) -> Any:
        _peaks()
        return value + 1


def test_what_follows_the_callers_code_is_refused_in_one_line() -> None:
    with pytest.raises(CaptureError, match=r"torch\.fx is running"):
        torch.fx.symbolic_trace(_Asks())
    with pytest.raises(CaptureError, match=r"torch\.jit\.trace is running"):
        torch.jit.trace(_Asks(), torch.zeros(2))
    asked = torch.zeros(2, requires_grad=True)
    asked.register_hook(lambda _: _peaks() and None)
    with pytest.raises(CaptureError, match="a backward pass is running"):
        asked.sum().backward()
