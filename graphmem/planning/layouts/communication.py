"""Bytes that one process sends in an optimizer step: simple formulas, and no prediction of time.

A ring over n processes sends, each, (n-1)/n of the whole for an all-gather or a reduce-scatter and twice that for an
all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; NCCL's own bandwidths are counted so,
nccl-tests, doc/PERFORMANCE.md). Of a ring with k neighbours in each machine one edge in k leaves the machine.

- DDP: an all-reduce of the gradients, once a step.
- FSDP: an all-gather of the parameters in the forward and one in the backward pass of each micro-batch (one only with
  ``reshard_after_forward=False``), a reduce-scatter of the gradients in fp32 after each, or after the last one; hybrid:
  within the machine, then an all-reduce of the shards among the replicas (Zhao et al. 2023, arXiv:2304.11277).
- ZeRO 1: a reduce-scatter of the gradients and an all-gather of the weights a step; 2: a reduce-scatter each
  micro-batch; 3: as FSDP (Rajbhandari et al. 2020, arXiv:1910.02054, section 7).
- tensor parallelism: two all-reduces of a block's activations in the forward and two in the backward pass (Shoeybi et
  al. 2019, arXiv:1909.08053, section 3), two more where the forward pass is recomputed.
- expert parallelism: every token's row goes to its experts and comes back, forward and backward: four all-to-alls of
  (n-1)/n of the rows, two more where recomputed.
- pipelines: each micro-batch's activations to the next stage, their gradients back.
- context parallelism: keys and values go round the others in the forward pass, and again with their gradients in the
  backward pass (Liu et al. 2023, arXiv:2310.01889).
- offload: what moves between the host and the card.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphmem.planning.layouts.axes import Job, Layout
from graphmem.planning.layouts.bounds import compute_bytes, tokens, weight_bytes

_FP32 = 4
_GB = 10**9

#: GB/s that a card sends to others of its machine, in one direction: half of what NVIDIA's data sheets call "NVLink" or
#: "interconnect bandwidth", which counts both: V100 300 (V100 data sheet, January 2020), A100 600 (A100 80GB, June
#: 2021), H100 SXM 900 (H100, 2023), H200 900 (H200, 2024), GH200 900 between GPUs (GH200, 2023), B200 14.4 TB/s for
#: eight (DGX B200, 2024). Of the H20 there is no public data sheet: **assumed**, 900 as its NVLink is that of the H100.
_NVLINK = {
    "V100-16GB": 150, "V100-32GB": 150, "A100-40GB": 300, "A100-80GB": 300, "H100-80GB": 450, "H200-141GB": 450,
    "H20-96GB": 450, "GH200-96GB": 450, "B200-180GB": 900,
}  # fmt: skip
#: PCI Express 4.0 with 16 lanes, one direction: 16 GT/s a lane, 31.5 GB/s after its 128/130 code (PCI-SIG, PCI Express
#: base specification 4.0). **Assumed** for every other card, and for offloading, whatever the machine has.
_PCIE = 32
#: A network of 400 Gb/s for each card: eight ConnectX-7 in NVIDIA's DGX H100 (its data sheet, 2023). **Assumed** for
#: every machine; ``--links`` says otherwise.
_NETWORK = 50


@dataclass(frozen=True)
class Links:
    """GB/s in one direction of each card: to others of its machine, to other machines, to the host."""

    near: float
    far: float = _NETWORK
    host: float = _PCIE

    def describe(self) -> str:
        """In words."""
        return f"{self.near:g} GB/s in a machine, {self.far:g} between machines, {self.host:g} to the host, each card"


def links_of(card: str) -> Links:
    """Of a card by its name."""
    return Links(_NVLINK.get(card, _PCIE))


@dataclass(frozen=True)
class Sent:
    """Bytes that one process sends in a step."""

    near: int = 0
    far: int = 0
    host: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.near + other.near, self.far + other.far, self.host + other.host)

    def seconds(self, links: Links) -> float:
        """At the speed of the links, one after the other, beside no computation."""
        return (self.near / links.near + self.far / links.far + self.host / links.host) / _GB


def sent(job: Job, layout: Layout) -> Sent:
    """Bytes that a process sends in a step, all its micro-batches together."""
    parts = (_of_states, _of_tensor, _of_experts, _of_pipeline, _of_context)
    return sum((part(job, layout) for part in parts), Sent())


def _of_states(job: Job, layout: Layout) -> Sent:
    parameters, trainable = (count // layout.tensor // layout.pipeline
                             for count in (job.shape.parameters, job.shape.trainable))  # fmt: skip
    if layout.expert > layout.tensor:  # experts are not gathered among those that share them out
        parameters, trainable = parameters // layout.expert, trainable // layout.expert
    weight, times = weight_bytes(job, layout), layout.accumulate * layout.in_flight
    if layout.wrapper == "ddp":
        return _ring(layout, layout.data, 2 * trainable * weight, layout.tensor)
    if layout.wrapper == "zero" and layout.shard in ("1", "2"):
        reduced = trainable * compute_bytes(job) * (times if layout.shard == "2" else 1)
        moved = 2 * trainable * compute_bytes(job) // layout.data if layout.offload else 0
        return _ring(layout, layout.data, reduced + parameters * weight, 1) + Sent(host=moved)
    if layout.wrapper not in ("fsdp", "zero"):
        return Sent()
    gathers = 1 if layout.shard == "grad-op" else 2
    reduces = 1 if layout.whole_gradients else times
    reduced = _FP32 if layout.wrapper == "fsdp" else compute_bytes(job)
    whole = gathers * times * parameters * compute_bytes(job) + reduces * trainable * reduced
    total = _ring(layout, layout.shards, whole, layout.tensor)
    if layout.replicas > 1:
        each = trainable * _FP32 // layout.shards
        total += _ring(layout, layout.replicas, 2 * reduces * each, layout.tensor * layout.shards)
    if layout.offload:
        kept = weight if layout.wrapper == "fsdp" else compute_bytes(job)
        moved = (gathers * times * parameters * kept + reduces * trainable * kept) // layout.shards
        total += Sent(host=moved)
    return total


def _of_tensor(job: Job, layout: Layout) -> Sent:
    if layout.tensor == 1:
        return Sent()
    rounds = 6 if layout.recompute else 4
    each = len(job.shape.units) * tokens(job, layout) * job.shape.hidden * compute_bytes(job)
    return _ring(layout, layout.tensor, 2 * rounds * each * layout.accumulate, 1)


def _of_experts(job: Job, layout: Layout) -> Sent:
    if layout.expert == 1:
        return Sent()
    rounds = 6 if layout.recompute else 4
    rows = tokens(job, layout) * job.shape.experts_of_token // layout.tensor
    each = job.shape.expert_layers * rows * job.shape.hidden * compute_bytes(job)
    # Every process sends to every other one, so that of an all-to-all the share goes far which is far.
    total = rounds * each * layout.accumulate * (layout.expert - 1) // layout.expert
    near = min(layout.expert, layout.on_node) - 1
    return Sent(total * near // (layout.expert - 1), total - total * near // (layout.expert - 1))


def _of_pipeline(job: Job, layout: Layout) -> Sent:
    """Of a stage in the middle. Stages are as far apart as the processes of one are many."""
    if layout.pipeline == 1:
        return Sent()
    each = tokens(job, layout) * job.shape.hidden * compute_bytes(job)
    total = 2 * each * layout.in_flight * layout.accumulate
    is_far = layout.processes // layout.pipeline >= layout.on_node and layout.processes > layout.on_node
    return Sent(far=total) if is_far else Sent(near=total)


def _of_context(job: Job, layout: Layout) -> Sent:
    if layout.context == 1:
        return Sent()
    shape = job.shape
    width = shape.hidden * shape.key_value_heads // max(1, shape.heads)
    each = 2 * tokens(job, layout) * width * compute_bytes(job) * len(shape.units)
    rounds = 4 if layout.recompute else 3
    return Sent(near=rounds * each * (layout.context - 1) * layout.accumulate)


def _ring(layout: Layout, ranks: int, whole: int, stride: int) -> Sent:
    """Rings over ``ranks`` processes that are ``stride`` apart: ``whole`` bytes, of which each sends (n-1)/n."""
    if ranks == 1:
        return Sent()
    total = whole * (ranks - 1) // ranks
    together = max(1, min(ranks, layout.on_node // stride))
    far = total // together if ranks > together else 0
    return Sent(total - far, far)
