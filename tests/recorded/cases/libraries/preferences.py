"""TRL: supervised fine-tuning, preferences with a reference model, generation and training in turns."""

from __future__ import annotations

import tempfile
from typing import Any

from tests.recorded.cases.libraries import text
from tests.recorded.cases.libraries.registry import program


def _options(**options: Any) -> dict[str, Any]:
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 42, "bf16": True,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return settings | options


@program("transformers", "accelerate", "datasets", "trl")
def sft() -> Any:
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(42)
    trainer = SFTTrainer(
        model=text.llama(),
        args=SFTConfig(**_options(max_length=256, gradient_checkpointing=False)),
        train_dataset=Dataset.from_dict({"text": text.sentences(40, 30, 250)}),
        processing_class=text.tokenizer(),
    )
    trainer.train()
    return trainer


@program("transformers", "accelerate", "datasets", "trl", "peft")
def sft_lora_of_completions() -> Any:
    """Prompts and completions, of which only the latter count; an adapter, checkpoints, evaluation."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(42)
    prompts, completions = text.sentences(40, 20, 80), text.sentences(40, 20, 80, seed=1)
    rows = Dataset.from_dict({"prompt": prompts, "completion": completions})
    trainer = SFTTrainer(
        model=text.llama(),
        args=SFTConfig(**_options(max_length=256, eval_strategy="steps", eval_steps=2, gradient_checkpointing=True)),
        train_dataset=rows.select(range(32)),
        eval_dataset=rows.select(range(32, 40)),
        processing_class=text.tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    return trainer


def _pairs() -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {
            "prompt": text.sentences(24, 10, 60),
            "chosen": text.sentences(24, 10, 90, seed=1),
            "rejected": text.sentences(24, 10, 90, seed=2),
        }
    )


@program("transformers", "accelerate", "datasets", "trl")
def dpo() -> Any:
    from transformers import set_seed
    from trl import DPOConfig, DPOTrainer

    set_seed(42)
    trainer = DPOTrainer(
        model=text.llama(),
        ref_model=text.llama(),
        args=DPOConfig(**_options(beta=0.1, max_length=256, gradient_checkpointing=False)),
        train_dataset=_pairs(),
        processing_class=text.tokenizer(),
    )
    trainer.train()
    return trainer


@program("transformers", "accelerate", "datasets", "trl", "peft")
def dpo_lora() -> Any:
    """With an adapter the reference is the model without it."""
    from peft import LoraConfig
    from transformers import set_seed
    from trl import DPOConfig, DPOTrainer

    set_seed(42)
    trainer = DPOTrainer(
        model=text.llama(),
        args=DPOConfig(**_options(max_length=256)),
        train_dataset=_pairs(),
        processing_class=text.tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    return trainer


@program("transformers", "accelerate", "datasets", "trl")
def grpo() -> Any:
    from datasets import Dataset
    from transformers import set_seed
    from trl import GRPOConfig, GRPOTrainer

    set_seed(42)

    def long(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    trainer = GRPOTrainer(
        model=text.llama(),
        reward_funcs=long,
        args=GRPOConfig(**_options(num_generations=4, max_completion_length=24, gradient_checkpointing=False)),
        train_dataset=Dataset.from_dict({"prompt": text.sentences(24, 10, 60)}),
        processing_class=text.tokenizer(padding_side="left"),
    )
    trainer.train()
    return trainer
