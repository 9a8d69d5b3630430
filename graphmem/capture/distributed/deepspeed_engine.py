"""A DeepSpeed engine around a model, with DeepSpeed's own code on a process group without others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from graphmem.errors import CaptureError
from graphmem.training import Training

#: What ``Trainer`` puts in place of "auto", from the model's width
#: (``HfTrainerDeepSpeedConfig.trainer_config_finalize``, transformers/integrations/deepspeed.py of 5.23).
_OF_WIDTH: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
#: In optimizers and schedulers: its defaults, which no memory depends on.
_OF_TRAINER = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "warmup_max_lr": 5e-5,
               "warmup_num_steps": 1, "total_num_steps": 1000}  # fmt: skip


def deepspeed_engine(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, training: Training, batch: int
) -> object:
    """The engine around ``model``, which is on the host; ``batch``: rows of a micro-batch. Without ``optimizer`` it is
    the one that the configuration names. Raises :class:`CaptureError`."""
    try:
        import deepspeed
    except ImportError:
        raise CaptureError(
            "--zero runs DeepSpeed itself, whose kernels need not be built: pip install deepspeed"
        ) from None
    deepspeed.init_distributed("nccl")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        optimizer=optimizer,
        config=configuration(model, training, batch),
    )
    return engine


def configuration(model: nn.Module, training: Training, batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration with defaults filled in. Raises :class:`CaptureError` for what cannot be followed."""
    assert training.zero is not None
    config: dict[str, Any] = json.loads(training.zero.config)
    of_step: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": training.grad_accum,
        "gradient_clipping": training.clip_grad_norm or 0.0,
    }
    for name, value in of_step.items():
        if config.get(name, "auto") == "auto":
            config[name] = value
    if config.get("train_batch_size") == "auto":
        del config["train_batch_size"]
    if config["gradient_accumulation_steps"] != training.grad_accum:
        raise CaptureError(
            f"gradient_accumulation_steps is {config['gradient_accumulation_steps']} in DeepSpeed's configuration and "
            f"{training.grad_accum} here; give --grad-accum {config['gradient_accumulation_steps']}"
        )
    if training.tp is not None:
        _fill_tensor_parallel(config, training.tp)
    for section in ("optimizer", "scheduler"):
        own = config.get(section, {}).get("params", {})
        own.update({name: _OF_TRAINER.get(name, 0) for name, value in own.items() if value == "auto"})
    _fill_precision(config, training)
    _fill_widths(config["zero_optimization"], model)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", 10**9)
    return config


def _fill_tensor_parallel(config: dict[str, Any], processes: int) -> None:
    """DeepSpeed shares the layers itself (AutoTP) before ZeRO shares out the rest."""
    own = config.setdefault("tensor_parallel", {})
    if own.setdefault("autotp_size", processes) != processes:
        raise CaptureError(
            f"tp is {processes}, and autotp_size {own['autotp_size']} in DeepSpeed's configuration; give one of them"
        )


def _fill_precision(config: dict[str, Any], training: Training) -> None:
    """DeepSpeed casts the model itself: the precision of autocast elsewhere is that of its weights here."""
    wanted = training.amp or (training.dtype if training.dtype in ("bf16", "fp16") else None)
    for precision in ("bf16", "fp16"):
        own = config.get(precision, {})
        if own.get("enabled", "auto") == "auto" and (own or precision == wanted):
            config[precision] = {**own, "enabled": precision == wanted}


def _fill_widths(zero: dict[str, object], model: nn.Module) -> None:
    for name in [name for name in _OF_WIDTH if zero.get(name) == "auto"]:
        width = getattr(getattr(model, "config", None), "hidden_size", None)
        if width is None:
            raise CaptureError(f"{name} is auto in DeepSpeed's configuration, and the model has no hidden_size")
        zero[name] = _OF_WIDTH[name](width)
