"""The cost by which fitting layouts are ranked: the time of communication and recomputation, by simple formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from graphmem.devices import Device
from graphmem.planning.layouts.axes import Job, Layout
from graphmem.planning.layouts.communication import Links, Sent, sent

#: 10^12 operations a second of cards of which the table has none.
_TFLOPS_ELSEWHERE = 100
#: How much of that large models reach: 38 to 43 % of the H100's in Llama 3's training (Dubey et al. 2024,
#: arXiv:2407.21783, table 4).
_REACHED = 0.4
#: Costs closer than this are the same: then the room that is left decides.
_SAME = 1.05


@dataclass(frozen=True)
class Cost:
    """Seconds of a step beside its computation: what is sent, one after the other, what is computed again, and how
    long a pipeline waits to be full and to be empty."""

    sent: Sent
    sending: float
    recomputing: float
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.sending + self.recomputing + self.waiting

    @property
    def step(self) -> int:
        """Equal where costs are about the same."""
        return round(math.log(self.seconds, _SAME)) if self.seconds > 0 else -1_000_000


def cost_of(job: Job, layout: Layout, links: Links) -> Cost:
    """Of a layout. A forward pass computes two operations a parameter and token (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1); of experts those that a token goes to."""
    moved = sent(job, layout)
    tokens = job.sequences * max(1, job.seq_len) / layout.processes
    forward = 2 * _active(job) * tokens / (_REACHED * _teraflops(job.cluster.card) * 1e12)
    again = forward if layout.recompute else 0.0
    # (p - 1)/m of the computation, of which the backward pass is twice the forward one (Narayanan et al. 2021,
    # arXiv:2104.04473, section 2.2).
    waits = (3 * forward + again) * (layout.pipeline - 1) / layout.in_flight
    return Cost(moved, moved.seconds(links), again, waits)


def _teraflops(card: Device) -> float:
    return card.tensor_teraflops or _TFLOPS_ELSEWHERE


def _active(job: Job) -> float:
    """Parameters that a token meets: attention and the like are not distinguished from the experts, which have nearly
    all of a block."""
    shape = job.shape
    in_blocks = sum(shape.units)
    share = shape.experts_of_token / shape.experts if shape.experts and shape.experts_of_token else 1.0
    return shape.parameters - in_blocks + in_blocks * share


def describe(card: Device, links: Links) -> str:
    """The assumptions in words."""
    return (
        f"links: {links.describe()}; computing again at {100 * _REACHED:.0f} % of {_teraflops(card):.0f} TFLOP/s; "
        "nothing overlaps; an optimizer on the host is not counted, so offloading comes last"
    )
