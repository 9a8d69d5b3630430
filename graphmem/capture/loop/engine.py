"""``--zero``: a DeepSpeed engine, which shards, scales, clips, accumulates and clears itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphmem.capture.distributed.deepspeed_engine import deepspeed_engine
from graphmem.capture.loop.optimizers.build import make_optimizers
from graphmem.capture.loop.strategies import Strategies
from graphmem.capture.loop.training_loop import Batch, Loader, TrainingLoop
from graphmem.capture.values.tensors import tensors_in
from graphmem.errors import CaptureError
from graphmem.training.epochs import BatchSize

if TYPE_CHECKING:
    from graphmem.capture.session.session import Session


class EngineLoop(TrainingLoop):
    """The loop around a DeepSpeed engine, as in its documentation: the engine scales, clips, accumulates and clears."""

    def step(self, micro_batches: Sequence[BatchSize | None]) -> None:
        engine: Any = self._model
        for size in micro_batches:
            self._next_batch(size)
            self._forward()
            engine.backward(self.loss)
            engine.step()
        self._schedule()


def engine_loop(
    session: Session,
    model: nn.Module,
    batch: Batch,
    strategies: Strategies,
    own_optimizer: type[torch.optim.Optimizer] | None,
    loader: Loader | None,
) -> tuple[TrainingLoop, list[str]]:
    """The loop around an engine, which moves the model from the host, and remarks."""
    training = strategies.training
    optimizers: list[torch.optim.Optimizer] = []
    remarks: list[str] = []
    if training.zero is not None and training.zero.own_optimizer is None:
        optimizers, remarks = make_optimizers(model, training, own_optimizer)
    if len(optimizers) > 1:
        raise CaptureError(f"DeepSpeed takes one optimizer, and {training.optimizer} needs two; choose another")
    rows = next((tensor.shape[0] for tensor in tensors_in(batch.inputs) if tensor.dim()), 1)
    engine = deepspeed_engine(model, optimizers[0] if optimizers else None, training, rows)
    session.label_model(model)
    return EngineLoop(session, engine, optimizers, strategies, loader), remarks
