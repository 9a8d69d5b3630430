"""xMem's runs of language models (Stone-ResearchLife/xMem): transformers 4.49, fp32, three iterations, gradients are
cleared before each, the output stays in a variable.

What 4.49 does otherwise than transformers of today is written out: fused attention lays query, key and value out head
by head first (``integrations/sdpa_attention.py``), so that its result is copied once more, and GPT-2 gives out its
keys and values as parts of the one tensor they are computed in, which the held output then keeps. Arguments: the
model, the batch, the optimizer, lengths after padding.
"""

import sys

import torch
import transformers
from torch.nn import functional
from transformers.masking_utils import sdpa_mask

MODELS = {
    "distilgpt2": {"n_layer": 6},
    "Cerebras-GPT-111M": {"n_layer": 10, "n_inner": 3072, "n_positions": 2048, "activation_function": "gelu"},
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
    config = transformers.GPT2Config(**MODELS[name])
    transformers.AttentionInterface.register("sdpa of 4.49", fused)
    transformers.AttentionMaskInterface.register("sdpa of 4.49", sdpa_mask)
    config._attn_implementation = "sdpa of 4.49"
    config.use_cache = False
    model = transformers.GPT2LMHeadModel(config).to("cuda")
    optimizer = OPTIMIZERS[optimizer](model.parameters(), lr=1e-3)
    model.train()
    given = []
    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda module, inputs, output: given.append(output))
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
