"""One rank of many, by the frameworks' own sharding: a file a framework. None of them is imported by this."""

from tests.recorded.cases.sharded import (
    adapters,
    combined,
    ddp,
    experts,
    fsdp,
    launchers,
    options,
    pipelines,
    single,
    tensor_parallel,
    titan,
    trainers,
    zero,
)
from tests.recorded.cases.sharded.registry import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "adapters",
    "combined",
    "ddp",
    "experts",
    "fsdp",
    "launchers",
    "options",
    "pipelines",
    "single",
    "tensor_parallel",
    "titan",
    "trainers",
    "zero",
]
