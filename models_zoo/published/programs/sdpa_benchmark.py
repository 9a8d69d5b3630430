"""fxmarty's ``benchmark_sdpa_training`` (gist 7e75cc3942d6974e4849093ebea0a331), with which the contributors of fused
attention to transformers measured their models: forward, the sum of the logits, backward, no optimizer, in fp16.

Ten rounds to warm up and a hundred that count; the output is a variable of the loop. Arguments: the model, the batch,
the length, ``eager|sdpa``.
"""

import sys

import torch
import transformers
from torch.nn import functional
from transformers.masking_utils import eager_mask, sdpa_mask

#: Fields of the models' public configurations that differ from their classes' defaults.
MODELS = {
    "bert-base-uncased": ("BertLMHeadModel", {"is_decoder": False}),
    "opt-350m": (
        "OPTForCausalLM",
        {
            "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "word_embed_proj_dim": 512, "do_layer_norm_before": False, "vocab_size": 50272,
        },
    ),
}  # fmt: skip


def opt_sdpa(module, query, key, value, mask, dropout=0.0, **_):
    """OPT's at the pull request, September 2024: query, key and value are laid out head by head."""
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=1.0)
    return mixed.transpose(1, 2).contiguous(), None


def opt_eager(module, query, key, value, mask, dropout=0.0, **_):
    """OPT's until 2024: scores are kept from below by the least number of their type, softmax is in fp32."""
    batch, heads, length, size = query.shape
    query, key, value = (t.contiguous().view(batch * heads, length, size) for t in (query, key, value))
    scores = torch.bmm(query, key.transpose(1, 2))
    scores = scores.view(batch, heads, length, length) + mask
    scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min, device=scores.device))
    scores = scores.view(batch * heads, length, length)
    shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(torch.float16)
    shares = functional.dropout(shares, p=dropout, training=module.training)
    mixed = torch.bmm(shares, value)
    return mixed.view(batch, heads, length, size).transpose(1, 2), None


def main():
    name, batch, length, attention = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    class_name, fields = MODELS[name]
    architecture = getattr(transformers, class_name)
    config = architecture.config_class(**fields)
    if name == "opt-350m":
        transformers.AttentionInterface.register("OPT's sdpa of 2024", opt_sdpa)
        transformers.AttentionInterface.register("OPT's eager of 2024", opt_eager)
        transformers.AttentionMaskInterface.register("OPT's sdpa of 2024", sdpa_mask)
        transformers.AttentionMaskInterface.register("OPT's eager of 2024", eager_mask)
        attention = f"OPT's {attention} of 2024"
    config._attn_implementation = attention
    model = architecture(config).to(torch.float16).to("cuda")
    ids = torch.randint(config.vocab_size - 1, (batch, length), dtype=torch.int64).to("cuda")
    model.train()
    for _ in range(3):
        model.zero_grad()
        outputs = model(input_ids=ids)
        loss = outputs.logits.sum()
        loss.backward()


main()
