"""The engine's layers: the weights of each, and its output.

Followed from vllm 0.32.0, ``model_executor/layers`` and the torch operators they call; the file is named at each. Sizes
are bytes of one rank: ``tp`` ranks share heads, columns and rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from graphmem.serving.vllm.lora import Adapters, Slots, TableSlots
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.trace import Category

#: ``DEFAULT_VOCAB_PADDING_SIZE`` (layers/vocab_parallel_embedding.py).
VOCAB_PADDING = 64
#: ``set_default_quant_scales`` (layers/attention/attention.py): of queries, keys, values and probabilities, a float
#: each, and two copies for the host, which are made on the device and again on the host when loading is done.
ATTENTION_SCALES, HOST_SCALES = 4, 2
#: Modules that are imported while the default device is the card leave a table there: FlashInfer with the first layer
#: of attention, compressed-tensors (compressors/nvfp4/helpers.py) once weights are loaded, if nothing quantised had it.
_FLASHINFER_TABLE, COMPRESSED_TENSORS_TABLE = 64, 32


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


class CacheScales(Enum):
    """The scales that a checkpoint may have for a quantised KV cache, by the method of its weights
    (``get_quant_method`` of layers of attention): ``NONE`` nothing; ``COPIED`` scales that are copied and let go
    (``BaseKVCacheMethod``, quantization/kv_cache.py: fp8 checkpoints and ModelOpt's); ``KEPT`` scales that replace the
    layer's own, and zero points that are let go (``CompressedTensorsKVCacheMethod``)."""

    NONE = "none"
    COPIED = "copied"
    KEPT = "kept"


class LinearMethod(Protocol):
    """How a model keeps the weights of its linear layers."""

    @property
    def cache_scales(self) -> CacheScales:
        """The scales that come with it for layers of attention."""

    @property
    def online(self) -> bool:
        """True if the engine itself quantises, while weights are loaded."""

    def of(self, name: str) -> WeightMethod:
        """That of the layer of this name."""


class WeightMethod(ABC):
    """The memory layout of a linear layer's weight, told by its tensors, and the memory that multiplying with it takes.
    Experts have the tensors that ``of_experts`` names, stacked: gate and up in one, down in another."""

    cache_scales: CacheScales = CacheScales.NONE
    online: bool = False
    of_experts: tuple[str, ...] = ("weight",)

    @property
    def by_marlin(self) -> bool:
        """True if Marlin's kernels multiply experts, else Triton's (fused_moe/experts/marlin_moe.py)."""
        return False

    @property
    def tile(self) -> int:
        """Rows of a tile of experts' kernels for large batches (``get_default_config``, fused_moe/fused_moe.py)."""
        return 128

    def narrowed(self, rows: int, width: int) -> list[int]:
        """Bytes of what so many rows are quantised to before experts multiply them, with their scales."""
        return []

    @property
    def by_cutlass(self) -> bool:
        """True if CUTLASS's do (fused_moe/experts/cutlass_moe.py)."""
        return False

    @property
    def in_four_bits(self) -> bool:
        """True if CUTLASS's multiply experts in four bits, of rows that are copied in their order and quantised."""
        return False

    @property
    def by_triton(self) -> bool:
        """True if the kernels of triton_kernels do, which sort tokens first."""
        return False

    def padded(self, hidden: int, width: int) -> tuple[int, int]:
        """(hidden size, width) of experts as their weights are laid out."""
        return hidden, width

    def of(self, name: str) -> WeightMethod:
        """The same for every layer."""
        return self

    def scales_of_rows(self) -> int | None:
        """Bytes of a row's scale where compiled code writes what a product reads in eight bits at once; None where it
        does not."""
        return None

    @abstractmethod
    def tensors(self, inputs: int, outputs: Sequence[int]) -> dict[str, int]:
        """Names and bytes of the tensors of a weight, in the order in which they are made. ``outputs`` are the parts
        that were fused."""

    @abstractmethod
    def apply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        """The product, of so many rows."""

    def narrow_inputs(self, tokens: int, width: int) -> list[int]:
        """Bytes of what an activation of so many values a row writes, where it quantises them for the product; none
        where it does not."""
        return []

    def multiply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        """The product of so many rows that are quantised already."""
        return self.apply(run, tokens, inputs, outputs)

    def share_sums(self, run: Run, tokens: int, outputs: int) -> None:  # noqa: B027
        """What a product of so many rows takes beside its output; by default nothing."""

    def make(self, run: Run, inputs: int, outputs: list[int], name: str) -> None:
        """The parameters of a layer with these sizes on this rank, as they are after loading."""
        for part, size in self.tensors(inputs, outputs).items():
            run.named[f"{name}.{part}"] = run.new(size, f"{name}.{part}")

    def finish(self, run: Run, inputs: int, outputs: list[int], name: str) -> None:  # noqa: B027
        """``process_weights_after_loading``; by default they stay as they were loaded."""

    def make_experts(self, run: Run, name: str, count: int, hidden: int, width: int, parts: int = 2) -> list[Tensor]:
        """The parameters of so many experts, of ``parts`` products of their width: gate and up, or one."""
        both = {"w13": self.tensors(hidden, [width] * parts), "w2": self.tensors(width, [hidden])}
        made = {}
        for part, one in ((part, one) for one in self.of_experts for part in both if one in both[part]):
            made[f"{name}.{part}_{one}"] = run.new(count * both[part][one], f"{name}.{part}_{one}")
        run.named |= made
        return list(made.values())

    def finish_experts(self, run: Run, name: str, count: int) -> None:  # noqa: B027
        """``process_weights_after_loading`` of so many experts."""


@dataclass(frozen=True)
class Unquantized(WeightMethod):
    """``UnquantizedLinearMethod`` (layers/linear.py)."""

    itemsize: int

    def tensors(self, inputs: int, outputs: Sequence[int]) -> dict[str, int]:
        return {"weight": inputs * sum(outputs) * self.itemsize}

    def apply(self, run: Run, tokens: int, inputs: int, outputs: int) -> Tensor:
        return run.matmul(tokens * outputs * self.itemsize)


class Linear:
    """A linear layer of one rank. ``inputs`` and ``outputs`` are this rank's."""

    def __init__(
        self,
        run: Run,
        name: str,
        inputs: int,
        outputs: list[int],
        method: LinearMethod,
        itemsize: int,
        *,
        bias: bool = False,
        reduce: bool = False,
    ) -> None:
        self.run, self.name = run, name
        self.inputs, self.outputs, self.method, self.reduce = inputs, outputs, method.of(name), reduce
        self.itemsize = itemsize
        self.slots: Slots | None = None
        self.method.make(run, inputs, outputs, name)
        if bias:
            run.named[f"{name}.bias"] = run.new(sum(outputs) * itemsize, f"{name}.bias")

    def finish(self) -> None:
        """After loading."""
        self.method.finish(self.run, self.inputs, self.outputs, self.name)

    def adapt(self, adapters: Adapters, *, whole: bool = False) -> Slots:
        """Room for adapters, of each part or of the ``whole``."""
        outputs = [sum(self.outputs)] if whole else self.outputs
        self.slots = Slots(self.run, adapters, self.name, self.inputs, outputs, self.itemsize)
        return self.slots

    def product(self, tokens: int, *, narrow: bool = False) -> Tensor:
        """This rank's product, not yet reduced. ``narrow``: its input is quantised already."""
        self.run.enter(self.name)
        early = self.slots.shrink(tokens) if self.slots is not None and self.run.compiled else None
        multiply = self.method.multiply if narrow else self.method.apply
        result = multiply(self.run, tokens, self.inputs, sum(self.outputs))
        if self.slots is not None:
            self.slots.expand(early or self.slots.shrink(tokens))
        return result

    def __call__(self, tokens: int, *, narrow: bool = False) -> Tensor:
        result = self.product(tokens, narrow=narrow)
        return self.run.all_reduce(result) if self.reduce else result


class Embedding:
    """``VocabParallelEmbedding`` and ``ParallelLMHead``."""

    def __init__(self, run: Run, name: str, vocab: int, width: int, itemsize: int) -> None:
        self.run, self.name, self.width, self.itemsize = run, name, width, itemsize
        self.rows = cdiv(vocab, VOCAB_PADDING) * VOCAB_PADDING // run.tp
        self.weight = run.new(self.rows * width * itemsize, f"{name}.weight")
        self.vocab = vocab
        self.slots: TableSlots | None = None
        self.head_slots: TableSlots | None = None

    def adapt(self, adapters: Adapters, *, head: bool) -> TableSlots:
        """Room for adapters, of embeddings or (``head``) of logits."""
        rows, width = (self.width, self.vocab) if head else (self.vocab, self.width)
        made = TableSlots(self.run, adapters, f"{self.name}.adapters", rows, width, self.itemsize)
        if head:
            self.head_slots = made
        else:
            self.slots = made
        return made

    def __call__(self, tokens: int) -> Tensor:
        """Looked up; ids of one rank are made 64 bits wide first, several ranks do it in one kernel."""
        run = self.run
        run.enter(self.name)
        adapters = self.slots.looked_up(tokens) if self.slots is not None else None
        if run.tp == 1:
            ids = run.new(tokens * 8, "ids")
            found = run.replacing(ids, run.new(tokens * self.width * self.itemsize, "embedded"))
        else:
            found = run.all_reduce(run.new(tokens * self.width * self.itemsize, "embedded"))
        if adapters is not None:
            run.free(adapters)
        return found

    def logits(self, rows: int, soft_cap: bool = False) -> Tensor:
        """``LogitsProcessor``: the product, gathered and put side by side (``all_gather``), then capped."""
        run = self.run
        run.enter("logits_processor")
        logits = run.matmul(rows * self.rows * self.itemsize, "logits")
        logits = run.all_gather(logits, "logits")
        if self.head_slots is not None:
            self.head_slots.add(rows)
        for _ in range(3 if soft_cap else 0):  # logits / cap, tanh, logits * cap: each before the last is let go
            logits = run.replacing(logits, run.new(logits.bytes, "capped logits"))
        return logits


class LayerNorm:
    """``torch.nn.LayerNorm``: the result, then mean and inverse deviation of every row, which nobody keeps."""

    def __init__(self, run: Run, name: str, width: int, itemsize: int) -> None:
        self.run, self.name, self.width, self.itemsize = run, name, width, itemsize
        run.new(width * itemsize, f"{name}.weight")
        run.new(width * itemsize, f"{name}.bias")

    def __call__(self, rows: int) -> Tensor:
        """Normed, as a new tensor."""
        self.run.enter(self.name)
        result = self.run.new(rows * self.width * self.itemsize, "normed")
        self.run.temporary(rows * 4, rows * 4)
        return result


def root_mean_square(run: Run, rows: int, wide: int) -> tuple[Tensor, Tensor]:
    """(the mean of the squares, the states times its inverse root) of rows in fp32, ``wide`` bytes in all: what torch
    operators of a norm begin with (vllm/ir/ops/layernorm.py)."""
    squares = run.new(wide)
    mean = run.replacing(squares, run.new(rows * 4))
    root = run.replacing(run.new(rows * 4), run.new(rows * 4))
    return mean, run.replacing(root, run.new(wide))


def turned_by_halves(run: Run, size: int, label: str = "") -> Tensor:
    """Heads that torch operators rotate: themselves times cosines, and halves that changed places times sines."""
    straight = run.new(size)
    turned = run.replacing(run.new(size // 2), run.new(size))
    product = run.replacing(turned, run.new(size))
    return run.replacing(product, straight, run.new(size, label))


def dropped_head(run: Run, vocab: int, width: int, itemsize: int, tied: Embedding | None) -> Embedding:
    """The head, which is made in any case; where it is ``tied`` to embeddings it is let go, and these are."""
    head = Embedding(run, "lm_head", vocab, width, itemsize)
    if tied is None:
        return head
    run.free(head.weight)
    return tied


def long_rotary(run: Run, name: str, positions: int, short: int, width: int, itemsize: int) -> Tensor:
    """The tables of ``Phi3LongRoPEScaledRotaryEmbedding``: so many rows for short texts of all positions, and the rest
    for long ones, joined."""
    rows = (short, positions - short)
    parts = [rotary(run, name, one, width, itemsize, scaled=True) for one in rows]
    return run.replacing(*parts, run.new(positions * width * itemsize, f"{name}.cos_sin_cache", Category.BUFFER))


def turned_by_factors(
    run: Run, tokens: int, heads: Sequence[int], turned: int, head_dim: int, itemsize: int, short: int
) -> list[Tensor]:
    """Heads of queries and of keys as its torch operators turn ``turned`` values of each: new tensors, which stay
    (layers/rotary_embedding/phi3_long_rope_scaled_rope.py). Where requests may be longer than ``short`` texts the rows
    of long ones are looked up."""
    held = [run.new(tokens * 8) for _ in range(2 if run.batch_limits.length > short else 0)]
    held += [run.new(tokens * turned * itemsize) for _ in range(3)]
    made = []
    for one in heads:
        held.append(turned_by_halves(run, tokens * one * turned * itemsize))
        made.append(run.new(tokens * one * head_dim * itemsize, "turned heads"))
    run.free(*held)
    return made


def rotary(
    run: Run, name: str, positions: int, width: int, itemsize: int, *, scaled: bool = False, linear: bool = False
) -> Tensor:
    """The table of cosines and sines, in the model's precision (layers/rotary_embedding/base.py). It is made in fp32
    on the device: the angles, both tables, both side by side; all are gone when it is done. ``scaled`` tables are
    multiplied (YaRN); for ``linear`` ones positions are divided, and one table is joined to no other
    (linear_scaling_rope.py)."""
    half = width // 2
    frequencies = run.new(half * 4)
    at = run.new(positions * 4)
    if linear:
        at = run.replacing(at, run.new(at.bytes))
    angles = run.new(positions * half * 4)
    cosines, sines = (_table(run, positions * half * 4, scaled) for _ in range(2))
    both = run.new(positions * width * 4)
    if linear:
        both = run.replacing(both, run.new(both.bytes))
    run.free(frequencies, at, angles, cosines, sines)
    if itemsize == 4:
        return both
    return run.replacing(both, run.new(positions * width * itemsize, f"{name}.cos_sin_cache", Category.BUFFER))


def _table(run: Run, size: int, scaled: bool) -> Tensor:
    table = run.new(size)
    return run.replacing(table, run.new(size)) if scaled else table


class AttentionScales:
    """The scales of a quantised KV cache, which every attention layer has; ``method`` is that of its weights, None for
    layers that no checkpoint has scales of."""

    def __init__(self, run: Run, name: str, method: LinearMethod | None = None, itemsize: int = 2) -> None:
        self.run = run
        self._kind = CacheScales.NONE if method is None else method.cache_scales
        run.once("table of flashinfer/quantization/fp4_quantization.py", _FLASHINFER_TABLE)
        own = [run.new(4, f"{name}.scale", Category.BUFFER) for _ in range(ATTENTION_SCALES)]
        self._host = [run.new(4, f"{name}.host scale", Category.BUFFER) for _ in range(HOST_SCALES)]
        self._replaced: list[Tensor] = []
        if self._kind is CacheScales.COPIED:
            self._replaced = [run.new(4, f"{name}.loaded scale") for _ in range(ATTENTION_SCALES)]
        elif self._kind is CacheScales.KEPT:
            for _ in range(ATTENTION_SCALES - 1):  # none of probabilities
                run.new(4, f"{name}.loaded scale", Category.BUFFER)
            zeros = [run.new(itemsize, f"{name}.zero point") for _ in range(ATTENTION_SCALES - 1)]
            self._replaced = own[: ATTENTION_SCALES - 1] + zeros

    def load(self) -> None:
        """``process_weights_after_loading`` of the checkpoint's scales, in the order of the modules."""
        self.run.free(*self._replaced)
        self._replaced = []

    def finish(self) -> None:
        """``process_weights_after_loading`` of the layer: copies for the host are made anew on the host unless the
        checkpoint may have had scales, which are written into those on the device."""
        self.load()
        if self._kind is CacheScales.NONE:
            self.run.free(*self._host)
