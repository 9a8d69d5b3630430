"""save_pretrained in shards over a folder that is there, from_pretrained, generation's configuration."""
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 500, (2, 16), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("out/checkpoint-1", max_shard_size="200KB")
names = sorted(os.listdir("out/checkpoint-1"))
print("SEE", names)
again = GPT2LMHeadModel.from_pretrained("out/checkpoint-1", torch_dtype=torch.bfloat16).cuda()
print("SEE", again.dtype, again.generation_config.eos_token_id)
again.save_pretrained("small")
print("SEE", sorted(os.listdir("small")), os.path.getsize("small/model.safetensors"))
