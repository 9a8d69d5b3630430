"""One card, to compare the others with: with the mask that transformers makes, and with the one of a card."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.recorded.cases.sharded.models import BF16, llama, tokens, train
from tests.recorded.cases.sharded.registry import add

_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip


def single(packing: bool = True, sequence: int = 1024, batch: int = 2, settings: dict[str, Any] | None = None) -> None:
    """``packing``: transformers looks whether positions start anew; without it that is never so."""
    from transformers import masking_utils

    found = masking_utils.find_packed_sequence_indices if packing else lambda position_ids: None
    with mock.patch.object(masking_utils, "find_packed_sequence_indices", found):
        model = llama(BF16, **settings or {})
        train(model, torch.optim.AdamW(model.parameters()), sequence=sequence, batch=batch)


def masked() -> None:
    """With an attention mask of ones, as tokenizers give it."""
    model = llama(BF16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids = tokens()
        model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


_LONG = {"sequence": 4096, "settings": {"max_position_embeddings": 8192}}
_LARGE = {"sequence": 8192, "batch": 1, "settings": _8B}
for name, packing in (("one_asoncard", False), ("one_default", True)):
    add(name, single, "transformers", world=1, packing=packing)
    add(f"{name}_4096", single, "transformers", world=1, packing=packing, **_LONG)
    add(f"{name}_8b", single, "transformers", world=1, packing=packing, **_LARGE)
add("one_ones", masked, "transformers", world=1)
