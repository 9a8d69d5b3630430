"""Accelerate's loop and transformers' ``Trainer``, which wrap the model themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from tests.recorded.cases.sharded.models import BATCH, ITERATIONS, SEQUENCE, VOCABULARY, llama, tokens
from tests.recorded.cases.sharded.registry import add
from tests.recorded.cases.sharded.zero import config


def accelerate(clip: bool = True, plugin: Callable[[], dict[str, Any]] = dict) -> None:
    """``plugin``: the arguments of ``Accelerator`` that choose the sharding."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=1, **plugin())
    model = llama(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    for _ in range(ITERATIONS):
        with accelerator.accumulate(model):
            ids = tokens()
            output = model(input_ids=ids, labels=ids)
            accelerator.backward(output.loss)
            del output
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def _deepspeed() -> dict[str, Any]:
    from accelerate import DeepSpeedPlugin

    return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config(2, clip=1.0))}


def _fsdp2() -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin

    wrapped = ["LlamaDecoderLayer"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=wrapped
    )
    return {"fsdp_plugin": plugin}


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.ids = torch.randint(0, VOCABULARY, (64, SEQUENCE))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.ids[row]}


def trainer(**options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        max_steps=ITERATIONS,
        bf16=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        optim="adamw_torch",
        **options,
    )
    Trainer(model=llama(device="cpu"), args=arguments, train_dataset=_Rows()).train()


_ZERO_2 = {
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
_NEEDS = ("transformers", "accelerate")
add("ac_ddp", accelerate, *_NEEDS, backend="alone")
add("ac_ds2", accelerate, *_NEEDS, "deepspeed", clip=False, plugin=_deepspeed)
add("ac_fsdp2", accelerate, *_NEEDS, plugin=_fsdp2)
add("tr_ddp", trainer, *_NEEDS, backend="alone")
add("tr_ds2", trainer, *_NEEDS, "deepspeed", deepspeed=_ZERO_2)
