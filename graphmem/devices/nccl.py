"""NCCL's memory on a card, communicator by communicator: by its source, compared with public measurements.

NCCL's source is read at 2.18 to 2.30 (github.com/NVIDIA/nccl, tags v2.18.3-1 to v2.30.7-1; files below are of src/):

- A connection within a machine (transport/p2p.cc) has one buffer at the sender and one at the receiver: the receiver's
  holds the three protocols (512 KiB LL, 4800 KiB LL128, 4 MiB Simple, init.cc), but on capability 8.0, which reads over
  NVLink instead of writing (graph/paths.cc, ``ncclTopoCheckP2p``), Simple lies at the sender. Both are rounded up to
  2 MiB (``CUDA_IPC_MIN``): 2 + 10 MiB, or 6 + 6. One over a network (transport/net.cc) has LL128 and Simple at the
  sender and all three at the receiver, 10 MiB each, on the card where the network reads it (GPUDirect). Cards that do
  not reach each other meet in host memory (transport/shm.cc).
- A ring has one neighbour before and one after, per channel (graph/connect.cc). A tree is a chain within a machine,
  along the ring, whose ends have one neighbour, so that its first member adds a receiver and its last a sender; one
  member of every machine has up to three others over the network.
- Channels: those found (graph/search.cc: 240 GB/s of NVLink to an A100 are 12 rings of 20, 370 to an H100
  12 of 30, 720 to a B200 16 of 45), twice. Across machines those their network interfaces carry, one of 200 Gb/s for
  each A100 and one of 400 for each later card being assumed.
- NVLS, on Hopper and later in machines with a switch and more than two of the ranks: for every channel and rank two
  buffers of eight chunks of 128 KiB; of 4 MiB before 2.21 (transport/nvls.cc).
- Since 2.22 an algorithm is connected when a collective first takes it (init.cc, ``runtimeConn``). Before, and without
  cuMem, rings, trees and NVLS are connected at once, and a buffer for messages over the network is made even where
  there is none: channels for messages x 16 x the chunk of messages (net.cc, ``sharedNetBuffersInit``).
- Messages (sends, receives, all-to-all) have connections of their own, in as many channels a peer as its links carry;
  those over the network share one buffer to send from and one to receive into.
- Which algorithm: all-gathers, reduce-scatters and broadcasts take rings. An all-reduce within a machine takes rings by
  the estimates of graph/tuning.cc, and above :data:`NVLS_FROM_BYTES` NVLS; across machines also trees.

Measured, against that:

- NCCL#964, 4 x A100 with NVLink, for each new communicator: 544 MiB of two ranks, 688 of more, on rank 0. By the above
  32 x 16 x 512 KiB + 24 x (6 + 6) = 544, and 24 x (6 + 2 x 6) + 256 = 688.
- NCCL#1685, 8 x H100: allocations of 10 and of 2 MiB, 32 channels a pair, 3.28 GB more after the first all-to-all.
  7 x 32 x (10 + 2) MiB are 2.82 GB; 7 x 32 x 14 MiB are 3.288. The purpose of the other 2 MiB is not known.
- NCCL#2363, 8 x B300, and pull request 2366, RTX 3090: 512 MiB for a communicator of one rank that is connected at
  once: 64 x 16 x 512 KiB. The latter's process of one communicator was 484 MiB, the empty context of that card is 256.
- NCCL#864 (2.18, cards not named): about 1.6 GB a communicator; eight H100 are 2.0 GiB by the above, six 1.7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from graphmem.base.figures import Communicator, Figure, Loads
from graphmem.base.records import dataclass
from graphmem.devices.capabilities import Links
from graphmem.units import KIB, MIB

#: PyTorch -> the NCCL that its wheels bring (the requirements of torch 2.6 to 2.15 on the package index; older ones as
#: its release notes tell). A version between two has the older one's.
_WITH_TORCH: dict[tuple[int, int], tuple[int, int]] = {
    (2, 1): (2, 18), (2, 2): (2, 19), (2, 3): (2, 20), (2, 5): (2, 21), (2, 7): (2, 26), (2, 8): (2, 27),
    (2, 11): (2, 28), (2, 13): (2, 29), (2, 15): (2, 30),
}  # fmt: skip
_NEWEST = (2, 30)

#: Versions of NCCL in which something here changed.
_CUMEM_BY_DEFAULT = (2, 19)
_NVLS_IN_CHUNKS = (2, 21)
_CONNECTS_LATE = (2, 22)
_MANY_CHANNELS = (2, 25)

#: ``NCCL_STEPS``, ``NCCL_SHARED_STEPS``; the chunks of messages over NVLink, PCIe and the network.
_STEPS, _SHARED_STEPS = 8, 16
_NVLINK_CHUNK, _OTHER_CHUNK = 512 * KIB, 128 * KIB
#: What shared buffers of cards are rounded up to (``CUDA_IPC_MIN``), and the least that cuMem takes.
_PAGE = 2 * MIB
#: An all-reduce within a machine of at least this takes NVLS: 25 microseconds and 267 GB/s against the ring's 15 and
#: 50 (LL), 41 and 190 (LL128) of eight H100, by the constants of graph/tuning.cc.
NVLS_FROM_BYTES = 1 * MIB
#: Machines up to which trees of NVLS are estimated to be faster than rings (graph/tuning.cc).
_NVLS_NODES = 2
#: Connections of a tree to other machines: a parent and, on average over both trees, a child.
_FAR_OF_TREE = 2
#: Bytes of a communicator beside its buffers: nothing that NCCL#964's figures show, at most a segment of the driver's.
_BESIDE_MOST = 34 * MIB
_LEAST = 1 * MIB
#: NCCL's kernels: of 484 MiB of a process on RTX 3090 (pull request 2366) 256 are the empty context (devices/context).
_KERNELS, _KERNELS_LEAST, _KERNELS_MOST = 228 * MIB, 16 * MIB, 256 * MIB
#: A message's channel with a near peer as NCCL#1685 measured it, where cuMem makes the buffers.
_MEASURED_CHANNEL = 14 * MIB

_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)")


def nccl_of(torch_version: tuple[int, int] | None) -> tuple[int, int]:
    """The version of NCCL that a PyTorch brings; the newest for None."""
    if torch_version is None:
        return _NEWEST
    older = [version for version in _WITH_TORCH if version <= torch_version]
    return _WITH_TORCH[max(older, default=min(_WITH_TORCH))]


def variables(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables of NCCL in an environment."""
    return tuple(sorted((name, text) for name, text in environment.items() if name.startswith("NCCL_")))


def figures(loads: Loads, links: Links, *, bridged: bool) -> list[Figure]:
    """NCCL's memory for the communicators of a run, of which there is at least one.

    ``links`` are those of the card's architecture; ``bridged`` cards have none to all others of their machine (PCIe).
    """
    nccl = _Nccl(loads.nccl_version or _NEWEST, dict(loads.nccl_variables), Links() if bridged else links)
    found = [_kernels()]
    collectives = [nccl.collectives(one) for one in loads.communicators]
    found.append(_sum("NCCL's buffers", collectives, _words(loads, nccl)))
    messages = [nccl.messages(one) for one in loads.communicators if one.peers]
    if messages:
        peers = sum(one.peers for one in loads.communicators)
        words = (
            f"assumed for {peers} peers: {nccl.channels_a_peer} channels each of {nccl.channel // MIB} MiB in a "
            "machine (transport/p2p.cc; 14 MiB measured on 8 x H100, NCCL#1685), a shared buffer for others (net.cc)"
        )
        found.append(_sum("NCCL's buffers for messages", messages, words))
    return found


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes as likely, at least, and at most."""

    likely: int
    least: int
    most: int


class _Nccl:
    """NCCL of one version under one environment on one kind of card."""

    def __init__(self, version: tuple[int, int], environment: Mapping[str, str], links: Links) -> None:
        self.version, self._environment = version, environment
        self._through_host = self._number("NCCL_P2P_DISABLE", 0) != 0 or self._text("NCCL_P2P_LEVEL") in ("loc", "0")
        self._links = Links() if self._through_host else links
        self.set = [name for name in environment if name in HONOURED]
        self._cumem = self._number("NCCL_CUMEM_ENABLE", int(version >= _CUMEM_BY_DEFAULT)) != 0
        self.connects_late = version >= _CONNECTS_LATE and self._cumem and self._number("NCCL_RUNTIME_CONNECT", 1) != 0
        simple = self._number("NCCL_BUFFSIZE", 4 * MIB)
        low = self._number("NCCL_LL_BUFFSIZE", 512 * KIB)
        low128 = self._number("NCCL_LL128_BUFFSIZE", 4800 * KIB)
        self._simple = simple
        head = 4 * KIB  # flags before the buffers: ncclSendMem, ncclRecvMem
        reads = self._links.reads
        self._send = _pages(head + simple * reads)
        self._receive = _pages(head + low + low128 + simple * (not reads))
        self._far_send, self._far_receive = _pages(low128 + simple), _pages(low + low128 + simple)
        if self._through_host:
            self._send = self._receive = 0
        self._nvls = bool(self._links.nvls_channels[0]) and self._number("NCCL_NVLS_ENABLE", 2) != 0

    # --- collectives ----------------------------------------------------------------------------------------------

    def collectives(self, one: Communicator) -> _Bytes:
        """A communicator's memory for collectives, without that for messages."""
        near = self._near(one)
        nodes = -(-one.ranks // near)
        channels = self._channels(near, nodes)
        ring, tree = self._ring(channels, near, nodes), self._tree(channels, one.place, near, nodes)
        nvls = self._nvls_bytes(near, nodes) if self._takes("nvls") else 0
        if not self.connects_late:
            at_once = ring + tree + nvls + self._shared(near, nodes)
            few = self._ring(self._fewest(channels), near, nodes)
            return _Bytes(max(at_once, _LEAST), max(few, _LEAST), self._most(one, near, nodes) + _BESIDE_MOST)
        reduced = one.reduced_bytes
        size = ring if one.gathers or reduced is None or reduced > 0 else 0
        if reduced is None or reduced > 0:
            size += tree if (nodes > 1 or not self._takes("ring")) and self._takes("tree") else 0
            size += nvls if nodes <= _NVLS_NODES and (reduced is None or reduced >= NVLS_FROM_BYTES) else 0
        least = self._ring(self._fewest(channels), near, nodes) if one.gathers else 0
        most = self._most(one, near, nodes) if size else 0
        return _Bytes(max(size, _LEAST), max(min(least, size), _LEAST), most + _BESIDE_MOST)

    def _most(self, one: Communicator, near: int, nodes: int) -> int:
        """Every algorithm connected, in the middle of chains, with twice the channels across machines."""
        channels = self._channels(near, nodes) * (1 if nodes == 1 and self._links.channels else 2)
        known = self._tree(channels, one.place, near, nodes)
        tree = max(known, channels * self._both) if one.ranks > 2 else known
        shared = 0 if self.connects_late else self._shared(near, nodes)
        return self._ring(channels, near, nodes) + tree + self._nvls_bytes(near, nodes) + shared

    @property
    def _both(self) -> int:
        return self._send + self._receive

    def _ring(self, channels: int, near: int, nodes: int) -> int:
        """Bytes of a ring's buffers on one rank."""
        if near * nodes < 2:
            return 0
        if nodes == 1:
            return channels * self._both
        far = self._far_send + self._far_receive
        if near == 1:
            return channels * far
        # of a machine's ranks one has the ring's way in, and one its way out
        return channels * self._both + channels * (far - self._both) // near

    def _tree(self, channels: int, place: int, near: int, nodes: int) -> int:
        """The tree's channels beside the ring's: the other way along the chain, and to other machines."""
        more = 0
        if near > 2:
            more = self._receive if place == 0 else self._send if place == near - 1 else self._both
        far = _FAR_OF_TREE * (self._far_send + self._far_receive) // near if nodes > 1 else 0
        return channels * (more + far)

    def _nvls_bytes(self, near: int, nodes: int) -> int:
        if not self._nvls or near <= 2:
            return 0
        alone, several = self._links.nvls_channels
        channels = self._number("NCCL_NVLS_NCHANNELS", alone if nodes == 1 else several)
        channels = min(channels, self._number("NCCL_MAX_CTAS", channels))
        chunked = self._number("NCCL_NVLS_CHUNKSIZE", 128 * KIB) * _STEPS
        return _pages(channels * 2 * near * (chunked if self.version >= _NVLS_IN_CHUNKS else self._simple)) + _PAGE

    def _channels(self, near: int, nodes: int) -> int:
        """Channels of rings and trees."""
        if near * nodes == 1:
            found = 64  # rings of nothing: as many as there may be
        elif not self._links.channels:
            found = self._links.bridged_channels
        elif nodes == 1:
            found = self._links.channels
        else:
            found = min(self._links.most_far_channels, self._links.far_channels * near)
        limit = 64 if self.version >= _MANY_CHANNELS else 32
        most = min(self._number("NCCL_MAX_NCHANNELS", limit), self._number("NCCL_MAX_CTAS", limit))
        least = max(self._number("NCCL_MIN_NCHANNELS", 1), self._number("NCCL_MIN_CTAS", 1))
        return max(1, min(limit, max(min(found, most), least)))

    def _fewest(self, channels: int) -> int:
        """Where cards are linked in part, or through other switches than assumed."""
        return max(1, channels // 4)

    # --- messages -------------------------------------------------------------------------------------------------

    @property
    def channels_a_peer(self) -> int:
        """Channels of messages to and from one peer in a machine."""
        limit = self._number("NCCL_MAX_P2P_NCHANNELS", 64)
        return min(_power(self._channels(2, 1)), self._links.message_channels, max(1, limit))

    @property
    def channel(self) -> int:
        """Bytes of one of them."""
        measured = self._cumem and self._links.channels > 0 and "NCCL_BUFFSIZE" not in self._environment
        return _MEASURED_CHANNEL if measured else self._both

    def messages(self, one: Communicator) -> _Bytes:
        """A communicator's buffers for point-to-point messages: made when two ranks first exchange one, and kept."""
        near = self._near(one)
        far = min(one.far_peers if one.far_peers is not None else max(0, one.peers - near + 1), one.peers)
        close = one.peers - far
        shared = 2 * self._shared(near, -(-one.ranks // near)) if far else 0
        count = close * self.channels_a_peer
        likely = count * self.channel + shared
        least = count * self._both // (1 if self._links.channels else 2)
        most = close * self.channels_a_peer * max(self._both + 4 * MIB, self.channel) + 2 * shared
        return _Bytes(max(likely, _LEAST), max(min(least, likely), _LEAST), max(most, likely, _LEAST))

    def _shared(self, near: int, nodes: int) -> int:
        """The buffer of messages over the network, in one direction."""
        channels = _power(self._channels(near, nodes))
        if nodes > 1:
            chunk = self._number("NCCL_P2P_NET_CHUNKSIZE", _OTHER_CHUNK)
        elif self._links.channels or near == 1:  # of one card all paths are NVLink's
            chunk = self._number("NCCL_P2P_NVL_CHUNKSIZE", _NVLINK_CHUNK)
        else:
            chunk = self._number("NCCL_P2P_PCI_CHUNKSIZE", _OTHER_CHUNK)
        return channels * _SHARED_STEPS * min(chunk, self._simple // _STEPS)

    # --- what is given --------------------------------------------------------------------------------------------

    def _near(self, one: Communicator) -> int:
        """Its ranks on this process's machine; up to eight where that is not known."""
        return max(1, min(one.on_node or _A_NODE, one.ranks))

    def _takes(self, algorithm: str) -> bool:
        """True if ``NCCL_ALGO`` allows it: a list of names, or of those left out after a ``^``. Lists for single
        collectives are not followed."""
        text = self._text("NCCL_ALGO")
        if not text or ":" in text:
            return True
        left_out = text.startswith("^")
        return (algorithm in text.removeprefix("^").split(",")) != left_out

    def _text(self, name: str) -> str:
        return self._environment.get(name, "").strip().lower()

    def _number(self, name: str, default: int) -> int:
        """A variable as NCCL reads it (misc/param.cc): a whole number in C's spelling, else the default."""
        found = _NUMBER.match(self._environment.get(name, "").strip())
        if found is None:
            return default
        value = int(found[0], 16) if "x" in found[0].lower() else int(found[0])
        return value if value >= 0 else default


#: Ranks of a machine where that is not known.
_A_NODE = 8

#: The variables that are honoured here.
HONOURED = frozenset({
    "NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_NVLS_ENABLE", "NCCL_NVLS_NCHANNELS", "NCCL_NVLS_CHUNKSIZE",
    "NCCL_CUMEM_ENABLE", "NCCL_RUNTIME_CONNECT", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE", "NCCL_ALGO",
})  # fmt: skip


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _sum(name: str, parts: list[_Bytes], words: str) -> Figure:
    likely, least, most = (
        sum(part.likely for part in parts), sum(part.least for part in parts), sum(part.most for part in parts),
    )  # fmt: skip
    return Figure(name, likely, least, most, words)


def _kernels() -> Figure:
    words = "assumed: 228 MiB, what a process of one communicator on RTX 3090 has beside its context (NCCL pull 2366)"
    return Figure("NCCL's kernels", _KERNELS, _KERNELS_LEAST, _KERNELS_MOST, words)


def _words(loads: Loads, nccl: _Nccl) -> str:
    ranks = sorted((one.ranks for one in loads.communicators), reverse=True)
    sizes = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    how = "as collectives first took them" if nccl.connects_late else "all at once"
    given = "".join(f", {name}" for name in sorted(nccl.set))
    return (
        f"assumed for {len(ranks)} process groups that were used (ranks: {sizes}): rings, trees and NVLS of NCCL "
        f"{'.'.join(map(str, nccl.version))}, connected {how}{given} (its source; 544 and 688 MiB of NCCL#964 are met)"
    )
