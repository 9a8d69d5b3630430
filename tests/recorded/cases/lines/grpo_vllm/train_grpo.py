"""GRPO with a vLLM on the card that trains."""

from __future__ import annotations

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def longer_is_better(completions: list[str], **_: object) -> list[float]:
    return [float(len(completion)) for completion in completions]


trainer = GRPOTrainer(
    model="model",
    reward_funcs=longer_is_better,
    train_dataset=Dataset.from_dict({"prompt": ["the quick brown fox"] * 64}),
    args=GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=64,
        max_steps=2,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        bf16=True,
        report_to=[],
        save_strategy="no",
        vllm_importance_sampling_correction=False,
        logging_steps=1,
    ),
)
trainer.train()
