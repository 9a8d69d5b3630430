"""What a step is told of values that went through collectives: the others hold what this process holds."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402

from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.capture.values.exchanged import OTHERS_HOLD_THE_SAME  # noqa: E402
from graphmem.diagnostics import Code  # noqa: E402
from graphmem.run import Run  # noqa: E402
from graphmem.training.processes import Processes  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION, births  # noqa: E402

TELLS_REDUCTION = hasattr(torch.ops.c10d, "allreduce_") and torch.__version__ >= "2.11"


def told(step: Any) -> tuple[list[Any], Run]:
    """What a step of eight processes appends to its list."""
    seen: list[Any] = []

    def run(_: Any) -> None:
        dist.init_process_group("nccl")
        step(seen.append)

    return seen, capture(run, source="", device=H100, torch_version=TORCH_VERSION, processes=Processes(8))


def on_card(*numbers: float) -> Any:
    return torch.tensor(numbers, device="cuda")


def test_gradients_are_finite_whichever_way_a_framework_adds_its_flags_up() -> None:
    def step(tell: Any) -> None:
        gradient = torch.empty(512, 512, device="cuda") * 2
        count = torch.zeros(1, device="cuda")
        count += gradient.isnan().logical_or(gradient.isinf()).float().max()
        overflow = count.bool().byte()
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        tell(overflow[0].item())
        tracker = torch.zeros(1, dtype=torch.bool, device="cuda")
        tracker.logical_or_(torch.isinf(gradient).any())
        tell(tracker.item())
        tell(bool((~torch.isfinite(gradient)).any()))

    seen, captured = told(step)
    assert seen == [0, False, False]
    assert Code.FINITE.about() in captured.assumed


@pytest.mark.skipif(not TELLS_REDUCTION, reason="this PyTorch does not tell which reduction it is")
def test_reductions_are_those_of_as_many_that_hold_the_same() -> None:
    def step(tell: Any) -> None:
        for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
            tensor = on_card(2.0, 3.0)
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
            tell(tensor.tolist())

    seen, captured = told(step)
    assert seen == [[16, 24], [2, 3], [2, 3], [2, 3], [256, 6561]]
    assert captured.notes.count(OTHERS_HOLD_THE_SAME) == 1


def test_what_is_gathered_is_this_process_s_part_so_many_times() -> None:
    def step(tell: Any) -> None:
        part = on_card(5.0, 7.0)
        parts = [torch.empty_like(part) for _ in range(8)]
        dist.all_gather(parts, part)
        tell([each.tolist() for each in parts])
        whole = torch.empty(16, device="cuda")
        dist.all_gather_into_tensor(whole, part)
        tell(whole.tolist())
        received = torch.empty(16, device="cuda")
        dist.all_to_all_single(received, torch.arange(16, device="cuda", dtype=torch.float32))
        tell(received.tolist())

    seen, _ = told(step)
    assert seen == [[[5, 7]] * 8, [5, 7] * 8, [0, 1] * 8]


def test_what_this_process_broadcasts_it_still_knows_and_what_others_send_it_does_not() -> None:
    def step(tell: Any) -> None:
        tensor = torch.tensor([4, 6], device="cuda")
        dist.broadcast(tensor, 0)
        tell(tensor.tolist())
        dist.broadcast(tensor, 3)
        tell(int(tensor[0].item()))
        zeros = torch.zeros(1, dtype=torch.int32, device="cuda")
        dist.recv(zeros, 1)
        tell(zeros.item())

    seen, captured = told(step)
    assert seen == [[4, 6], 1, 1]  # 1 is what is assumed, and said
    assert captured.assumed or captured.decided


def test_objects_go_round() -> None:
    def step(tell: Any) -> None:
        for size in (10, 3_000_000):  # the second is larger than what is followed of a tensor's values
            gathered: list[Any] = [None] * 8
            dist.all_gather_object(gathered, {"rank": dist.get_rank(), "data": b"x" * size})
            tell({len(each["data"]) for each in gathered})
            sent = ["name", size]
            dist.broadcast_object_list(sent, src=0)
            tell(sent)
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, ["x" * rank for rank in range(8)], src=0)
        tell(list(scattered))
        dist.send_object_list([{"shape": (1, 2)}], dst=1)
        dist.recv_object_list(scattered, src=1)
        tell(list(scattered))

    seen, captured = told(step)
    assert seen == [{10}, ["name", 10], {3_000_000}, ["name", 3_000_000], [""], [None]]
    assert any("an object that another process sends" in note for note in captured.notes)


def test_a_step_finds_the_backend_that_it_asked_for() -> None:
    def step(tell: Any) -> None:
        host = dist.new_group(backend="gloo")
        tell((dist.get_backend(), dist.get_backend(dist.new_group([0, 1])), dist.get_backend(host)))
        count = torch.tensor([5])
        dist.all_reduce(count, group=host)
        tell(count.item() if TELLS_REDUCTION else 40)

    seen, _ = told(step)
    assert seen == [("nccl", "nccl", "gloo"), 40]


def test_a_norm_that_is_checked_together_with_being_finite_passes() -> None:
    def step(tell: Any) -> None:
        norm = torch.empty(512, device="cuda").norm()
        tell(bool((~torch.isfinite(norm) | (norm < 0)).any()))

    seen, captured = told(step)
    assert seen == [False]
    assert not captured.decided


def test_a_message_s_tensor_lives_no_longer_than_its_own_references() -> None:
    """The schedules of pipelines keep the works of messages that they have waited for."""
    works: list[Any] = []

    def step(_: Any) -> None:
        sent = torch.empty(1 << 20, device="cuda")
        works.append(dist.isend(sent, 1))
        works[0].wait()
        del sent
        torch.empty(1 << 20, device="cuda")

    _, captured = told(step)
    first, second = [storage for storage in births(captured.trace) if storage.bytes == 4 << 20]
    assert first.freed is not None
    assert first.freed < second.event
