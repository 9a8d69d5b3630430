"""Fine-tuning a small causal language model with transformers' Trainer: padding, evaluation, saving."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Texts(Dataset):
    def __init__(self, count, longest):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(longest // 2, longest + 1, (count,), generator=generator).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": [1 + (index + i) % 500 for i in range(self.lengths[index])]}


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    input_ids = torch.tensor([f["input_ids"] + [0] * (longest - len(f["input_ids"])) for f in features])
    attention_mask = torch.tensor([[1] * len(f["input_ids"]) + [0] * (longest - len(f["input_ids"])) for f in features])
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": input_ids.masked_fill(attention_mask == 0, -100),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--longest", type=int, default=96)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    args = parser.parse_args()
    set_seed(42)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        training_args = TrainingArguments(
            output_dir=folder,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            gradient_checkpointing=args.gradient_checkpointing,
            bf16=args.bf16,
            learning_rate=2e-4,
            warmup_steps=10,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = Trainer(
            model=model,
            args=training_args,
            data_collator=collate,
            train_dataset=Texts(4000, args.longest),
            eval_dataset=Texts(16, args.longest),
        )
        print(trainer.train().global_step)
        print(sorted(trainer.evaluate()))
        trainer.save_model(folder)


if __name__ == "__main__":
    main()
