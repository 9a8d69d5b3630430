"""OPT (model_executor/models/opt.py of vllm 0.32.0): biases, LayerNorm out of place, learned positions."""

from __future__ import annotations

from graphmem.serving.vllm.layers import AttentionScales, Embedding, LayerNorm, Linear
from graphmem.serving.vllm.models.base import Family, Shape
from graphmem.serving.vllm.run import Run, Tensor

#: ``OPTLearnedPositionalEmbedding``: rows before the first position.
OFFSET = 2


class Layer:
    """One decoder layer."""

    def __init__(self, run: Run, name: str, shape: Shape) -> None:
        self.run, self.shape = run, shape
        size, width, inner = shape.itemsize, shape.hidden // run.tp, shape.intermediate // run.tp
        method = shape.linear
        attn = f"{name}.self_attn"
        self.qkv = Linear(run, f"{attn}.qkv_proj", shape.hidden, [width] * 3, method, size, bias=True)
        self.out = Linear(run, f"{attn}.out_proj", width, [shape.hidden], method, size, bias=True, reduce=True)
        self.scales = AttentionScales(run, f"{attn}.attn", method, size)
        self.first_norm = LayerNorm(run, f"{name}.self_attn_layer_norm", shape.hidden, size)
        self.fc1 = Linear(run, f"{name}.fc1", shape.hidden, [inner], method, size, bias=True)
        self.fc2 = Linear(run, f"{name}.fc2", inner, [shape.hidden], method, size, bias=True, reduce=True)
        self.last_norm = LayerNorm(run, f"{name}.final_layer_norm", shape.hidden, size)

    def __call__(self, tokens: int) -> Tensor:
        """The output; the input is the caller's."""
        run, size = self.run, tokens * self.shape.hidden * self.shape.itemsize
        normed = self.first_norm(tokens)
        qkv = self.qkv(tokens)
        attended = run.new(size // run.tp, "attention output")
        output = run.replacing(qkv, attended, normed, self.out(tokens))
        residual = run.replacing(output, run.new(size, "residual"))
        inner = run.replacing(self.last_norm(tokens), self.fc1(tokens))
        acted = run.replacing(inner, run.new(inner.bytes, "activated"))
        output = run.replacing(acted, self.fc2(tokens))
        return run.replacing(output, residual, run.new(size, "hidden"))


class OPT(Family):
    """The whole model. Inductor's code of LayerNorm and biases is not followed."""

    def __init__(self, run: Run, shape: Shape) -> None:
        self.run, self.shape = run, shape
        size = shape.itemsize
        self.embedding = Embedding(run, "model.decoder.embed_tokens", shape.vocab, shape.hidden, size)
        run.new((shape.positions + OFFSET) * shape.hidden * size, "model.decoder.embed_positions.weight")
        self.norm = LayerNorm(run, "model.decoder.final_layer_norm", shape.hidden, size)
        self.layers = [Layer(run, f"model.decoder.layers.{index}", shape) for index in range(shape.layers)]
        self.head = Embedding(run, "lm_head", shape.vocab, shape.hidden, size)
        if shape.tied:
            run.free(self.head.weight)

    def finish(self) -> None:
        for layer in self.layers:
            layer.scales.finish()

    def forward(self, tokens: int) -> Tensor:
        run, size = self.run, tokens * self.shape.hidden * self.shape.itemsize
        embedded = self.embedding(tokens)
        shifted = run.new(tokens * 8, "positions + 2")
        places = run.replacing(shifted, run.new(size, "embedded positions"))
        hidden = run.new(size, "hidden")
        for layer in self.layers:
            hidden = run.replacing(hidden, layer(tokens))
        return run.replacing(hidden, embedded, places, self.norm(tokens))
