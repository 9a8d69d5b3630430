"""Medusa: heads on the target's last hidden states, each a few residual layers and a head of its own (vllm 0.32.0,
v1/spec_decode/medusa.py, model_executor/models/medusa.py). They draft with the first model runner only, and nothing of
them runs while the engine profiles."""

from __future__ import annotations

from graphmem.serving.base import ServedModel
from graphmem.serving.values import count
from graphmem.serving.vllm.layers import Embedding
from graphmem.serving.vllm.models.base import Family
from graphmem.serving.vllm.run import Tensor
from graphmem.serving.vllm.speculation import MedusaShape, Speculator


def medusa_shape(model: ServedModel) -> MedusaShape:
    """Its sizes (transformers_utils/configs/medusa.py, ``MedusaConfig``)."""
    config = model.config
    vocab, heads = count(model, "vocab_size", 32000), count(model, "num_heads", 5)
    shared = bool(config.get("original_lm_head"))
    return MedusaShape(
        count(model, "hidden_size", 4096), heads, count(model, "num_hidden_layers", 1), 1 if shared else heads,
        count(model, "truncated_vocab_size", vocab) if shared else vocab, bool(config.get("medusa_fc_bias")),
    )  # fmt: skip


class Medusa(Speculator):
    """``MedusaProposer``."""

    def make(self) -> None:
        """It has no buffers."""

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

    def propose(self, rows: int, tokens: int, taps: list[Tensor]) -> None:
        """Nothing is drafted while the engine profiles."""
