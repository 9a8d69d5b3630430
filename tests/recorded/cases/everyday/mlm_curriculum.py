"""Masked LM on text with a tokenizer of its own vocabulary file; the length grows; the collator of transformers masks at random."""

import os
import random
import tempfile

import torch
from torch.utils.data import DataLoader
from transformers import (
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    DistilBertConfig,
    DistilBertForMaskedLM,
    get_cosine_schedule_with_warmup,
    set_seed,
)

set_seed(3)
folder = tempfile.mkdtemp()
words = [f"w{i}" for i in range(2000)]
with open(os.path.join(folder, "vocab.txt"), "w") as f:
    f.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
tokenizer = BertTokenizerFast(os.path.join(folder, "vocab.txt"))
texts = [" ".join(random.choices(words, k=random.randint(20, 400))) for _ in range(160)]
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model = DistilBertForMaskedLM(
    DistilBertConfig(vocab_size=len(tokenizer), dim=384, n_layers=4, n_heads=6, hidden_dim=1536)
).to(device)
print(model.num_parameters())
collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
stages = [(64, 32), (128, 32), (256, 16)]
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 20)
seen = 0
for max_length, batch_size in stages:
    encoded = [tokenizer(t, truncation=True, max_length=max_length, return_special_tokens_mask=True) for t in texts]
    loader = DataLoader(encoded, batch_size=batch_size, shuffle=True, collate_fn=collator, drop_last=True)
    for i, batch in enumerate(loader):
        if i == 4:
            break
        batch = batch.to(device)
        out = model(**batch)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        scheduler.step()
        n_masked = (batch["labels"] != -100).sum().item()
        seen += n_masked
        print(max_length, tuple(batch["input_ids"].shape), n_masked, f"{out.loss.item():.3f}")
model.eval()
with torch.inference_mode():
    enc = tokenizer(["w1 w2 [MASK] w4", "w7 [MASK]"], padding=True, return_tensors="pt").to(device)
    logits = model(**enc).logits
    where = (enc.input_ids == tokenizer.mask_token_id).nonzero(as_tuple=True)
    top = logits[where].softmax(-1).topk(5)
    print([tokenizer.convert_ids_to_tokens(x) for x in top.indices.tolist()], seen)
