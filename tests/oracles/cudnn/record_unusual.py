"""Records what PyTorch's CUDA build allocates in convolutions of all kinds, with cuDNN's own plans, on the stub driver.

    record_unusual.py OUT.jsonl.gz CARD [CASES]

Each line: the arguments, as of ``conv_layouts.jsonl.gz``, the card, and the allocations (positive) and frees (negative)
in bytes of the forward and of the backward pass. The environment chooses the card: ``FAKE_CUDNN_REAL=1``,
``FAKE_CUDNN_DEVPROP`` a description of it, ``FAKE_CUDA_CC`` and ``FAKE_CUDA_SMS``.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}


def events(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=5000)
    result = run()
    signs = {"alloc": 1, "free_requested": -1}
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    return result, [signs[event["action"]] * event["size"] for event in trace if event["action"] in signs]


def choose(source: random.Random) -> dict[str, Any]:
    dim = source.choice((1, 1, 2, 2, 2, 3))
    groups = source.choice((1, 1, 1, 1, 2, 8))
    stride = source.choice((1, 1, 2))
    sizes = {1: (64, 128, 500), 2: (14, 28, 56, 113), 3: (8, 16, 20)}[dim]
    return {
        "dim": dim, "N": source.choice((1, 4, 32)), "C": groups * source.choice((3, 8, 32, 64, 100)),
        "K": groups * source.choice((8, 16, 64, 75)), "HW": source.choice(sizes), "R": source.choice((1, 3, 3, 5)),
        "stride": stride, "pad": source.choice((0, 1, 2)), "dil": source.choice((1, 1, 1, 2)),
        "transposed": source.random() < 0.3, "op": source.choice((0, stride - 1)), "groups": groups,
        "dtype": source.choice(("fp32", "fp32", "fp16", "bf16", "fp64")), "cl": source.random() < 0.3,
        "bias": source.random() < 0.5, "offset": source.choice((0, 0, 0, 1, 2, 8)),
        "deterministic": source.random() < 0.2, "tf32": source.random() < 0.8, "benchmark": source.random() < 0.1,
    }  # fmt: skip


def record(case: dict[str, Any]) -> dict[str, Any]:
    torch.backends.cudnn.deterministic = case["deterministic"]
    torch.backends.cudnn.allow_tf32 = case["tf32"]
    torch.backends.cudnn.benchmark = case["benchmark"]
    dim, dtype, groups = case["dim"], DTYPES[case["dtype"]], case["groups"]
    shape = (case["N"], case["C"], *[case["HW"]] * dim)
    if not case["transposed"]:
        case["op"] = 0
    kernel = (case["C"], case["K"] // groups) if case["transposed"] else (case["K"], case["C"] // groups)
    count = 1
    for size in shape:
        count *= size
    storage = torch.empty(count + case["offset"], device="cuda", dtype=dtype)
    tensor = storage[case["offset"] :].view(shape)
    weight = torch.empty(*kernel, *[case["R"]] * dim, device="cuda", dtype=dtype)
    if case["cl"] and dim > 1:
        last = torch.channels_last if dim == 2 else torch.channels_last_3d
        weight = weight.to(memory_format=last)
        if not case["offset"]:
            tensor = tensor.to(memory_format=last)
    bias = torch.empty(case["K"], device="cuda", dtype=dtype) if case["bias"] else None
    steps = [[case[name]] * dim for name in ("stride", "pad", "dil")]
    rest = (*steps, case["transposed"], [case["op"]] * dim, groups)
    out, forward = events(lambda: torch.ops.aten.convolution(tensor, weight, bias, *rest))
    grad = torch.empty_like(out)
    mask = [True, True, case["bias"]]
    _, backward = events(lambda: torch.ops.aten.convolution_backward(grad, tensor, weight, [case["K"]], *rest, mask))
    return {**case, "strides": list(out.stride()), "fwd": forward, "bwd": backward}


def main() -> None:
    path, card = sys.argv[1:3]
    source = random.Random(card)
    held = torch.empty(64, 64, device="cuda")
    held @ held  # cuBLAS's workspace exists now
    written = 0
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        while written < int(sys.argv[3] if len(sys.argv) > 3 else 100):
            case = choose(source)
            if case["HW"] + 2 * case["pad"] <= case["dil"] * (case["R"] - 1):
                continue
            try:
                line = record(case)
            except RuntimeError:
                continue  # PyTorch refuses it
            file.write((json.dumps({"card": card, **line}, separators=(",", ":")) + "\n").encode())
            written += 1


if __name__ == "__main__":
    main()
