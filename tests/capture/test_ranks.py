"""Which of several processes is analysed, what it finds, and which of them holds the most."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build has no torch.distributed", allow_module_level=True)

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from graphmem.analyze import analyze  # noqa: E402
from graphmem.answering.ranks import _axes  # noqa: E402
from graphmem.base.figures import Communicator  # noqa: E402
from graphmem.capture.session.session import capture  # noqa: E402
from graphmem.errors import CaptureError, UsageError  # noqa: E402
from graphmem.training import Training  # noqa: E402
from graphmem.training.processes import Processes, cards_of  # noqa: E402
from tests.support.captures import H100, TORCH_VERSION  # noqa: E402
from tests.support.examples import first_quick  # noqa: E402

MIB = 1 << 20


def found(step: Any, processes: Processes | None) -> list[Any]:
    """What a step of one process appends to its list."""
    seen: list[Any] = []
    capture(lambda _: step(seen.append), source="", device=H100, torch_version=TORCH_VERSION, processes=processes)
    return seen


def looking(tell: Any) -> None:
    dist.init_process_group("nccl")
    local = int(__import__("os").environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    parameter = nn.Linear(2, 2).to(f"cuda:{local}").weight
    tell((dist.get_rank(), dist.get_world_size(), local, torch.cuda.device_count(), torch.cuda.current_device()))
    tell((parameter.device, torch.empty(1, device="cuda").device, torch.cuda.Stream().device, parameter.get_device()))


@pytest.mark.parametrize(
    ("processes", "numbers"),
    [
        (Processes(4), (0, 4, 0, 4, 0)),
        (Processes(4, 3), (3, 4, 3, 4, 3)),
        (Processes(16, 11), (11, 16, 3, 8, 3)),
        (Processes(16, 11, 4), (11, 16, 3, 4, 3)),
        (Processes(12), (0, 12, 0, 12, 0)),
    ],
)
def test_a_process_finds_the_cards_of_its_machine_and_has_one(processes: Processes, numbers: tuple[int, ...]) -> None:
    assert found(looking, processes) == [numbers, (*[torch.device("cuda", numbers[-1])] * 3, numbers[-1])]


def test_another_process_s_card_is_not_followed() -> None:
    with pytest.raises(CaptureError, match="cuda:0 is asked for, and an analysis follows one card, cuda:3"):
        found(lambda _: torch.empty(1, device="cuda:0"), Processes(4, 3))


@pytest.mark.parametrize(
    ("environment", "cards"),
    [
        ({"RANK": "11", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, (8, 3)),
        ({"RANK": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, (1, 0)),  # each is shown its own card alone
        ({"RANK": "3", "LOCAL_RANK": "three", "LOCAL_WORLD_SIZE": "4"}, (1, 0)),
        ({"RANK": "3"}, (1, 0)),
        ({}, (1, 0)),
    ],
)
def test_the_environment_of_torchrun_counts_as_it_is(environment: dict[str, str], cards: tuple[int, int]) -> None:
    assert cards_of(None, environment) == cards


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4), "rank 4 of 4 processes: ranks go from 0 to 3"),
        ((4, -1), "ranks go from 0 to 3"),
        ((4, 0, 3), "4 processes do not fill machines of 3"),
        ((4, 0, 0), "at least 1"),
        ((0,), "world_size is a whole number"),
    ],
)
def test_processes_that_cannot_be(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Processes(*arguments)


def test_a_rank_needs_the_number_of_processes() -> None:
    with pytest.raises(UsageError, match="need world_size"):
        Training(rank=1)
    with pytest.raises(UsageError, match="ranks are of several processes"):
        analyze(staged, ranks="all")


def staged() -> None:
    """The last of a group of stages has the head, and its second half the larger layers."""
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    kept = [torch.empty(MIB, device="cuda")]
    if rank == size - 1:
        kept.append(torch.empty(16 * MIB, device="cuda"))
    dist.all_reduce(kept[0])


def test_the_fullest_process_is_reported_with_the_others_beside_it() -> None:
    estimate = analyze(staged, training=Training(world_size=8), ranks="all", device="H100-80GB")
    told = estimate.details["ranks"]
    assert told["fullest"] == 7
    assert told["complete"]
    assert [kind["ranks"] for kind in told["kinds"]] == [[0, 3, 5, 6], [7]]
    assert [kind["allocated_bytes"] for kind in told["kinds"]] == [4 * MIB, 68 * MIB]
    assert estimate.allocated == 68 * MIB
    assert "rank 7 holds the most of 8" in next(d.message for d in estimate.diagnostics if d.kind == "headline")
    some = analyze(staged, training=Training(world_size=8), ranks=(0, 1), device="H100-80GB")
    assert some.details["ranks"]["analysed"] == [0, 1]
    assert some.allocated == 4 * MIB


def test_processes_of_a_grid_are_told_by_its_axes() -> None:
    groups = [tuple(range(8)), (0, 1), (0, 2, 4, 6), (0, 1)]
    assert _axes(groups, 8) == [(0, 1), (0, 2, 4, 6)]
    assert _axes([(0, 1), (0, 2)], 8) == [tuple(range(8))]
    assert _axes([], 3) == [(0, 1, 2)]


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3))
def test_every_process_of_a_grid_is_a_sum_along_its_axes(shape: list[int]) -> None:
    world = 1
    groups = []
    for size in reversed(shape):
        groups.append(tuple(world * step for step in range(size)))
        world *= size
    assert sorted(_axes([*groups, tuple(range(world))], world)) == sorted(groups)


def test_communicators_are_those_of_groups_that_are_used_and_messages_have_peers() -> None:
    def step(_: Any) -> None:
        dist.init_process_group("nccl")
        pair, _idle, row = dist.new_group([0, 1]), dist.new_group([0, 2]), dist.new_group([0, 1, 2, 3])
        x = torch.ones(16, device="cuda")
        dist.all_reduce(x, group=pair)
        dist.send(x, 1, group=row)
        dist.recv(x, 3, group=row)
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.barrier(dist.new_group(backend="gloo"))

    captured = capture(step, source="", device=H100, torch_version=TORCH_VERSION, processes=Processes(8))
    assert set(captured.communicators) == {
        Communicator(2, 0, 0, 2, 0, gathers=False, reduced_bytes=64),
        Communicator(4, 2, 0, 4, 0, gathers=False, reduced_bytes=0),
        Communicator(8, 7, 0, 8, 0, gathers=False, reduced_bytes=0),
    }
    assert sorted(map(len, captured.groups)) == [2, 2, 4, 8]


def test_a_communicator_knows_its_machine_and_what_went_through_it() -> None:
    def step(_: Any) -> None:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        across, idle = dist.new_group([1, 5, 9, 13]), dist.new_group([0, 5])
        x = torch.ones(16, device="cuda")
        dist.all_gather_into_tensor(torch.empty(256, device="cuda"), x)
        dist.all_to_all_single(torch.empty_like(x), x, group=across)
        dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=across)
        dist.all_reduce(torch.ones(4), group=idle)  # of the host: gloo's
        own, _ = dist.new_group([5]), dist.new_group([5])
        dist.all_reduce(x, group=own)

    processes = Processes(16, rank=5, per_node=8)
    captured = capture(step, source="", device=H100, torch_version=TORCH_VERSION, processes=processes)
    assert set(captured.communicators) == {
        Communicator(16, 0, 0, 8, 5, gathers=True, reduced_bytes=0),
        Communicator(4, 3, 2, 2, 1, gathers=False, reduced_bytes=4 << 20),
        Communicator(1, 0, 0, 1, reduced_bytes=1),
    }


def chained() -> None:
    """Every process sends on what it got and its own part, to the last one, which tells all."""
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    count = torch.tensor([rank + 1], device="cuda")
    if rank:
        got = torch.empty_like(count)
        dist.recv(got, rank - 1)
        count += got
    if rank < size - 1:
        dist.send(count, rank + 1)
    dist.broadcast(count, size - 1)
    name = ["run-7" if rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    assert name == ["run-7"]
    torch.empty(int(count.item()) * MIB, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("rank", first_quick([1, 0, 3], 1))
def test_what_another_process_says_is_asked_of_it(rank: int) -> None:
    estimate = analyze(chained, training=Training(world_size=4, rank=rank), device="H100-80GB")
    assert max(one.bytes for one in estimate.top) == (1 + 2 + 3 + 4) * MIB
    assert not [one for one in estimate.diagnostics if one.kind == "assumed"]


def waiting_for_each_other() -> None:
    dist.init_process_group("nccl")
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    dist.recv(count, 1 - dist.get_rank())
    dist.send(count, 1 - dist.get_rank())
    torch.empty(int(count.item()) * MIB, dtype=torch.uint8, device="cuda")


def test_what_processes_wait_for_of_each_other_is_assumed() -> None:
    estimate = analyze(waiting_for_each_other, training=Training(world_size=2), device="H100-80GB")
    assert max(one.bytes for one in estimate.top) == MIB
    assert [one for one in estimate.diagnostics if one.kind == "assumed"]
