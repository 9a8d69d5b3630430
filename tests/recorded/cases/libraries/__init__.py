"""Whole programs in the style of libraries' tutorials, a file a library. None of the libraries is imported by this."""

from tests.recorded.cases.libraries import detection, diffusion, graphs, lightning, speech, timm_training, vision
from tests.recorded.cases.libraries.registry import CASES, Case

__all__ = ["CASES", "Case", "detection", "diffusion", "graphs", "lightning", "speech", "timm_training", "vision"]
