"""Kernel rules against recordings of single operators: every allocation and free, its size and its order.

The recordings were made with the CUDA build of PyTorch 2.13.0 on a driver that pretends to be a card of compute
capability 9.0 with 132 SMs of 2048 threads. ``equal_cases.json`` holds how many cases of each family are exactly equal;
the number may grow, not shrink.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import places

torch = pytest.importorskip("torch")

if (places.installed_torch() or (0, 0)) < places.PYTORCH_VERSION:
    pytest.skip("recorded with a newer PyTorch than the installed one", allow_module_level=True)

from graphmem.capture.kernels.parts.sdp_choice import AttentionCall, choose_sdp_backend  # noqa: E402
from tests.support.cards import HOPPER  # noqa: E402
from tests.support.kernel_replay import KernelReplay, attention, batch_norm, forward_and_backward, rms_norm  # noqa: E402

GOLDEN = places.PYTORCH / "ops"
RATCHET = GOLDEN / "equal_cases.json"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BACKENDS = {
    "FLASH_ATTENTION": "flash",
    "EFFICIENT_ATTENTION": "efficient",
    "CUDNN_ATTENTION": "cudnn",
    "MATH": "math",
}

Case = dict[str, Any]


def cases(family: str) -> Iterator[Case]:
    with gzip.open(GOLDEN / f"{family}.jsonl.gz", "rt") as lines:
        for line in lines:
            yield json.loads(line)


def tensor(*shape: int, dtype: str, channels_last: int = 0) -> Any:
    value = torch.empty(shape, device="meta", dtype=DTYPES[dtype])
    return value.to(memory_format=torch.channels_last) if channels_last else value


def replay_linear(case: Case) -> Case:
    layer = torch.nn.Linear(case["i"], case["o"], bool(case["bias"]), device="meta", dtype=DTYPES[case["dtype"]])
    x = tensor(case["rows"], case["i"], dtype=case["dtype"]).requires_grad_()
    forward, backward, _ = forward_and_backward(lambda: layer(x))
    return {"fwd": forward, "bwd": backward}


def replay_reduce(case: Case) -> Case:
    if case["op"] == "sum_nhw":
        x = tensor(
            case["N"], case["C"], case["HW"], case["HW"], dtype=case["dtype"], channels_last=case["channels_last"]
        )
        runs = {"bias": lambda: x.sum((0, 2, 3))}
    else:
        x = tensor(case["rows"], case["cols"], dtype=case["dtype"])
        runs = {
            "dim0": lambda: x.sum(0),
            "dim1": lambda: x.sum(1),
            "all": lambda: x.sum(),
            "dim0_f32": lambda: x.sum(0, dtype=torch.float32),
            "amax1": lambda: x.amax(1),
            "norm": lambda: torch.linalg.vector_norm(x),
        }
    found = {}
    for name, run in runs.items():
        replay = KernelReplay()
        with replay:
            result = run()
            found[name] = replay.taken()
        del result
    return found


def replay_norm(case: Case) -> Case:
    op, dtype = case["op"], case["dtype"]
    if op in ("LayerNorm", "RMSNorm"):
        layer = getattr(torch.nn, op)(case["c"], device="meta", dtype=DTYPES[dtype])
        x = tensor(case["rows"], case["c"], dtype=dtype).requires_grad_()
        if op == "RMSNorm":
            forward, backward = rms_norm(x.detach(), layer.weight.detach())
            return {"fwd": forward, "bwd": backward}
        forward, backward, _ = forward_and_backward(lambda: layer(x))
        return {"fwd": forward, "bwd": backward}
    parameters = torch.float32 if op == "bn_f32w" else DTYPES[dtype]
    options = {"device": "meta", "dtype": parameters}
    norm = torch.nn.GroupNorm(8, case["C"], **options) if op == "gn" else torch.nn.BatchNorm2d(case["C"], **options)
    x = tensor(case["N"], case["C"], case["HW"], case["HW"], dtype=dtype, channels_last=case["channels_last"])
    x.requires_grad_()
    forward, backward, _ = forward_and_backward(lambda: norm(x) if op == "gn" else batch_norm(norm, x))
    return {"fwd": forward, "bwd": backward}


def replay_embed(case: Case) -> Case:
    layer = torch.nn.Embedding(case["V"], case["d"], device="meta", dtype=DTYPES[case["dtype"]])
    indices = torch.zeros(case["T"], dtype=torch.long, device="meta")
    forward, backward, _ = forward_and_backward(lambda: layer(indices))
    return {"fwd": forward, "bwd": backward}


def replay_sdpa(case: Case) -> Case:
    batch, heads, length, head_dim, dtype = (case[key] for key in ("B", "H", "T", "D", "dtype"))
    q, k, v = (tensor(batch, length, heads, head_dim, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    mask = tensor(batch, 1, length, length, dtype=dtype) if case["opt"] == "mask" else None
    known: dict[str, dict[str, Any]] = {"causal": {"is_causal": True}, "drop": {"dropout_p": 0.1}}
    options = known.get(case["opt"], {})
    backend = BACKENDS[case["backend"]]
    forward, backward, out = forward_and_backward(lambda: attention(backend, q, k, v, mask, **options))
    return {"fwd": forward, "bwd": backward, "o_strides": list(out.stride())}


FAMILIES = {
    "linear": replay_linear,
    "reduce": replay_reduce,
    "norm": replay_norm,
    "embed": replay_embed,
    "sdpa": replay_sdpa,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_case_that_was_equal_differs_now(family: str, request: pytest.FixtureRequest) -> None:
    total = equal = 0
    differing = []
    for case in cases(family):
        if "error" in case:
            continue
        total += 1
        found = FAMILIES[family](case)
        if all(case[key] == events for key, events in found.items()):
            equal += 1
        else:
            differing.append((case, found))
    ratchet = json.loads(RATCHET.read_text())
    if request.config.getoption("--update-goldens"):
        ratchet[family] = {"cases": total, "equal": equal}
        RATCHET.write_text(json.dumps(ratchet, indent=2, sort_keys=True) + "\n")
        return
    assert total == ratchet[family]["cases"]
    assert equal >= ratchet[family]["equal"], f"{equal} of {total} cases equal; the first that differs: {differing[0]}"


def test_attention_backends_are_refused_where_cuda_refused_them() -> None:
    for case in cases("sdpa"):
        shape = (case["B"], case["H"], case["T"], case["D"])
        mask = (case["B"], 1, case["T"], case["T"]) if case["opt"] == "mask" else None
        backend = BACKENDS[case["backend"]]
        options = {
            "mask": mask,
            "dropout_p": 0.1 if case["opt"] == "drop" else 0.0,
            "is_causal": case["opt"] == "causal",
            "requires_grad": True,
        }
        call = AttentionCall(shape, shape, shape, DTYPES[case["dtype"]], HOPPER, **options)
        if "error" in case:
            with pytest.raises(RuntimeError, match="No available kernel"):
                choose_sdp_backend(call, frozenset({backend}))
        else:
            assert choose_sdp_backend(call, frozenset({backend})) == backend
