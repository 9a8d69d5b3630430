"""The register of differences between versions of vLLM.

Read: 0.9.2, 0.11.2, 0.21.0 and 0.32.0 (the released wheels). Where a change lies between two of them it is taken to
come with the later one. 0.32 is held by recordings; the others by their source, and by figures of public logs.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.base.versions import Version
from graphmem.errors import UsageError

NEWEST: Version = (0, 32)
OLDEST: Version = (0, 8)


@dataclass(frozen=True)
class Change:
    """Something that a version brought."""

    since: Version
    what: str

    def holds(self, version: Version) -> bool:
        """True if that version has it."""
        return version >= self.since


#: config/cache.py: the default of ``gpu_memory_utilization`` was 0.9.
UTILIZATION_92 = Change((0, 21), "gpu_memory_utilization is 0.92 by default")
#: v1/worker/gpu_worker.py, ``_scoped_allocator_max_split`` around ``load_model``.
SPLIT_WHILE_LOADING = Change((0, 21), "weights are loaded under max_split_size_mb:20")
#: The same around the profile run.
SPLIT_WHILE_PROFILING = Change((0, 32), "the profile run is under max_split_size_mb:20")
#: envs.py, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS.
GRAPHS_CHARGED = Change((0, 21), "an estimate of CUDA graphs is taken from the KV cache")
#: utils/mem_utils.py (vllm#49208): free memory before and after instead of weights, peak and growth outside torch.
DEVICE_LEVEL = Change((0, 32), "what is consumed is measured on the card")
#: config/vllm.py, ``use_v2_model_runner``.
SECOND_RUNNER = Change((0, 32), "the second model runner is the default")
#: engine/arg_utils.py, ``get_batch_defaults``: cards from 160 GiB on.
LARGEST_CARDS = Change((0, 32), "cards of 160 GiB serve batches of 16384 tokens")
#: v1/worker/gpu_worker.py: whether two batches are in flight (config/scheduler.py, ``async_scheduling``).
ASYNC_SCHEDULING = Change((0, 21), "scheduling is asynchronous: two batches are in flight")

#: PyTorch that a version was built with: major and minor (the wheels' requirements).
_TORCH = (((0, 32), (2, 13)), ((0, 21), (2, 11)), ((0, 11), (2, 9)), ((0, 9), (2, 7)), ((0, 8), (2, 6)))


def torch_of(version: Version) -> Version:
    """The PyTorch that this version of the engine came with."""
    return next(torch for since, torch in _TORCH if version >= since)


def checked(version: Version | None) -> Version:
    """The version to follow; the newest for None. Raises :class:`UsageError`."""
    if version is None:
        return NEWEST
    if not OLDEST <= version <= NEWEST:
        accepted = f"{_text(OLDEST)} to {_text(NEWEST)}"
        raise UsageError(f"vLLM {_text(version)} is not followed; accepted: {accepted}")
    return version


def _text(version: Version) -> str:
    return ".".join(map(str, version))
