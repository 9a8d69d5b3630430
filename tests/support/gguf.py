"""GGUF headers made here: a few fields, tensors by name, type and sizes, and no data."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from graphmem.serving.gguf import TYPES

_NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
Tensors = Sequence[tuple[str, str, Sequence[int]]]


def header(metadata: Mapping[str, Any], tensors: Tensors, version: int = 3) -> bytes:
    """The bytes of a header. Whole numbers are written as u32, lists as arrays of i32 or of text."""
    parts = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for name, value in metadata.items():
        parts += [_text(name), _value(value)]
    for name, kind, shape in tensors:
        parts += [_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        parts.append(struct.pack("<IQ", _NUMBERS[kind], 0))
    return b"".join(parts)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, feed_forward: int, vocabulary: int, *, context: int = 8192,
    kind: str = "q4_0", head_kind: str = "q6_K", mixed: bool = False, freqs: bool = False,
) -> bytes:  # fmt: skip
    """A model like Llama. ``mixed``: values and down projections of some layers are q6_K, as Q4_K_M has them
    (``use_more_bits``, src/llama-quant.cpp)."""
    kv = hidden // heads * kv_heads
    tensors: list[tuple[str, str, Sequence[int]]] = [("token_embd.weight", kind, (hidden, vocabulary))]
    for layer in range(layers):
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        better = "q6_K" if mixed and more else kind
        tensors += [
            (f"blk.{layer}.attn_norm.weight", "f32", (hidden,)), (f"blk.{layer}.ffn_norm.weight", "f32", (hidden,)),
            (f"blk.{layer}.attn_q.weight", kind, (hidden, hidden)), (f"blk.{layer}.attn_k.weight", kind, (hidden, kv)),
            (f"blk.{layer}.attn_v.weight", better, (hidden, kv)),
            (f"blk.{layer}.attn_output.weight", kind, (hidden, hidden)),
            (f"blk.{layer}.ffn_gate.weight", kind, (hidden, feed_forward)),
            (f"blk.{layer}.ffn_up.weight", kind, (hidden, feed_forward)),
            (f"blk.{layer}.ffn_down.weight", better, (feed_forward, hidden)),
        ]  # fmt: skip
    tensors += [("output_norm.weight", "f32", (hidden,)), ("output.weight", head_kind, (hidden, vocabulary))]
    if freqs:
        tensors.append(("rope_freqs.weight", "f32", (hidden // heads // 2,)))
    return header(_metadata("llama", layers, hidden, heads, kv_heads, feed_forward, context), tensors)


def qwen3(
    layers: int, hidden: int, heads: int, kv_heads: int, head: int, feed_forward: int, vocabulary: int, *, context: int,
    kind: str = "q8_0",
) -> bytes:  # fmt: skip
    """A Qwen 3: norms of queries and keys."""
    tensors: list[tuple[str, str, Sequence[int]]] = [("token_embd.weight", kind, (hidden, vocabulary))]
    for layer in range(layers):
        for name, of, shape in (
            ("attn_norm", "f32", (hidden,)), ("ffn_norm", "f32", (hidden,)), ("attn_q_norm", "f32", (head,)),
            ("attn_k_norm", "f32", (head,)), ("attn_q", kind, (hidden, heads * head)),
            ("attn_k", kind, (hidden, kv_heads * head)), ("attn_v", kind, (hidden, kv_heads * head)),
            ("attn_output", kind, (heads * head, hidden)), ("ffn_gate", kind, (hidden, feed_forward)),
            ("ffn_up", kind, (hidden, feed_forward)), ("ffn_down", kind, (feed_forward, hidden)),
        ):  # fmt: skip
            tensors.append((f"blk.{layer}.{name}.weight", of, shape))
    tensors += [("output_norm.weight", "f32", (hidden,)), ("output.weight", kind, (hidden, vocabulary))]
    metadata = _metadata("qwen3", layers, hidden, heads, kv_heads, feed_forward, context)
    return header(metadata | {"qwen3.attention.key_length": head, "qwen3.attention.value_length": head}, tensors)


def pythia(layers: int, hidden: int, heads: int, vocabulary: int, *, context: int = 2048) -> bytes:
    """A GPT-NeoX in half precision."""
    tensors: list[tuple[str, str, Sequence[int]]] = [("token_embd.weight", "f16", (hidden, vocabulary))]
    for layer in range(layers):
        for name, kind, shape in (
            ("attn_norm.weight", "f32", (hidden,)), ("attn_norm.bias", "f32", (hidden,)),
            ("ffn_norm.weight", "f32", (hidden,)), ("ffn_norm.bias", "f32", (hidden,)),
            ("attn_qkv.weight", "f16", (hidden, 3 * hidden)), ("attn_qkv.bias", "f32", (3 * hidden,)),
            ("attn_output.weight", "f16", (hidden, hidden)), ("attn_output.bias", "f32", (hidden,)),
            ("ffn_up.weight", "f16", (hidden, 4 * hidden)), ("ffn_up.bias", "f32", (4 * hidden,)),
            ("ffn_down.weight", "f16", (4 * hidden, hidden)), ("ffn_down.bias", "f32", (hidden,)),
        ):  # fmt: skip
            tensors.append((f"blk.{layer}.{name}", kind, shape))
    tensors += [("output_norm.weight", "f32", (hidden,)), ("output_norm.bias", "f32", (hidden,))]
    tensors.append(("output.weight", "f16", (hidden, vocabulary)))
    return header(_metadata("gptneox", layers, hidden, heads, heads, 4 * hidden, context), tensors)


def _metadata(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, feed_forward: int, context: int
) -> dict[str, Any]:
    return {
        "general.architecture": name, f"{name}.block_count": layers, f"{name}.embedding_length": hidden,
        f"{name}.attention.head_count": heads, f"{name}.attention.head_count_kv": kv_heads,
        f"{name}.feed_forward_length": feed_forward, f"{name}.context_length": context,
        "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 1],
    }  # fmt: skip
