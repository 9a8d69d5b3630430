"""A small Qwen 2 with a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2TokenizerFast

MODEL = Path("model")

alphabet = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
tokenizer = Qwen2TokenizerFast(vocab=alphabet, merges=[])
tokenizer.save_pretrained(MODEL)
end = tokenizer.eos_token_id
config = Qwen2Config(
    vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=end, eos_token_id=end, pad_token_id=end,
)  # fmt: skip
Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(MODEL)
