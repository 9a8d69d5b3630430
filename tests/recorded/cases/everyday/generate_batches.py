"""Offline generation: prompts sorted by length, left padding, greedy, sampled, beams, assisted; results written as JSON lines."""

import json
import os
import tempfile

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(11)
rng = np.random.default_rng(11)
device = "cuda:0"
model = (
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=12000,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    .to(device)
    .to(torch.float16)
)
helper = (
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=12000,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    .to(device)
    .half()
)
model.eval(), helper.eval()
prompts = [rng.integers(1, 12000, int(k)).tolist() for k in rng.integers(5, 180, 22)]
prompts.sort(key=len)
out_path = os.path.join(tempfile.mkdtemp(), "out.jsonl")
with open(out_path, "w") as f, torch.inference_mode():
    for start in range(0, len(prompts), 8):
        part = prompts[start : start + 8]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in part]).to(device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part]).to(device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=32, do_sample=True, top_k=20, temperature=0.7)
        for row in out[:, width:].cpu().tolist():
            f.write(json.dumps({"tokens": row}) + "\n")
    one = torch.tensor([prompts[-1]], device=device)
    beams = model.generate(
        one, attention_mask=torch.ones_like(one), num_beams=6, max_new_tokens=24, num_return_sequences=3
    )
    print("beams", beams.shape)
    scored = model.generate(
        one,
        attention_mask=torch.ones_like(one),
        max_new_tokens=16,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    print("scores", torch.stack(scored.scores).shape)
print(os.path.getsize(out_path) > 0, sum(1 for _ in open(out_path)))
