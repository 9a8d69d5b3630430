"""PEFT: low-rank adapters, DoRA, soft prompts."""

from __future__ import annotations

from typing import Any

import torch

from tests.recorded.cases.libraries import text
from tests.recorded.cases.libraries.registry import program

_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _batches(rows: int = 48, batch: int = 8) -> Any:
    tokenizer = text.tokenizer()

    def collate(chosen: list[str]) -> Any:
        encoded = tokenizer(chosen, padding=True, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        encoded["labels"] = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        return encoded

    return torch.utils.data.DataLoader(text.sentences(rows, 30, 250), batch_size=batch, collate_fn=collate)


def _train(model: Any, steps: int = 3) -> Any:
    """The loop of PEFT's examples."""
    model = model.to("cuda")
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model.train()
    total = 0.0
    for step, batch in enumerate(_batches()):
        batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
        loss = model(**batch).loss
        total += loss.detach().float()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step + 1 == steps:
            break
    return model, optimizer, total


@program("transformers", "accelerate", "peft")
def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=_ALL, task_type="CAUSAL_LM")
    model = get_peft_model(text.llama(), config)
    model.print_trainable_parameters()
    return _train(model)


@program("transformers", "accelerate", "peft")
def lora_bf16_checkpointing() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = text.llama().to(torch.bfloat16)
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return _train(get_peft_model(base, config))


@program("transformers", "accelerate", "peft")
def dora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=8, use_dora=True, target_modules=_ALL, task_type="CAUSAL_LM")
    return _train(get_peft_model(text.llama().to(torch.bfloat16), config))


@program("transformers", "accelerate", "peft")
def prompt_tuning() -> Any:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    torch.manual_seed(0)
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=20)
    return _train(get_peft_model(text.llama(), config))


@program("transformers", "accelerate", "peft")
def prefix_tuning() -> Any:
    from peft import PrefixTuningConfig, TaskType, get_peft_model

    torch.manual_seed(0)
    config = PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=20)
    return _train(get_peft_model(text.llama(), config))


@program("transformers", "accelerate", "peft")
def lora_merged_generates() -> Any:
    """A trained adapter is merged into its base, and the merged model writes."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model, _, _ = _train(get_peft_model(text.llama(), config))
    merged = model.merge_and_unload().eval()
    prompt = text.tokenizer()(text.sentences(1, 20, 20), return_tensors="pt").to("cuda")
    prompt.pop("token_type_ids", None)
    return merged, merged.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)
