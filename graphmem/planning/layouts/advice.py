"""Suggestions that save memory in a chosen layout, beyond the space that was searched: each a capture of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from graphmem.answering.runs import labelled
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from graphmem.planning.layouts.axes import Job, Layout
from graphmem.planning.layouts.search import Candidate

#: Buckets that need less, by wrapper.
_SMALLER = {"ddp": "view", "zero": "small"}


@dataclass(frozen=True)
class Tweak:
    """A change: its words, the option that makes it, and the device bytes that it saves (negative: costs)."""

    change: str
    option: str
    saved_bytes: int | None
    device_bytes: int | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, memory in bytes."""
        return {"change": self.change, "option": self.option, "saved_bytes": self.saved_bytes,
                "device_bytes": self.device_bytes, "reason": self.reason or None}  # fmt: skip


#: Segments that grow (``PYTORCH_ALLOC_CONF``).
GROWING = "expandable_segments:True"

Capture = Callable[..., tuple[Estimate, str]]


def tweaks_of(job: Job, best: Candidate, capture: Capture, say: Callable[[str], None]) -> Iterator[Tweak]:
    """Every change of the best layout, tried."""
    assert best.estimate is not None
    conf = {"alloc_conf": best.alloc_conf} if best.alloc_conf else {}
    for change, option, changed in _changes(job, best.layout):
        try:
            heard = labelled(say, f"advice, {change}")
            device = capture(**{"layout": best.layout, "say": heard, **changed, **conf})[0].device
        except GraphmemError as error:
            yield Tweak(change, option, None, None, str(error))
        else:
            yield Tweak(change, option, best.estimate.device - device, device)


def _changes(job: Job, layout: Layout) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what to do, the option, what is changed of the question)."""
    if layout.buckets == "" and layout.wrapper in _SMALLER:
        smaller = replace(layout, buckets=_SMALLER[layout.wrapper])
        if layout.wrapper == "ddp":
            yield "gradients as views of DDP's buckets", "gradient_as_bucket_view=True", {"layout": smaller}
        else:
            zero = smaller.zero_configuration()["zero_optimization"]
            sizes = {name: size for name, size in zero.items() if name.endswith("bucket_size")}
            option = ", ".join(f"{name}={size:,}".replace(",", "_") for name, size in sizes.items())
            yield "smaller buckets than DeepSpeed's", option, {"layout": smaller}
    if job.step.loop == "hold":
        yield "drop the output before the backward pass", "--loop drop", {"step": {"loop": "drop"}}
