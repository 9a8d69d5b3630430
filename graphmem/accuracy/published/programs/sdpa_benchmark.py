"""fxmarty's ``benchmark_sdpa_training`` (gist 7e75cc3942d6974e4849093ebea0a331), with which the contributors of fused
attention to transformers measured their models: forward, the sum of the logits, backward, no optimizer, in fp16.

Ten rounds to warm up and a hundred that count; the output is a variable of the loop. Arguments: the model, the batch,
the length, ``eager|sdpa``.
"""

import sys

import torch
import transformers

#: Fields of the models' public configurations that differ from their classes' defaults.
MODELS = {
    "bert-base-uncased": ("BertLMHeadModel", {"is_decoder": False}),
    "albert-base-v1": (
        "AlbertForMaskedLM",
        {
            "embedding_size": 128, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        },
    ),
    "opt-350m": (
        "OPTForCausalLM",
        {
            "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "word_embed_proj_dim": 512, "do_layer_norm_before": False, "vocab_size": 50272,
        },
    ),
    "pythia-410m": (
        "GPTNeoXForCausalLM",
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "vocab_size": 50304, "rotary_pct": 0.25, "hidden_act": "gelu",
        },
    ),
    "gpt2-large": ("GPT2LMHeadModel", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "distilbert-base-uncased": ("DistilBertForMaskedLM", {}),
}  # fmt: skip


def main():
    name, batch, length, attention = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    class_name, fields = MODELS[name]
    architecture = getattr(transformers, class_name)
    config = architecture.config_class(**fields)
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
