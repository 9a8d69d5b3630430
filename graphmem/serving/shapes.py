"""Sizes of a decoder's weights and of its cache from its configuration, and the answer of an engine that gives its
cache what is left, for engines that are followed by formulas.

Counts of parameters are those of transformers' models of these names; where a checkpoint lies beside the configuration,
its headers' bytes are used instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphmem.devices import Device, Loads
from graphmem.documents import shown
from graphmem.errors import UsageError
from graphmem.figures import Communicator, Figure
from graphmem.serving.base import KVCache, Part, Question, Served, ServedModel
from graphmem.serving.options import Named
from graphmem.serving.values import count, mapping
from graphmem.units import GIB

#: Decoders whose layers are attention, a gated feed-forward layer and two norms, with what differs: biases of queries,
#: keys and values; norms of queries and keys.
_BIASED, _NORMED = frozenset(("qwen2",)), frozenset(("qwen3", "qwen3_moe"))
FOLLOWED = frozenset(("llama", "mistral", "mixtral", *_BIASED, *_NORMED))
#: Bits of a weight of the layers' products by ``quant_method``: 4-bit ones with a scale and a zero of 16 bits for each
#: group of 128 (AWQ's and GPTQ's files), 8-bit ones with hardly any.
_BITS = {"awq": 4 + 32 / 128, "gptq": 4 + 32 / 128, "fp8": 8.0}


@dataclass(frozen=True)
class Decoder:
    """Parameters of one card, and what its cache keeps for a token. ``products`` may be quantised, ``others``
    (embeddings, head, norms) are not."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    longest: int
    wide: int
    products: int
    others: int
    weights_bytes: int

    def activations(self, tokens: int, rows: int) -> int:
        """Bytes at the peak of one step of so many tokens, in 16 bits: the gated layer's two products and their result
        beside three hidden states, or the logits of ``rows``; what vLLM's dense decoders were seen to take."""
        return max(2 * tokens * 3 * (self.wide + self.hidden), 6 * rows * self.vocabulary)

    def token_bytes(self, element: float) -> int:
        """Bytes that a token takes in this card's cache."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * element)


def decoder(question: Question, cards: int) -> Decoder:
    """One card's share under tensor parallelism. Raises :class:`UsageError` for a model that is not like these, and for
    cards that do not divide its heads."""
    model = question.model
    kind = model.config.get("model_type")
    if not isinstance(kind, str) or kind not in FOLLOWED:
        raise UsageError(
            f"{model.name}: model_type {shown(kind)} is not followed here; accepted: {', '.join(sorted(FOLLOWED))}"
        )
    layers, hidden = count(model, "num_hidden_layers"), count(model, "hidden_size")
    heads, vocabulary = count(model, "num_attention_heads"), count(model, "vocab_size")
    kv_heads = count(model, "num_key_value_heads", heads)
    head_dim = count(model, "head_dim", max(1, hidden // heads))
    if cards < 1 or heads % cards or (kv_heads % cards and cards % kv_heads):
        raise UsageError(f"{heads} heads and {kv_heads} of keys cannot be shared by {cards} cards")
    own = max(1, kv_heads // cards)
    attention = hidden * head_dim * (2 * heads // cards + 2 * own)
    products = layers * (attention + _feed_forward(model, kind, hidden, cards))
    small = layers * 2 * hidden + hidden
    small += layers * head_dim * (heads // cards + 2 * own) if kind in _BIASED else 0
    small += layers * 2 * head_dim if kind in _NORMED else 0
    tied = model.config.get("tie_word_embeddings") is True
    others = small + vocabulary * hidden // cards * (1 if tied else 2)
    return Decoder(
        layers, own, head_dim, hidden, vocabulary, count(model, "max_position_embeddings", 2048),
        _wide(model, kind) // cards, products, others,
        _bytes(question, products, others, cards),
    )  # fmt: skip


def _feed_forward(model: ServedModel, kind: str, hidden: int, cards: int) -> int:
    if kind == "mixtral":
        return count(model, "num_local_experts") * (3 * hidden * count(model, "intermediate_size") // cards + hidden)
    if kind == "qwen3_moe":
        return count(model, "num_experts") * (3 * hidden * count(model, "moe_intermediate_size") // cards + hidden)
    return 3 * hidden * count(model, "intermediate_size") // cards


def _wide(model: ServedModel, kind: str) -> int:
    if kind == "qwen3_moe":
        return count(model, "moe_intermediate_size") * count(model, "num_experts_per_tok", 8)
    return count(model, "intermediate_size") * (count(model, "num_experts_per_tok", 2) if kind == "mixtral" else 1)


def _bytes(question: Question, products: int, others: int, cards: int) -> int:
    checkpoint = question.model.checkpoint
    if checkpoint is not None:
        return checkpoint.bytes // cards
    width = 4 if question.dtype in ("float", "float32") else 2
    method: Any = question.quantization or mapping(question.model, "quantization_config").get("quant_method")
    if method is None:
        return width * (products + others)
    if not isinstance(method, str) or method not in _BITS:
        raise UsageError(f"quantization {shown(method)} is not followed here; accepted: {', '.join(_BITS)}")
    return round(products * _BITS[method] / 8) + width * others


#: Bytes of an element of the cache by the names that engines use.
CACHE_BYTES = {
    "auto": 2, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
    "fp8_e4m3fn": 1, "int8": 1,
}  # fmt: skip


def outside(device: Device, cards: int) -> tuple[Figure, ...]:
    """What a process holds before it loads a model."""
    return device.outside(Loads(communicators=(Communicator(cards),) if cards > 1 else ()))


def first_parts(before: Sequence[Figure], own: Decoder) -> list[Part]:
    """What the engine finds on the card, and what it loads first."""
    return [
        Part("outside the engine", sum(figure.bytes for figure in before), "; ".join(figure.name for figure in before)),
        Part("weights", own.weights_bytes, "as the configuration counts them"),
    ]


def filled(
    engine: Named, question: Question, own: Decoder, cards: int, *, parts: Sequence[Part], token_bytes: int,
    page: int, length: int, requests: int, settings: Mapping[str, Any], advice: str, basis: str, notes: tuple[str, ...],
) -> Served:  # fmt: skip
    """The answer of an engine that cuts whatever ``parts`` leave of the card into pages of so many tokens."""
    device = question.device
    available = device.capacity_bytes - sum(part.bytes for part in parts)
    pages = max(0, available // (token_bytes * page))
    tokens = pages * page
    refusal = None
    if not tokens:
        refusal = (
            f"nothing is left for the KV cache on {device.name}: weights take {own.weights_bytes / GIB:.2f} of "
            f"{device.capacity_bytes / GIB:.2f} GiB; {advice}"
        )
    cache = KVCache(
        available_bytes=available, block_bytes=token_bytes * page, block_size=page, blocks=pages, tokens=tokens,
        concurrency=tokens / length, longest=min(tokens, own.longest), groups=(("full attention", own.layers),),
    )  # fmt: skip
    return Served(
        engine=engine.title, version=engine.newest, model=question.model.name, gpu=device.name, cards=cards,
        settings={**settings, "max_model_len": length, "max_num_seqs": requests},
        total_bytes=device.capacity_bytes, requested_bytes=device.capacity_bytes, weights_bytes=own.weights_bytes,
        parts=tuple(parts), kv_cache=cache, graphs_bytes=0, fragmentation_bytes=0, outside=(),
        request_blocks=lambda asked: max(1, -(-asked // page)), refusal=refusal, notes=notes, basis=basis,
    )  # fmt: skip


def length_of(own: Decoder, asked: int | None, option: str) -> int:
    """The longest request; the model's where none is asked for. Raises :class:`UsageError`."""
    if asked is None:
        return own.longest
    if not 1 <= asked <= own.longest:
        raise UsageError(f"{option} {asked}; accepted: 1 to {own.longest}, the model's own")
    return asked
