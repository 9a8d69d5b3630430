"""Schedulers of the learning rate, by the names that PyTorch and transformers give them. Nothing here imports torch.

A scheduler's rates are numbers on the host and take nothing of the card. But one that cycles the momentum gives plain
SGD its buffers, and one that watches the loss reads it back.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from graphmem.errors import UsageError

#: Class in ``torch.optim.lr_scheduler`` (2.13) -> the options that it cannot be made without, with values that any loop
#: could have: rates decide nothing about memory.
SCHEDULERS: Mapping[str, Mapping[str, object]] = {
    "LambdaLR": {},  # its function is made where the scheduler is
    "MultiplicativeLR": {},
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 1000},
    "CosineAnnealingWarmRestarts": {"T_0": 1000},
    "CyclicLR": {"base_lr": 1e-5, "max_lr": 1e-3},
    "OneCycleLR": {"max_lr": 1e-3, "total_steps": 1_000_000},
    "ReduceLROnPlateau": {},
}

#: ``lr_scheduler_type`` of transformers' ``TrainingArguments`` (``SchedulerType`` in ``trainer_utils.py`` of 5.23): all
#: are functions of the step's number, but one.
_OF_TRANSFORMERS = {
    **dict.fromkeys(
        ("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"),
        "LambdaLR",
    ),
    "reduce_lr_on_plateau": "ReduceLROnPlateau",
}


def scheduler_named(name: object) -> str | None:
    """The class of a scheduler, None for ``None`` and ``"none"``. Raises :class:`UsageError` listing the names."""
    if name is None or str(name).strip().lower() in ("none", "off"):
        return None
    key = str(name).strip().lower()
    known = {one.lower(): one for one in SCHEDULERS} | _OF_TRANSFORMERS
    if key in known:
        return known[key]
    close = difflib.get_close_matches(key, known, n=1)
    hint = f" (did you mean {known[close[0]]}?)" if close else ""
    accepted = ", ".join((*SCHEDULERS, *_OF_TRANSFORMERS))
    raise UsageError(f"unknown lr_scheduler {name!r}{hint}; accepted: {accepted}")
