"""Multi-token prediction: layers of the target's kind behind a projection of the next token's embedding and the hidden
states (vllm 0.32.0, v1/worker/gpu/spec_decode/mtp, models/{qwen3_next,qwen3_5,deepseek}_mtp.py).

Embeddings and head are the target's; the draft's own are made and let go. A drafted token takes one layer, in turn.
"""

from __future__ import annotations

from abc import abstractmethod

from graphmem.errors import UsageError
from graphmem.serving.vllm.layers import Embedding, Linear
from graphmem.serving.vllm.models.base import Family
from graphmem.serving.vllm.models.decoder import Decoder, Layer, Mixing, Norm
from graphmem.serving.vllm.models.deltanet import GatedAttention
from graphmem.serving.vllm.run import Batch, Run, Tensor
from graphmem.serving.vllm.speculation import Dependent, Draft


class Predictor(Dependent):
    """``MTPSpeculator``."""

    def load(self, target: Family) -> None:
        if not isinstance(target, Decoder):
            raise UsageError("multi-token prediction is followed for decoders only")
        self.target = target
        self.layers: list[Layer] = []
        own = self.make_layers()
        for layer in self.layers:
            layer.finish()
        for layer in self.layers:
            if layer.attention.scales is not None:
                layer.attention.scales.finish()
        self.run.free(*[table.weight for table in reversed(own)])

    @abstractmethod
    def make_layers(self) -> list[Embedding]:
        """Its layers; tables that are replaced by the target's."""

    def table(self, name: str) -> Embedding:
        """A table of embeddings, or a head."""
        shape = self._shape()
        return Embedding(self.run, f"draft.{name}", shape.vocab, shape.hidden, shape.itemsize)

    def norm(self, name: str) -> Norm:
        """A norm as the target's."""
        shape = self._shape()
        return Norm(self.run, f"draft.{name}", shape.hidden, shape.itemsize, self.target.style.norm)

    def layer(self, index: int) -> Layer:
        """A layer of attention."""
        return Layer(
            self.run, f"draft.layers.{index}", self._shape(), self.target.style, self.mixing, index
        )  # fmt: skip

    def mixing(self, name: str, index: int) -> Mixing:
        """The target's attention."""
        return self.target.mixing(name, index)

    def logits(self, rows: int) -> Tensor:
        return self.target.head.logits(rows)


class GatedPredictor(Predictor):
    """Qwen's: one projection, and norms before it and at the end."""

    continues_rows = False

    def make_layers(self) -> list[Embedding]:
        run, shape = self.run, self._shape()
        own = [self.table("embed_tokens")]
        self.fuse = Linear(run, "draft.fc", 2 * shape.hidden, [shape.hidden // run.tp], shape.linear, shape.itemsize)
        self.layers += [self.layer(index) for index in range(shape.layers)]
        self.last, self.before_hidden, self.before_embedding = (
            self.norm(name) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
        )  # fmt: skip
        return [*own, self.table("lm_head")]

    def mixing(self, name: str, index: int) -> Mixing:
        return GatedAttention(self.run, f"{name}.self_attn", self._shape())

    def step(self, tokens: int, number: int) -> list[Tensor]:
        run = self.run
        normed = run.replacing(self.target.embedding(tokens), self.before_embedding.plain(tokens))
        states = self.before_hidden.plain(tokens)
        beside = run.replacing(states, run.new(normed.bytes + states.bytes, "embedded and hidden states"))
        fused = run.replacing(beside, run.all_gather(self.fuse(tokens), "projected"))
        hidden, residual = self.layers[number % len(self.layers)](tokens, fused, None)
        result, added = self.last.added(tokens, hidden, residual)
        run.free(*dict.fromkeys((residual, added, normed, fused, hidden)))
        return [result]


class DeepSeekPredictor(Predictor):
    """DeepSeek's: a projection of its own, three norms and a head for each layer."""

    def make_layers(self) -> list[Embedding]:
        run, shape = self.run, self._shape()
        own: list[Embedding] = []
        for index in range(shape.layers):
            self.before_embedding, self.before_hidden = self.norm("enorm"), self.norm("hnorm")
            run.new(2 * shape.hidden * shape.hidden * shape.itemsize, "draft.eh_proj.weight")
            self.last = self.norm("shared_head.norm")
            own.append(self.table("shared_head.head"))
            self.layers.append(self.layer(index))
        return [*own, self.table("embed_tokens")]

    def step(self, tokens: int, number: int) -> list[Tensor]:
        """Embeddings of first positions are taken as zero; the caller keeps them as they were. Logits are of the sum,
        the next step of its norm."""
        run = self.run
        embedded = self.target.embedding(tokens)
        first = [run.new(tokens, "whether the position is the first"), run.new(self._shape().itemsize)]
        masked = run.replacing(*reversed(first), run.new(embedded.bytes, "embedded or zero"))
        normed = run.replacing(masked, self.before_embedding.plain(tokens))
        states = self.before_hidden.plain(tokens)
        beside = run.new(2 * normed.bytes, "embedded and hidden states")
        fused = run.replacing(beside, run.matmul(normed.bytes, "projected"))
        hidden, residual = self.layers[number % len(self.layers)](tokens, fused, None)
        total = run.replacing(hidden, run.new(normed.bytes, "hidden states of the draft"))
        following = self.last.plain(tokens)
        run.free(*dict.fromkeys((states, normed, residual, fused, embedded)))
        return [total, following]

    def drafted(self, rows: int) -> None:
        normed = self.last.plain(rows)
        super().drafted(rows)
        self.run.free(normed)


def predictor_for(run: Run, batch: Batch, draft: Draft) -> Predictor:
    """The predictor of this kind of target."""
    assert draft.shape is not None
    return (DeepSeekPredictor if draft.shape.latent is not None else GatedPredictor)(run, batch, draft)
