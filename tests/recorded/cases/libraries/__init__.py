"""Whole programs in the style of libraries' tutorials, a file a library. None of the libraries is imported by this."""

from tests.recorded.cases.libraries import (
    accelerators,
    adapters,
    detection,
    diffusion,
    embeddings,
    graphs,
    lightning,
    plain,
    preferences,
    pretrained,
    quantized,
    speech,
    timm_training,
    trainer,
    vision,
)
from tests.recorded.cases.libraries.registry import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "accelerators",
    "adapters",
    "detection",
    "diffusion",
    "embeddings",
    "graphs",
    "lightning",
    "plain",
    "preferences",
    "pretrained",
    "quantized",
    "speech",
    "timm_training",
    "trainer",
    "vision",
]
