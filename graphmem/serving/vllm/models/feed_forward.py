"""Differences of decoder families, and their gated feed-forward layer (vllm 0.32.0, ``model_executor/models``)."""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.serving.vllm.layers import Linear
from graphmem.serving.vllm.models.base import Shape
from graphmem.serving.vllm.run import Run, Tensor


@dataclass(frozen=True)
class Style:
    """The differences of a family from Llama.

    ``norm``: ``rms`` adds the residual in place, ``gemma`` computes in fp32 and returns new tensors. ``holds_gate_up``:
    the feed-forward layer keeps a name for it until it returns. ``head_norms``: queries and keys are normed per head.
    ``post_norms``: the outputs of attention and feed-forward are normed too. ``scales_embedding``: it is multiplied.
    ``makes_tied_head``: with tied embeddings the head is made first, and dropped. ``first_norm``: the first layer has
    one before attention (EAGLE's has none). ``adapts_tables``: adapters may change embeddings and the head (the class
    lists them in ``embedding_modules``; others' stay as they are, lora/utils.py, ``get_supported_lora_modules``).
    ``quantises_activation``: the activation writes what the next product reads, where that has a kernel for it
    (``maybe_fused_act_quant``, layers/fusion/fused_act_quant.py). ``fused``: checkpoints have queries, keys and values
    in one matrix, and gate and up, so adapters do (``packed_modules_mapping`` of phi3.py).
    ``gated``: the feed-forward layer has a gate.
    """

    norm: str = "rms"
    holds_gate_up: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    scales_embedding: bool = False
    soft_cap: bool = False
    makes_tied_head: bool = True
    first_norm: bool = True
    adapts_tables: bool = True
    gated: bool = True
    quantises_activation: bool = False
    fused: bool = False


class FeedForward:
    """Gate and up in one product, an activation that multiplies them, and down."""

    def __init__(
        self,
        run: Run,
        name: str,
        shape: Shape,
        style: Style,
        width: int | None = None,
        *,
        reduces: bool = True,
        gate: Linear | None = None,
        whole: bool = False,
    ) -> None:
        self.run, self.name, self.style, self.size, self.gate = run, name, style, shape.itemsize, gate
        self.width = (shape.intermediate if width is None else width) // (1 if whole else run.tp)
        method, bias = shape.linear, shape.mlp_bias
        both, down = f"{name}.gate_up_proj", f"{name}.down_proj"
        self.gate_up_proj = Linear(
            run, both, shape.hidden, [self.width] * (1 + style.gated), method, self.size, bias=bias
        )
        self.down_proj = Linear(
            run, down, self.width, [shape.hidden], method, self.size, bias=bias, reduce=reduces
        )  # fmt: skip

    def finish(self) -> None:
        """After loading."""
        self.gate_up_proj.finish()
        self.down_proj.finish()

    def __call__(self, tokens: int) -> Tensor:
        """The output; the input is the caller's."""
        run = self.run
        both = self.gate_up_proj(tokens)
        run.enter(f"{self.name}.act_fn")
        narrow = self._narrow(tokens)
        acted = [run.new(size, "activated") for size in narrow or [tokens * self.width * self.size]]
        if not self.style.holds_gate_up:
            run.free(both)
        result = run.replacing(*acted, self.down_proj(tokens, narrow=bool(narrow)))
        if self.gate is not None:
            result = self._gated(tokens, self.gate, result)
        if self.style.holds_gate_up:
            run.free(both)
        return result

    def _narrow(self, tokens: int) -> list[int]:
        fused = self.style.quantises_activation and self.down_proj.slots is None
        return self.down_proj.method.narrow_inputs(tokens, self.width) if fused else []

    def _gated(self, tokens: int, gate: Linear, result: Tensor) -> Tensor:
        """The product with a token's gate, which is made last."""
        run = self.run
        raw = gate(tokens)
        weight = run.replacing(raw, run.new(raw.bytes))
        return run.replacing(weight, result, run.new(result.bytes, "gated"))
