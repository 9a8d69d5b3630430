"""A model by a capture of transformers' own code, as vLLM's backend for such models runs it
(:mod:`graphmem.sources.vllm_backend`): that code's operators as they were captured, and the engine's layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from graphmem.errors import UsageError
from graphmem.serving.vllm.layers import AttentionScales, Embedding, Linear, dropped_head, rotary
from graphmem.serving.vllm.lora import Adapters, Slots, wrapper
from graphmem.serving.vllm.models.base import Attend, Family, Piece, Shape
from graphmem.serving.vllm.models.decoder import Norm
from graphmem.serving.vllm.models.experts import Experts
from graphmem.serving.vllm.models.latent import LatentAttention, unpack_context
from graphmem.serving.vllm.models.mamba import Layer as StateLayer
from graphmem.serving.vllm.models.narrow import pieces_of
from graphmem.serving.vllm.models.pieces import Plan, plan_of
from graphmem.serving.vllm.models.states import mixer
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.sources.vllm_layers import Happening, Layer
from graphmem.trace import Category

#: ``model_type`` of the engine's own code that takes adapters (``SupportsLoRA``), and whether those of embeddings and
#: of the head too (``embedding_modules``, model_executor/models). Transformers' code takes those of embeddings.
ADAPTED = {
    "apertus": (True, True), "cohere": (True, False), "cohere2": (True, False), "exaone4": (True, True),
    "granite": (True, True), "hyperclovax": (True, True), "nemotron": (True, True),
}  # fmt: skip
#: ``model_type`` whose rotary tables are made before the projections of attention; other models make them behind.
_TABLES_FIRST = ("gpt_oss",)


@dataclass(frozen=True)
class Table:
    """A rotary table: its rows and their width, whether it is multiplied, or its positions divided, and its base."""

    positions: int
    width: int
    scaled: bool
    linear: bool
    base: str


class Captured(Family):
    """The model. Embeddings may come from an encoder's buffer (``_given``)."""

    _given: Tensor | None = None

    def __init__(self, run: Run, shape: Shape) -> None:
        assert shape.backend is not None
        self.run, self.shape, self.backend = run, shape, shape.backend
        self._replay(self.backend.making, 0, {}, Category.BUFFER)
        self.followed_layers = len(self.backend.attention)
        self._layers = {layer.name: layer for layer in self.backend.layers}
        linears = [layer.name for layer in self.backend.layers if layer.kind == "linear"]
        own = [[one for one in linears if one.startswith(f"{name}.")] for name in self.backend.attention]
        #: Numbers of the layers of attention by the first and the last of their projections.
        self._first_projections = {names[0]: at for at, names in enumerate(own) if names}
        self._last_projections = {names[-1]: at for at, names in enumerate(own) if names}
        self._linears: dict[str, Linear] = {}
        self._norms: dict[str, Norm] = {}
        self._experts: dict[str, Experts] = {}
        self._states: dict[str, StateLayer] = {}
        self._latents: dict[str, LatentAttention] = {}
        self._tables: dict[str, Embedding] = {}
        self._scales: dict[int, AttentionScales] = {}
        left = [layer for layer in self.backend.layers if layer.kind == "left"]
        self._wide_table: Tensor | None = None
        for layer in self.backend.layers[: len(self.backend.layers) - len(left)]:
            if shape.rotary_dim and shape.kind in _TABLES_FIRST:
                self._make_table(self._first_projections.get(layer.name))
            self._make(layer)
            last = self._last_projections.get(layer.name)
            if shape.rotary_dim and shape.kind not in _TABLES_FIRST:
                self._make_table(last)
            if last is not None and self.backend.own_code:  # else behind the model
                self._make_scales(last)
        for at in range(len(self.backend.attention)):
            self._make_scales(at)
        for layer in left:
            self._make(layer)
        if not self._tables:
            raise UsageError(f"{shape.kind}: the model has no table of embeddings")
        first = next(iter(self._tables.values())) if shape.tied else None
        widths = {name: norm.width for name, norm in self._norms.items()}
        self._plan = plan_of(self.backend, self._linears, widths, shape.itemsize)
        if self._plan is not None:
            self.followed_layers = Family.followed_layers
        if self.backend.encodes:
            self.head = next(iter(self._tables.values()))
        else:
            self.head = dropped_head(run, shape.vocab, shape.hidden, shape.itemsize, first)
        self.soft_cap = shape.soft_cap

    def _make(self, layer: Layer) -> None:
        run, shape = self.run, self.shape
        if layer.kind == "linear":
            self._linears[layer.name] = Linear(
                run, layer.name, layer.inputs, list(layer.outputs), shape.linear, shape.itemsize, bias=layer.bias,
                reduce=layer.reduces,
            )  # fmt: skip
        elif layer.kind == "embedding":
            self._tables[layer.name] = Embedding(run, layer.name, layer.inputs, layer.outputs[0], shape.itemsize)
        elif layer.experts is not None:
            self._experts[layer.name] = Experts(run, layer.name, shape, layer.experts)
        elif layer.states is not None:
            self._states[layer.name] = mixer(run, layer.name, shape)
        elif layer.kind == "latent":
            assert shape.latent is not None
            self._latents[layer.name] = LatentAttention(run, layer.name, shape, shape.latent, run.ropes)
        elif layer.kind in ("parameter", "left"):
            run.new(layer.bytes, layer.name)
        else:
            kind = "rms" if layer.kind == "norm" else "gemma"
            self._norms[layer.name] = Norm(run, layer.name, layer.inputs, shape.itemsize, kind)

    def _make_scales(self, at: int) -> None:
        """Of the cache of this layer of attention."""
        name, shape = self.backend.attention[at], self.shape
        if name in self._latents:
            self._scales[at] = self._latents[name].scales
        elif at not in self._scales:
            self._scales[at] = AttentionScales(self.run, f"{name}.attn", shape.linear, shape.itemsize)

    def _make_table(self, at: int | None) -> None:
        """The rotary table of this layer of attention, unless there is one like it."""
        run, shape = self.run, self.shape
        if at is None:
            return
        table = shape.ropes[at]
        if table in run.ropes:
            return
        run.ropes.add(table)
        assert isinstance(table, Table)
        made = rotary(
            run, "rotary_emb", table.positions, table.width, shape.rope_bytes or shape.itemsize, scaled=table.scaled,
            linear=table.linear,
        )  # fmt: skip
        self._wide_table = made if shape.rope_bytes > shape.itemsize else None

    def finish(self) -> None:
        linears = self._linears.values() if self.backend.own_code else self._fused_last()
        for linear in linears:
            linear.finish()
            if (at := self._last_projections.get(linear.name)) is not None and self.backend.own_code:
                self._scales[at].load()
        layers: list[StateLayer] = [*self._latents.values(), *self._experts.values()]
        for layer in (*layers, *self._states.values()):
            layer.finish()
        for scales in self._scales.values():
            scales.finish()

    def adapt(self, adapters: Adapters) -> list[Slots]:
        if self._experts or self._states or self._latents:
            return super().adapt(adapters)
        wrapper(self.run, adapters)
        embeds, logits = ADAPTED[self.shape.kind] if self.backend.own_code else (True, False)
        tables = list(self._tables.values())
        made: list[Slots] = [tables[0].adapt(adapters, head=False)] if embeds else []
        made += [linear.adapt(adapters) for linear in self._linears.values()]
        return [*made, self.head.adapt(adapters, head=True)] if logits else made

    def _fused_last(self) -> list[Linear]:
        """The linear layers as the backend's modules have them: what it fuses comes behind the others of its module
        (``setattr`` in transformers/fusers/merged_column.py)."""
        of_module: dict[str, list[Linear]] = {}
        for name, linear in self._linears.items():
            of_module.setdefault(name.rpartition(".")[0], []).append(linear)
        return [one for own in of_module.values() for one in sorted(own, key=lambda each: len(each.outputs) > 1)]

    def give(self, embeddings: Tensor) -> None:
        self._given = embeddings

    def forward(self, tokens: int) -> Tensor:
        alive: dict[int, Tensor] = {}
        self._replay(self.backend.forward, tokens, alive)
        return self._output(alive)

    def compiled(self, tokens: int, attend: Attend, piece: Piece, layers: int | None = None) -> Tensor:
        """The same in pieces, attention between them, with what torch.compile leaves of one where the layers are alike;
        else as without it. Of all layers, by :attr:`followed_layers`."""
        if self._plan is not None and self._given is None:
            with self.run.as_compiled():
                return pieces_of(self.run, self._plan, tokens).whole(attend, piece, layers)
        alive: dict[int, Tensor] = {}
        happenings = self.backend.forward
        cuts = [at for at, one in enumerate(happenings, start=1) if one.kind == "attended"]
        for start, stop in pairwise((0, *cuts, len(happenings))):
            with piece():
                self._replay(happenings[start:stop], tokens, alive)
            if stop in cuts:
                attend(tokens)
        return self._output(alive)

    def plan(self) -> Plan | None:
        return self._plan

    def _output(self, alive: dict[int, Tensor]) -> Tensor:
        output = alive.pop(self.backend.output)
        self.run.free(*(one for one in alive.values() if one is not self._given))
        return output

    def _replay(
        self, happenings: tuple[Happening, ...], tokens: int, alive: dict[int, Tensor], kind: Category | None = None
    ) -> None:
        """Replay the recorded events, for so many tokens, on the tensors that are alive."""
        run = self.run
        for one in happenings:
            if one.kind == "free":
                gone = alive.pop(one.storage)
                if gone is not self._given:
                    run.free(gone)
            elif one.kind == "returned":
                alive[one.storage] = self._returned(one, tokens)
            elif one.kind == "cublas":
                run.cublas_workspace()
            else:
                if one.name != run.module:
                    run.enter(one.name)
                narrow = []
                if one.kind == "attended":
                    self._narrow_table()
                    narrow = run.narrowed(tokens * self.shape.heads // run.tp * self.shape.head_dim)
                alive[one.storage] = run.new(one.bytes + one.token_bytes * tokens, one.name, kind)
                run.free(*narrow)
                if one.kind == "attended" and self.shape.latent is not None:
                    unpack_context(run, self.shape, self.shape.latent)

    def _narrow_table(self) -> None:
        """``_match_cos_sin_cache_dtype``: the table is made as wide as queries when it is used first."""
        wide, self._wide_table = self._wide_table, None
        if wide is not None:
            self.run.new(wide.bytes * self.shape.itemsize // self.shape.rope_bytes, "rotary_emb.cos_sin_cache")
            self.run.free(wide)

    def _returned(self, one: Happening, tokens: int) -> Tensor:
        if one.name in self._linears:
            return self._product(self._linears[one.name], tokens)
        layer = self._experts.get(one.name) or self._states.get(one.name) or self._latents.get(one.name)
        if layer is not None:
            return layer(tokens)
        if one.name in self._tables and self._given is not None:
            return self._given
        if one.name in self._tables:
            return self._tables[one.name](tokens)
        norm, row = self._norms[one.name], one.token_bytes
        if row < norm.width * norm.itemsize:
            return self._normed_whole(norm, tokens, row)
        return norm.plain(tokens, row // (norm.width * norm.itemsize))

    def _normed_whole(self, norm: Norm, tokens: int, row: int) -> Tensor:
        """The norm of all ranks' parts, which are put side by side before it (``_apply_qk_norm``, models/olmoe.py)."""
        run, whole = self.run, tokens * norm.width * norm.itemsize
        part, gathered = run.new(tokens * row), run.new(whole)
        beside = run.replacing(part, gathered, run.new(whole))
        return run.replacing(beside, norm.plain(tokens))

    def _product(self, linear: Linear, tokens: int) -> Tensor:
        """The output of a linear layer; one that ``splits`` copies its part of the input, one that ``gathers`` has all
        ranks' results and puts them side by side (``all_gather``)."""
        run, layer = self.run, self._layers[linear.name]
        part = [run.new(tokens * layer.inputs * self.shape.itemsize)] if layer.splits else []
        result = linear(tokens)
        run.free(*part)
        if layer.gathers:
            gathered = run.new(result.bytes * run.tp)
            whole = run.new(gathered.bytes)
            run.free(gathered, result)
            return whole
        return result


def windows(values: Mapping[str, object], layers: int) -> tuple[int | None, ...]:
    """The window of every layer: by its type, or one for all (``_create_attention_instances``; ``sliding_window`` of
    the cache's configuration, engine/arg_utils.py)."""
    types = values.get("layer_types")
    chunk = values.get("attention_chunk_size")
    if type(chunk) is int and chunk > 0 and isinstance(types, list):
        return tuple(chunk if one == "chunked_attention" else None for one in types)
    window = values.get("sliding_window")
    if type(window) is not int or window < 1 or values.get("use_sliding_window") is False:
        return (None,) * layers
    if isinstance(types, list):
        return tuple(window if one == "sliding_attention" else None for one in types)
    return (window,) * layers
