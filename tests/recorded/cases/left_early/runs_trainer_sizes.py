"""The Trainer in a loop: the same small language model with a few batch sizes and sequence lengths."""

import gc
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Blocks(Dataset):
    def __init__(self, count, length):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 4000, (count, length), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


results = {}
for batch_size, length in [(4, 64), (8, 128), (8, 256), (16, 256)]:
    set_seed(0)
    config = GPT2Config(vocab_size=4000, n_positions=256, n_embd=256, n_layer=4, n_head=4)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        learning_rate=5e-4,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Blocks(5 * batch_size, length))
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    results[batch_size, length] = torch.cuda.max_memory_allocated()
    del trainer, model
    gc.collect()
    torch.cuda.empty_cache()
for (batch_size, length), peak in results.items():
    print(f"{batch_size} x {length}: {peak / 2**20:.0f} MiB")
