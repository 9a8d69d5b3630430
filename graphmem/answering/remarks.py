"""What a reader must be told of a card, and of what it does to a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphmem.answering.question import Question
from graphmem.base.figures import Figure
from graphmem.devices import DEFAULT_DEVICE, Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.labels import WORKSPACES_OF_CUDNN
from graphmem.replay import Replay
from graphmem.trace import Trace
from graphmem.units import format_bytes

#: The share of the reserved peak from which on a predicted workspace is worth a remark.
_NOTABLE = 0.02


def headlines(device: Device) -> Iterator[Diagnostic]:
    """What must be read before any figure for this card."""
    if device.compute_capability is None:
        yield Code.NOT_NVIDIA.about(card=device.name, stands_in=DEFAULT_DEVICE)


def no_card_named(gpu: str) -> str:
    """What is said where this card was taken because none was named."""
    return f"no GPU was named: {gpu} (give --gpu)"


def device_notes(question: Question, context: Sequence[Figure]) -> list[str]:
    """What is assumed of the card of a question."""
    device, notes = question.setting.device, []
    if question.device is None:
        notes.append(no_card_named(device.name))
    if not device.context_measured:
        notes.extend(f"{figure.name} of {device.name}: {figure.source}" for figure in context)
    if device.capacity_assumed:
        notes.append(f"capacity of {device.name}: {device.capacity_source}")
    return notes


def plans_told(limited: Replay | None) -> tuple[Diagnostic, ...]:
    """What there is to say of a card that refuses libraries their workspaces."""
    if limited is None or not limited.later_plans:
        return ()
    return (Code.LATER_PLAN.about(count=limited.later_plans),)


def workspaces_told(trace: Trace, peak: int) -> tuple[Diagnostic, ...]:
    """How much of the answer may be workspaces that cuDNN could tell."""
    sizes = [storage.bytes for storage in trace.storages if storage.label in WORKSPACES_OF_CUDNN]
    largest = max(sizes, default=0)
    if not trace.predicted_plans or not peak or largest < _NOTABLE * peak:  # no peak: the first request was refused
        return ()
    return (Code.PLANS_PREDICTED.about(largest=format_bytes(largest), share=largest / peak),)
