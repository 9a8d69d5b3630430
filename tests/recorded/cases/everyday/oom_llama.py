"""Sequence classification on an 8 GB share of the card: the batch is halved on errors of memory, the step is tried again."""

import gc

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

torch.manual_seed(0)
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(8 * 2**30 / total)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = LlamaModel(
            LlamaConfig(
                vocab_size=16000,
                hidden_size=1024,
                intermediate_size=2816,
                num_hidden_layers=8,
                num_attention_heads=16,
                num_key_value_heads=4,
                use_cache=False,
            )
        )
        self.score = nn.Linear(1024, 5)

    def forward(self, ids, mask):
        h = self.body(input_ids=ids, attention_mask=mask).last_hidden_state
        last = mask.sum(1) - 1
        return self.score(h[torch.arange(len(ids), device=ids.device), last].float())


def make(batch, length=512):
    ids = torch.randint(1, 16000, (batch, length))
    lengths = torch.randint(length // 2, length + 1, (batch,))
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    return ids, mask, torch.randint(0, 5, (batch,))


model = Classifier().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
batch, done = 64, 0
while done < 4:
    ids, mask, y = (t.cuda() for t in make(batch))
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(ids, mask), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        print("ok", batch, loss.item())
    except torch.cuda.OutOfMemoryError:
        print("out of memory at", batch)
        ids = mask = y = loss = None
        optimizer.zero_grad(set_to_none=True)
        batch //= 2
        gc.collect()
        torch.cuda.empty_cache()
        if batch == 0:
            raise
stats = torch.cuda.memory_stats()
print(batch, stats["num_ooms"], torch.cuda.max_memory_allocated())
