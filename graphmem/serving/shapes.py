"""Sizes of a decoder's weights and of its cache from its configuration, and the answer of an engine that gives its
cache the rest, for engines that are followed by formulas.

Counts of parameters are those of transformers' models of these names; where a checkpoint lies beside the configuration,
its headers' bytes are used instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphmem.base.figures import Communicator, Figure
from graphmem.devices import Device, Loads
from graphmem.errors import UsageError
from graphmem.serving.base import KVCache, Part, Question, Served, ServedModel
from graphmem.serving.caches import Cached, cached, language
from graphmem.serving.options import Option, options_of
from graphmem.serving.stored import FAMILIES, experts_of, kind_of, stored
from graphmem.serving.values import count
from graphmem.units import GIB

#: Bytes of an element of the cache by the names that engines use.
CACHE_BYTES = {
    "auto": 2, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "fp8_e4m3fn": 1, "int8": 1,
}  # fmt: skip
#: Decoders whose layers all keep keys and values of every head, and those that keep one latent vector for all heads.
FOLLOWED = frozenset(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"))
LATENT = frozenset(("deepseek_v2", "deepseek_v3"))


@dataclass(frozen=True)
class Decoder:
    """The share of a decoder on one card: what its layers keep, ``wide``: of the feed-forward layer."""

    layers: int
    cached: Cached
    hidden: int
    vocabulary: int
    longest: int
    wide: int
    weights_bytes: int
    counted_by: str

    def activations(self, tokens: int, rows: int) -> int:
        """Bytes at the peak of one step of so many tokens, in 16 bits: the gated layer's two products and their result
        beside three hidden states, or the logits of ``rows``; as observed of vLLM's dense decoders."""
        return max(2 * tokens * 3 * (self.wide + self.hidden), 6 * rows * self.vocabulary)

    def token_bytes(self, element: float) -> int:
        """Bytes that a token takes in this card's cache, where every layer sees all."""
        return round((self.cached.values + self.cached.windowed) * element)


def decoder(question: Question, cards: int, accepted: frozenset[str] = FOLLOWED) -> Decoder:
    """One card's share under tensor parallelism. Raises :class:`UsageError` for a model that is not like these, unless
    the bytes of its weights are known, and for cards that do not divide its heads."""
    model = question.model
    if model.checkpoint is None:
        kind_of(model, accepted)
    model = language(model)
    own, layers, hidden = cached(model, cards), count(model, "num_hidden_layers"), count(model, "hidden_size")
    _, width, chosen = experts_of(model)
    return Decoder(
        layers, own, hidden, count(model, "vocab_size"), count(model, "max_position_embeddings", 2048),
        width * chosen // cards, _bytes(question, cards),
        "the configuration counts them" if model.checkpoint is None else "the checkpoint's headers say",
    )  # fmt: skip


def _bytes(question: Question, cards: int) -> int:
    """Bytes of one card: by the headers of the checkpoint, else by its configuration."""
    model, checkpoint = question.model, question.model.checkpoint
    width = 4 if question.dtype in ("float", "float32") else 2
    whole = stored(model, question.quantization, width, cards) if checkpoint is None else checkpoint.bytes // cards
    return whole - _unloaded(model, question.quantization, width, cards)


def _unloaded(model: ServedModel, quantization: str | None, width: int, cards: int) -> int:
    """Bytes of further layers in the checkpoint, which only speculative decoding loads."""
    if not count(model, "num_nextn_predict_layers", 0, least=0) or model.config.get("model_type") not in FAMILIES:
        return 0
    without = replace(model, config={**model.config, "num_nextn_predict_layers": 0})
    return stored(model, quantization, width, cards) - stored(without, quantization, width, cards)


def outside(device: Device, cards: int) -> tuple[Figure, ...]:
    """The memory that a process holds before it loads a model."""
    return device.outside(Loads(communicators=(Communicator(cards),) if cards > 1 else ()))


class Resolved:
    """A question to an engine that is followed by a formula: ``found``, the values of its options by its own names,
    ``own``, one card's share of the model, ``length``, tokens of the longest request, and what lies on the card before
    a cache is made."""

    def __init__(self, engine: Formula, question: Question) -> None:
        self.question, self.device = question, question.device
        self._options = engine.options
        self._names = {option.field: name for name, option in engine.options.items()}
        self.found = options_of(question, engine, engine.options, engine.short)
        self.cards = self.of("tensor_parallel_size", 1)
        weights = question.with_(quantization=self.of("quantization"), dtype=self.found["dtype"])
        self.own = decoder(weights, self.cards, engine.accepted)
        self.length = self.of("max_model_len", self.own.longest)
        if self.length < 1 or (engine.keeps_to_length and self.length > self.own.longest):
            option = self._names["max_model_len"].replace("_", "-")
            raise UsageError(f"--{option} {self.length}; accepted: 1 to {self.own.longest}, the model's own")
        before = outside(self.device, self.cards)
        self.context = sum(figure.bytes for figure in before)
        self.first = (
            Part("outside the engine", self.context, "; ".join(figure.name for figure in before)),
            Part("weights", self.own.weights_bytes, f"as {self.own.counted_by}"),
        )

    def of(self, field: str, otherwise: Any = None) -> Any:
        """The value of the option that is this field of a question."""
        return self.found.get(self._names.get(field, ""), otherwise)

    def shown(self) -> dict[str, Any]:
        """The options of an answer: all but those of the weights, which ``first`` counts."""
        hidden = (self._names.get("dtype"), self._names.get("quantization"), "basis")
        values = {**self.found, self._names["max_model_len"]: self.length}
        return {name: values[name] for name in self._options if name in values and name not in hidden}


class Formula:
    """An engine that is followed by a formula over its ``options``: its cache gets what is left of the card, but for
    :meth:`parts`. ``accepted``: models that are followed; ``advice``: what to do where nothing is left;
    ``notes``: what a reader has to know, with values of options."""

    title: str
    newest: str
    options: Mapping[str, Option]
    advice: str
    short: Mapping[str, str] = {}
    accepted = FOLLOWED
    basis = "formula"
    notes: tuple[str, ...] = ()
    #: Whether it refuses requests that are longer than the model's own configuration says.
    keeps_to_length = True

    def serve(self, question: Question) -> Served:
        """See :class:`graphmem.serving.base.Engine`."""
        start = Resolved(self, question)
        parts = (*start.first, *self.parts(start))
        return self.filled(start, parts, self.token_bytes(start), start.of("max_num_seqs"), start.shown())

    def parts(self, start: Resolved) -> Iterable[Part]:
        """What is neither outside the engine, nor weights, nor the cache; nothing by default."""
        return ()

    def token_bytes(self, start: Resolved) -> int:
        """Bytes of a token in one card's cache."""
        return start.own.token_bytes(CACHE_BYTES[start.of("kv_cache_dtype", "auto")])

    def filled(
        self, start: Resolved, parts: Sequence[Part], token_bytes: int, requests: int, settings: Mapping[str, Any]
    ) -> Served:  # fmt: skip
        """The answer where whatever ``parts`` leave of the card is cut into pages."""
        device, own, page = start.device, start.own, start.of("block_size", 1)
        available = device.capacity_bytes - sum(part.bytes for part in parts)
        pages = max(0, available // (token_bytes * page))
        tokens = pages * page
        refusal = None
        if not tokens:
            refusal = (
                f"nothing is left for the KV cache on {device.name}: weights take {own.weights_bytes / GIB:.2f} of "
                f"{device.capacity_bytes / GIB:.2f} GiB; {self.advice}"
            )
        cache = KVCache(
            available_bytes=available, block_bytes=token_bytes * page, block_size=page, blocks=pages, tokens=tokens,
            concurrency=tokens / start.length, longest=min(tokens, own.longest),
            groups=(("full attention", own.layers),),
        )  # fmt: skip
        return Served(
            engine=self.title, version=self.newest, model=start.question.model.name, gpu=device.name, cards=start.cards,
            settings={**settings, "max_model_len": start.length, "max_num_seqs": requests},
            total_bytes=device.capacity_bytes, requested_bytes=device.capacity_bytes, weights_bytes=own.weights_bytes,
            parts=tuple(parts), kv_cache=cache,
            request_blocks=lambda length: max(1, -(-length // page)), refusal=refusal, basis=self.basis,
            notes=tuple(note.format(**start.found) for note in self.notes),
        )  # fmt: skip


def with_pool(served: Served, size: int) -> Served:
    """The answer with a cache of so many bytes."""
    cache = served.kv_cache
    blocks = max(0, size // cache.block_bytes)
    return replace(
        served, kv_cache=replace(cache, available_bytes=size, blocks=blocks, tokens=blocks * cache.block_size)
    )
