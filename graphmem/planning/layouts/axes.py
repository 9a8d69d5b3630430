"""The space of layouts: one entry in :data:`AXES` for each thing that can be chosen.

An axis gives the values that go with what the axes before it have chosen, and has a value in words and as the options
of ``graphmem analyze``. Whoever adds one adds a field to :class:`Layout`, an entry here, its share of the bound
(:mod:`bounds`), of the communication (:mod:`communication`) and of the step (:meth:`Layout.training`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from graphmem.base.textbook import ModelShape
from graphmem.planning.layouts.cluster import Cluster
from graphmem.training import DataParallel, FullyShard, PipelineParallel, Training, ZeRO

#: The largest micro-batch that is considered, in sequences.
MOST_MICRO_BATCH = 64
#: Micro-batches that are captured of a step of several: the second finds what the first left, and so do all others.
CAPTURED_MICRO_BATCHES = 2
#: Micro-batches of a pipeline for each of its processes: then it waits for (p - 1)/4p of its time (Huang et al. 2019,
#: arXiv:1811.06965, section 3: at four a process it hardly matters).
BATCHES_OF_A_STAGE = 4
#: Elements of DeepSpeed's buckets in place of 500 million (``DeepSpeedZeroConfig``, deepspeed/runtime/zero/config.py).
SMALL_BUCKET = 5_000_000
#: The schedule of pipelines.
SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Job:
    """The job to lay out: ``sequences`` of ``seq_len`` tokens (0: the model has none) for each step of ``step``."""

    shape: ModelShape
    cluster: Cluster
    sequences: int
    seq_len: int
    step: Training
    frameworks: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """One way to train on ``processes`` cards.

    ``wrapper``: ``none``, ``ddp``, ``fsdp`` or ``zero``; ``shard``: of FSDP, ``full``, ``grad-op`` or ``hybrid:NxM``,
    of ZeRO the stage. ``tensor`` processes share each layer, ``expert`` the experts. ``offload``: model states live in
    the host's memory. ``recompute``: activations are computed again in the backward pass. ``whole_gradients``: between
    the micro-batches of a step FSDP keeps gradients that nobody has reduced yet. ``buckets``: other ones than the
    framework's own: ``view`` (DDP: gradients are views of them) or ``small`` (DeepSpeed). ``pipeline`` processes have a
    stage each, and a schedule runs ``in_flight`` micro-batches; ``context`` processes share each sequence.
    """

    processes: int
    on_node: int
    wrapper: str = "ddp"
    shard: str = ""
    tensor: int = 1
    expert: int = 1
    micro_batch: int = 1
    accumulate: int = 1
    recompute: bool = False
    offload: bool = False
    whole_gradients: bool = False
    buckets: str = ""
    pipeline: int = 1
    in_flight: int = 1
    context: int = 1

    @property
    def data(self) -> int:
        """Groups of processes that see different sequences."""
        return self.processes // self.tensor // self.pipeline // self.context

    @property
    def rows(self) -> int:
        """Sequences that a process is given at once: a micro-batch, or all those of a pipeline's schedule."""
        return self.micro_batch * self.in_flight

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes of which one holds the most: the first, which has the largest part wherever parts differ; of
        a pipeline also the first one of its last stage. Those between have neither embedding nor head, and fewer
        micro-batches in flight than the first."""
        return (0,) if self.pipeline == 1 else (0, self.processes - self.processes // self.pipeline)

    def stages(self) -> PipelineParallel:
        """The options of the pipeline."""
        return PipelineParallel(self.pipeline, SCHEDULE, self.in_flight)

    @property
    def shards(self) -> int:
        """Processes among which FSDP or ZeRO shares out, tensor parallelism apart; 1 where nothing is."""
        if self.wrapper == "fsdp":
            within = self.shard.rpartition("x")[2] if self.shard.startswith("hybrid:") else self.data * self.context
            return int(within)
        return self.data if self.wrapper == "zero" and self.shard != "0" else 1

    @property
    def replicas(self) -> int:
        """Copies of the model's states."""
        return self.data * self.context // self.shards

    def fully_shard(self) -> FullyShard:
        """The options of ``fully_shard``."""
        return FullyShard(
            self.processes, self.shard, self.offload, sync_each_batch=not self.whole_gradients and self.pipeline == 1
        )

    def training(self, step: Training) -> Training:
        """The step in this layout, as it is captured: of many micro-batches the first ones."""
        wrapped: dict[str, Any] = {}
        if self.wrapper == "ddp":
            wrapped["ddp"] = DataParallel(self.processes, gradient_as_bucket_view=self.buckets == "view")
        elif self.wrapper == "fsdp":
            wrapped["fsdp"] = self.fully_shard()
        elif self.wrapper == "zero":
            wrapped["zero"] = ZeRO(self.processes, int(self.shard), self.zero_configuration())
        if self.pipeline > 1:
            wrapped["pp"] = self.stages()
        sizes = {"tp": self.tensor, "ep": self.expert, "cp": self.context}
        wrapped |= {name: size for name, size in sizes.items() if size > 1}
        return replace(
            step,
            checkpoint_activations=self.recompute,
            grad_accum=min(self.accumulate, CAPTURED_MICRO_BATCHES),
            nproc_per_node=self.on_node if self.processes > 1 else None,
            **wrapped,
        )

    def zero_configuration(self) -> dict[str, Any]:
        """DeepSpeed's ``zero_optimization`` settings without the stage, as in its configuration; empty where none."""
        zero: dict[str, Any] = {}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
            if self.shard == "3":
                zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        if self.buckets == "small":
            other = "stage3_prefetch_bucket_size" if self.shard == "3" else "allgather_bucket_size"
            zero |= {"reduce_bucket_size": SMALL_BUCKET, other: SMALL_BUCKET}
        return {"zero_optimization": zero} if zero else {}

    @property
    def family(self) -> Layout:
        """The same for any micro-batch."""
        return replace(self, micro_batch=1, accumulate=1, whole_gradients=False, in_flight=1)

    def words(self) -> str:
        """``FSDP full, tensor 2, micro-batch 4 x 2, recomputed``."""
        return ", ".join(filter(None, (axis.words(self) for axis in AXES)))

    def options(self) -> str:
        """The options of ``graphmem analyze``."""
        options = [axis.options(self) for axis in AXES]
        nodes = f"--nproc-per-node {self.on_node}" if self.processes > self.on_node else ""
        return " ".join(filter(None, (*options, nodes)))


@dataclass(frozen=True)
class Axis:
    """One axis of choice in a layout. ``values``: the layouts that follow from one that the axes before it made;
    ``words`` and ``options`` of a layout's value, empty where there is nothing to say."""

    name: str
    values: Callable[[Job, Layout], Iterable[Layout]]
    words: Callable[[Layout], str]
    options: Callable[[Layout], str]


def space(job: Job) -> list[Layout]:
    """Every layout of the job."""
    layouts = [Layout(job.cluster.count, job.cluster.on_node)]
    for axis in AXES:
        layouts = [following for layout in layouts for following in axis.values(job, layout)]
    return layouts


# --- tensor and expert parallelism ------------------------------------------------------------------------------------


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _tensor(job: Job, layout: Layout) -> Iterator[Layout]:
    """Within a machine, as a layer waits for every one of its sums; heads are not divided."""
    shape = job.shape
    most = layout.on_node if "tp" in shape.plans and {"fsdp"} & set(job.frameworks) else 1
    for size in _powers(most):
        if layout.on_node % size == 0 and shape.heads % size == 0 and shape.key_value_heads % size == 0:
            yield replace(layout, tensor=size)


def _expert(job: Job, layout: Layout) -> Iterator[Layout]:
    """A multiple of tensor's size that divides the experts, as transformers asks for."""
    yield layout
    if "ep" not in job.shape.plans or "fsdp" not in job.frameworks:
        return
    for size in _powers(min(layout.processes, job.shape.experts)):
        if size > 1 and size % layout.tensor == 0 and job.shape.experts % size == 0 and layout.processes % size == 0:
            yield replace(layout, expert=size)


def _pipeline(job: Job, layout: Layout) -> Iterator[Layout]:
    """Stages of a model that says how it is split, with FSDP within each, as torchtitan has it; the embedding and the
    head count as a layer each."""
    yield layout
    splits = "pp" in job.shape.plans and job.shape.predicts and "fsdp" in job.frameworks and job.step.amp != "fp16"
    if not splits or layout.tensor > 1 or layout.expert > 1:
        return
    for size in _powers(min(layout.processes // 2, len(job.shape.units) // 2)):
        if size > 1 and layout.processes % size == 0:
            yield replace(layout, pipeline=size, in_flight=BATCHES_OF_A_STAGE * size)


def _context(job: Job, layout: Layout) -> Iterator[Layout]:
    """Processes of a machine that share each sequence, with FSDP alone; each has an early and a late part of it
    (torch.distributed.tensor.experimental, ``_RoundRobinLoadBalancer``). ``--cp`` runs accelerate's."""
    yield layout
    if importlib.util.find_spec("accelerate") is None:
        return
    is_parted = layout.tensor > 1 or layout.expert > 1 or layout.pipeline > 1
    if is_parted or not job.shape.predicts or "fsdp" not in job.frameworks:
        return
    for size in _powers(layout.on_node):
        if size > 1 and layout.on_node % size == 0 and job.seq_len and job.seq_len % (2 * size) == 0:
            yield replace(layout, context=size)


# --- what wraps the model ---------------------------------------------------------------------------------------------

#: Wrapper and shard by framework, in words and as the option of ``analyze``.
_SHARDS = {
    "ddp": {("ddp", ""): ("DDP", "--ddp --world-size {0}")},
    "fsdp": {
        ("fsdp", "full"): ("FSDP full", "--fsdp {0}"),
        ("fsdp", "grad-op"): ("FSDP grad-op", "--fsdp {0} --fsdp-shard grad-op"),
        ("fsdp", "hybrid"): ("FSDP {1}", "--fsdp {0} --fsdp-shard {1}"),
    },
    "deepspeed": {
        ("zero", stage): (f"ZeRO-{stage}", f"--zero {stage} --world-size {{0}}") for stage in ("1", "2", "3")
    },
}
FRAMEWORKS = tuple(_SHARDS)


def frameworks_here(asked: Iterable[str] | None) -> tuple[str, ...]:
    """Those asked for; None: all that run here (DeepSpeed where it is installed)."""
    if asked is not None:
        return tuple(asked)
    return tuple(name for name in FRAMEWORKS if name != "deepspeed" or importlib.util.find_spec("deepspeed"))


def _wrapped(job: Job, layout: Layout) -> Iterator[Layout]:
    if layout.processes == 1:
        yield replace(layout, wrapper="none")
        return
    is_parted = layout.tensor > 1 or layout.expert > 1 or layout.pipeline > 1
    for framework in job.frameworks:
        for wrapper, shard in _SHARDS[framework]:
            if (is_parted and shard != "full") or (layout.context > 1 and wrapper != "fsdp"):
                continue  # transformers distributes models so, and in no other way
            if shard == "hybrid":
                if layout.processes > layout.on_node > 1:
                    nodes = layout.processes // layout.on_node
                    yield replace(layout, wrapper=wrapper, shard=f"hybrid:{nodes}x{layout.on_node}")
                continue
            yield replace(layout, wrapper=wrapper, shard=shard)


def _wrapper_words(layout: Layout) -> str:
    return _of_wrapper(layout, 0) or "one process"


def _wrapper_options(layout: Layout) -> str:
    return _of_wrapper(layout, 1)


def _of_wrapper(layout: Layout, place: int) -> str:
    key = (layout.wrapper, layout.shard.partition(":")[0])
    found = next((texts[key] for texts in _SHARDS.values() if key in texts), ("", ""))
    return found[place].format(layout.processes, layout.shard)


def _offloaded(job: Job, layout: Layout) -> Iterator[Layout]:
    """Not of models that transformers distributes: ``--tp`` with ``--fsdp-offload`` is not analysed."""
    yield layout
    if layout.tensor > 1 or layout.expert > 1 or layout.pipeline > 1:
        return
    if (layout.wrapper == "fsdp" and layout.shard != "grad-op") or layout.wrapper == "zero":
        yield replace(layout, offload=True)


def _offload_options(layout: Layout) -> str:
    return "--fsdp-offload" if layout.offload and layout.wrapper == "fsdp" else ""


def _buckets(job: Job, layout: Layout) -> Iterator[Layout]:
    """The framework's own, and such as need less."""
    yield layout
    smaller = {"ddp": "view", "zero": "small"}.get(layout.wrapper)
    if smaller is not None:
        yield replace(layout, buckets=smaller)


_BUCKETS = {"": "", "view": "gradients in the buckets", "small": "small buckets"}


def _bucket_options(layout: Layout) -> str:
    if layout.buckets == "view":
        return "--ddp-option gradient_as_bucket_view=true"
    return "--zero-config deepspeed.json" if layout.wrapper == "zero" and layout.zero_configuration() else ""


# --- the batch --------------------------------------------------------------------------------------------------------


def _micro_batch(job: Job, layout: Layout) -> Iterator[Layout]:
    """Powers of two that divide the sequences of one process."""
    if job.sequences % layout.data:
        return
    own, rest = divmod(job.sequences // layout.data, layout.in_flight)
    if rest:
        return
    for size in _powers(min(own, MOST_MICRO_BATCH)):
        if own % size == 0:
            yield replace(layout, micro_batch=size, accumulate=own // size)


def _batch_options(layout: Layout) -> str:
    captured = min(layout.accumulate, CAPTURED_MICRO_BATCHES)
    return f"-b {layout.rows}" + (f" --grad-accum {captured}" if captured > 1 else "")


def _may_keep(layout: Layout) -> bool:
    """Whether gradients of a micro-batch can wait for those of the others: FSDP's, outside pipelines."""
    return layout.wrapper == "fsdp" and layout.accumulate > 1 and layout.pipeline == 1


def _gradients(job: Job, layout: Layout) -> Iterator[Layout]:
    yield layout
    if _may_keep(layout):
        yield replace(layout, whole_gradients=True)


def _recomputed(job: Job, layout: Layout) -> Iterator[Layout]:
    yield layout
    if job.shape.units:
        yield replace(layout, recompute=True)


def _sized(name: str, values: Callable[[Job, Layout], Iterable[Layout]], words: str, options: str) -> Axis:
    """An axis whose value is a number of processes; of one process there is nothing to say."""

    def formatted(text: str) -> Callable[[Layout], str]:
        return lambda layout: text.format(layout) if getattr(layout, name) > 1 else ""

    return Axis(name, values, formatted(words), formatted(options))


#: In this order a layout is chosen.
AXES = (
    _sized("tensor", _tensor, "tensor {0.tensor}", "--tp {0.tensor}"),
    _sized("expert", _expert, "expert {0.expert}", "--ep {0.expert}"),
    _sized(
        "pipeline",
        _pipeline,
        f"pipeline {{0.pipeline}} ({SCHEDULE})",
        f"--pp {{0.pipeline}} --schedule {SCHEDULE} --micro-batches {{0.in_flight}}",
    ),
    _sized("context", _context, "context {0.context}", "--cp {0.context}"),
    Axis("wrapper", _wrapped, _wrapper_words, _wrapper_options),
    Axis("offload", _offloaded, lambda layout: "offloaded" if layout.offload else "", _offload_options),
    Axis("buckets", _buckets, lambda layout: _BUCKETS[layout.buckets], _bucket_options),
    Axis(
        "micro_batch",
        _micro_batch,
        lambda layout: (
            f"micro-batch {layout.micro_batch}" + (f" x {layout.accumulate}" if layout.accumulate > 1 else "")
        ),
        _batch_options,
    ),
    Axis(
        "whole_gradients",
        _gradients,
        lambda layout: "no_sync" if layout.whole_gradients else "",
        lambda layout: "--fsdp-sync-each-batch" if _may_keep(layout) and not layout.whole_gradients else "",
    ),
    Axis(
        "recompute",
        _recomputed,
        lambda layout: "recomputed" if layout.recompute else "",
        lambda layout: "--checkpoint-activations" if layout.recompute else "",
    ),
)
