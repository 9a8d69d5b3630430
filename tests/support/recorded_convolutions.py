"""Recorded convolutions on meta tensors, and what the kernel rules say of them: bytes allocated and freed, in order."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphmem.capture.kernels import run_rule
from graphmem.capture.kernels.parts.script import Card, Script
from tests import places

OPS = places.PYTORCH / "ops"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def lines(name: str) -> Iterator[dict[str, Any]]:
    """The lines of a recording."""
    with gzip.open(OPS / name, "rt") as file:
        yield from map(json.loads, file)


class Case:
    """A recorded convolution. ``x``, ``w`` and ``g`` are the layouts of input, filter and gradient."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.line = line
        dim, dtype = line["dim"], DTYPES[line["dtype"]]
        inner, outer, groups = line["C"], line["K"], line["groups"]
        size = [line["HW"]] * dim
        shape = (inner, outer // groups) if line["transposed"] else (outer, inner // groups)
        kernel = [line["R"]] * dim
        self.input = _laid_out(torch.empty(line["N"], inner, *size, device="meta", dtype=dtype), line["x"])
        self.weight = _laid_out(torch.empty(*shape, *kernel, device="meta", dtype=dtype), line["w"])
        self.bias = torch.empty(outer, device="meta", dtype=dtype) if line["bias"] else None
        self.output = torch.empty_strided(
            (line["N"], outer, *[_output_size(line)] * dim), line["strides"], dtype=dtype, device="meta"
        )
        self.grad = _laid_out(torch.empty_like(self.output), line["g"])
        steps = [[line[name]] * dim for name in ("stride", "pad", "dil")]
        self.params = (*steps, line["transposed"], [line["op"]] * dim, groups)

    def gradients(self, mask: Sequence[bool] | None = None) -> list[Any]:
        bias = torch.empty(self.line["K"], device="meta", dtype=self.input.dtype)
        asked = self.line["mask"] if mask is None else mask
        return [g for g, wanted in zip((self.input, self.weight, bias), asked, strict=True) if wanted]

    def forward(self, card: Card) -> Script | None:
        arguments = (self.input, self.weight, self.bias, *self.params)
        return run_rule("aten.convolution.default", arguments, {}, [self.output], card)

    def backward(self, card: Card, mask: Sequence[bool] | None = None) -> Script | None:
        asked = [bool(wanted) for wanted in (self.line["mask"] if mask is None else mask)]
        arguments = (self.grad, self.input, self.weight, [self.line["K"]], *self.params, asked)
        return run_rule("aten.convolution_backward.default", arguments, {}, self.gradients(asked), card)


def plain_case(line: dict[str, Any]) -> Case:
    """A line of ``conv.jsonl.gz``: 2-D, and everything channels last or nothing."""
    layout = "cl" if line["channels_last"] else ""
    shape = (line["N"], line["K"], *[(line["HW"] + 2 * line["pad"] - line["R"]) // line["stride"] + 1] * 2)
    strides = _laid_out(torch.empty(shape, device="meta"), layout).stride()
    common = {"dim": 2, "dil": 1, "op": 0, "transposed": False, "bias": False, "mask": [True, True, False]}
    return Case({**line, **common, "x": layout, "w": layout, "g": "", "strides": strides})


def unusual_case(line: dict[str, Any]) -> Case:
    """A line of ``conv_unusual.jsonl.gz``: an input with an offset is dense, whatever the filter's layout."""
    layout = "cl" if line["cl"] else ""
    filled = {"x": "" if line["offset"] else layout, "w": layout, "g": "", "mask": [True, True, line["bias"]]}
    case = Case({**line, **filled})
    shape, offset = case.input.shape, line["offset"]
    if offset:
        storage = torch.empty(math.prod(shape) + offset, device="meta", dtype=case.input.dtype)
        case.input = storage[offset:].view(shape)
    return case


def events(script: Script | None, outputs: list[Any]) -> list[int]:
    """Positive: bytes allocated, negative: freed; empty tensors leave no event."""
    assert script is not None
    events, taken = [], {}
    for step in script.steps:
        if step.kind == "output":
            output = outputs[step.index]
            events.append(output.numel() * output.element_size() if step.bytes is None else step.bytes)
        elif step.kind == "take":
            taken[step.index] = step.bytes or 0
            events.append(taken[step.index])
        elif step.kind == "give":
            events.append(-taken[step.index])
    assert sum(step.kind == "output" for step in script.steps) == len(outputs)
    return [event for event in events if event]


def timing_buffers(script: Script | None) -> list[int]:
    """Bytes of the workspaces in which plans are timed."""
    assert script is not None
    return [step.bytes or 0 for step in script.steps if step.label.startswith("cuDNN workspace for timing")]


def _laid_out(tensor: Any, layout: str) -> Any:
    """The layouts of the recordings: contiguous, channels last, dimensions swapped, a slice, an expanded scalar."""
    if layout == "cl" and tensor.dim() > 3:
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.to(memory_format=last)
    if layout == "perm":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "slice":
        wider = (*tensor.shape[:-1], tensor.shape[-1] + 1)
        return torch.empty(wider, device="meta", dtype=tensor.dtype)[..., :-1]
    if layout == "exp":
        return torch.empty((), device="meta", dtype=tensor.dtype).expand(tensor.shape)
    return tensor


def _output_size(line: dict[str, Any]) -> int:
    reach = line["dil"] * (line["R"] - 1)
    if line["transposed"]:
        return int((line["HW"] - 1) * line["stride"] - 2 * line["pad"] + reach + line["op"] + 1)
    return int((line["HW"] + 2 * line["pad"] - reach - 1) // line["stride"] + 1)
