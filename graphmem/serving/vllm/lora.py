"""Room for adapters: ``--enable-lora`` (vllm 0.32.0, ``vllm/lora``).

Every layer that an adapter can change has stacked matrices for all slots, zero until one is loaded (``lora/layers``,
``create_lora_weights``): A of every part that was fused, then B. Before the profile run dummy adapters of rank 8 are
put into all slots. A product adds an adapter's in place, through a buffer in fp32 (``punica_wrapper/punica_gpu.py``),
which torch.compile makes before the product.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.serving.vllm.run import Run, Tensor
from graphmem.trace import Category

#: ``LORA_WARMUP_RANK`` (v1/worker/lora_model_runner_mixin.py).
_DUMMY_RANK = 8
#: Pointers, strides and sizes that a kernel keeps for a layer of several parts (ops/triton_ops/utils.py): of A and B,
#: and where the parts begin; where they differ in width also three strides and the widths.
_KEPT_ALIKE, _KEPT_UNLIKE = 3, 7


@dataclass(frozen=True)
class Adapters:
    """``max_loras`` slots of ``max_lora_rank``."""

    slots: int
    rank: int


class Slots:
    """The matrices of one layer. ``inputs`` and ``outputs`` are this rank's, the latter by part."""

    def __init__(self, run: Run, adapters: Adapters, name: str, inputs: int, outputs: list[int], itemsize: int) -> None:
        self.run, self.adapters, self.outputs, self.itemsize = run, adapters, outputs, itemsize
        for _ in outputs:
            run.new(adapters.slots * adapters.rank * inputs * itemsize, f"{name}.lora_a_stacked")
        for width in outputs:
            run.new(adapters.slots * width * adapters.rank * itemsize, f"{name}.lora_b_stacked")
        self._kept = len(outputs) == 1
        self.filled = tuple(outputs)

    def fill(self) -> None:
        """``set_lora``: B goes there through a copy on the card."""
        for width in self.filled:
            self.run.temporary(width * _DUMMY_RANK * self.itemsize)

    def shrink(self, tokens: int) -> Tensor:
        """The product of the input with A, in fp32 (``add_shrink``)."""
        buffer = self.run.new(len(self.outputs) * tokens * self.adapters.rank * 4, "adapters' buffer")
        if not self._kept:
            self._keep(1)
        return buffer

    def expand(self, buffer: Tensor) -> None:
        """Its product with B is added to the layer's (``add_expand``)."""
        if not self._kept:
            self._kept = True
            alike = len(set(self.outputs)) == 1
            self._keep((_KEPT_ALIKE if alike else _KEPT_UNLIKE) - 1)
        self.run.free(buffer)

    def _keep(self, number: int) -> None:
        for _ in range(number):
            self.run.new(len(self.outputs) * 8, "pointers of adapters", Category.WORKSPACE)


class TableSlots(Slots):
    """The matrices of embeddings (A is looked up) or of the head (A multiplies)."""

    def __init__(self, run: Run, adapters: Adapters, name: str, rows: int, width: int, itemsize: int) -> None:
        super().__init__(run, adapters, name, rows, [width], itemsize)
        self.filled = (rows, width)  # both go there through copies

    @property
    def row_bytes(self) -> int:
        """Of a row of A."""
        return self.adapters.rank * self.itemsize

    def looked_up(self, tokens: int) -> Tensor:
        """Rows of A; the ids are made 64 bits wide for it."""
        ids = self.run.new(tokens * 8, "ids")
        return self.run.replacing(ids, self.run.new(tokens * self.row_bytes, "adapters' embeddings"))

    def add(self, rows: int) -> None:
        """Take the memory of an addition to logits (``add_lora_logits``)."""
        self.run.temporary(rows * self.adapters.rank * 4)


def wrapper(run: Run, adapters: Adapters) -> None:
    """``PunicaWrapperGPU``: indices of tokens and of requests, and the metadata of two sets of kernels."""
    tokens, requests = run.batch_limits.tokens, run.batch_limits.requests
    sizes = [tokens * 8] * 4 + [requests * 8] * 3
    for _ in range(2):
        sizes += [tokens * 4] * 2 + [(adapters.slots + 1) * 4] * 2 + [(adapters.slots + 2) * 4]
    for size in sizes:
        run.new(size, "indices of adapters", Category.BUFFER)
