"""Mamba 2: layers of states instead of a cache (vllm 0.32.0, models/mamba2.py, layers/mamba/mamba_mixer2.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from graphmem.serving.base import ServedModel
from graphmem.serving.values import count
from graphmem.serving.vllm.layers import Embedding, Linear, LinearMethod
from graphmem.serving.vllm.models.base import Family, Shape, StateShape, plain_shape
from graphmem.serving.vllm.models.decoder import Norm
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.trace import Category

#: What Triton writes before every run that it times (triton/backends/nvidia/driver.py): 256 MiB.
_TIMED = 256 << 20


@dataclass(frozen=True)
class ScanShape(StateShape):
    """Mamba 2's. ``size``: of a state for each element of a head; ``kernel``: of the convolution."""

    heads: int
    head_dim: int
    groups: int
    size: int
    kernel: int
    chunk: int
    conv_bias: bool = True
    bias: bool = False
    #: Whether what is gated is normed, and what is projected is multiplied by factors.
    normed: bool = True
    scaled: bool = False
    checkpoints: int = field(default=1, kw_only=True)

    def shared(self, tp: int) -> ScanShape:
        """One rank's share; groups that cannot be shared out are on every rank."""
        return replace(self, heads=self.heads // tp, groups=max(1, self.groups // tp))

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: heads, and both projections of the groups."""
        return self.inner + 2 * self.groups * self.size

    @property
    def state_elements(self) -> int:
        """Of the states of all heads."""
        return self.inner * self.size

    @property
    def page_bytes(self) -> int:
        """The bytes kept for one request (``MambaStateShapeCalculator.mamba2_state_shape``)."""
        return (self.kernel - 1) * self.convolved * self.conv_bytes + self.state_elements * self.state_bytes


class Mixer:
    """``MambaMixer2``. While the engine profiles it does not scan: it runs its kernels on one chunk. The first time on
    a machine Triton looks for their best configurations, which it keeps on the disk."""

    def __init__(self, run: Run, name: str, shape: Shape, state: ScanShape) -> None:
        self.run, self.name, self.shape, self.state = run, name, shape, state
        size, own = shape.itemsize, state.shared(run.tp)
        self.own = own
        run.new(own.convolved * state.kernel * size, f"{name}.conv1d.weight")
        if state.conv_bias:
            run.new(own.convolved * size, f"{name}.conv1d.bias")
        outputs = [own.inner, own.convolved, own.heads]
        self.in_proj = Linear(run, f"{name}.in_proj", shape.hidden, outputs, shape.linear, size, bias=state.bias)
        run.new(own.heads * 4, f"{name}.A")
        run.new(own.heads * size, f"{name}.D")
        run.new(own.heads * size, f"{name}.dt_bias")
        self.out_proj = Linear(
            run, f"{name}.out_proj", own.inner, [shape.hidden], shape.linear, size, bias=state.bias, reduce=True
        )
        if state.normed:
            run.new(own.inner * size, f"{name}.norm.weight")
        self._warm = False

    def finish(self) -> None:
        """After loading."""
        self.in_proj.finish()
        self.out_proj.finish()

    def __call__(self, tokens: int) -> Tensor:
        """The projected output; the input is the caller's."""
        run, size = self.run, self.shape.itemsize
        projected = self.in_proj(tokens)
        run.enter(self.name)
        if self.state.scaled:
            projected = run.replacing(projected, run.new(projected.bytes, "scaled"))
        scanned = run.new(tokens * self.own.inner * size, "scanned")
        self._warm_up()
        run.temporary(tokens * self.own.convolved * size)  # what would be convolved, copied
        normed = self._gated(tokens)
        return run.replacing(normed, scanned, projected, self.out_proj(tokens))

    def _gated(self, tokens: int) -> Tensor:
        """``Mixer2RMSNormGated``: a kernel of one group that no other rank has a part of; else torch operators in
        fp32."""
        run, elements = self.run, tokens * self.own.inner
        narrow, wide = elements * self.shape.itemsize, elements * 4
        if self.state.normed and self.state.groups == 1 and run.tp == 1:
            normed = run.new(narrow, "gated and normed")
            run.temporary(tokens * 4)
            return normed
        activated = run.replacing(run.new(wide), run.new(wide))
        if not self.state.normed:
            again = run.replacing(activated, run.new(narrow))
            return run.replacing(again, run.new(narrow, "gated"))
        product = run.replacing(activated, run.new(wide))
        rows = tokens * 4 * (1 if self.state.groups == 1 else self.own.groups)
        mean = run.replacing(run.new(wide), run.new(rows))
        sums = [run.new(rows), run.new(rows)] if self.state.groups == 1 else []  # of all ranks, and divided
        root = run.replacing(run.new(rows), run.new(rows))
        normed = run.replacing(root, product, run.new(wide))
        return run.replacing(run.new(narrow), normed, mean, *sums, run.new(narrow, "gated and normed"))

    def _warm_up(self) -> None:
        """``_warmup_ssd_kernels``: a chunk without a state before it, then with one; the allocator's cache is emptied
        while their inputs are there."""
        if self._warm:
            return
        self._warm = True
        run, own, chunk, size = self.run, self.own, self.state.chunk, self.shape.itemsize
        timed = run.cold and "state kernels" not in run.named
        wide = chunk * own.heads * own.head_dim * size
        beside = chunk * own.groups * own.size * size
        sizes = (wide, chunk * own.heads * size, beside, beside, 8, 8, 4, 4, wide)
        made = [run.new(one) for one in sizes]
        self._chunk(timed=timed, again=False)
        made.append(run.new(own.state_elements * self.state.state_bytes))
        self._chunk(timed=timed, again=True)
        run.empty_cache()
        run.free(*made)
        if timed:
            run.named["state kernels"] = made[0]

    def _chunk(self, *, timed: bool, again: bool) -> None:
        """``_mamba_chunk_scan_combined_fwd`` (ops/ssd_combined.py); kernels that do not depend on the state before are
        timed once."""
        run, own, chunk = self.run, self.own, self.state.chunk
        first = timed and not again

        def search(applies: bool) -> None:
            if applies:
                run.temporary(_TIMED)

        sums = [run.new(own.heads * chunk * 4) for _ in range(2)]
        search(first)
        states = run.new(own.state_elements * 4)
        search(first)
        passed = run.new(own.state_elements * self.state.state_bytes)
        search(timed)
        run.free(states)
        products = run.new(own.groups * chunk * chunk * 4)
        search(first)
        search(timed)
        index = run.new(8)
        final = run.new(own.state_elements * self.state.state_bytes)
        run.free(index, *sums, passed, products, final)


@dataclass(frozen=True)
class ConvolutionShape(StateShape):
    """A short convolution's: ``channels``, and the ``kernel``."""

    channels: int
    kernel: int
    bias: bool = False
    conv_bias: bool = False
    checkpoints: int = field(default=1, kw_only=True)

    def shared(self, tp: int) -> ConvolutionShape:
        """One rank's share."""
        return replace(self, channels=self.channels // tp)

    @property
    def page_bytes(self) -> int:
        """The bytes kept for one request (``short_conv_state_shape``)."""
        return (self.kernel - 1) * self.channels * self.conv_bytes


class ShortConvolution:
    """``ShortConv``, into a tensor that is made before."""

    def __init__(self, run: Run, name: str, shape: Shape, state: ConvolutionShape) -> None:
        self.run, self.name, self.hidden, size = run, name, shape.hidden * shape.itemsize, shape.itemsize
        own = state.shared(run.tp).channels
        self.row, method = own * size, shape.linear
        run.new(own * state.kernel * size, f"{name}.conv.weight")
        if state.conv_bias:
            run.new(own * size, f"{name}.conv.bias")
        self.in_proj = Linear(run, f"{name}.in_proj", shape.hidden, [own] * 3, method, size, bias=state.bias)
        self.out_proj = Linear(
            run, f"{name}.out_proj", own, [shape.hidden], method, size, bias=state.bias, reduce=True
        )  # fmt: skip

    def finish(self) -> None:
        """After loading."""
        self.in_proj.finish()
        self.out_proj.finish()

    def __call__(self, tokens: int) -> Tensor:
        """The projected output; the input is the caller's."""
        run = self.run
        result = run.new(tokens * self.hidden, "output")
        projected = self.in_proj(tokens)
        gated, convolved = (run.new(tokens * self.row) for _ in range(2))
        run.free(self.out_proj(tokens), gated, convolved, projected)
        return result


class Layer(Protocol):
    """One of states."""

    def __call__(self, tokens: int) -> Tensor: ...

    def finish(self) -> None: ...


class StatesOnly(Family):
    """A model of an embedding, layers of states, and a head; norms are in place. ``mixer`` makes the layer of a name.
    Scans are the engine's own operators: Inductor makes nothing else of it."""

    def __init__(self, run: Run, shape: Shape, mixer: Callable[[str], Layer]) -> None:
        self.run, self.shape = run, shape
        self.embedding = Embedding(run, "backbone.embeddings", shape.vocab, shape.hidden, shape.itemsize)
        self.layers: list[Layer] = []
        for index in range(shape.layers):
            self.layers.append(mixer(f"backbone.layers.{index}.mixer"))
            Norm(run, f"backbone.layers.{index}.norm", shape.hidden, shape.itemsize, "rms")
        Norm(run, "backbone.norm_f", shape.hidden, shape.itemsize, "rms")

    def finish(self) -> None:
        for layer in self.layers:
            layer.finish()

    def forward(self, tokens: int) -> Tensor:
        run = self.run
        residual = self.embedding(tokens)
        hidden = run.new(residual.bytes, "normed")
        for layer in self.layers:
            hidden = run.replacing(hidden, layer(tokens))
        return run.replacing(residual, hidden)


class Mamba2(StatesOnly):
    """The whole model."""

    def __init__(self, run: Run, shape: Shape) -> None:
        state = shape.state
        assert isinstance(state, ScanShape)
        super().__init__(run, shape, lambda name: Mixer(run, name, shape, state))
        self.head = self.embedding
        if not shape.tied:
            self.head = Embedding(run, "lm_head", shape.vocab, shape.hidden, shape.itemsize)


def mamba2_shape(model: ServedModel, itemsize: int, method: LinearMethod) -> Shape:
    """Its sizes; it has no attention."""
    heads = count(model, "num_heads")
    state = ScanShape(
        heads, count(model, "head_dim"), count(model, "n_groups", 1), count(model, "state_size", 128),
        count(model, "conv_kernel", 4, least=2), count(model, "chunk_size", 256),
        conv_bias=bool(model.config.get("use_conv_bias", True)), bias=bool(model.config.get("use_bias")),
        conv_bytes=itemsize, state_bytes=itemsize,
    )  # fmt: skip
    return plain_shape(
        model, itemsize, method, intermediate=count(model, "hidden_size"), heads=heads, kv_heads=heads,
        head_dim=state.head_dim, positions=1, tied=bool(model.config.get("tie_word_embeddings", True)), rotary_dim=1,
        attention_bias=False, state=state,
    )  # fmt: skip


def state_index(run: Run, shape: Shape) -> None:
    """``MambaHybridModelState``: which request has which state; with blocks of attention beside them (and prefixes
    kept) also where it begins."""
    for _ in range(0 if shape.state is None else 4 if shape.attends else 1):
        run.new(run.batch_limits.requests * 4, "indices of states", Category.BUFFER)
