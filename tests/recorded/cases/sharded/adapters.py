"""LoRA and QLoRA on one rank of several: adapters of PEFT, weights in 4 bits by bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.recorded.cases.libraries import text
from tests.recorded.cases.sharded.models import BF16, LLAMA, blocks, llama, start, train
from tests.recorded.cases.sharded.registry import add

_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=_ALL, task_type="CAUSAL_LM"))


def in_four_bits(model: Any) -> Any:
    """As transformers does with a loaded model: every linear layer but the head, quantised when it is moved."""
    import bitsandbytes

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if not isinstance(child, nn.Linear) or name == "lm_head":
                continue
            options = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": BF16}
            layer = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=BF16, **options
            )
            layer.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, module=layer, **options)
            setattr(module, name, layer)
    return model


def _train_adapters(model: Any) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train(model, torch.optim.AdamW(trained, lr=1e-4))


def lora_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    start()
    model = with_adapters(llama(BF16))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(BF16)  # one dtype in every group
    for block in blocks(model.get_base_model()):
        fully_shard(block)
    fully_shard(model)
    _train_adapters(model)


def qlora(parallel: bool = False) -> None:
    start()
    model = with_adapters(in_four_bits(llama(BF16, device="cpu"))).to("cuda")
    if parallel:
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    _train_adapters(model)


def qlora_pretrained() -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=BF16,
    )
    folder = text.llama_folder(**LLAMA)
    _train_adapters(
        with_adapters(
            AutoModelForCausalLM.from_pretrained(folder, dtype=BF16, device_map={"": 0}, quantization_config=four_bits)
        )
    )


_NEEDS = ("transformers", "accelerate", "peft")
add("lora_f2", lora_fsdp2, *_NEEDS)
add("qlora_one", qlora, *_NEEDS, "bitsandbytes")
add("qlora_ddp", qlora, *_NEEDS, "bitsandbytes", backend="alone", parallel=True)
add("qlora_pretrained", qlora_pretrained, *_NEEDS, "bitsandbytes", world=1)
