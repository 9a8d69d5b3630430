"""Layers of experts in a model of transformers', which vLLM makes one layer of its own each
(``MoEBlockFuser``, model_executor/models/transformers/fusers/moe.py, and ``FusedMoE`` of its own models): the module
around weights that are stacked by expert, with its router and the experts that every token is sent to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from graphmem.errors import UsageError
from graphmem.sources.vllm_layers import ExpertShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Bytes of an element in fp32.
_WIDE = 4


@dataclass(frozen=True)
class Block:
    """The module ``name`` around experts, and the module of their weights."""

    name: str
    module: nn.Module
    experts: nn.Module


def blocks(model: nn.Module) -> dict[str, Block]:
    """The layers of experts by name. Raises :class:`UsageError` for experts in another form."""
    found = {
        f"model.{name}": Block(f"model.{name}", module, child)
        for name, module in model.named_modules()
        for child in module.children()
        if len(_stacked(child)) > 1
    }
    within = {id(one) for block in found.values() for one in block.module.modules()}
    for name, module in model.named_modules():
        if id(module) not in within and (_stacked(module) or name.rsplit(".", 1)[-1] == "experts"):
            raise UsageError(
                f"{type(model).__name__} has experts whose weights are not stacked beside a router ({name}), which is "
                "how they are followed"
            )
    return found


def stand_in(block: Block) -> None:
    """Leave out the experts' own code, which reads where tokens are sent."""
    block.experts.forward = lambda hidden_states, *_, **__: torch.empty_like(hidden_states)


def shape_of(block: Block, config: PreTrainedConfig, wide: set[tuple[int, ...]], *, own_code: bool) -> ExpertShape:
    """The sizes of a layer of experts. Raises :class:`UsageError` for one whose parts are not known."""
    stacked, hidden = _stacked(block.experts), int(config.hidden_size)
    count = stacked[0].shape[0]
    width = min(one[0].numel() for one in stacked) // hidden
    router = next((one for one in _others(block) if _weight(one) == (count, hidden)), None)
    chosen = next((one.top_k for one in block.module.modules() if isinstance(getattr(one, "top_k", None), int)), None)
    chosen = chosen or getattr(config, "num_experts_per_tok", None)
    if router is None or not isinstance(chosen, int):
        raise UsageError(f"{block.name}: the router of these experts is not found, which is how they are followed")
    names = {name.rsplit(".", 1)[-1] for name, _ in (*block.module.named_parameters(), *block.module.named_buffers())}
    in_fp32 = (count, hidden) in wide
    return ExpertShape(
        count, chosen, width, _shared_width(block),
        correction_bias="e_score_correction_bias" in names,
        grouped=(getattr(config, "topk_group", None) or 1) > 1,
        shared_gate=any(_weight(one) == (1, hidden) for one in _others(block)),
        bias=any("bias" in name for name, _ in block.experts.named_parameters()),
        router_bytes=_WIDE if in_fp32 and own_code else 0,
        score_bytes=_WIDE if in_fp32 else 0,
    )  # fmt: skip


def _stacked(module: nn.Module) -> list[nn.Parameter]:
    """The module's own weights that have a part for every expert; those of convolutions have as many dimensions."""
    if isinstance(module, nn.Conv1d):
        return []
    return [one for one in module.parameters(recurse=False) if one.ndim == 3]


def _others(block: Block) -> Iterator[nn.Module]:
    return (one for one in block.module.children() if one is not block.experts)


def _weight(module: nn.Module) -> tuple[int, ...]:
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, Tensor) else ()


def _shared_width(block: Block) -> int:
    """The width of the experts that every token is sent to: what the last of their projections reads."""
    for one in _others(block):
        linears = [each for each in one.modules() if isinstance(each, nn.Linear)]
        if len(linears) > 1:
            return int(linears[-1].in_features)
    return 0
