"""Single operators asked over thousands of sizes: ``golden/pytorch/2.13/ops``, one file a family, one question a line.

A line has the arguments and what the operator did: bytes asked for and given back (negative), in order. Recording
asks the questions of the lines that are there again; a new line is a question without answers, appended to the file.

    python -m tests.recorded operators record [reduce|linear|sdpa|embed|norm|conv|conv_layouts|rnn ...]
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from graphmem.cudnn.card import description
from graphmem.devices import device_named
from tests import places
from tests.recorded import stub

FOLDER = places.PYTORCH / "ops"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
Line = dict[str, Any]
_MOST_EVENTS = 5000
_SIGNS = {"alloc": 1, "free_requested": -1}
_LONGEST_ERROR = 120


def events(run: Callable[[], Any]) -> tuple[Any, list[int]]:
    """What ``run`` returns, and the bytes that it asks for and gives back."""
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=_MOST_EVENTS)
    result = run()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    return result, [_SIGNS[event["action"]] * event["size"] for event in trace if event["action"] in _SIGNS]


def warm_up() -> None:
    """The cuBLAS workspaces of both threads exist before the first question."""
    square = torch.empty(64, 64, device="cuda")
    square @ square
    (torch.empty(64, 64, device="cuda", requires_grad=True) @ square).sum().backward()
    torch.addmm(torch.empty(64, device="cuda"), square, square)


def _empty(*shape: int, line: Line, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=DTYPES[line["dtype"]], requires_grad=grad)


def _both(run: Callable[[], torch.Tensor]) -> Line:
    """Forward, then backward from a gradient that is there before."""
    out, forward = events(run)
    grad = torch.empty_like(out)
    return {"fwd": forward, "bwd": events(lambda: out.backward(grad))[1]}


def _sum(line: Line) -> Line:
    x = _empty(line["rows"], line["cols"], line=line)
    questions = {
        "dim0": lambda: x.sum(0),
        "dim1": lambda: x.sum(1),
        "all": lambda: x.sum(),
        "dim0_f32": lambda: x.sum(0, dtype=torch.float32),
        "amax1": lambda: x.amax(1),
        "norm": lambda: torch.linalg.vector_norm(x),
    }
    return {name: events(run)[1] for name, run in questions.items()}


def _sum_of_images(line: Line) -> Line:
    x = _laid_out(_empty(line["N"], line["C"], line["HW"], line["HW"], line=line), line["channels_last"])
    return {"bias": events(lambda: x.sum((0, 2, 3)))[1]}


def _linear(line: Line) -> Line:
    layer = nn.Linear(line["i"], line["o"], bias=bool(line["bias"]), device="cuda", dtype=DTYPES[line["dtype"]])
    x = _empty(line["rows"], line["i"], line=line, grad=True)
    return _both(lambda: layer(x))


def _attention(line: Line) -> Line:
    batch, heads, steps, size = (line[name] for name in ("B", "H", "T", "D"))
    query, key, value = (
        _empty(batch, steps, heads, size, line=line).transpose(1, 2).requires_grad_() for _ in range(3)
    )
    known: dict[str, dict[str, Any]] = {"causal": {"is_causal": True}, "drop": {"dropout_p": 0.1}}
    options = known.get(line["opt"], {})
    if line["opt"] == "mask":
        options = {"attn_mask": _empty(batch, 1, steps, steps, line=line)}
    with sdpa_kernel(getattr(SDPBackend, line["backend"])):
        out, forward = events(lambda: scaled_dot_product_attention(query, key, value, **options))
        grad = torch.empty_like(out)
        return {"fwd": forward, "bwd": events(lambda: out.backward(grad))[1], "o_strides": list(out.stride())}


def _embedding(line: Line) -> Line:
    table = nn.Embedding(line["V"], line["d"], device="cuda", dtype=DTYPES[line["dtype"]])
    tokens = torch.zeros(line["T"], dtype=torch.long, device="cuda")
    return _both(lambda: table(tokens))


def _norm_of_images(line: Line) -> Line:
    channels = line["C"]
    module = (nn.GroupNorm(8, channels) if line["op"] == "gn" else nn.BatchNorm2d(channels)).cuda()
    if line["op"] != "bn_f32w":
        module = module.to(DTYPES[line["dtype"]])
    x = _laid_out(_empty(line["N"], channels, line["HW"], line["HW"], line=line), line["channels_last"])
    x.requires_grad_()
    return _both(lambda: module(x))


def _norm_of_rows(line: Line) -> Line:
    module = getattr(nn, line["op"])(line["c"], device="cuda", dtype=DTYPES[line["dtype"]])
    x = _empty(line["rows"], line["c"], line=line, grad=True)
    return _both(lambda: module(x))


def _convolution(line: Line) -> Line:
    inner, outer, groups, stride, pad = (line[name] for name in ("C", "K", "groups", "stride", "pad"))
    x = _laid_out(_empty(line["N"], inner, line["HW"], line["HW"], line=line), line["channels_last"])
    weight = _laid_out(_empty(outer, inner // groups, line["R"], line["R"], line=line), line["channels_last"])
    out, forward = events(lambda: torch.conv2d(x, weight, None, stride, pad, 1, groups))
    grad = torch.empty_like(out)
    rest = ([stride] * 2, [pad] * 2, [1, 1], False, [0, 0], groups)

    def backward(mask: list[bool]) -> list[int]:
        return events(lambda: torch.ops.aten.convolution_backward(grad, x, weight, None, *rest, mask))[1]

    return {
        "fwd": forward,
        "bwd_data": backward([True, False, False]),
        "bwd_weight": backward([False, True, False]),
    }


def _laid_out(tensor: torch.Tensor, channels_last: int) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if channels_last else tensor


def _any_convolution(line: Line) -> Line:
    """Any number of dimensions, layout of each tensor, and choice of gradients; with cuDNN or without."""
    dim, groups = line["dim"], line["groups"]
    inner, outer, kernel = line["C"], line["K"], [line["R"]] * dim
    shape = (inner, outer // groups) if line["transposed"] else (outer, inner // groups)
    steps = [[line[name]] * dim for name in ("stride", "pad", "dil")]
    rest = (*steps, line["transposed"], [line["op"]] * dim, groups)
    x = _in_layout(_empty(line["N"], inner, *[line["HW"]] * dim, line=line), line["x"])
    weight = _in_layout(_empty(*shape, *kernel, line=line), line["w"])
    bias = _empty(outer, line=line) if line["bias"] else None
    with torch.backends.cudnn.flags(enabled=line["cudnn"]):
        out, forward = events(lambda: torch.ops.aten.convolution(x, weight, bias, *rest))
        grad = _in_layout(torch.empty_like(out), line["g"])
        mask = [bool(wanted) for wanted in line["mask"]]
        _, backward = events(lambda: torch.ops.aten.convolution_backward(grad, x, weight, [outer], *rest, mask))
        backend = torch._C._select_conv_backend(x, weight, bias, *rest, bias_sizes=[outer]).name
    return {"backend": backend, "fwd": forward, "bwd": backward, "strides": list(out.stride())}


def _in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Channels last, dimensions swapped, a slice of a wider tensor, or an expanded scalar; else contiguous."""
    if layout == "cl" and tensor.dim() > 3:
        return tensor.to(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
    if layout == "perm":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "slice":
        wider = (*tensor.shape[:-1], tensor.shape[-1] + 1)
        return torch.empty(wider, device=tensor.device, dtype=tensor.dtype)[..., :-1]
    if layout == "exp":
        return torch.empty((), device=tensor.device, dtype=tensor.dtype).expand(tensor.shape)
    return tensor


def _recurrent(line: Line) -> Line:
    from tests.recorded.recurrent import network, warm_up

    warm_up()
    with torch.backends.cudnn.flags(enabled=bool(line["cudnn"])):
        module, moved = events(network(line).cuda)
        order = (line["B"], line["T"]) if line["bf"] else (line["T"], line["B"])
        steps = torch.empty(
            *order, line["I"], device="cuda", dtype=DTYPES[line["dt"]], requires_grad=bool(line["xgrad"])
        )
        backward: list[int] = []
        with torch.set_grad_enabled(bool(line["train"])):
            (output, hidden), forward = events(lambda: module(steps))
        if line["train"]:
            state = hidden[0] if isinstance(hidden, tuple) else hidden
            used = {"o": [output], "h": [state], "both": [output, state]}[line["use"]]
            gradients = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in used]
            _, backward = events(lambda: torch.autograd.backward(used, gradients))
    return {"to": moved, "fwd": forward, "bwd": backward}


def _unusual_convolution(line: Line) -> Line:
    """Switches of cuDNN, and addresses that 32 does not divide; one of several cards."""
    dim, dtype, groups, offset = line["dim"], DTYPES[line["dtype"]], line["groups"], line["offset"]
    shape = (line["N"], line["C"], *[line["HW"]] * dim)
    kernel = (line["C"], line["K"] // groups) if line["transposed"] else (line["K"], line["C"] // groups)
    x = torch.empty(math.prod(shape) + offset, device="cuda", dtype=dtype)[offset:].view(shape)
    weight = _empty(*kernel, *[line["R"]] * dim, line=line)
    if line["cl"]:
        weight = _in_layout(weight, "cl")
        x = x if offset else _in_layout(x, "cl")
    bias = _empty(line["K"], line=line) if line["bias"] else None
    steps = [[line[name]] * dim for name in ("stride", "pad", "dil")]
    rest = (*steps, line["transposed"], [line["op"]] * dim, groups)
    switches = {name: line[key] for name, key in (("deterministic",) * 2, ("allow_tf32", "tf32"), ("benchmark",) * 2)}
    with torch.backends.cudnn.flags(enabled=True, **switches):
        out, forward = events(lambda: torch.ops.aten.convolution(x, weight, bias, *rest))
        grad = torch.empty_like(out)
        mask = [True, True, line["bias"]]
        _, backward = events(lambda: torch.ops.aten.convolution_backward(grad, x, weight, [line["K"]], *rest, mask))
    return {"strides": list(out.stride()), "fwd": forward, "bwd": backward}


#: Family: how its lines are asked, by their ``op``, and what the stub is told beside.
_IMAGES = {"bn": _norm_of_images, "gn": _norm_of_images, "bn_f32w": _norm_of_images}
FAMILIES: dict[str, dict[str, Callable[[Line], Line]]] = {
    "reduce": {"sum": _sum, "sum_nhw": _sum_of_images},
    "linear": {"linear": _linear},
    "sdpa": {"sdpa": _attention},
    "embed": {"embedding": _embedding},
    "norm": {**_IMAGES, "LayerNorm": _norm_of_rows, "RMSNorm": _norm_of_rows},
    "conv": {"conv2d": _convolution},
    "conv_layouts": {"": _any_convolution},
    "conv_unusual": {"": _unusual_convolution},
    "rnn": {"": _recurrent},
}
ANSWERS = {
    *("fwd", "bwd", "bwd_data", "bwd_weight", "dim0", "dim1", "all", "dim0_f32", "amax1", "norm"),
    *("o_strides", "strides", "to", "error"),
}
#: Where the real cuDNN chooses plans; elsewhere plans take nothing.
_REAL_CUDNN = {"reduce", "linear", "sdpa", "embed", "norm", "conv", "conv_unusual", "rnn"}


def lines(family: str) -> Iterator[Line]:
    """The lines of a file."""
    with gzip.open(FOLDER / f"{family}.jsonl.gz", "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def question(family: str, line: Line) -> Line:
    """The line without its answers; two names are answers of one family alone."""
    answers = ANSWERS | {"sum_nhw": {"bias"}}.get(line.get("op", ""), set())
    if family == "conv_layouts":
        answers = answers | {"backend"}
    return {name: value for name, value in line.items() if name not in answers}


def answered(family: str, line: Line) -> Line:
    """The question asked again, with its answers."""
    asked = question(family, line)
    ways = FAMILIES[family]
    ask = ways[asked["op"] if asked.get("op") in ways else ""]
    try:
        answers = ask(asked)
    except Exception as error:  # what the build refuses is an answer too
        return asked | {"error": str(error).split("\n")[0][:_LONGEST_ERROR]}
    return asked | answers


def write(family: str, card: str | None = None) -> None:
    """Ask everything of a file again, in this process; of a file about several cards, what is about this one."""
    warm_up()
    found = [answered(family, line) if line.get("card") == card else line for line in lines(family)]
    data = "\n".join(json.dumps(line, separators=(",", ":")) for line in found) + "\n"
    (FOLDER / f"{family}.jsonl.gz").write_bytes(gzip.compress(data.encode(), 9, mtime=0))
    print(family, card or "", sum(line.get("card") == card for line in found), "lines", flush=True)


class _Operators:
    """The families as a kind of recording; one process on the stub each."""

    def record(self, arguments: list[str]) -> int:
        status = 0
        for family in arguments or FAMILIES:
            if family not in FAMILIES:
                raise SystemExit(f"{family!r} is no family of operators: {', '.join(FAMILIES)}")
            for card in dict.fromkeys(line.get("card") for line in lines(family)):
                status = self._ask(family, card) or status
        return status

    def _ask(self, family: str, card: str | None) -> int:
        extra = {"FAKE_CUDA_TOTAL_MIB": "1000000"} | (stub.REAL_CUDNN if family in _REAL_CUDNN else {})
        program = f"from tests.recorded import operators; operators.write({family!r}, {card!r})"
        if card is None:
            return stub.run(["-c", program], extra)
        device = device_named(card)
        major, minor = device.compute_capability or (0, 0)
        extra |= {"FAKE_CUDA_CC": f"{major}{minor}", "FAKE_CUDA_SMS": str(device.sm_count)}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(description(device), file)
            file.flush()
            return stub.run(["-c", program], extra | {"FAKE_CUDNN_DEVPROP": file.name})

    def table(self, arguments: list[str]) -> int:
        print("held by tests/capture/kernels: python -m pytest tests/capture/kernels")
        return 0

    differ = table


KIND = _Operators()
