"""LoRA of peft: the adapter saved every epoch, the base model saved once, both loaded again and merged."""

import os
import shutil
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

folder = tempfile.mkdtemp()
base_folder = os.path.join(folder, "base")
torch.manual_seed(0)
config = GPT2Config(vocab_size=2000, n_positions=128, n_embd=256, n_layer=2, n_head=4, use_cache=False)
GPT2LMHeadModel(config).save_pretrained(base_folder)

base = GPT2LMHeadModel.from_pretrained(base_folder).cuda()
model = get_peft_model(base, LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for epoch in range(3):
    for _ in range(2):
        ids = torch.randint(2000, (4, 128)).cuda()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(os.path.join(folder, f"adapter_{epoch}"))
    torch.save(optimizer.state_dict(), os.path.join(folder, f"adapter_{epoch}", "optimizer.bin"))
    if epoch > 1:
        shutil.rmtree(os.path.join(folder, f"adapter_{epoch - 2}"))
assert sorted(os.listdir(folder)) == ["adapter_1", "adapter_2", "base"]
del model, base, optimizer

base = GPT2LMHeadModel.from_pretrained(base_folder).cuda()
model = PeftModel.from_pretrained(base, os.path.join(folder, "adapter_2"), is_trainable=True)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
optimizer.load_state_dict(torch.load(os.path.join(folder, "adapter_2", "optimizer.bin")))
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
merged = model.merge_and_unload()
merged.save_pretrained(os.path.join(folder, "merged"), max_shard_size="2MB")
print(len(os.listdir(os.path.join(folder, "merged"))), torch.cuda.max_memory_allocated())
