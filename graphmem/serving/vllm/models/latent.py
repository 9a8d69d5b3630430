"""Multi-head latent attention: DeepSeek V2 and V3 (vllm 0.32.0, models/deepseek_v2.py, layers/mla.py,
layers/attention/mla_attention.py)."""

from __future__ import annotations

from graphmem.serving.vllm.layers import AttentionScales, Linear, Unquantized, cdiv, rotary, turned_by_halves
from graphmem.serving.vllm.models.base import LatentShape, Shape
from graphmem.serving.vllm.run import Run, Tensor

#: ``determine_chunked_prefill_workspace_size``: eight full requests or four pages a sequence, at most 64 k tokens.
_FULL_REQUESTS, _PAGES, _MOST_TOKENS = 8, 4, 64 * 1024


def unpack_context(run: Run, shape: Shape, latent: LatentShape) -> None:
    """Room for as many tokens of a context as a chunk of a prompt unpacks at once, while the engine profiles."""
    if not run.profiling:
        return
    batch = run.batch_limits
    wanted = max(_FULL_REQUESTS * batch.length, _PAGES * batch.requests * batch.block_size)
    tokens = cdiv(max(min(wanted, _MOST_TOKENS), batch.block_size), batch.block_size) * batch.block_size
    run.temporary(tokens * (shape.heads // run.tp) * (latent.nope + latent.value) * shape.itemsize)


class UnpackedScales(AttentionScales):
    """With them what unpacks keys and values is made plain where it is quantised, and stays (``split_kv_b_proj``,
    ``scaled_dequantize``): what decoding multiplies queries and outputs with are views of it."""

    def __init__(self, run: Run, name: str, unpacking: Linear) -> None:
        super().__init__(run, name)
        self._unpacking = unpacking

    def finish(self) -> None:
        super().finish()
        one = self._unpacking
        values = one.inputs * sum(one.outputs)
        if not isinstance(one.method, Unquantized):
            # In fp32: scales of more than the whole, values, and their product.
            scales = [self.run.new(values * 4)] if getattr(one.method, "block", 1) else []
            product = self.run.replacing(self.run.new(values * 4), self.run.new(values * 4))
            self.run.replacing(product, *scales, self.run.new(values * one.itemsize, f"{one.name} made plain"))


class LatentAttention:
    """Queries and keys through low ranks. Nothing of the cache runs while the engine profiles; the context that a chunk
    of a prompt would unpack is asked for and given back."""

    def __init__(self, run: Run, name: str, shape: Shape, latent: LatentShape, ropes: set[object]) -> None:
        self.run, self.name, self.shape, self.latent = run, name, shape, latent
        size, method, hidden = shape.itemsize, shape.linear, shape.hidden
        self.heads = shape.heads // run.tp
        queries, self.compressed = self.heads * (latent.nope + latent.rope), latent.kv_rank + latent.rope
        self.linears: list[Linear] = []

        def linear(part: str, inputs: int, outputs: list[int], *, reduce: bool = False) -> Linear:
            made = Linear(run, f"{name}.{part}", inputs, outputs, method, size, reduce=reduce)
            self.linears.append(made)
            return made

        if latent.q_rank:
            self.down = linear("fused_qkv_a_proj", hidden, [latent.q_rank, self.compressed])
            run.new(latent.q_rank * size, f"{name}.q_a_layernorm.weight")
            self.up = linear("q_b_proj", latent.q_rank, [queries])
        else:
            self.down = linear("kv_a_proj_with_mqa", hidden, [self.compressed])
            self.up = linear("q_proj", hidden, [queries])
        run.new(latent.kv_rank * size, f"{name}.kv_a_layernorm.weight")
        unpacking = linear("kv_b_proj", latent.kv_rank, [self.heads * (latent.nope + latent.value)])
        self.o_proj = linear("o_proj", self.heads * latent.value, [hidden], reduce=True)
        rope = (None, shape.rope_positions, latent.rope)
        if rope not in ropes:
            ropes.add(rope)
            rotary(run, f"{name}.rotary_emb", shape.rope_positions, latent.rope, size, scaled=shape.rope_scaled)
        self.scales = UnpackedScales(run, f"{name}.mla_attn", unpacking)

    def finish(self) -> None:
        """After loading."""
        for linear in self.linears:
            linear.finish()

    def __call__(self, tokens: int) -> Tensor:
        """The projected output; the input is the caller's."""
        run, latent, size = self.run, self.latent, self.shape.itemsize
        down = self.down(tokens)
        kept = [down]
        if latent.q_rank:
            kept.append(run.new(tokens * latent.q_rank * size, "normed queries"))
        keys = run.new(tokens * latent.kv_rank * size, "normed keys")
        queries = self.up(tokens)
        rotated = [self._rotate(tokens)] if self.shape.rope_scaled else []
        attended = run.new(tokens * self.heads * latent.value * size, "attention output")
        unpack_context(run, self.shape, latent)
        return run.replacing(*kept, *rotated, keys, queries, attended, self.o_proj(tokens))

    def _rotate(self, tokens: int) -> Tensor:
        """``DeepseekScalingRotaryEmbedding`` as torch operators: cosines and sines by token, then queries and keys,
        each turned by halves; the turned keys stay."""
        run, size = self.run, self.shape.itemsize
        run.enter(f"{self.name}.rotary_emb")
        width = tokens * self.latent.rope * size
        tables = [run.new(width) for _ in range(3)]
        queries, keys = turned_by_halves(run, width * self.heads), turned_by_halves(run, width)
        return run.replacing(*tables, queries, keys)
