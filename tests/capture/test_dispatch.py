"""The interceptors between an operator and the trace: each knows some operators, and is asked of those alone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphmem import Inference, analyze
from graphmem.capture.operators.facts import OperatorFacts, facts_of
from graphmem.capture.record import dispatch
from graphmem.capture.record.dispatch import INTERCEPTORS, NOT_HANDLED
from graphmem.trace import Place
from tests.support.captures import record


def _every_overload() -> list[Any]:
    """Of the libraries whose operators a capture meets."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        operator, _, overload = name.partition(".")
        namespace, _, operator = operator.partition("::")
        if namespace in ("aten", "c10d", "_c10d_functional"):
            packet = getattr(getattr(torch.ops, namespace), operator)
            found.append(getattr(packet, overload or "default"))
    return found


def test_every_interceptor_knows_an_operator_and_has_a_name_of_its_own() -> None:
    every = [facts_of(func) for func in _every_overload()]
    assert len(every) > 2000
    schema = "weak_ref_tensor(Tensor input) -> Tensor"
    with _operator("CUDA", torch.zeros_like) as operator, _of_library("_C", schema) as library:
        every += [facts_of(operator), facts_of(library.weak_ref_tensor.default)]
        known = {i.name: sum(i.applies is None or i.applies(facts) for facts in every) for i in INTERCEPTORS}
    assert all(known.values()), known
    assert [name for name, count in known.items() if count == len(every)] == ["host values"]
    assert len(known) == len(INTERCEPTORS)


@contextlib.contextmanager
def _operator(key: str, body: Callable[[Any], Any]) -> Iterator[Any]:
    """An operator of one tensor whose kernel at a dispatch key is a function in Python; shapes are its input's."""
    library = torch.library.Library("graphmem_bodies", "DEF")
    try:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", body, key)
        torch.library.register_fake("graphmem_bodies::f", torch.empty_like, lib=library)
        yield torch.ops.graphmem_bodies.f.default
    finally:
        facts_of.cache_clear()
        library._destroy()


@contextlib.contextmanager
def _of_library(namespace: str, *schemas: str) -> Iterator[Any]:
    """Operators of vLLM's libraries, without kernels."""
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        for schema in schemas:
            library.define(schema)
        yield getattr(torch.ops, namespace)
    finally:
        facts_of.cache_clear()
        library._destroy()


def test_a_view_of_pinned_memory_takes_none_of_the_card() -> None:
    def step() -> None:
        seen = library.get_cuda_view_from_cpu_tensor(torch.zeros(1 << 20, pin_memory=True))
        assert seen.is_cuda
        assert seen.shape == (1 << 20,)
        seen.neg()

    with _of_library("_C", "get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor") as library:
        trace = record(step)
    assert max(born.bytes for born in trace.storages if born.place is Place.PINNED) == 4 << 20
    assert sum(born.bytes for born in trace.storages if born.place is Place.DEVICE) == 4 << 20


def test_a_tensor_that_does_not_hold_its_memory_lets_it_go() -> None:
    """By which an engine keeps what a CUDA graph writes."""
    held: list[int] = []

    def step() -> None:
        written = torch.empty(1 << 20, 2, device="cuda").t()
        seen = library.weak_ref_tensor(written)
        assert (seen.is_cuda, seen.shape, seen.stride()) == (True, written.shape, written.stride())
        del written
        held.append(torch.cuda.memory_allocated())

    with _of_library("_C", "weak_ref_tensor(Tensor input) -> Tensor") as library:
        analyze(step, device="H200")
    assert held == [0]


#: FlashAttention 3's operators, but for what no call here gives.
_FLASH_ATTENTION = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int headdim, Tensor seqused_k, "
    "int? page_size, bool is_causal, int window_size_left, int window_size_right, int num_splits) -> Tensor",
    "fwd(Tensor q, Tensor v, Tensor? out, Tensor? cu_seqlens_q, int num_splits) -> Tensor[]",
)


def test_flash_attention_takes_its_schedule_and_what_is_put_together() -> None:
    """Keys in 32 parts, as CUDA graphs have them: sizes by hopper/flash_api.cpp."""
    schedules: list[int] = []

    def step() -> None:
        lengths = torch.empty(6, dtype=torch.int32, device="cuda")
        for size, splits in ((128, 32), (128, 0), (64, 32), (64, 0)):
            made = library.get_scheduler_metadata(6, 1, 4096, size, lengths, 16, True, -1, -1, splits)
            schedules.append(made.numel())
        query = torch.empty(6, 4, 128, dtype=torch.half, device="cuda")
        value = torch.empty(8, 16, 2, 128, dtype=torch.half, device="cuda")
        starts = torch.empty(7, dtype=torch.int32, device="cuda")
        before = torch.cuda.memory_allocated()
        found = library.fwd(query, value, torch.empty_like(query), starts, 32)
        assert found[0].shape == query.shape
        sizes.append([one.numel() * one.element_size() for one in found[1:]])
        taken.append(torch.cuda.memory_allocated() - before)

    sizes: list[list[int]] = []
    taken: list[int] = []
    with _of_library("_vllm_fa3_C", *_FLASH_ATTENTION) as library:
        analyze(step, device="H100")
    assert schedules == [1 + 8 * 3, 1 + 8 * 2, 1 + 8 * 2, 1 + 8]
    assert sizes == [[4 * 6 * 4, 32 * 4 * 6 * 128 * 4, 32 * 4 * 6 * 4]]
    assert taken == [6144 + 512 + sizes[0][1] + sizes[0][2]]


#: vLLM's products with packed weights, but for what no call here gives.
_PACKED_PRODUCTS = (
    "marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_scales, SymInt size_m, SymInt size_n, bool use_fp32_reduce) "
    "-> Tensor",
    "machete_mm(Tensor A, Tensor B, ScalarType? out_type) -> Tensor",
)


def test_products_with_packed_weights_take_sums_beside_their_outputs() -> None:
    """On an H100: its 132 multiprocessors take 64 rows of 256 columns each; of Machete all 128 tiles are one wave, with
    two barriers a tile."""
    taken: list[int] = []

    def step() -> None:
        half = torch.empty(2048, 4096, dtype=torch.half, device="cuda")
        weight = torch.empty(512, 1024, dtype=torch.int32, device="cuda")
        for product in (
            lambda: library.marlin_gemm(half, None, half, 2048, 4096, True),
            lambda: library.marlin_gemm(half, None, half, 2048, 4096, False),
            lambda: library.machete_mm(half, weight, None),
        ):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            shape = product().shape
            taken.append(torch.cuda.max_memory_allocated() - before - 2048 * shape[1] * 2)

    with _of_library("_C", *_PACKED_PRODUCTS) as library:
        analyze(step, device="H100")
    assert taken == [132 * 64 * 256 * 4, 0, 128 * (128 * 128 * 4 + 8)]


@pytest.mark.parametrize("key", ["CUDA", "CompositeExplicitAutograd"])
def test_an_operator_in_python_takes_the_memory_of_its_body(key: str) -> None:
    """As it did on the stub of the driver: every tensor of the body is born and dies there."""

    def body(x: Any) -> Any:
        wide = torch.empty(4 << 20, device=x.device)
        return torch.nn.functional.silu(x) + wide[0]

    peaks: list[int] = []

    def step() -> None:
        operator(torch.empty(256, device="cuda"))
        peaks.append(torch.cuda.max_memory_allocated())

    with _operator(key, body) as operator:
        analyze(step, device="H200")
    assert peaks == [(16 << 20) + 3 * 1024]


def test_where_a_body_in_python_cannot_run_its_shapes_are_known_and_a_doubt_is_left() -> None:
    tried: list[Any] = []

    def body(x: Any) -> Any:
        tried.append(x)
        raise RuntimeError("no compiler for kernels")

    class Uses(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return operator(operator(super().forward(x)))

    with _operator("CUDA", body) as operator:
        estimate = analyze(Uses(4, 4), torch.zeros(2, 4), training=Inference())
    assert len(tried) == 1
    assert any("graphmem_bodies.f" in remark.message for remark in estimate.diagnostics)


def _watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """How often each interceptor is asked whether it knows an operator, and how often each handles a call."""
    asked: Counter[tuple[str, str]] = Counter()
    handled: Counter[str] = Counter()

    def watched(interceptor: dispatch.Interceptor) -> dispatch.Interceptor:
        def applies(facts: OperatorFacts) -> bool:
            asked[interceptor.name, facts.name] += 1
            return interceptor.applies is None or interceptor.applies(facts)

        def attempt(mode: Any, call: Any) -> Any:
            result = interceptor.attempt(mode, call)
            handled[interceptor.name] += result is not NOT_HANDLED
            return result

        return replace(interceptor, applies=applies, attempt=attempt)

    monkeypatch.setattr(dispatch, "INTERCEPTORS", tuple(map(watched, INTERCEPTORS)))
    return asked, handled


def test_what_can_apply_to_an_operator_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, _ = _watched(monkeypatch)

    def step() -> None:
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
        for _ in range(3):
            (x * 2.0 + x.exp()).sum().backward()

    record(step)
    assert asked["fan-in", "aten.mul.Tensor"] == 1
    assert set(asked.values()) == {1}


def test_a_step_that_meets_them_is_handled_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _, handled = _watched(monkeypatch)

    def step() -> None:
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
        x.exp().sum().backward()
        torch.ones(4, pin_memory=True)
        torch.linspace(0, 1, 4).tolist()
        x.detach().sum().item()
        with torch.inference_mode():
            torch.nn.functional.linear(x, x)
        torch.nn.functional.bilinear(x, x, torch.ones(2, 4, 4, device="cuda"))
        x.grad = None
        torch.optim.SGD([x], lr=0.1, fused=True).step()

    record(step)
    expected = {
        "pinned memory",
        "host values",
        "inference decomposition",
        "accumulated gradients",
        "decisions",
        "decompositions",
    }
    # Fan-in and formulas in place look at the stack, and would find this test's frame in the engine's stead.
    assert expected | {"decompositions"} <= {name for name, count in handled.items() if count}


def test_tensors_of_the_same_memory() -> None:
    """``is_set_to``, which torchrl's target networks ask, as C++ answers it."""
    answers: list[bool] = []

    def step() -> None:
        whole = torch.ones(4, 4, device="cuda")
        others = (whole.detach(), whole.data, whole[:2], whole.t(), torch.ones(4, 4, device="cuda"))
        answers.extend(whole.is_set_to(other) for other in others)

    record(step)
    assert answers == [True, True, False, False, False]


def test_an_operator_without_tensors_is_none_of_the_trace() -> None:
    """Libraries ask for their version when they are imported, which may be in the middle of a first step."""
    with torch.library._scoped_library("graphmem_tests", "DEF") as library:
        library.define("version() -> int")
        library.impl("version", lambda: 7, "CompositeExplicitAutograd")

        class Asks(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert torch.ops.graphmem_tests.version() == 7
                return x * 2

        estimate = analyze(Asks(), torch.zeros(4), training=Inference())
    assert estimate.trace is not None
    assert not [name for name in estimate.trace.operator_names if "version" in name]
    assert not [one for one in estimate.diagnostics if one.kind == "unknown"]
