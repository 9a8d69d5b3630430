"""Batch inference through pipelines on checkpoints that the script saved itself: classification, fill-mask, features."""

import os
import random
import tempfile

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertTokenizerFast,
    pipeline,
)

random.seed(0)
torch.manual_seed(0)
folder = tempfile.mkdtemp()
words = [f"word{i}" for i in range(1500)]
with open(os.path.join(folder, "vocab.txt"), "w") as f:
    f.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + words))
tokenizer = BertTokenizerFast(os.path.join(folder, "vocab.txt"), model_max_length=128)
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=384,
    num_hidden_layers=4,
    num_attention_heads=6,
    intermediate_size=1536,
    num_labels=3,
    max_position_embeddings=128,
)
cls_dir, mlm_dir = os.path.join(folder, "cls"), os.path.join(folder, "mlm")
BertForSequenceClassification(config).save_pretrained(cls_dir)
BertForMaskedLM(config).save_pretrained(mlm_dir)
tokenizer.save_pretrained(cls_dir), tokenizer.save_pretrained(mlm_dir)

texts = [" ".join(random.choices(words, k=random.randint(3, 150))) for _ in range(60)]
classify = pipeline("text-classification", model=cls_dir, tokenizer=cls_dir, device=0, top_k=None)
results = classify(texts, batch_size=16, truncation=True)
print(len(results), len(results[0]))
fill = pipeline("fill-mask", model=mlm_dir, tokenizer=tokenizer, device=torch.device("cuda:0"))
print(fill("word1 [MASK] word3", top_k=3)[0].keys())
extract = pipeline("feature-extraction", model=cls_dir, device=0, dtype=torch.float16)
features = [np.array(x[0]).mean(0) for x in extract(texts[:10], truncation=True)]
print(np.stack(features).shape)
model = AutoModelForSequenceClassification.from_pretrained(cls_dir, num_labels=3).cuda().eval()
tok = AutoTokenizer.from_pretrained(cls_dir)
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16):
    batch = tok(texts, padding="max_length", truncation=True, return_tensors="pt").to("cuda")
    probs = model(**batch).logits.softmax(-1)
    print(probs.argmax(-1).cpu().numpy()[:5], probs.shape)
