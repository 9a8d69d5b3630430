"""The loops, group by group; importing this registers all of them."""

from tests.recorded.cases.loops import (
    checkpointing,
    evaluation,
    gradients,
    hooks,
    loops,
    mixed_precision,
    models,
    optimizers,
    packed,
    quantized,
    recurrent,
)
from tests.recorded.cases.loops.registry import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "checkpointing",
    "evaluation",
    "gradients",
    "hooks",
    "loops",
    "mixed_precision",
    "models",
    "optimizers",
    "packed",
    "quantized",
    "recurrent",
]
