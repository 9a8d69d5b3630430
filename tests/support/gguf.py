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
    layers: int, hidden: int, heads: int, kv_heads: int, feed_forward: int, vocabulary: int, *, head: int = 0,
    context: int = 8192, architecture: str = "llama", kind: str = "q4_0", head_kind: str = "q6_K",
    table_kind: str | None = None, qkv_kind: str | None = None, mixed: bool = False, tied: bool = False,
    freqs: bool = False, small: Sequence[tuple[str, int]] = (),
) -> bytes:  # fmt: skip
    """A model like Llama. ``mixed``: values and down projections of some layers are q6_K, as Q4_K_M has them
    (``use_more_bits``, src/llama-quant.cpp); ``qkv_kind``: queries, keys and values lie in one tensor of that type, and
    gate and up in another; ``small``: further vectors of every layer, in fp32; ``tied``: no tensor of the output."""
    size = head or hidden // heads
    wide, kv = heads * size, kv_heads * size
    tensors: list[tuple[str, str, Sequence[int]]] = [("token_embd.weight", table_kind or kind, (hidden, vocabulary))]
    for layer in range(layers):
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        better = "q6_K" if mixed and more else kind
        if qkv_kind:
            inputs = [("attn_qkv", qkv_kind, (hidden, wide + 2 * kv)), ("ffn_up", kind, (hidden, 2 * feed_forward))]
        else:
            inputs = [
                ("attn_q", kind, (hidden, wide)), ("attn_k", kind, (hidden, kv)), ("attn_v", better, (hidden, kv)),
                ("ffn_gate", kind, (hidden, feed_forward)), ("ffn_up", kind, (hidden, feed_forward)),
            ]  # fmt: skip
        outputs = [("attn_output", kind, (wide, hidden)), ("ffn_down", better, (feed_forward, hidden))]
        norms = [("attn_norm", "f32", (hidden,)), ("ffn_norm", "f32", (hidden,))]
        tensors += [(f"blk.{layer}.{name}.weight", of, shape) for name, of, shape in (*inputs, *outputs, *norms)]
        tensors += [(f"blk.{layer}.{name}", "f32", (count,)) for name, count in small]
    tensors.append(("output_norm.weight", "f32", (hidden,)))
    if not tied:
        tensors.append(("output.weight", head_kind, (hidden, vocabulary)))
    if freqs:
        tensors.append(("rope_freqs.weight", "f32", (size // 2,)))
    metadata = _metadata(architecture, layers, hidden, heads, kv_heads, feed_forward, context)
    lengths = {f"{architecture}.attention.{name}_length": head for name in ("key", "value")} if head else {}
    return header(metadata | lengths, tensors)


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
