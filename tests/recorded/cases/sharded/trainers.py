"""Trainers of libraries that shard by themselves: transformers' and TRL's with configurations of FSDP and DeepSpeed as
their users write them, and Lightning's strategies."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from tests.recorded.cases.libraries import text
from tests.recorded.cases.sharded.launchers import _Rows
from tests.recorded.cases.sharded.models import LLAMA, llama, loss_of, written_llama
from tests.recorded.cases.sharded.registry import add

#: ``accelerate launch --config_file``, of FSDP: what it puts into the environment.
_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
}
#: A file of DeepSpeed's as transformers' documentation has it.
_DEEPSPEED = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
_ZERO_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_OFFLOADED = {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}


def _options(**options: Any) -> dict[str, Any]:
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 42, "bf16": True,
    }  # fmt: skip
    return settings | options


def trainer(zero: dict[str, Any] | None = None, launched: dict[str, str] | None = None, **options: Any) -> None:
    """``zero``: of DeepSpeed's file; the model is made after the arguments, as the documentation asks for."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    os.environ.update(launched or {})
    if zero is not None:
        options["deepspeed"] = {**_DEEPSPEED, "zero_optimization": zero}
    arguments = TrainingArguments(**_options(**options))
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    Trainer(
        model=model, args=arguments, train_dataset=_Rows(), eval_dataset=torch.utils.data.Subset(_Rows(), range(32))
    ).train()


def sft(lora: bool, zero: dict[str, Any] | None = None, launched: dict[str, str] | None = None, **options: Any) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    os.environ.update(launched or {})
    set_seed(42)
    if zero is not None:
        options["deepspeed"] = {**_DEEPSPEED, "zero_optimization": zero}
    arguments = SFTConfig(**_options(max_length=256, train_sampling_strategy="sequential", **options))
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    SFTTrainer(
        model=llama(device="cpu", vocab_size=32000),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": text.sentences(80, 30, 250)}),
        processing_class=text.tokenizer(),
        peft_config=adapter,
    ).train()


# --- Lightning ---


def _module(tokens: int = 1024) -> Any:
    import lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.llama: Any = None

        def configure_model(self) -> None:
            if self.llama is None:
                self.llama = written_llama(None)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = loss_of(self.llama(batch), batch)
            self.log("loss", loss, prog_bar=False)
            return loss

        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.log("validation", loss_of(self.llama(batch), batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Model()


class _Tokens(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(0, 32000, (rows, 1024))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.rows[row]


def lightning(strategy: str, **options: Any) -> None:
    import lightning as pl

    pl.seed_everything(42)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        num_nodes=8,
        strategy=_STRATEGIES[strategy](),
        max_steps=4,
        val_check_interval=2,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=tempfile.mkdtemp(),
        **options,
    )
    rows = torch.utils.data.DataLoader(_Tokens(128), batch_size=2)
    trainer.fit(_module(), rows, torch.utils.data.DataLoader(_Tokens(64), batch_size=2))


def _fsdp_strategy() -> Any:
    from lightning.pytorch.strategies import FSDPStrategy

    from tests.recorded.cases.sharded.models import Block

    return FSDPStrategy(
        auto_wrap_policy={Block}, activation_checkpointing_policy={Block}, sharding_strategy="FULL_SHARD"
    )


def _deepspeed_strategy() -> Any:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=2, allgather_bucket_size=5e7, reduce_bucket_size=5e7)


_STRATEGIES = {"fsdp": _fsdp_strategy, "deepspeed": _deepspeed_strategy}
_HF = ("transformers", "accelerate")
_TRL = (*_HF, "datasets", "trl", "peft")
add("tr_fsdp1", trainer, *_HF, launched={**_FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"},
    eval_strategy="steps", eval_steps=2)  # fmt: skip
add("tr_fsdp2_accum", trainer, *_HF, launched={**_FSDP, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    gradient_accumulation_steps=2)  # fmt: skip
add("tr_z3_own", trainer, *_HF, "deepspeed", zero=_ZERO_3, gradient_checkpointing=True)
add("tr_z2_own_off", trainer, *_HF, "deepspeed", zero=_OFFLOADED)
add("sft_fsdp2", sft, *_TRL, lora=False, launched={**_FSDP, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    gradient_checkpointing=False)  # fmt: skip
add("sft_z3_lora", sft, *_TRL, "deepspeed", lora=True, zero=_ZERO_3)
add("pl_fsdp", lightning, "lightning", strategy="fsdp", precision="bf16-mixed")
add(
    "pl_ddp", lightning, "lightning", backend="alone", strategy="ddp", precision="bf16-mixed", accumulate_grad_batches=2
)
add("pl_ds2", lightning, "lightning", "deepspeed", strategy="deepspeed", precision="bf16-mixed", gradient_clip_val=1.0)
