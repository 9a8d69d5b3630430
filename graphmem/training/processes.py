"""One process of several, as a launcher starts it: which one it is, and how many share its machine."""

from __future__ import annotations

from collections.abc import Mapping

from graphmem.base.options import REQUIRED, Whole, check_values, option
from graphmem.base.records import public_value
from graphmem.errors import UsageError

#: Larger worlds are no launcher's: every collective on lists holds one tensor a process.
_MOST = 1 << 20
_A_NODE = 8


def check_world_size(name: str, world_size: object) -> object:
    """The number of processes. Raises :class:`UsageError`."""
    if type(world_size) is not int or not 1 <= world_size <= _MOST:
        raise UsageError(f"{name} is a whole number from 1 to {_MOST:,}, not {world_size!r}")
    return world_size


def at_least_two(name: str, size: object) -> object:
    """The number of processes that share something. Raises :class:`UsageError`."""
    if type(size) is not int or not 2 <= size <= _MOST:
        raise UsageError(f"{name} is a number of processes of at least 2, not {size!r}; leave it out for one")
    return size


@public_value(frozen=True, slots=True)
class Processes:
    """``torchrun --nproc-per-node per_node`` on as many machines as ``world_size`` processes need, seen from one.
    Without ``per_node``, 8 is what most machines of data centres have.

    Raises :class:`UsageError` where the rank is not among them, or they do not fill their machines.
    """

    world_size: int = option(REQUIRED, "Processes, one card each.", check_world_size)
    rank: int = option(0, "Which of the processes is analysed, from 0. Default 0.", metavar="R")
    per_node: int | None = option(
        None,
        "Processes, and cards, of a machine. Default: 8 where more processes fill machines of 8, else all.",
        Whole(),
        flags="--nproc-per-node --nproc_per_node",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if type(self.rank) is not int or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank!r} of {self.world_size} processes: ranks go from 0 to {self.world_size - 1}"
            )
        if self.per_node is not None and self.world_size % self.per_node:
            raise UsageError(
                f"{self.world_size} processes do not fill machines of {self.per_node}: the number of processes is a "
                "multiple of those a node"
            )

    @property
    def on_node(self) -> int:
        """Processes of this one's machine."""
        if self.per_node is not None:
            return self.per_node
        return self.world_size if self.world_size % _A_NODE else _A_NODE

    @property
    def local_rank(self) -> int:
        """Which process of its machine this is, and which of its cards it has."""
        return self.rank % self.on_node

    def environment(self) -> dict[str, str]:
        """The environment variables that ``torchrun`` sets (``LocalElasticAgent._start_workers``,
        torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
        nodes, node = self.world_size // self.on_node, self.rank // self.on_node
        values = {
            "RANK": self.rank, "LOCAL_RANK": self.local_rank, "GROUP_RANK": node, "ROLE_RANK": self.rank,
            "ROLE_NAME": "default", "LOCAL_WORLD_SIZE": self.on_node, "WORLD_SIZE": self.world_size,
            "GROUP_WORLD_SIZE": nodes, "ROLE_WORLD_SIZE": self.world_size, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": 29500,
        }  # fmt: skip
        return {name: str(value) for name, value in values.items()}

    def describe(self) -> str:
        """``rank 3 of 16 processes, 8 a node``."""
        a_node = "" if self.on_node == self.world_size else f", {self.on_node} a node"
        return f"rank {self.rank} of {self.world_size} process{'es' * (self.world_size > 1)}{a_node}"


def visible_cards(environment: Mapping[str, str]) -> int:
    """The number of cards that ``CUDA_VISIBLE_DEVICES`` names; one where it names none."""
    named = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(1, len([one for one in named if one.strip() not in ("", "-1")]))


def cards_of(processes: Processes | None, environment: Mapping[str, str]) -> tuple[int, int]:
    """The number of cards a process finds, and the index of its own: of ``processes``, else by the ``environment`` of
    ``torchrun``, else those that are visible. One, where a process's number on its machine is not the launcher's: then
    each is shown its own card alone (``CUDA_VISIBLE_DEVICES``), as without a launcher."""
    if processes is not None:
        return processes.on_node, processes.local_rank
    try:
        rank, local_rank, each = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):
        return visible_cards(environment), 0
    return (each, local_rank) if 0 <= local_rank < each and rank % each == local_rank else (1, 0)
