"""xMem's runs of language models (Stone-ResearchLife/xMem): transformers 4.49, fp32, three iterations, gradients are
cleared before each, the output stays in a variable.

What 4.49 does otherwise than transformers of today is written out: fused attention lays query, key and value out head
by head first (``integrations/sdpa_attention.py``), so that its result is copied once more; and the cache that the held
output gives out has the keys and values as their layers computed them (``cache_utils.py``), GPT-2's as parts of one
tensor, not copies that attention can use as well. Arguments: the model, the batch, the optimizer, lengths after
padding.
"""

import sys

import torch
import transformers
from torch.nn import functional
from transformers.masking_utils import sdpa_mask

#: Class, configuration, attention, and the layers whose results the cache holds.
MODELS = {
    "distilgpt2": ("GPT2LMHeadModel", {"n_layer": 6}, "sdpa of 4.49", "attn.c_attn"),
    "Cerebras-GPT-111M": (
        "GPT2LMHeadModel",
        {"n_layer": 10, "n_inner": 3072, "n_positions": 2048, "activation_function": "gelu"},
        "sdpa of 4.49",
        "attn.c_attn",
    ),
    "gpt-neo-125M": (
        "GPTNeoForCausalLM",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
        "eager",
        "k_proj v_proj",
    ),
    "T5-small": ("T5ForConditionalGeneration", {"decoder_start_token_id": 0}, "eager", "Attention.k Attention.v"),
}
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def fused(module, query, key, value, mask, dropout=0.0, scaling=None, **_):
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None
    )
    return mixed.transpose(1, 2).contiguous(), None


def main():
    name, batch, optimizer, *lengths = sys.argv[1:]
    class_name, fields, attention, cached = MODELS[name]
    architecture = getattr(transformers, class_name)
    config = architecture.config_class(**fields)
    transformers.AttentionInterface.register("sdpa of 4.49", fused)
    transformers.AttentionMaskInterface.register("sdpa of 4.49", sdpa_mask)
    config._attn_implementation = attention
    config.use_cache = False
    model = architecture(config).to("cuda")
    optimizer = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    model.train()
    given = []
    for layer, module in model.named_modules():
        if layer.endswith(tuple(cached.split())) and not layer.startswith("encoder"):
            module.register_forward_hook(lambda module, inputs, output: given.append(output))
    for length in lengths:
        before, given = given, []
        ids = torch.zeros(int(batch), int(length), dtype=torch.long).to("cuda")
        mask = torch.ones(int(batch), int(length), dtype=torch.long).to("cuda")
        optimizer.zero_grad()
        outputs = model(input_ids=ids, attention_mask=mask, labels=ids)
        before.clear()
        loss = outputs.loss
        loss.backward()
        optimizer.step()


main()
