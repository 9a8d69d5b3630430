"""Training whose model states are shared out among processes, each with a card."""

from __future__ import annotations

import re

from graphmem.base.options import REQUIRED, check_values, documented, option
from graphmem.base.records import public_value
from graphmem.errors import UsageError
from graphmem.training.processes import check_world_size

#: What is shared out: parameters, gradients and optimizer states; all but what the forward pass has gathered, which is
#: kept for the backward pass; or the same within groups only (``hybrid:NxM``).
SHARDS = ("full", "grad-op", "hybrid:NxM")


@documented
@public_value(frozen=True, slots=True)
class FullyShard:
    """``torch.distributed.fsdp.fully_shard`` (FSDP2) of every block of the model and of the model; the analysis is of
    one process, and the batch is that of one process.

    With ``amp`` the parameters are gathered in that precision and gradients reduced in fp32
    (``MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)``), in place of autocast. ``shard``: ``full``
    is ``reshard_after_forward`` at its default (blocks give back after the forward pass what they gathered, the rest of
    the model does not), ``grad-op`` is False (none does), ``hybrid`` a mesh of two dimensions.

    Raises :class:`UsageError` for a field that is not accepted.
    """

    world_size: int = option(
        REQUIRED,
        "Sharded training (FSDP2, fully_shard of every block) over N processes, or over --world-size.",
        check_world_size,
        flags="--fsdp",
        metavar="[N]",
        bare=0,
        opens=True,
    )
    shard: str = option("full", f"{', '.join(SHARDS)} (N replicas of M shards).", flags="--fsdp-shard", metavar="WHAT")
    offload: bool = option(False, "Keep parameters and optimizer states in pinned host memory.", flags="--fsdp-offload")
    sync_each_batch: bool = option(
        False,
        "Reduce gradients after every micro-batch (accelerate's sync_each_batch). Default: after the last.",
        flags="--fsdp-sync-each-batch",
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.shard in ("full", "grad-op"):
            return
        match = re.fullmatch(r"hybrid:([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", str(self.shard))
        if match is None:
            raise UsageError(f"unknown fsdp_shard {self.shard!r}; accepted: {', '.join(SHARDS)}")
        if self.world_size % (int(match[1]) * int(match[2])):
            raise self._of_others(int(match[1]) * int(match[2]), self.world_size)

    def _of_others(self, named: int, processes: int) -> UsageError:
        return UsageError(
            f"fsdp_shard {self.shard} is of {named} processes, and there are {processes}; N times M is the number of "
            "processes that have the same part of the model"
        )

    def mesh_of(self, processes: int) -> dict[str, int]:
        """The mesh of as many of the processes as have the same part of the model: its ``shard`` dimension, below
        ``replicate`` where it is hybrid. Raises :class:`UsageError` for another number than the hybrid one."""
        if not self.shard.startswith("hybrid:"):
            return {"shard": processes}
        replicas, shards = map(int, self.shard.removeprefix("hybrid:").split("x"))
        if replicas * shards != processes:
            raise self._of_others(replicas * shards, processes)
        return {"replicate": replicas, "shard": shards}

    def describe(self) -> str:
        """The wrapper in words: ``FSDP over 8 processes (grad-op, offloaded)``."""
        chosen = [self.shard] * (self.shard != "full") + ["offloaded"] * self.offload
        chosen += ["synchronized each micro-batch"] * self.sync_each_batch
        return f"FSDP over {self.world_size} processes" + (f" ({', '.join(chosen)})" if chosen else "")
