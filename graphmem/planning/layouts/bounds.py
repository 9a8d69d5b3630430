"""The lower bound of a layout's memory: bytes that are certainly alive at one moment of a step, and nothing else.

A bound must never be above what a capture finds, so each part is what the mechanism cannot do without:

- *model states* at the optimizer step: the process's part of the weights, their gradients and the optimizer's states.
  Processes that hold a part each hold, in the mean, the whole divided by their number, and the first of them, which is
  captured, at least as much (``torch.chunk`` gives the first ones more). Optimizers whose states are not known count
  as stateless. Trainable parameters are taken to be used in the step;
- *gathered parameters*: of FSDP and ZeRO-3 the largest block, in the precision it computes in, whole; with
  ``reshard_after_forward=False`` all of them from the forward to the backward pass;
- *activations* where the loss is, of transformers' language models: the input of each block, which its
  recomputation, or its first operator's gradient, begins with; without recomputation also an input for each width of
  its linear layers (the gradient of a weight is made of it); and the distribution over the vocabulary in fp32
  (``ForCausalLMLoss`` upcasts; ``log_softmax`` saves its result) with its gradient of the same size. Tensor
  parallelism is taken to divide all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphmem.base.textbook import OPTIMIZER_STATES
from graphmem.planning.layouts.axes import Job, Layout

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_FP32 = 4


@dataclass(frozen=True)
class Part:
    """Bytes of one process and their purpose in words."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Bound:
    """The moment of a step that needs the most, as far as it is certain: its ``parts`` are alive together."""

    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Their sum."""
        return sum(part.bytes for part in self.parts)

    def over(self, capacity: int) -> tuple[Part, ...]:
        """The largest parts that are too many without the others."""
        chosen: list[Part] = []
        for part in sorted(self.parts, key=lambda part: -part.bytes):
            chosen.append(part)
            if sum(one.bytes for one in chosen) > capacity:
                break
        return tuple(chosen)


def bound(job: Job, layout: Layout) -> Bound:
    """The lower bound of the bytes that the layout needs on a card."""
    return max((Bound(tuple(part for part in parts if part.bytes)) for parts in _moments(job, layout)),
               key=lambda one: one.bytes)  # fmt: skip


def _moments(job: Job, layout: Layout) -> Iterator[tuple[Part, ...]]:
    """Moments of a step by what a process holds then at least: at the optimizer's step, where the loss is made, in
    flight in a pipeline's first stage, and with the largest unit gathered."""
    states = States.of(job, layout)
    yield (
        Part("weights", states.weights),
        Part("gradients", states.gradients),
        Part("optimizer states", states.optimizer),
        Part("DDP's buckets", states.buckets),
    )
    yield (
        Part("weights", states.weights),
        Part("optimizer states", states.optimizer),
        Part("DDP's buckets", states.buckets),
        Part("gathered parameters", gathered(job, layout)),
        Part("gradients of the micro-batches before", states.accumulated),
        Part("inputs of the blocks", saved_inputs(job, layout)),
        Part("the loss over the vocabulary", loss_bytes(job, layout)),
    )
    if layout.pipeline > 1:  # the first stage, once as many micro-batches as there are stages are on their way
        on_way = min(layout.pipeline, layout.in_flight) * tokens(job, layout) * compute_bytes(job)
        inputs = len(_ends(job, layout)[0]) * job.shape.hidden * on_way
        first = sum(job.shape.units[number] for number in _ends(job, layout)[0]) * weight_bytes(job, layout)
        yield Part("weights", first // layout.shards), Part("inputs of the blocks in flight", inputs)
    yield Part("weights", states.weights), Part("gathered parameters", largest_unit(job, layout))


@dataclass(frozen=True)
class States:
    """Bytes of one process: weights, gradients when the optimizer steps, the optimizer's states (a copy of the weights
    included), what DDP's reducer holds, and gradients that wait for the other micro-batches."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int = 0
    accumulated: int = 0

    @staticmethod
    def of(job: Job, layout: Layout) -> States:
        """Of a layout."""
        weight = weight_bytes(job, layout)
        parameters, trainable = parameters_of(job, layout)
        kept = OPTIMIZER_STATES.get(job.step.optimizer_class, 0) * trainable
        if layout.wrapper == "fsdp":
            return _of_fsdp(job, layout, parameters, trainable, kept, weight)
        if layout.wrapper == "zero":
            return _of_zero(layout, parameters, trainable, kept, weight, is_half=weight < _FP32)
        own = (parameters * weight, trainable * weight, kept * weight)
        return States(
            *own,
            buckets=trainable * weight if layout.wrapper == "ddp" and not layout.buckets else 0,
            accumulated=trainable * weight if layout.accumulate > 1 else 0,
        )


def _of_fsdp(job: Job, layout: Layout, parameters: int, trainable: int, kept: int, weight: int) -> States:
    """FSDP2's: shards among the processes of a replica, in the precision that the model has. Gradients that wait are
    whole, in the precision that they are reduced in (``FSDPParam.to_accumulated_grad_if_needed``,
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py), or shards. A pipeline's schedule reduces them in the last
    micro-batch (``backward_maybe_with_nosync``, torch/distributed/pipelining/stage.py)."""
    parts = layout.processes // layout.replicas // layout.pipeline
    waits = 0
    if (layout.accumulate > 1 and layout.whole_gradients) or (layout.pipeline > 1 and layout.in_flight > 1):
        each = _FP32 if job.step.amp and layout.expert == 1 else min(compute_bytes(job), _BYTES[job.step.dtype])
        waits = trainable * each * layout.shards // parts // max(1, layout.expert // layout.tensor)
    elif layout.accumulate > 1 and not layout.offload:
        waits = trainable * weight // parts
    if layout.offload:
        return States(0, 0, 0, accumulated=waits)
    own = (parameters * weight // parts, trainable * weight // parts, kept * weight // parts)
    return States(*own, accumulated=waits)


def _of_zero(layout: Layout, parameters: int, trainable: int, kept: int, weight: int, *, is_half: bool) -> States:
    """DeepSpeed's: a copy in fp32 and the optimizer's states, in fp32, are shared out from stage 1 on
    (deepspeed/runtime/zero/stage_1_and_2.py), weights in stage 3."""
    stage, ranks = int(layout.shard), layout.data
    states = 0 if layout.offload else (kept * _FP32 + (trainable * _FP32 if is_half else 0)) // ranks
    weights = parameters * weight // (ranks if stage == 3 else 1)
    if stage == 3 and layout.offload:
        weights = 0
    return States(weights, 0 if layout.offload else trainable * weight // ranks, states)


def parameters_of(job: Job, layout: Layout) -> tuple[int, int]:
    """Parameters, and those that are trained, of the model, or of the blocks of a pipeline's last stage."""
    shape = job.shape
    if layout.pipeline == 1:
        return shape.parameters, shape.trainable
    count = sum(shape.units[number] for number in _ends(job, layout)[1])
    return count, count if shape.trainable == shape.parameters else 0


def _ends(job: Job, layout: Layout) -> tuple[range, range]:
    """The blocks of the first and of the last stage."""
    divided = layout.stages().divided(len(job.shape.units))
    return divided[0], divided[-1]


def weight_bytes(job: Job, layout: Layout) -> int:
    """Of one weight as it is kept: DeepSpeed casts the model, the others cast when they compute."""
    if layout.wrapper == "zero" and job.step.amp:
        return _BYTES[job.step.amp]
    return _BYTES[job.step.dtype]


def compute_bytes(job: Job) -> int:
    """Bytes of one element of the type that is computed with."""
    return _BYTES[job.step.amp or job.step.dtype]


def largest_unit(job: Job, layout: Layout) -> int:
    """The largest block that is gathered for its computation."""
    if layout.pipeline > 1:
        return 0
    gathers = (layout.wrapper == "fsdp" or layout.shard == "3") and layout.shards > 1
    if not gathers or not job.shape.units or layout.expert > 1:
        return 0
    return max(job.shape.units) * compute_bytes(job) // layout.tensor


def gathered(job: Job, layout: Layout) -> int:
    """Bytes of gathered parameters at the loss: all of them where they are kept for the backward pass, else none."""
    if layout.wrapper == "fsdp" and layout.shard == "grad-op" and layout.shards > 1:
        return job.shape.parameters * compute_bytes(job) // layout.tensor
    return 0


def saved_inputs(job: Job, layout: Layout) -> int:
    """Inputs of blocks and of their linear layers, alive where the loss is; of a pipeline those of the blocks of its
    last stage."""
    shape = job.shape
    if not shape.predicts:
        return 0
    if layout.pipeline > 1:
        return len(_ends(job, layout)[1]) * shape.hidden * tokens(job, layout) * compute_bytes(job)
    inputs = shape.hidden * len(shape.units)
    if not layout.recompute and not shape.experts:
        inputs = sum(max(shape.hidden, widths) for widths in shape.saved)
    return inputs * tokens(job, layout) * compute_bytes(job) // layout.tensor


def loss_bytes(job: Job, layout: Layout) -> int:
    """The distribution that the loss is of, and its gradient."""
    return 2 * job.shape.predicts * tokens(job, layout) * _FP32 // layout.tensor


def tokens(job: Job, layout: Layout) -> int:
    """Tokens of a micro-batch that a process has."""
    return layout.micro_batch * job.seq_len // layout.context
