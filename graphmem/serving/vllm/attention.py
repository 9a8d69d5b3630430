"""The memory that attention takes besides its output, by the kernels that the engine chooses for a card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from graphmem.devices import Device
from graphmem.serving.vllm.layers import cdiv
from graphmem.serving.vllm.models.base import Shape
from graphmem.serving.vllm.run import Batch, Run

#: ``flash_attn_max_num_splits_for_cuda_graph`` (config/attention.py).
MAX_SPLITS = 32


@dataclass(frozen=True)
class FlashAttention2:
    """FlashAttention 2 (8.x): the kernels of attention of so many heads on this rank. ``whole``: batches are captured
    whole, not only piece by piece (``use_full_cuda_graph``)."""

    heads: int
    head_dim: int
    whole: bool = True

    name: ClassVar[str] = "FlashAttention 2"

    @property
    def keeps_schedule(self) -> bool:
        """True if the values computed before a step stay until the next one's are there."""
        return False

    def metadata(self, batch: Batch) -> list[int]:
        """Sizes of buffers that stay while graphs are used."""
        return []

    def scheduled(self, requests: int) -> list[int]:
        """Sizes of the values computed before a step of so many requests."""
        return []

    def call(self, run: Run, tokens: int) -> None:
        """One call while graphs are captured."""
        run.temporary(tokens * self.heads * 4)


class FlashAttention3(FlashAttention2):
    """FlashAttention 3 (compute capability 9.0): with CUDA graphs keys are split into up to 32 parts, whose results in
    fp32 are put together (vllm-flash-attention, hopper/flash_api.cpp: ``out_accum``, ``softmax_lse_accum``). Without
    whole ones nothing is split, and a step's schedule is copied nowhere: it stays."""

    name = "FlashAttention 3"

    @property
    def keeps_schedule(self) -> bool:
        return not self.whole

    def metadata(self, batch: Batch) -> list[int]:
        """The schedule of the largest batch (v1/attention/backends/flash_attn.py)."""
        return [(1 + cdiv(batch.requests, 4) * 16) * 4, 1] if self.whole else [1]

    def scheduled(self, requests: int) -> list[int]:
        return [(requests * 3 + 1) * 4] if self.whole else [(cdiv(requests, 4) * 8 + 1) * 4]

    def call(self, run: Run, tokens: int) -> None:
        rows = tokens * self.heads * 4
        split = (MAX_SPLITS * rows * self.head_dim, MAX_SPLITS * rows) if self.whole else ()
        run.temporary((tokens + 1) * 4, rows, *split)


def backend_for(device: Device, shape: Shape, tp: int, *, whole: bool = True) -> FlashAttention2:
    """The kernels that the engine takes on this card; those of others than FlashAttention are not followed."""
    kind = FlashAttention3 if device.limits.vllm_attention == FlashAttention3.name else FlashAttention2
    return kind(max(1, shape.heads // tp), shape.head_dim, whole)


def quantises_queries(device: Device, cache_dtype: str) -> bool:
    """True if attention over a KV cache in eight bits takes queries in eight bits too (``query_quant``,
    layers/attention/attention.py): FlashAttention 3, whose starts were recorded."""
    return cache_dtype.startswith("fp8") and device.limits.vllm_attention == FlashAttention3.name
