"""Speculative decoding: the model or method that drafts tokens, its weights and its part of the profile run.

Followed from vllm 0.32.0, ``v1/worker/gpu/spec_decode`` (``speculator``, ``ngram``, ``standalone_ar``,
``target_dependent_ar``) and ``model_executor/models/llama_eagle{,3}.py``. A draft drafts while the engine profiles too:
one step of all tokens, then one of a token for each request, as many as are drafted after the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count
from graphmem.serving.vllm.layers import Embedding, Linear, cdiv
from graphmem.serving.vllm.models.base import Family, Shape
from graphmem.serving.vllm.models.decoder import Attention, Decoder, Norm, Style
from graphmem.serving.vllm.run import Batch, Run, Tensor
from graphmem.trace import Category

#: Tokens that a block of the n-gram search covers, by the longest request (ngram/speculator.py).
_NGRAM_BLOCKS = ((1024, 256), (256, 128), (64, 64), (0, 16))
#: Bytes of an index in the buffers.
_LONG = 8


@dataclass(frozen=True)
class MedusaShape:
    """Medusa's sizes. ``heads`` of ``layers`` residual layers each; ``tables``: matrices of logits, all heads' own or
    one."""

    hidden: int
    heads: int
    layers: int
    tables: int
    vocab: int
    bias: bool = False


def medusa_shape(model: ServedModel) -> MedusaShape:
    """Its sizes (transformers_utils/configs/medusa.py, ``MedusaConfig``)."""
    config = model.config
    vocab, heads = count(model, "vocab_size", 32000), count(model, "num_heads", 5)
    shared = bool(config.get("original_lm_head"))
    return MedusaShape(
        count(model, "hidden_size", 4096), heads, count(model, "num_hidden_layers", 1), 1 if shared else heads,
        count(model, "truncated_vocab_size", vocab) if shared else vocab, bool(config.get("medusa_fc_bias")),
    )  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """The source of drafts: its method, tokens, and the draft model's sizes. ``own_head``: its checkpoint has a head
    and embeddings are the target's; else both are. ``heads``: Medusa's sizes."""

    method: str
    tokens: int
    shape: Shape | None = None
    style: Style | None = None
    draft_vocab: int = 0
    own_head: bool = False
    heads: MedusaShape | None = None
    itemsize: int = 2

    @property
    def extra_slots(self) -> int:
        """Tokens of every request that the engine keeps free of a batch (``_set_max_num_scheduled_tokens``)."""
        return 1 if self.method == "draft_model" else 0


class Speculator:
    """``Speculator``: its buffers, weights, and steps."""

    def __init__(self, run: Run, batch: Batch, draft: Draft) -> None:
        self.run, self.batch, self.draft = run, batch, draft

    def hold(self, *sizes: int) -> None:
        """Buffers that stay."""
        self.run.enter("speculator")
        for size in sizes:
            self.run.new(size, "buffers of drafts", Category.BUFFER)

    def make(self) -> None:
        """Buffers made before the weights are loaded; none by default."""

    def load(self, target: Family) -> None:
        """The draft's weights; none by default."""

    def taps(self, layers: int) -> tuple[int, ...]:
        """Layers of the target before which hidden states are kept for it."""
        return ()

    def propose(self, rows: int, tokens: int, taps: list[Tensor]) -> None:
        """Drafts for a batch of so many tokens; by default nothing is drafted while the engine profiles."""

    def _model_buffers(self) -> None:
        """``DraftModelSpeculator.__init__``: input buffers of its own, and its buffers of sampling."""
        tokens, requests, drafted = self.batch.tokens, self.batch.requests, self.draft.tokens
        self.hold(tokens * 4, tokens * 8, tokens, (requests + 1) * 4, requests * 4, requests * 4)
        self.hold(requests * _LONG, requests * 4, requests * _LONG, requests * drafted * _LONG, requests * drafted * 4)


class NGram(Speculator):
    """Drafts are looked up in the request itself, whose tokens are all on the card."""

    def make(self) -> None:
        length, requests = self.batch.length, self.batch.requests
        block = next(size for least, size in _NGRAM_BLOCKS if length >= least)
        self.hold(requests * cdiv(length, block) * _LONG, requests * self.draft.tokens * _LONG)


class DraftModel(Speculator):
    """A model of its own, which reads the prompt as the target does."""

    def make(self) -> None:
        tokens, requests = self.batch.tokens, self.batch.requests
        self._model_buffers()
        self.hold(requests * _LONG, (requests + 1) * 4, 8, (tokens + requests) * 4, (tokens + requests) * 8)

    def load(self, target: Family) -> None:
        assert self.draft.shape is not None
        assert self.draft.style is not None
        self.model = Decoder(self.run, self.draft.shape, self.draft.style)
        self.run.empty_cache()
        self.model.finish()
        self.run.empty_cache()

    def propose(self, rows: int, tokens: int, taps: list[Tensor]) -> None:
        run = self.run
        hidden = self.model.forward(tokens)
        self._drafted(rows, gathered=True)
        run.free(hidden)
        places = [run.new(rows * 4), run.new(rows * _LONG)]
        for _ in range(self.draft.tokens - 1):
            hidden = self.model.forward(rows)
            self._drafted(rows, gathered=False)
            run.free(hidden)
        run.free(*places)

    def _drafted(self, rows: int, *, gathered: bool) -> None:
        """``sample_draft`` of the rows' hidden states."""
        run, shape = self.run, self.model.shape
        held = [run.new(rows * shape.hidden * shape.itemsize), run.new(rows * _LONG)] if gathered else []
        logits = self.model.logits(rows)
        chosen = run.new(rows * _LONG)
        run.free(*held, logits, chosen)


class Dependent(Speculator, ABC):
    """Continues the target's hidden states (``TargetDependentARSpeculator``): a step of all tokens, then one of a token
    for each request, as many as are drafted after the first."""

    #: Whether the rows' hidden states are picked out for the next step.
    continues_rows = True

    def make(self) -> None:
        shape = self._shape()
        requests = self.batch.requests
        self._model_buffers()
        self.hold(self.batch.tokens * shape.hidden * shape.itemsize, 8, requests * _LONG, requests * _LONG)

    def _shape(self) -> Shape:
        assert self.draft.shape is not None
        return self.draft.shape

    @abstractmethod
    def step(self, tokens: int, number: int) -> list[Tensor]:
        """[hidden states that logits are made of; those of the next step where they are others]."""

    @abstractmethod
    def logits(self, rows: int) -> Tensor:
        """Of the rows' hidden states."""

    def combined(self, tokens: int, taps: list[Tensor]) -> list[Tensor]:
        """What is made of the target's states first, and stays."""
        return []

    def propose(self, rows: int, tokens: int, taps: list[Tensor]) -> None:
        run, width = self.run, rows * self._shape().hidden * self._shape().itemsize
        kept = self.combined(tokens, taps)
        places = [run.new(rows * _LONG), run.new(rows * _LONG)]
        hidden, *following = self.step(tokens, 0)
        sampled = run.new(width, "sampled hidden states")
        self.drafted(rows)
        if self.continues_rows:
            run.temporary(width)
        run.free(*following, *places, hidden, sampled)
        for number in range(1, self.draft.tokens):
            states = self.step(rows, number)
            self.drafted(rows)
            run.free(*states)
        run.free(*kept)

    def drafted(self, rows: int) -> None:
        """Logits, and the likeliest token of each row."""
        logits = self.logits(rows)
        self.run.free(logits, self.run.new(rows * _LONG))


class Eagle(Dependent):
    """A layer or few that continue the target's hidden states. EAGLE-3 takes those of three layers, norms them, and
    puts them beside the embeddings."""

    @property
    def third(self) -> bool:
        """True if it is EAGLE-3."""
        return self.draft.method == "eagle3"

    def taps(self, layers: int) -> tuple[int, ...]:
        """``get_eagle3_default_aux_hidden_state_layers`` of Llama."""
        return (2, layers // 2, layers - 3) if self.third else ()

    def load(self, target: Family) -> None:
        run, shape, style = self.run, self._shape(), self.draft.style
        assert style is not None
        if not isinstance(target, Decoder):
            raise UsageError("EAGLE is followed for decoders like Llama's only")
        size, hidden = shape.itemsize, shape.hidden
        embedding = Embedding(run, "draft.embed_tokens", shape.vocab, hidden, size)
        if not self.third:
            self._fuse(2 * hidden)
        self.model = Decoder.layers_alone(run, shape, replace(style, first_norm=self.third))
        self.wide: Linear | None = None
        plain: Tensor | None = None
        if self.third:
            first = self._attention()
            plain = run.named[f"{first.qkv_proj.name}.weight"]
            self.wide = Linear(
                run, "draft.qkv_proj", 2 * hidden, first.qkv_proj.outputs, shape.linear, size, bias=shape.attention_bias
            )
            Norm(run, "draft.hidden_norm", hidden, size, "rms")
            self._fuse(3 * hidden)
            Norm(run, "draft.norm", hidden, size, "rms")
        head = Embedding(run, "draft.lm_head", self.draft.draft_vocab or shape.vocab, hidden, size)
        if self.draft.draft_vocab and self.third:
            run.new(self.draft.draft_vocab * _LONG, "draft.draft_id_to_target_id")
        if plain is not None:
            run.free(plain)
        self.model.finish()
        self.head = head
        if not self.draft.own_head:
            run.free(head.weight)
            self.head = target.head
        run.free(embedding.weight)
        self.embedding = target.embedding

    def _attention(self) -> Attention:
        attention = self.model.layers[0].attention
        assert isinstance(attention, Attention)
        return attention

    def _fuse(self, inputs: int) -> None:
        shape = self._shape()
        self.fuse = Linear(self.run, "draft.fc", inputs, [shape.hidden], shape.linear, shape.itemsize)

    def combined(self, tokens: int, taps: list[Tensor]) -> list[Tensor]:
        if not self.third:
            return []
        beside = self.run.new(sum(tap.bytes for tap in taps), "hidden states of three layers")
        return [self.run.replacing(beside, self.fuse(tokens))]

    def step(self, tokens: int, number: int) -> list[Tensor]:
        run, shape = self.run, self._shape()
        width = tokens * shape.hidden * shape.itemsize
        embedded = self.embedding(tokens)
        if self.third:
            return [self._third_layer(tokens, embedded, width)]
        beside = run.new(2 * width, "embedded, and the target's hidden states")
        hidden, residual = self.model.through(tokens, run.replacing(beside, self.fuse(tokens)))
        return [run.replacing(hidden, embedded, residual, run.new(width, "hidden states of the draft"))]

    def _third_layer(self, tokens: int, embedded: Tensor, width: int) -> Tensor:
        """The layer of EAGLE-3, whose queries, keys and values are of twice the width."""
        run, layer, size = self.run, self.model.layers[0], self._shape().itemsize
        attention = self._attention()
        assert self.wide is not None
        normed, own = run.new(width, "normed"), run.new(width, "normed hidden states")
        beside = run.replacing(own, run.new(2 * width, "embedded and hidden states"))
        qkv = self.wide(tokens)
        attended = run.new(tokens * attention.q * size, "attention output")
        output = run.replacing(qkv, attended, beside, attention.o_proj(tokens))
        return run.replacing(output, normed, embedded, layer.mlp(tokens))

    def logits(self, rows: int) -> Tensor:
        """``compute_draft_logits``: those of a smaller vocabulary are put where the target's are."""
        run, shape = self.run, self._shape()
        logits = self.head.logits(rows)
        if not self.third or not self.draft.draft_vocab:
            return logits
        ids = [run.new(self.draft.draft_vocab * _LONG) for _ in range(2)]
        whole = run.new(rows * shape.vocab * shape.itemsize, "logits of the target's vocabulary")
        return run.replacing(logits, *ids, whole)


class Medusa(Speculator):
    """``MedusaProposer`` (v1/spec_decode/medusa.py, model_executor/models/medusa.py): heads on the target's last hidden
    states, each a few residual layers and a head of its own. With the first model runner only."""

    def load(self, target: Family) -> None:
        run, shape = self.run, self.draft.heads
        assert shape is not None
        size = self.draft.itemsize
        run.enter("medusa")
        for _ in range(shape.heads * shape.layers):
            run.new(shape.hidden * shape.hidden * size, "medusa.blocks.weight")
            if shape.bias:
                run.new(shape.hidden * size, "medusa.blocks.bias")
        for index in range(shape.tables):
            Embedding(run, f"medusa.lm_heads.{index}", shape.vocab, shape.hidden, size)


def speculator_for(run: Run, batch: Batch, draft: Draft) -> Speculator:
    """The speculator of this method."""
    from graphmem.serving.vllm.prediction import predictor_for

    kinds: dict[str, Callable[[Run, Batch, Draft], Speculator]] = {
        "ngram": NGram, "draft_model": DraftModel, "eagle": Eagle, "eagle3": Eagle, "mtp": predictor_for,
        "medusa": Medusa,
    }  # fmt: skip
    return kinds[draft.method](run, batch, draft)
