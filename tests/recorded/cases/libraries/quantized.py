"""bitsandbytes: QLoRA with nested quantisation, 8-bit layers, paged optimizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.recorded.cases.libraries import text
from tests.recorded.cases.libraries.registry import program

BF16 = torch.bfloat16
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _four_bit(model: nn.Module, **options: Any) -> nn.Module:
    """Every linear layer but the head as bitsandbytes' 4-bit layer; its weights are quantised when they are moved."""
    import bitsandbytes

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                layer = bitsandbytes.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=BF16, **options
                )
                layer.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data, requires_grad=False, module=layer, **options
                )
                setattr(module, name, layer)
    return model


def _eight_bit(model: nn.Module, threshold: float) -> nn.Module:
    import bitsandbytes

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                layer = bitsandbytes.nn.Linear8bitLt(
                    child.in_features, child.out_features, bias=False, has_fp16_weights=False, threshold=threshold
                )
                layer.weight = bitsandbytes.nn.Int8Params(child.weight.data, requires_grad=False)
                setattr(module, name, layer)
    return model


def _train(model: nn.Module, optimizer: Any, sequence: int = 384, batch: int = 2) -> Any:
    model.train()
    for _ in range(3):
        tokens = torch.randint(0, text.VOCABULARY, (batch, sequence), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss


def _adapted(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=_ALL, task_type="CAUSAL_LM"))


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


_NESTED = {"compress_statistics": True, "quant_type": "nf4"}


@program("transformers", "accelerate", "peft", "bitsandbytes")
def qlora_nf4_nested_paged() -> Any:
    import bitsandbytes

    torch.manual_seed(0)
    model = _adapted(_four_bit(text.llama().to(BF16), **_NESTED)).to("cuda")
    return _train(model, bitsandbytes.optim.PagedAdamW(_trainable(model), lr=2e-4))


@program("transformers", "accelerate", "peft", "bitsandbytes")
def qlora_fp4_fp32_storage_bf16() -> Any:
    torch.manual_seed(0)
    options = {"compress_statistics": False, "quant_type": "fp4", "quant_storage": BF16}
    model = _adapted(_four_bit(text.llama().to(BF16), **options)).to("cuda")
    return _train(model, torch.optim.AdamW(_trainable(model), lr=2e-4), sequence=100)


@program("transformers", "accelerate", "peft", "bitsandbytes")
def qlora_prepared_checkpointing() -> Any:
    """As the notebooks have it: norms in fp32, checkpoints, a paged 8-bit optimizer."""
    import bitsandbytes
    from peft import prepare_model_for_kbit_training

    torch.manual_seed(0)
    model = _four_bit(text.llama().to(BF16), **_NESTED).to("cuda")
    model.is_loaded_in_4bit = True
    model = _adapted(prepare_model_for_kbit_training(model))
    return _train(model, bitsandbytes.optim.PagedAdamW8bit(_trainable(model), lr=2e-4))


@program("transformers", "accelerate", "bitsandbytes")
def four_bit_generates() -> Any:
    torch.manual_seed(0)
    model = _four_bit(text.llama().to(BF16), **_NESTED).to("cuda").eval()
    prompt = torch.randint(3, text.VOCABULARY, (1, 24), device="cuda")
    return model, model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)


@program("transformers", "accelerate", "peft", "bitsandbytes")
def lora_on_eight_bit() -> Any:
    torch.manual_seed(0)
    model = _adapted(_eight_bit(text.llama().to(torch.float16), threshold=0.0)).to("cuda")
    return _train(model, torch.optim.AdamW(_trainable(model), lr=2e-4))


@program("transformers", "accelerate", "peft", "bitsandbytes")
def lora_on_eight_bit_with_threshold() -> Any:
    torch.manual_seed(0)
    model = _adapted(_eight_bit(text.llama().to(BF16), threshold=6.0)).to("cuda")
    return _train(model, torch.optim.AdamW(_trainable(model), lr=2e-4), sequence=100)
