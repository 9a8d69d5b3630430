"""The scheduler of the default step's learning rates."""

from __future__ import annotations

import torch
from torch.optim import lr_scheduler

from graphmem.training import SCHEDULERS


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """A scheduler of that class of ``torch.optim.lr_scheduler``, with rates that any loop could have."""
    options = dict(SCHEDULERS[name])
    if name in ("LambdaLR", "MultiplicativeLR"):
        options["lr_lambda"] = _constant
    if name in ("CyclicLR", "OneCycleLR") and not {"momentum", "betas"} & optimizer.defaults.keys():
        options["cycle_momentum"] = False
    scheduler: lr_scheduler.LRScheduler = getattr(lr_scheduler, name)(optimizer, **options)
    return scheduler


def _constant(step: int) -> float:
    return 1.0
