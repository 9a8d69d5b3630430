"""What programs about text share: a tokenizer, sentences of many lengths, small models by their configuration."""

from __future__ import annotations

import random
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


def llama(**options: Any) -> Any:
    """A small llama with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**settings | options))


def bert_config(**options: Any) -> Any:
    from transformers import BertConfig

    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 6, "max_position_embeddings": 512, "pad_token_id": 0,
    }  # fmt: skip
    return BertConfig(**settings | options)
