"""peft: an adapter saved, removed, loaded again; merged weights saved."""
import os
import shutil

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=500)
model = get_peft_model(GPT2LMHeadModel(config), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)).cuda()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(3):
    ids = torch.randint(0, 500, (2, 16), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("adapter")
print("SEE", sorted(os.listdir("adapter")), os.path.getsize("adapter/adapter_model.safetensors"))
again = PeftModel.from_pretrained(GPT2LMHeadModel(config), "adapter").cuda()
shutil.rmtree("adapter")
again.merge_and_unload().save_pretrained("merged")
print("SEE", sorted(os.listdir("merged")), os.path.getsize("merged/model.safetensors"))
