"""A small llama of its own, its tokenizer, and rows of text."""

import json
import os
import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = [f"word{number}" for number in range(990)]
vocabulary = {word: at for at, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
).save_pretrained("model")
config = LlamaConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("model")
os.makedirs("data")
draw = random.Random(1)
with open("data/train.jsonl", "w") as file:
    for _ in range(64):
        file.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randrange(40, 160)))}) + "\n")
