"""A tokenizer and rows of text."""

import json
import os
import random

from tokenizers import Tokenizer, models, pre_tokenizers

words = [f"word{number}" for number in range(1990)]
vocabulary = {word: at for at, word in enumerate(["<|begin_of_text|>", "<|end_of_text|>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
os.makedirs("tokenizer")
tokenizer.save("tokenizer/tokenizer.json")
with open("tokenizer/tokenizer_config.json", "w") as file:
    json.dump({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, file)
os.makedirs("data")
draw = random.Random(1)
with open("data/data.json", "w") as file:
    for _ in range(200):
        file.write(json.dumps({"text": " ".join(draw.choices(words, k=200))}) + "\n")
