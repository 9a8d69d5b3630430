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
#: ``model_type`` whose routers are in fp32 in the engine's own code, and those whose scores alone are: ``params_dtype``
#: and ``out_dtype`` of ``GateLinear`` in their files (vllm 0.32.0, model_executor/models). The others have the model's
#: dtype there, whatever transformers computes them in.
_WIDE_ROUTERS = (
    "afmoe", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "longcat_flash", "mimo_v2_flash", "minimax_m2",
)  # fmt: skip
_WIDE_SCORES = ("gemma4_text", "nemotron_h")
#: Those whose weight is in fp32 where no kernel of the card makes it so (``force_fp32_compute``).
_WIDE_ELSEWHERE = ("nemotron_h",)


#: ``model_type`` whose own code hands its router to the experts (``gate=self.gate``), which let go of its scores.
_ROUTED_WITHIN = ("axk1", "exaone_moe")


@dataclass(frozen=True)
class Block:
    """The module ``name`` around experts, and the module of their weights, which is a child of it, ``inner``."""

    name: str
    module: nn.Module
    experts: nn.Module
    inner: str

    @property
    def is_routed(self) -> bool:
        """Whether vLLM's backend takes the block over, router and all: one whose router has but its weight, and that
        returns one thing (``MoEBlockFuser.match``). Of others it takes the experts alone."""
        own = ("weight", "e_score_correction_bias")
        return any(
            {name for name, _ in (*one.named_parameters(), *one.named_buffers())} <= set(own) and _weight(one)[1:]
            for one in _others(self)
            if not isinstance(one, nn.Linear)
        )


def blocks(model: nn.Module) -> dict[str, Block]:
    """The layers of experts by name. Raises :class:`UsageError` for experts in another form."""
    found = {
        f"model.{name}": Block(f"model.{name}", module, child, inner)
        for name, module in model.named_modules()
        for inner, child in module.named_children()
        if len(_stacked(child)) > 1 or (inner == "experts" and not isinstance(child, nn.ModuleList))
    }
    within = {id(one) for block in found.values() for one in block.module.modules()}
    for name, module in model.named_modules():
        if id(module) not in within and (_stacked(module) or name.rsplit(".", 1)[-1] == "experts"):
            raise UsageError(
                f"{type(model).__name__} has experts whose weights are not in tensors of all of them ({name}), which "
                "is how they are followed"
            )
    return found


def stand_in(module: nn.Module) -> None:
    """Leave out the code of experts, which reads where tokens are sent, or of a scan."""
    module.forward = lambda hidden_states, *_, **__: torch.empty_like(hidden_states)


def shape_of(
    block: Block,
    config: PreTrainedConfig,
    wide: set[tuple[int, ...]],
    *,
    own_code: bool,
    routed: bool = True,
    lets_go: bool = False,
) -> ExpertShape:
    """The sizes of a layer of experts; those alone where they are not ``routed`` by the engine. ``lets_go``: what every
    token is sent to lets go of its gate's product. Raises :class:`UsageError` for one whose parts are not known."""
    hidden = int(config.hidden_size)
    weights = [one for one in block.experts.parameters() if one.ndim > 1 and one.shape[-1] > 1]
    weights = [one for one in weights if one.ndim == 3] or weights
    router = next((one for one in _beside(block) if _weight(one)[1:] == (hidden,) and _is_router(one, weights)), None)
    chosen = next((one.top_k for one in block.module.modules() if isinstance(getattr(one, "top_k", None), int)), None)
    chosen = chosen or getattr(config, "num_experts_per_tok", None)
    if router is None or not isinstance(chosen, int):
        raise UsageError(f"{block.name}: the router of these experts is not found, which is how they are followed")
    gated = len({one.numel() for one in weights}) > 1 or len(weights) > 2
    count = _weight(router)[0]
    width = min(one.numel() for one in weights) // hidden // count
    bias = any("bias" in name for name, _ in block.experts.named_parameters())
    if not routed:
        return ExpertShape(count, chosen, width, bias=bias, routed=False, gated=gated)
    names = {name.rsplit(".", 1)[-1] for name, _ in (*block.module.named_parameters(), *block.module.named_buffers())}
    in_fp32 = config.model_type in _WIDE_ROUTERS if own_code else (count, hidden) in wide
    scored = in_fp32 or (own_code and config.model_type in _WIDE_SCORES)
    return ExpertShape(
        count, chosen, width, _shared_width(block),
        correction_bias=bool(names & {"e_score_correction_bias", "expert_bias"}),
        grouped=(getattr(config, "topk_group", None) or 1) > 1,
        shared_gate=any(_weight(one) == (1, hidden) for one in _others(block)),
        bias=bias,
        router_bytes=_WIDE if in_fp32 and own_code else 0,
        score_bytes=_WIDE if scored else 0,
        holds_shared=gated and not lets_go,
        holds_scores=own_code and config.model_type not in _ROUTED_WITHIN,
        gated=gated, wide_elsewhere=own_code and config.model_type in _WIDE_ELSEWHERE,
    )  # fmt: skip


def _is_router(module: nn.Module, weights: list[nn.Parameter]) -> bool:
    """Whether the module's weight has a row for each of as many experts as the weights are of."""
    count, first = _weight(module)[0], weights[0]
    return first.shape[0] == count if first.ndim == 3 else count > 1 and first.shape[0] % count == 0


def _beside(block: Block) -> Iterator[nn.Module]:
    """All modules of a block but those of its experts."""
    within = {id(one) for one in block.experts.modules()}
    return (one for one in block.module.modules() if id(one) not in within)


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
