"""The default step: what a plain PyTorch loop does with a model, its inputs and its loss.

    build on the host, move to the device, then for every iteration:
    forward, loss, backward (once a micro-batch), clip, optimizer step, scheduler, zero_grad

Loops written by hand hold the model's output in a variable, ``outputs = model(**batch)``: logits and caches live
through the backward pass and the next forward, until the next output takes their place (``loop="hold"``). Where a loop
writes ``loss = model(**batch).loss`` or returns the loss from a function of its own, as transformers' Trainer does
(``Trainer.compute_loss``), they are dropped once the loss exists (``loop="drop"``). One run tells both where it can
(:mod:`graphmem.capture.loop.held_output`).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphmem.capture.device.pretend_device import cards, move
from graphmem.capture.loop.blocks import unsplit_blocks
from graphmem.capture.loop.checkpointing import checkpoint_blocks
from graphmem.capture.loop.held_output import held_by
from graphmem.capture.loop.optimizers.build import iterations_of_history, make_optimizers
from graphmem.capture.loop.prefetching import prefetched
from graphmem.capture.loop.schedulers import scheduler_of
from graphmem.capture.ports import LoopsBook, StepBook
from graphmem.capture.values.tensors import tensors_in
from graphmem.errors import CaptureError
from graphmem.training import Inference, Training
from graphmem.training.epochs import BatchSize, Iteration

if TYPE_CHECKING:
    from graphmem.capture.distributed.pipelining import Stages
    from graphmem.capture.distributed.shared_layers import SharedLayers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


#: Iterations when the user names no number. The second has the optimizer's state and reuses the first one's segments;
#: a third finds the rare step whose fragmentation still grows, and is left out where an iteration has more operators
#: than this, because it takes long and so many storages hardly move the heap any more.
DEFAULT_ITERATIONS, MANY_OPERATORS = 3, 5000


@dataclass(frozen=True)
class Batch:
    """What a loader gives: the model's inputs, and the loss where the model does not make it."""

    inputs: Any
    loss: Any = None


def run_training(
    session: StepBook,
    model: nn.Module,
    inputs: Any,
    loss: Any,
    training: Training,
    iterations: int | None,
    own_optimizer: type[torch.optim.Optimizer] | None = None,
    loader: Loader | None = None,
    both: LoopsBook | None = None,
) -> Ran:
    """Run ``iterations`` training iterations of the default loop on a model that is on the host or the device.

    ``own_optimizer`` is the class that ``training`` names, if it is the user's and imported already. ``loader`` gives
    batches that differ or are moved ahead, in place of ``inputs`` and ``loss``. ``both`` takes what tells the loop
    that holds the output from the one that drops it; without one the loop that ``training`` names is run.
    """
    if training.pp is not None:
        return _run_pipeline(session, model, Batch(inputs, loss), training, iterations, own_optimizer)
    mesh = None
    if training.mesh:
        from graphmem.capture.distributed.mesh import process_mesh

        mesh = process_mesh(training)
    # By transformers, FSDP2 too; DeepSpeed shares layers itself.
    is_parted = bool(training.tp or training.ep) and not training.tp_in_mesh and training.zero is None
    if is_parted or not training.casts_itself:  # else the wrapper moves what it shards
        model = model_on_device(session, model, training, mesh)
    given = _cuttable(Batch(inputs, loss), training)
    if loader is None:
        given = batch_on_device(session, given, training.dtype)
    model.train()
    if training.checkpoint_activations:
        checkpoint_blocks(model)
    if training.ddp is not None:
        from graphmem.capture.distributed.data_parallel import data_parallel

        model = data_parallel(model, training.ddp)
    sequences = None
    if training.fsdp is not None and not is_parted:
        assert mesh is not None
        if training.cp is not None:
            from graphmem.capture.distributed.context_parallel import prepare

            prepare(model)
            sequences = mesh["cp"]
        model = _sharded(session, model, training, mesh)
    optimizers: list[torch.optim.Optimizer] = []
    remarks: list[str] = []
    if training.zero is None or training.zero.own_optimizer is None:
        optimizers, remarks = make_optimizers(model, training, own_optimizer)
    loop: _Loop
    if training.zero is not None:
        engine = _in_engine(session, model, optimizers, training, given)
        loop = _EngineLoop(session, engine, optimizers, training, loader)
    else:
        loop = _Loop(session, model, optimizers, training, loader)
    loop.batch, loop.sequences = given, sequences
    if both is not None:
        loop.tell_both(both)
    if loader is not None:
        del given, inputs, loss
    if loader is not None and training.epoch.varies:
        _run_epochs(session, loop, loader)
    else:
        _run_alike(session, loop, iterations, None if loader is None else loader.epoch[0])
    return Ran(remarks, loop.output_bytes)


def _run_pipeline(
    session: StepBook, model: nn.Module, batch: Batch, training: Training, iterations: int | None,
    own_optimizer: type[torch.optim.Optimizer] | None,
) -> Ran:  # fmt: skip
    """As :func:`run_training`, of one process of a pipeline: its stages are moved, sharded and stepped one by one."""
    from graphmem.capture.distributed.context_parallel import prepare
    from graphmem.capture.distributed.mesh import process_mesh
    from graphmem.capture.distributed.pipelining import Cut, schedule, split
    from graphmem.capture.distributed.shared_layers import SharedLayers

    assert training.pp is not None
    _check_for_pipeline(model, batch, training)
    mesh = process_mesh(training)
    batch = batch_on_device(session, _cuttable(batch, training), training.dtype)
    model.train()
    if training.checkpoint_activations:
        checkpoint_blocks(model)
    layers = SharedLayers(model, training) if training.tp_in_mesh else None
    if training.cp is not None:
        prepare(model)
    stages = split(model, training.pp, mesh.get_local_rank("pp"), training.cp is not None)
    stages.modules = [_placed(stage, training, mesh, layers) for stage in stages.modules]
    parts, optimizers, remarks = nn.ModuleList(stages.modules), [], [*stages.remarks]
    session.label_model(parts)
    for stage in stages.modules:
        made, said = make_optimizers(stage, training, own_optimizer)
        optimizers += made
        remarks += said
    del model
    computed = DTYPES[training.amp or training.dtype]
    divided = Cut(training.cp or 1, training.tp or 1 if training.sp else 1)
    run = schedule(stages, mesh["pp"].get_group(), batch.inputs, computed, divided)
    loop = _PipelineLoop(session, parts, optimizers, training, None)
    loop.follow(run, stages, mesh)
    loop.batch, loop.sequences = batch, mesh["cp"] if training.cp is not None else None
    del batch
    _run_alike(session, loop, iterations)
    return Ran(list(dict.fromkeys(remarks)), loop.output_bytes)


def _placed(stage: nn.Module, training: Training, mesh: Any, layers: SharedLayers | None) -> nn.Module:
    """A stage on the card, in its precision, its layers shared, sharded or replicated."""
    from graphmem.capture.distributed.data_parallel import data_parallel
    from graphmem.capture.distributed.shared_layers import materialize

    if training.dtype != "fp32":
        stage.to(DTYPES[training.dtype])
    if training.fsdp is not None:
        return _shard(stage, training, mesh, layers)
    if layers is not None:
        layers.share(stage.model, mesh["tp"])
        materialize(stage)
        return stage
    stage.to(cards().own)
    return stage if training.ddp is None else data_parallel(stage, training.ddp, mesh["replicate"].get_group())


def _cuttable(batch: Batch, training: Training) -> Batch:
    """The batch, on the host, with what parts of its sequences cannot tell."""
    if training.cp is not None:
        from graphmem.capture.distributed.context_parallel import with_positions

        inputs = with_positions(batch.inputs, training.cp, training.tp or 1 if training.sp else 1)
        return Batch(inputs, batch.loss)
    if training.sp and training.tp:
        from graphmem.capture.distributed.shared_layers import with_positions as with_whole_positions

        return Batch(with_whole_positions(batch.inputs, training.tp, training.pp is not None), batch.loss)
    return batch


def _check_for_pipeline(model: nn.Module, batch: Batch, training: Training) -> None:
    """Raises :class:`CaptureError` for what cannot be trained in a pipeline."""
    inputs = batch.inputs
    if is_quantized(model):
        raise CaptureError("quantised weights are not split by --pp; leave it out, or write the program")
    if batch.loss is not None or not isinstance(inputs, dict) or not {"input_ids", "labels"} <= set(inputs):
        raise CaptureError(
            "--pp is of models of transformers that make their loss of input_ids and labels; split others in a program "
            "of your own (graphmem run)"
        )
    if training.optimizer == "lbfgs" or training.lr_scheduler == "ReduceLROnPlateau":
        name = training.optimizer if training.optimizer == "lbfgs" else training.lr_scheduler
        raise CaptureError(f"{name} needs the loss, which only the last process of a pipeline has; choose another")


def _run_epochs(session: StepBook, loop: _Loop, loader: Loader) -> None:
    """Iterations on batches that differ, epoch after epoch."""
    for number, step in enumerate(loader.iterations):
        if number % loop.training.epoch.steps == 0:
            loop.go_through(loader.epoch)
        session.begin_iteration()
        loop.step(step.micro_batches)
        if step.evaluated:
            loop.evaluate(step.evaluated)


def _run_alike(session: StepBook, loop: _Loop, iterations: int | None, size: BatchSize | None = None) -> None:
    """Iterations on one batch, or on batches of one ``size``: as many as were asked for, else as many as settle it."""
    begun, of_history = 0, loop.of_history
    if size is not None:
        loop.go_through(itertools.repeat(size))
    for number in range(iterations or max(DEFAULT_ITERATIONS, of_history)):
        before = session.operator_count
        if number >= 2 and not of_history and iterations is None and before - begun > MANY_OPERATORS:
            break
        begun = before
        session.begin_iteration()
        loop.step([size] * loop.training.grad_accum)
    loop.end()


@dataclass(frozen=True)
class Ran:
    """What a loop tells when it is over: remarks for the reader, and the largest bytes of an output of the model that
    only a variable of the loop can hold (beyond its parameters and inputs)."""

    remarks: list[str]
    output_bytes: int


@dataclass(frozen=True)
class Loader:
    """Batches that are moved to the card one by one: ``iterations`` in order, each batch made on the host by
    ``batch_of``. ``epoch``: what is trained on from one end of the loader to the other."""

    iterations: Sequence[Iteration]
    epoch: Sequence[BatchSize]
    batch_of: Callable[[BatchSize], Batch]


class _Loop:
    """The variables of a loop written by hand. Each lives until it is assigned again."""

    def __init__(
        self,
        session: StepBook,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        training: Training,
        loader: Loader | None,
    ) -> None:
        self.training = training
        self.of_history = iterations_of_history(optimizers[0]) if optimizers else 0
        self.batch: Batch | None = None
        self.sequences: Any = None  # the mesh of the processes that share them
        self.output: Any = None
        self.loss: Any = None
        self.output_bytes = 0
        self._both: LoopsBook | None = None
        self._session, self._model, self._optimizers, self._loader = session, model, optimizers, loader
        self._ahead: Iterator[Batch] | None = None  # what gives batches that are on the card before their turn
        self._called = _compiled(model, training.compile)
        self._scaler = torch.amp.GradScaler("cuda") if training.scales_loss else None
        self._schedulers = [scheduler_of(training.lr_scheduler, one) for one in optimizers if training.lr_scheduler]
        if self.of_history and self._scaler:
            raise CaptureError("lbfgs evaluates the loss itself, which torch.amp.GradScaler does not support; use bf16")
        if self.of_history and training.zero_grad_at != "after_step":
            raise CaptureError("lbfgs clears gradients before it evaluates the loss; leave out zero_grad_at")

    def tell_both(self, both: LoopsBook) -> None:
        """Drop what can be dropped, and tell ``both`` what a loop that holds it would have kept, and how long."""
        if self.of_history:
            both.untold()  # the optimizer evaluates the loss itself
        self._both = both

    def step(self, micro_batches: Sequence[BatchSize | None]) -> None:
        """One optimizer step; None stands for the batch that is on the device already."""
        if self.of_history:
            self._closure_step(micro_batches)
            return
        self._gradients(micro_batches)
        self._optimizer_step()
        if self._both is not None and self._both.is_told:
            with self._both.loss_dropped():
                self.loss = None
        elif self.training.loop == "drop":
            self.loss = None

    def end(self) -> None:
        """The iterations are over, and the loop's variables go."""
        self.output = None
        if self._both is not None:
            self._both.output_assigned()
        self.loss = None
        if self._both is not None:
            self._both.loss_assigned()

    def _gradients(self, micro_batches: Sequence[BatchSize | None]) -> None:
        training = self.training
        for number, size in enumerate(micro_batches):
            if number == 0 and training.zero_grad_at == "before_forward":
                self._zero_grad()
            self._next_batch(size)
            is_last = number == len(micro_batches) - 1
            with self._reducing(is_last), self._cut():
                self._forward()
                if len(micro_batches) > 1:
                    self.loss = self.loss / len(micro_batches)
                if number == 0 and training.zero_grad_at == "before_backward":
                    self._zero_grad()
                (self._scaler.scale(self.loss) if self._scaler else self.loss).backward()

    def _reducing(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are reduced among processes in the last micro-batch, unless FSDP is told to do it in each."""
        fsdp = self.training.fsdp
        if fsdp is not None and self.training.grad_accum > 1 and not fsdp.sync_each_batch:
            self._model.set_requires_gradient_sync(is_last)
        waits = self.training.ddp is not None and not is_last
        return self._model.no_sync() if waits else contextlib.nullcontext()

    def _cut(self) -> contextlib.AbstractContextManager[Any]:
        if self.sequences is None or self.batch is None:
            return contextlib.nullcontext()
        from graphmem.capture.distributed.context_parallel import cut

        return cut(self.batch.inputs, self.sequences)

    def go_through(self, sizes: Iterable[BatchSize]) -> None:
        """The next batches are those of a loader from its begin to its end."""
        if self.training.prefetch:
            self._ahead = prefetched(sizes, self.training.prefetch, self._moved, _tensors_of_batch)

    def _next_batch(self, size: BatchSize | None) -> None:
        """``for batch in loader: batch = batch.to("cuda")``: the loop's variable lets the batch before go first; of
        batches that are prefetched it does not."""
        if self._ahead is not None:
            self.batch = next(self._ahead)
        elif size is not None and self._loader is not None:
            self.batch = self._loader.batch_of(size)
            self.batch = self._moved(size)

    def _moved(self, size: BatchSize) -> Batch:
        assert self._loader is not None
        return batch_on_device(self._session, self._loader.batch_of(size), self.training.dtype)

    def _forward(self) -> None:
        """The loss of the batch; what the variables held before lives until they are assigned."""
        assert self.batch is not None
        inputs, loss = self.batch.inputs, self.batch.loss
        with autocast(self.training):
            self.output = _call(self._called, inputs)
            if self._both is not None:
                self._both.output_assigned()
            self._note_output(self.output)
            made = loss(self.output) if loss is not None else default_loss(self.output)
            self._drop_output(made)
            self.loss = made
            if self._both is not None:
                self._both.loss_assigned()
        check_loss(self.loss)

    def _drop_output(self, loss: Any) -> None:
        """The loss exists; nothing else of the output stays alive, unless the loop holds it."""
        if self._both is not None and self._both.is_told:
            kept = held_by((self.output,), loss)
            if kept is not None:
                with self._both.output_dropped(kept):
                    self.output = None
                return
            self._both.untold()
        if self.training.loop == "drop":
            self.output = None

    def _note_output(self, output: Any) -> None:
        self.output_bytes = max(self.output_bytes, _bytes_of(output))

    def evaluate(self, sizes: Sequence[BatchSize]) -> None:
        """Forward passes without gradients, in evaluation mode, in the loop's own variables; then back to training."""
        self._model.eval()
        self.go_through(sizes)
        for size in sizes:
            self._next_batch(size)
            assert self.batch is not None
            inputs, loss = self.batch.inputs, self.batch.loss
            with torch.no_grad(), autocast(self.training):
                if self.training.loop == "hold":
                    self.output = _call(self._called, inputs)
                    if loss is not None:
                        self.loss = loss(self.output)
                elif loss is not None:
                    loss(_call(self._called, inputs))
                else:
                    _call(self._called, inputs)
        self._model.train()

    def _optimizer_step(self) -> None:
        scaler, training = self._scaler, self.training
        if training.clip_grad_norm is not None:
            if scaler:
                for optimizer in self._optimizers:
                    scaler.unscale_(optimizer)
            self._clip(training.clip_grad_norm)
        for optimizer in self._optimizers:
            if scaler:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler:
            scaler.update()
        self._schedule()
        if training.zero_grad_at == "after_step":
            self._zero_grad()

    def _clip(self, most: float) -> None:
        nn.utils.clip_grad_norm_(self._model.parameters(), most)

    def _schedule(self) -> None:
        for scheduler in self._schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(self.loss.detach())
            else:
                scheduler.step()

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=self.training.zero_grad == "set_to_none")

    def _closure_step(self, micro_batches: Sequence[BatchSize | None]) -> None:
        """A step that evaluates the loss as often as it likes, as in the documentation of ``torch.optim``: the output
        is a variable of the closure."""
        optimizer: Any = self._optimizers[0]

        def closure() -> torch.Tensor:
            self._zero_grad()
            self._gradients(micro_batches)
            if self.training.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._model.parameters(), self.training.clip_grad_norm)
            value, self.loss, self.output = self.loss, None, None
            return value

        optimizer.step(closure)
        self._schedule()


class _EngineLoop(_Loop):
    """The loop around a DeepSpeed engine, as in its documentation: the engine scales, clips, accumulates and clears."""

    def step(self, micro_batches: Sequence[BatchSize | None]) -> None:
        engine: Any = self._model
        for size in micro_batches:
            self._next_batch(size)
            self._forward()
            engine.backward(self.loss)
            engine.step()
        self._schedule()


class _PipelineLoop(_Loop):
    """The loop around a schedule, as in the documentation of ``torch.distributed.pipelining``: tokens are given to the
    first stage, labels to the last, and the schedule runs the passes of all micro-batches.

    Held is what ``schedule.step`` returns, the logits of all micro-batches on the last process; ``drop`` tells it not
    to put them together (``return_outputs=False``), as torchtitan does.
    """

    def follow(self, run: Any, stages: Stages, mesh: Any) -> None:
        """The schedule ``run`` of ``stages``, on the process ``mesh``."""
        self._run, self._stages, self._mesh = run, stages, mesh
        self._losses: list[torch.Tensor] | None = None

    def _gradients(self, micro_batches: Sequence[BatchSize | None]) -> None:
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
            with self._cut():
                self.output = self._run.step(*tokens, target=target, losses=self._losses, **others)
            self._note_output(self.output)

    def _clip(self, most: float) -> None:
        """By the norm of all stages' gradients, as torchtitan does it (``clip_grad_norm_`` of its utils.py)."""
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norm **= 2.0
        torch.distributed.all_reduce(norm, group=self._mesh["pp"].get_group())
        norm **= 0.5
        nn.utils.clip_grads_with_norm_(parameters, most, norm)


def run_inference(session: StepBook, model: nn.Module, inputs: Any, inference: Inference, iterations: int) -> None:
    """Run ``iterations`` forward passes without gradients; an output lives until the next call."""
    model = model_on_device(session, model, inference)
    inputs = batch_on_device(session, Batch(inputs), inference.dtype).inputs
    model.eval()
    called = _compiled(model, inference.compile)
    for _ in range(iterations):
        session.begin_iteration()
        with torch.no_grad(), autocast(inference):
            output = _call(called, inputs)
        del output


def _compiled(model: nn.Module, mode: str | None) -> Any:
    return model if mode is None else torch.compile(model, mode=mode)


def model_on_device(session: StepBook, model: nn.Module, step: Training | Inference, mesh: Any = None) -> nn.Module:
    weights = DTYPES[step.dtype]
    if not is_quantized(model):
        if weights is not torch.float32:
            model = model.to(weights)
        if isinstance(step, Training) and step.tp_in_mesh:
            from graphmem.capture.distributed.shared_layers import SharedLayers, materialize

            SharedLayers(model, step).share(model, mesh["tp"])
            materialize(model)
        elif step.tp or step.ep:
            from graphmem.capture.distributed.tensor_parallel import tensor_parallel

            model = tensor_parallel(model, step)
        else:
            model = model.to(cards().own)
    session.label_model(model)
    return model


def _sharded(session: StepBook, model: nn.Module, training: Training, mesh: Any) -> nn.Module:
    """The model, which stays on the host until its shards are moved."""
    from graphmem.capture.distributed.shared_layers import SharedLayers

    assert training.fsdp is not None
    if is_quantized(model):
        raise CaptureError("quantised weights are not sharded by --fsdp; leave it out, or write the program")
    if training.dtype != "fp32":
        model = model.to(DTYPES[training.dtype])
    model = _shard(model, training, mesh, SharedLayers(model, training) if training.tp_in_mesh else None)
    session.label_model(model)
    return model


def _shard(model: nn.Module, training: Training, mesh: Any, layers: SharedLayers | None) -> nn.Module:
    """The model, or a stage of it, in FSDP2, and its ``layers`` shared before."""
    from graphmem.capture.distributed.fully_sharded import fully_sharded
    from graphmem.capture.distributed.mesh import shards_of
    from graphmem.capture.distributed.shared_layers import materialize

    assert training.fsdp is not None
    if layers is not None:
        layers.share(model if training.pp is None else model.model, mesh["tp"])
    precision = DTYPES[training.amp] if training.amp else None
    model = fully_sharded(model, unsplit_blocks(model), training.fsdp, shards_of(mesh), precision)
    if layers is not None:
        materialize(model, torch.device("cpu") if training.fsdp.offload else None)
    return model


def _in_engine(
    session: StepBook, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], training: Training, batch: Batch
) -> Any:
    """The model, which stays on the host until DeepSpeed moves it, in an engine."""
    from graphmem.capture.distributed.deepspeed_engine import deepspeed_engine

    if is_quantized(model):
        raise CaptureError("quantised weights are not trained by --zero; leave it out, or write the program")
    if len(optimizers) > 1:
        raise CaptureError(f"DeepSpeed takes one optimizer, and {training.optimizer} needs two; choose another")
    rows = next((tensor.shape[0] for tensor in tensors_in(batch.inputs) if tensor.dim()), 1)
    engine = deepspeed_engine(model, optimizers[0] if optimizers else None, training, rows)
    session.label_model(model)
    return engine


def batch_on_device(session: StepBook, batch: Batch, dtype: str) -> Batch:
    weights, loss = DTYPES[dtype], batch.loss
    inputs = move(batch.inputs, weights if weights is not torch.float32 else None)
    session.label_inputs(inputs)
    if hasattr(loss, "targets"):
        loss = copy.copy(loss)
        loss.targets = move(loss.targets)
        session.label_inputs(loss.targets, "targets")
    return Batch(inputs, loss)


def _tensors_of_batch(batch: Batch) -> Iterator[torch.Tensor]:
    yield from tensors_in(batch.inputs)
    yield from tensors_in(getattr(batch.loss, "targets", None))


def is_quantized(model: nn.Module) -> bool:
    """Whether transformers has quantised the model while it loaded, onto the card and in its types."""
    return bool(getattr(model, "is_quantized", False))


def check_loss(value: object) -> None:
    """Raises :class:`CaptureError` for what no backward pass can begin with."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
        raise CaptureError(
            f"the loss is {_describe(value)}; it should be a tensor of one element that requires a gradient. "
            "Return a loss from the factory: (model, inputs, loss) or (model, inputs, targets, loss)"
        )


def default_loss(output: Any) -> torch.Tensor:
    """``output.loss`` if there is one, else the mean of the first floating-point tensor of the output."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    for tensor in tensors_in(output):
        if tensor.is_floating_point():
            return tensor.mean()
    raise CaptureError("the model's output has no floating-point tensor; return a loss from the factory")


def _bytes_of(output: Any) -> int:
    """The bytes of the storages behind an output's tensors, each counted once."""
    return sum({one._cdata: one.nbytes() for one in map(torch.Tensor.untyped_storage, _tensors_of(output))}.values())


def _tensors_of(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Tensors in nested values and in the attributes of objects, as caches of keys and values have them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for item in _parts_of(value):
            yield from _tensors_of(item, depth - 1)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    return vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) else ()


def autocast(step: Training | Inference) -> Any:
    casts = None if isinstance(step, Training) and step.casts_itself else step.amp
    return torch.autocast("cuda", DTYPES[casts]) if casts else contextlib.nullcontext()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        gradient = "" if value.requires_grad else ", without gradient"
        return f"a tensor of shape {tuple(value.shape)}{gradient}"
    return f"a {type(value).__name__}"
