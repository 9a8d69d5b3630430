"""What NCCL holds, against what others measured and what its source says."""

from __future__ import annotations

import pytest

from graphmem.base.figures import Communicator, Figure
from graphmem.devices import Loads, device_named
from graphmem.devices.nccl import nccl_of
from graphmem.units import MIB

EIGHT = Communicator(8, on_node=8, reduced_bytes=0)


def found(
    card: str, *communicators: Communicator, version: tuple[int, int] | None = None, **variables: str
) -> dict[str, Figure]:
    loads = Loads(communicators=communicators, nccl_version=version, nccl_variables=tuple(variables.items()))
    return {figure.name: figure for figure in device_named(card).outside(loads)}


def buffers(card: str, one: Communicator, version: tuple[int, int] | None = None, **variables: str) -> float:
    return found(card, one, version=version, **variables)["NCCL's buffers"].bytes / MIB


@pytest.mark.parametrize(("ranks", "measured"), [(2, 544), (3, 688), (4, 688)])
def test_a100_with_nvlink_as_measured(ranks: int, measured: int) -> None:
    """NCCL#964, August 2023, rank 0 of 4 x A100."""
    assert buffers("A100", Communicator(ranks, on_node=ranks), (2, 18)) == measured


def test_what_others_measured_lies_inside() -> None:
    all_to_all = found("H100", Communicator(8, 7, 0, 8, gathers=False, reduced_bytes=0), version=(2, 26))
    messages = all_to_all["NCCL's buffers for messages"]
    assert messages.least_bytes <= 3.28e9 <= messages.most_bytes
    assert messages.bytes == pytest.approx(3.28e9, rel=0.005)  # NCCL#1685
    six, eight = (buffers("H100", Communicator(ranks, on_node=ranks), (2, 18)) for ranks in (6, 8))
    assert six < 1.8e9 / MIB < eight + 100  # NCCL#864: about 1.6 GB


@pytest.mark.parametrize("card", ["B300", "RTX-3090"])
def test_a_communicator_of_one_rank_that_is_connected_at_once(card: str) -> None:
    """NCCL#2363 and pull request 2366: 512 MiB with NCCL 2.28."""
    alone = Communicator(1, 0, 0, 1, reduced_bytes=1)
    assert buffers(card, alone, (2, 28), NCCL_RUNTIME_CONNECT="0") == 512
    assert buffers(card, alone, (2, 28)) == 1
    assert buffers(card, alone, (2, 21)) == 256  # half as many channels


def test_collectives_connect_what_they_take() -> None:
    rings = 24 * 12
    assert buffers("H100", EIGHT) == rings
    small = Communicator(8, on_node=8, gathers=False, reduced_bytes=4)
    large = Communicator(8, on_node=8, gathers=False, reduced_bytes=64 * MIB)
    assert buffers("H100", small) == rings
    assert buffers("H100", large) == rings + 16 * 2 * 8 + 2  # NVLS
    assert buffers("B200", large) == 32 * 12 + 24 * 2 * 8 + 2
    assert buffers("A100", large) == rings  # has no NVLS
    assert buffers("H100", Communicator(2, 1, 0, 2, gathers=False, reduced_bytes=0)) == 1  # messages alone


def test_versions_before_2_22_connect_everything_at_once() -> None:
    last = {version: buffers("H100", EIGHT, version) for version in ((2, 18), (2, 21), (2, 22))}
    at_once = 24 * (12 + 10) + 256  # rings, the first of a tree, the shared buffer of messages
    assert last == {(2, 18): at_once + 1024 + 2, (2, 21): at_once + 256 + 2, (2, 22): 288}
    assert buffers("H100", EIGHT, (2, 22), NCCL_RUNTIME_CONNECT="0") == last[2, 21]
    assert buffers("H100", EIGHT, (2, 22), NCCL_CUMEM_ENABLE="0") == last[2, 21]


def test_across_machines_channels_are_those_of_the_network() -> None:
    # 16 channels of rings; of a machine's eight members one in eight is where a ring comes in or goes out
    assert buffers("H100", Communicator(64, on_node=8, place=3, reduced_bytes=0)) == 16 * 12 + 16 * 8 / 8
    with_tree = Communicator(64, on_node=8, place=3, reduced_bytes=4)
    assert buffers("H100", with_tree) == 16 * 12 + 16 + 16 * (12 + 2 * 20 / 8)
    # one of every machine: everything goes over the network
    assert buffers("H100", Communicator(8, on_node=1, reduced_bytes=0)) == 4 * 20


def test_variables_are_honoured() -> None:
    large = Communicator(8, on_node=8, reduced_bytes=64 * MIB)
    assert buffers("H100", large, NCCL_NVLS_ENABLE="0") == 288
    assert buffers("H100", large, NCCL_ALGO="Ring,Tree") == buffers("H100", large, NCCL_ALGO="^NVLS") == 288
    assert buffers("H100", large, NCCL_ALGO="allreduce:ring") > 288  # lists for single collectives are not followed
    assert buffers("H100", large, NCCL_NVLS_NCHANNELS="4") == 288 + 4 * 2 * 8 + 2
    assert buffers("H100", EIGHT, NCCL_MAX_NCHANNELS="2") == 24
    assert buffers("H100", EIGHT, NCCL_MAX_CTAS="0x4") == 48
    assert buffers("H100", EIGHT, NCCL_MIN_NCHANNELS="32") == 32 * 12
    assert buffers("H100", EIGHT, NCCL_BUFFSIZE="8388608") == 24 * (2 + 14)
    assert buffers("H100", EIGHT, NCCL_BUFFSIZE="plenty") == 288
    figure = found("H100", EIGHT, NCCL_BUFFSIZE="8388608")["NCCL's buffers"]
    assert "NCCL_BUFFSIZE" in figure.source
    few = found("H100", Communicator(2, 1, 0, 2), NCCL_MAX_P2P_NCHANNELS="2")["NCCL's buffers for messages"]
    assert few.bytes == 2 * 14 * MIB


def test_cards_without_links_need_little() -> None:
    assert buffers("A100-PCIE-40GB", EIGHT) < buffers("A100", EIGHT) / 5
    assert buffers("RTX-4090", EIGHT, NCCL_P2P_DISABLE="1") == 1  # through host memory
    assert buffers("H100", EIGHT, NCCL_P2P_LEVEL="LOC") == 1
    far = found("H100", Communicator(16, 8, 8, 8))["NCCL's buffers for messages"]
    assert far.bytes == 2 * 16 * 16 * 128 * 1024  # one buffer to send from and one to receive into, for all


def test_every_pytorch_has_an_nccl() -> None:
    assert [nccl_of(version) for version in ((1, 13), (2, 6), (2, 9), (2, 12), (3, 0))] == [
        (2, 18), (2, 21), (2, 27), (2, 28), (2, 30),
    ]  # fmt: skip
    assert nccl_of(None) == (2, 30)
