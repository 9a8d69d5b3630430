"""A profile for https://www.speedscope.app: who holds the memory of the peak, by module and by source line.

The format is that of ``file-format-schema.json`` there. Each profile adds up to the device bytes of the peak.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from graphmem.base.records import dataclass
from graphmem.estimate import GAPS, Estimate
from graphmem.exports import Asked, trace_of
from graphmem.reports.tree import owner
from graphmem.trace import Operator, Place, Storage

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True)
class Frame:
    """A frame of a stack, as the format has it."""

    name: str
    file: str = ""
    line: int = 0

    def to_dict(self) -> dict[str, object]:
        """Without what is not known."""
        return {key: value for key, value in vars(self).items() if value}


#: The frames of a storage from the outermost on, given the operator that made it.
Stack = Callable[[Storage, Operator], Sequence[Frame]]


class Speedscope:
    name = "speedscope"
    suffixes = (".speedscope.json",)
    is_binary = False

    def render(self, estimate: Estimate, asked: Asked) -> str:
        """One JSON object with two profiles."""
        frames: dict[Frame, int] = {}
        profiles = [_profile(f"{estimate.model}, {name}", estimate, stack, frames) for name, stack in _STACKS.items()]
        shared = {"frames": [frame.to_dict() for frame in frames]}
        named = {"name": f"{estimate.model} on {estimate.gpu}", "exporter": "graphmem", "activeProfileIndex": 0}
        return json.dumps({"$schema": SCHEMA, "shared": shared, "profiles": profiles, **named}) + "\n"


EXPORT = Speedscope()


def _profile(name: str, estimate: Estimate, stack: Stack, frames: dict[Frame, int]) -> dict[str, object]:
    trace = trace_of(estimate)
    makers = trace.births()
    held: dict[tuple[int, ...], int] = {}
    live = [(trace.storages[index], trace.operators[makers[index]]) for index in trace.live_at(estimate.moment.event)]
    found = [(stack(storage, made), storage.bytes) for storage, made in live if storage.place == Place.DEVICE]
    found += [([Frame(gap.lower())], estimate.breakdown.get(gap, 0)) for gap in GAPS]
    for path, size in found:
        key = tuple(frames.setdefault(frame, len(frames)) for frame in path)
        held[key] = held.get(key, 0) + size
    weights = {key: size for key, size in sorted(held.items()) if size > 0}
    return {
        "type": "sampled",
        "name": name,
        "unit": "bytes",
        "startValue": 0,
        "endValue": sum(weights.values()),
        "samples": [list(key) for key in weights],
        "weights": list(weights.values()),
    }


def _by_module(storage: Storage, made: Operator) -> list[Frame]:
    names = owner(storage, made).split(".")
    return [*map(Frame, filter(None, names)), Frame(made.name, *_line(made)), Frame(storage.category.name.lower())]


def _by_source(storage: Storage, made: Operator) -> list[Frame]:
    file, line = _line(made)
    places = [Frame(file), Frame(f"{file}:{line}", file, line)] if file else [Frame("(no source line)")]
    return [*places, Frame(made.name, file, line), Frame(storage.category.name.lower())]


_STACKS: dict[str, Stack] = {"by module": _by_module, "by source line": _by_source}


def _line(made: Operator) -> tuple[str, int]:
    file, _, line = made.source.rpartition(":")
    return (file, int(line)) if line.isdigit() else (made.source, 0)
