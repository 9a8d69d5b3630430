"""TorchScript's fuser: figures as PyTorch's CUDA build has them on the stub driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from graphmem.capture.session.session import capture
from graphmem.diagnostics import Code
from tests.support.captures import H100, TORCH_VERSION, births, record


def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return x + torch.pow(torch.sin(x * alpha), 2)


def two(x: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.relu(x) * scale
    return y, torch.exp(y).half()


def taken(calls: Callable[[], Any]) -> list[list[int]]:
    """Bytes of what each run takes, in order; a tensor of one byte is made before each."""
    runs: list[list[int]] = []
    for birth in births(record(calls)):
        if birth.bytes == 1:
            runs.append([])
        elif runs:
            runs[-1].append(birth.bytes)
    return runs


def mark() -> None:
    torch.empty(1, dtype=torch.uint8, device="cuda")


def of_sizes(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[int]:
    """The number of tensors that a scripted function takes at each of these sizes in a row."""

    def step() -> None:
        run, alpha = torch.jit.script(snake), torch.ones(64, device="cuda", dtype=dtype)
        tensors = [torch.ones(size, 64, device="cuda", dtype=dtype) for size in sizes]
        for x in tensors:
            mark()
            assert run(x, alpha).dtype is dtype

    return list(map(len, taken(step)))


def test_a_group_takes_its_results_from_the_second_run_on() -> None:
    assert of_sizes([100, 100, 100]) == [4, 1, 1]
    assert of_sizes([100, 100], torch.float16) == [4, 1]


def test_two_shapes_are_fused_each_for_itself_and_further_ones_together() -> None:
    assert of_sizes([100, 200, 300, 400, 500, 200]) == [4, 4, 4, 1, 1, 1]


def test_all_results_of_a_group_are_made_whatever_way_it_is_called() -> None:
    def step() -> None:
        run, x = torch.jit.script(two), torch.ones(256, device="cuda")
        for kwargs in ({}, {"scale": 3.0}):
            mark()
            run(x=x, **kwargs)

    assert taken(step) == [[1024, 1024, 1024, 512], [512, 1024]]


def test_constants_of_frozen_code_are_compared_when_it_is_fused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x * self.one) + self.other

    def step() -> None:
        frozen, x = torch.jit.freeze(torch.jit.script(Scaled().cuda().eval())), torch.ones(8, 64, device="cuda")
        for _ in range(3):
            mark()
            frozen(x)

    assert taken(step)[2] == [2048]


def join(xs: list[torch.Tensor], more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"y": torch.cat(xs, 0) * 3 + 1, "z": more["k"].sin().cos()}


def test_what_takes_no_tensor_of_its_own_is_checked_by_nobody() -> None:
    def step() -> None:
        run, x = torch.jit.script(join), torch.ones(64, 64, device="cuda", requires_grad=True)
        for _ in range(4):
            run([x, x], more={"k": x})["y"].sum().backward()

    record(step)


def test_gradients_that_are_off_leave_what_was_noted_with_them() -> None:
    """``RequiresGradCheck`` asks the tensor, not the mode: what the gradients would need is still made."""

    def step() -> None:
        run, x = torch.jit.script(snake), torch.ones(64, 64, device="cuda", requires_grad=True)
        for _ in range(3):
            run(x, torch.ones(64, device="cuda")).sum().backward()
        with torch.no_grad():
            mark()
            run(x, torch.ones(64, device="cuda"))

    assert list(map(len, taken(step))) == [4]


def test_autocast_of_scripted_code_is_that_of_its_compiler() -> None:
    """Eager autocast leaves a product with a number in 16 bits (``torch/csrc/jit/passes/autocast.cpp``)."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.linear(x)) * 2

    def step() -> None:
        for make, dtype in ((torch.jit.script, torch.float32), (lambda module: module, torch.bfloat16)):
            module = make(Gate().cuda())
            for _ in range(3):
                with torch.autocast("cuda", torch.bfloat16):
                    assert module(torch.ones(8, 64, device="cuda")).dtype is dtype

    record(step)


def test_what_is_not_fused_is_said() -> None:
    def step(_: object) -> None:
        with torch.jit.optimized_execution(False):
            torch.jit.script(snake)(torch.ones(8, 64, device="cuda"), torch.ones(64, device="cuda"))

    run = capture(step, source="test", device=H100, torch_version=TORCH_VERSION)
    assert run.assumed[Code.SCRIPT_UNFUSED.about()] == 1
