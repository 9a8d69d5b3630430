"""A transformers model in stages, and PyTorch's own schedule of those that one process has.

A stage is the model without the parts of other stages: transformers' own base model calls its layers, so that masks,
positions and caches are unchanged, and the last stage is the whole class with its head. Only models whose configuration
has a plan for it are split (``base_model_pp_plan``): theirs take ``inputs_embeds`` in place of tokens. The shapes that
stages exchange are given in advance (``input_args``, ``output_args`` of ``PipelineStage``), so nothing is run to find
them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphmem.capture.device.pretend_device import cards
from graphmem.capture.values.tensors import NOWHERE
from graphmem.errors import CaptureError, UsageError, first_line
from graphmem.training import PipelineParallel
from graphmem.training.pipelines import SCHEDULES

#: What a base model has, and what a plan names, where transformers can split it.
_SPLIT = ("embed_tokens", "layers", "norm")


class _Stage(nn.Module):  # type: ignore[misc]
    """A stage: the base model, or with the last one the whole, on tokens or on hidden states."""

    def __init__(self, model: nn.Module, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = getattr(model, "_no_split_modules", None)
        self._takes = "input_ids" if is_first else "inputs_embeds"
        self._gives = "logits" if is_last else "last_hidden_state"

    def forward(self, given: torch.Tensor, **others: object) -> torch.Tensor:
        return getattr(self.model(**{self._takes: given}, use_cache=False, **others), self._gives)


@dataclass(frozen=True)
class Cut:
    """Into how many parts: ``sequences``, and beyond that ``activations`` between the layers."""

    sequences: int
    activations: int


@dataclass(frozen=True)
class _Shape:
    """Of a micro-batch: ``tokens`` of each row, and how many of them ``activations`` between stages are of."""

    rows: int
    tokens: int
    activations: int


@dataclass
class Stages:
    """The stages of one process: ``modules`` in their order, at the places ``numbers`` of all. ``target``: the part of
    the batch that the last one compares its logits with."""

    options: PipelineParallel
    numbers: tuple[int, ...]
    modules: list[nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    target: str
    width: int
    vocabulary: int
    remarks: list[str] = field(default_factory=list)

    @property
    def has_first(self) -> bool:
        """True if tokens enter here."""
        return 0 in self.numbers

    @property
    def has_last(self) -> bool:
        """True if the loss is made here."""
        return self.options.stages - 1 in self.numbers


def split(model: nn.Module, options: PipelineParallel, rank: int, is_shifted: bool) -> Stages:
    """The stages of the process at ``rank`` of the pipeline; ``model`` is not whole any more. ``is_shifted``: labels
    are, as those of a part of a sequence have to be.

    Raises :class:`CaptureError` for a model that cannot be split.
    """
    whole: Any = model
    base = _base_of(model)
    try:
        divided = options.divided(len(base.layers))
    except UsageError as error:
        raise CaptureError(str(error)) from None
    numbers, last = options.stages_of(rank), options.stages - 1
    remarks = []
    if getattr(whole.config.get_text_config(), "tie_word_embeddings", False):
        if {0, last} <= set(numbers):
            raise CaptureError(
                f"schedule {options.schedule} has the first and the last stage on one process, whose tied embedding "
                "and head PyTorch's stages do not know to be one; set tie_word_embeddings to false"
            )
        whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach().clone())
        remarks.append("tied embedding and head are two in a pipeline, one with its first and one with its last stage")
    modules = [_stage(whole, base, divided[number], number == 0, number == last) for number in numbers]
    text = whole.config.get_text_config()
    loss = _loss_of(whole.loss_function, text.vocab_size, is_shifted)
    target = "shift_labels" if is_shifted else "labels"
    return Stages(options, numbers, modules, loss, target, text.hidden_size, text.vocab_size, remarks)


def _base_of(model: nn.Module) -> nn.Module:
    """The part of a transformers model that has the layers. Raises :class:`CaptureError`."""
    whole: Any = model
    plan = getattr(getattr(whole, "config", None), "base_model_pp_plan", None) or {}
    base = getattr(whole, getattr(whole, "base_model_prefix", "") or " ", None)
    if not all(name in plan and hasattr(base, name) for name in _SPLIT) or not hasattr(whole, "lm_head"):
        raise CaptureError(
            f"{type(model).__name__} has no plan for --pp: it is of transformers' causal language models with a "
            "base_model_pp_plan, as llama's; split others in a program of your own (graphmem run)"
        )
    return base


def _stage(whole: Any, base: Any, owned: range, is_first: bool, is_last: bool) -> nn.Module:
    """One stage, of copies of the modules without their parameters, and of the layers themselves."""
    try:
        from transformers.distributed.pipeline_parallel import PipelineIdentityLayer as Absent
    except ImportError:
        raise CaptureError("--pp splits models of transformers 5.20 and newer; install that") from None
    part = _shell(base)
    for name, child in base.named_children():
        if name not in _SPLIT:  # positions and the like: every stage has its own
            setattr(part, name, copy.deepcopy(child))
    part.layers = nn.ModuleList(layer if number in owned else Absent() for number, layer in enumerate(base.layers))
    if not is_first:
        part.embed_tokens = Absent()
    if not is_last:
        part.norm = Absent()
        return _Stage(part, is_first, is_last)
    shell = _shell(whole)
    setattr(shell, whole.base_model_prefix, part)
    return _Stage(shell, is_first, is_last)


def _shell(module: nn.Module) -> nn.Module:
    """A copy of a module, whose children can be replaced."""
    shell = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        shell.__dict__[name] = dict(shell.__dict__[name])
    return shell


def _loss_of(function: Any, vocabulary: int, is_shifted: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        given = {"labels": None, "shift_labels": labels} if is_shifted else {"labels": labels}
        made: torch.Tensor = function(logits=logits, vocab_size=vocabulary, **given)
        return made

    return loss


def schedule(stages: Stages, group: object, inputs: Mapping[str, Any], dtype: torch.dtype, cut: Cut) -> object:
    """PyTorch's schedule for the ``stages``, which are on the card, of micro-batches of ``inputs``; ``dtype`` is that
    of the stages' results, ``cut`` how sequences are. Raises :class:`CaptureError` for a schedule that PyTorch does not
    accept."""
    try:
        from torch.distributed.pipelining.schedules import get_schedule_class
    except ImportError:
        raise CaptureError("--pp runs torch.distributed.pipelining's schedules: install PyTorch 2.6 or newer") from None
    options = stages.options
    rows, length = inputs["input_ids"].shape
    count = options.micro_batches or rows
    if rows % count:
        raise CaptureError(
            f"the batch has {rows} rows, which are not {count} equal micro-batches; give a multiple of {count} for "
            f"--batch (graphmem fit: --multiple-of {count})"
        )
    name, takes_several = SCHEDULES[options.schedule]
    shape = _Shape(rows // count, length // cut.sequences, length // cut.sequences // cut.activations)
    made = [
        _pipeline_stage(stages, module, number, group, shape, dtype)
        for number, module in zip(stages.numbers, stages.modules, strict=True)
    ]
    try:
        return get_schedule_class(name)(made if takes_several else made[0], n_microbatches=count, loss_fn=stages.loss)
    except (ValueError, AssertionError) as error:
        raise CaptureError(
            f"{name} refuses {count} micro-batches on {options.ranks} processes: {first_line(error)}"
        ) from None


def _pipeline_stage(
    stages: Stages, module: nn.Module, number: int, group: object, shape: _Shape, dtype: torch.dtype
) -> object:
    from torch.distributed.pipelining import PipelineStage

    class Agreeing(PipelineStage):  # type: ignore[misc]
        """All stages are made alike, here, so the vote of those that are not run is known: every one has its shapes
        (``PipelineStage._warmup_backward_result``, torch/distributed/pipelining/stage.py of 2.13)."""

        def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
            return super()._warmup_backward_result(received_result).fill_(1)

    def shown(*sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device=NOWHERE, requires_grad=True)

    between = (shape.rows, shape.activations, stages.width)
    took = shown(*between) if number else torch.empty(shape.rows, shape.tokens, dtype=torch.long, device=NOWHERE)
    is_last = number == stages.options.stages - 1
    made = shown(shape.rows, shape.tokens, stages.vocabulary) if is_last else shown(*between)
    return Agreeing(
        module, number, stages.options.stages, cards().own, input_args=(took,), output_args=(made,), group=group
    )
