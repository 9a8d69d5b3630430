"""What programs about text share: a tokenizer, sentences of many lengths, small models by their configuration."""

from __future__ import annotations

import json
import math
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY = 8000


def tokenizer(**options: Any) -> Any:
    """Words by spaces; ``w0`` to ``w7990`` and the special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    words = [*special, *(f"w{number}" for number in range(VOCABULARY - len(special)))]
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names, **options)


def sentences(count: int, shortest: int, longest: int, seed: int = 0) -> list[str]:
    """So many sentences of seeded lengths, in words."""
    draw = random.Random(seed)
    lengths = [draw.randint(shortest, longest) for _ in range(count)]
    return [" ".join(f"w{draw.randint(0, VOCABULARY - 8)}" for _ in range(length)) for length in lengths]


_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(**options: Any) -> Any:
    """A small llama with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_LLAMA | options))


def llama_folder(**options: Any) -> str:
    """A folder as ``save_pretrained`` leaves it: that model's configuration, and its weights in bf16, all zeros."""
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **_LLAMA, **options}
    return _folder(settings, _llama_weights(settings), "BF16", 2)


def bert_folder(**options: Any) -> str:
    """The same of the small BERT, in fp32."""
    settings = {"model_type": "bert", "architectures": ["BertModel"], **_BERT, **options}
    return _folder(settings, _bert_weights(settings), "F32", 4)


def _folder(settings: dict[str, Any], weights: dict[str, list[int]], dtype: str, width: int) -> str:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in weights.items():
        start, end = end, end + width * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(written)) + written)
        file.truncate(8 + len(written) + end)
    return str(folder)


def _bert_weights(settings: dict[str, Any]) -> dict[str, list[int]]:
    width, inner, named = settings["hidden_size"], settings["intermediate_size"], "encoder.layer.{}."
    products = {"attention.self.query": [width, width], "attention.self.key": [width, width]}
    products |= {"attention.self.value": [width, width], "attention.output.dense": [width, width]}
    products |= {"intermediate.dense": [inner, width], "output.dense": [width, inner]}
    layers = [named.format(layer) for layer in range(settings["num_hidden_layers"])]
    weights = {
        f"embeddings.{name}_embeddings.weight": [rows, width]
        for name, rows in (("word", VOCABULARY), ("token_type", 2))
    }
    weights["embeddings.position_embeddings.weight"] = [settings["max_position_embeddings"], width]
    for name, shape in {layer + name: shape for layer in layers for name, shape in products.items()}.items():
        weights |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    weights |= {"pooler.dense.weight": [width, width], "pooler.dense.bias": [width]}
    norms = [layer + name for layer in layers for name in ("attention.output.LayerNorm", "output.LayerNorm")]
    for norm in ("embeddings.LayerNorm", *norms):
        weights |= {f"{norm}.weight": [width], f"{norm}.bias": [width]}
    return weights


def _llama_weights(settings: dict[str, Any]) -> dict[str, list[int]]:
    width, inner = settings["hidden_size"], settings["intermediate_size"]
    keys = width // settings["num_attention_heads"] * settings["num_key_value_heads"]
    block = {
        "input_layernorm": [width], "post_attention_layernorm": [width],
        "self_attn.q_proj": [width, width], "self_attn.k_proj": [keys, width], "self_attn.v_proj": [keys, width],
        "self_attn.o_proj": [width, width],
        "mlp.gate_proj": [inner, width], "mlp.up_proj": [inner, width], "mlp.down_proj": [width, inner],
    }  # fmt: skip
    words = [settings["vocab_size"], width]
    weights = {"lm_head": words, "model.embed_tokens": words, "model.norm": [width]}
    for layer in range(settings["num_hidden_layers"]):
        weights |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in weights.items()}


_BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 6, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip


def bert_config(**options: Any) -> Any:
    from transformers import BertConfig

    return BertConfig(**_BERT | options)
