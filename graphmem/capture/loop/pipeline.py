"""``--pp``: the model cut into stages, which a schedule of ``torch.distributed.pipelining`` runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from graphmem.capture.distributed.pipelining import Cut, Stages, schedule, split
from graphmem.capture.loop.optimizers.build import make_optimizers
from graphmem.capture.loop.strategies import Strategies
from graphmem.capture.loop.training_loop import Batch, TrainingLoop
from graphmem.capture.values.tensors import DTYPES
from graphmem.errors import CaptureError
from graphmem.training import Training
from graphmem.training.epochs import BatchSize

if TYPE_CHECKING:
    from graphmem.capture.session.session import Session


class Schedule(Protocol):
    """A schedule of ``torch.distributed.pipelining``: the passes of all micro-batches in their order."""

    def step(self, *tokens: torch.Tensor, **options: object) -> torch.Tensor | None:
        """Run them; the outputs of the last stage."""


class PipelineLoop(TrainingLoop):
    """The loop around a schedule, as in the documentation of ``torch.distributed.pipelining``: tokens are given to the
    first stage, labels to the last, and the schedule runs the passes of all micro-batches.

    Held is the result of ``schedule.step``, the logits of all micro-batches on the last process; ``drop`` has it not
    put them together (``return_outputs=False``), as torchtitan does.
    """

    def follow(self, run: Schedule, stages: Stages) -> None:
        """The schedule ``run`` of ``stages``."""
        self._run, self._stages = run, stages
        self._losses: list[torch.Tensor] | None = None

    def _gradients(self, micro_batches: Sequence[BatchSize | None]) -> None:
        """Make the gradients of one step: the schedule runs both passes of its own micro-batches, once for each of
        ``micro_batches``; gradients are set to zero before if asked for, and the output is held."""
        assert self.batch is not None
        if self.training.zero_grad_at == "before_forward":
            self._zero_grad()
        inputs = self.batch.inputs
        targets = ("input_ids", "labels", "shift_labels")
        others = {name: value for name, value in inputs.items() if name not in targets}
        if self.training.loop == "drop":
            others["return_outputs"] = False
        for _ in micro_batches:
            tokens = [inputs["input_ids"]] if self._stages.has_first else []
            self._losses = [] if self._stages.has_last else None
            target = inputs[self._stages.target] if self._stages.has_last else None
            with self._micro_batch(is_last=True):
                self.output = self._run.step(*tokens, target=target, losses=self._losses, **others)
            self._note_output(self.output)

    def _clip(self, most: float) -> None:
        """By the norm of all stages' gradients, as torchtitan does it (``clip_grad_norm_`` of its utils.py)."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norm **= 2.0
        torch.distributed.all_reduce(norm, group=self.strategies.mesh["pp"].get_group())
        norm **= 0.5
        nn.utils.clip_grads_with_norm_(parameters, most, norm)


def pipeline_loop(
    session: Session,
    model: nn.Module,
    batch: Batch,
    strategies: Strategies,
    own_optimizer: type[torch.optim.Optimizer] | None,
) -> tuple[TrainingLoop, list[str]]:
    """The loop of one process of a pipeline, whose stages are placed, wrapped and stepped one by one, and remarks."""
    training, mesh = strategies.training, strategies.mesh
    for one in strategies:
        one.prepare(model)
    assert training.pp is not None
    stages = split(model, training.pp, mesh.get_local_rank("pp"), training.cp is not None)
    for number, stage in enumerate(stages.modules):
        stage = strategies.placed(stage)
        for one in strategies:
            stage = one.wrapped(stage)
        stages.modules[number] = stage
    parts, optimizers, remarks = nn.ModuleList(stages.modules), [], [*stages.remarks]
    session.label_model(parts)
    for stage in stages.modules:
        made, more = make_optimizers(stage, training, own_optimizer)
        optimizers += made
        remarks += more
    divided = Cut(training.cp or 1, training.tp or 1 if training.sp else 1)
    computed = DTYPES[training.amp or training.dtype]
    loop = PipelineLoop(session, parts, optimizers, strategies)
    passes = cast(Schedule, schedule(stages, mesh["pp"].get_group(), batch.inputs, computed, divided))
    loop.follow(passes, stages)
    return loop, list(dict.fromkeys(remarks))


def check_for_pipeline(inputs: object, loss: object, training: Training) -> None:
    """Raises :class:`CaptureError` for a step that cannot be trained in a pipeline."""
    if loss is not None or not isinstance(inputs, dict) or not {"input_ids", "labels"} <= set(inputs):
        raise CaptureError(
            "--pp is of models of transformers that make their loss of input_ids and labels; split others in a program "
            "of your own (graphmem run)"
        )
    if training.optimizer == "lbfgs" or training.lr_scheduler == "ReduceLROnPlateau":
        name = training.optimizer if training.optimizer == "lbfgs" else training.lr_scheduler
        raise CaptureError(f"{name} needs the loss, which only the last process of a pipeline has; choose another")
