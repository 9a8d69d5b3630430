"""The items that the engine encodes at once while it profiles: their number and modality.

Followed from vllm 0.32.0, ``multimodal/encoder_budget.py`` (``MultiModalBudget``) and
``v1/core/encoder_cache_manager.py`` (``compute_mm_encoder_budget``). ``max_num_encoder_input_tokens`` and
``encoder_cache_size`` are both ``max_num_batched_tokens``, or one item of the largest modality where that is more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.vllm.run import Batch

#: ``get_limit_per_prompt`` (config/multimodal.py): items of a modality in a prompt where nobody says.
LIMIT = 999


@dataclass(frozen=True)
class Pictured:
    """A model that takes images: its configuration, its encoder's, the values of its processor, and the tokens of the
    longest request."""

    model: ServedModel
    vision: ServedModel
    processor: Mapping[str, Any]
    length: int

    @property
    def kind(self) -> str:
        """Its ``model_type``."""
        return str(self.model.config["model_type"])

    def scopes(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The processor's values, and those of the modality of this name, which are stronger."""
        return self.processor, self.processor.get(name) or {}


@dataclass(frozen=True)
class Items:
    """The items encoded in the profile run: their number and modality, and the tokens of each; ``cache``: tokens that
    the encoder cache may hold; ``limits``: items of every modality that a prompt may have; ``spread``: rows that each
    item's embeddings are written into, of which they are ``embedded`` (0: they are kept as they are)."""

    modality: str
    count: int
    tokens: int
    cache: int
    limits: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    spread: int = 0
    embedded: int = 0

    def __str__(self) -> str:
        return f"{self.count} {self.modality} item{'s' if self.count > 1 else ''} of {self.tokens:,} tokens"


def limits_of(asked: Mapping[str, object], modalities: tuple[str, ...], most: int | None = None) -> dict[str, int]:
    """Items of every modality that a prompt may have, where a model takes ``most``. Raises :class:`UsageError`."""
    for name in asked:
        if name not in modalities:
            raise UsageError(f"limit_mm_per_prompt of {shown(name)}; accepted for this model: {', '.join(modalities)}")
    found = {name: _limit(name, asked.get(name)) for name in modalities}
    return found if most is None else {name: min(most, limit) for name, limit in found.items()}


def _limit(modality: str, value: object) -> int:
    if isinstance(value, Mapping):
        sizes = sorted(set(value) - {"count"})
        if sizes:
            raise UsageError(
                f"{shown(sizes[0])} of {modality} in limit_mm_per_prompt is not followed: give a count, and the "
                "largest size by --mm-processor-kwargs"
            )
        value = value.get("count")
    if value is None:
        return LIMIT
    if type(value) is not int or value < 0:
        raise UsageError(f"limit_mm_per_prompt of {modality} is {shown(value)}; accepted: a whole number from 0 on")
    return value


def profiled(tokens: Mapping[str, int], limits: Mapping[str, int], batch: Batch) -> Items | None:
    """The items to encode where one of each modality has at most so many ``tokens``; None where none is allowed."""
    tokens = {name: count for name, count in tokens.items() if limits[name]}
    if not tokens:
        return None
    cache = max(batch.tokens, *tokens.values())
    most, modality = max((count, name) for name, count in tokens.items())
    in_prompt = max(1, min(limits[modality], batch.length // most))
    return Items(modality, max(1, min(cache // most, batch.requests * in_prompt)), most, cache, tuple(limits.items()))
