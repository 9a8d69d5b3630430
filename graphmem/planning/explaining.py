"""Why a run was out of memory, from what there is: a snapshot, the allocator's own record in this process, or nothing
but the error's words."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphmem.base.spellings import also_named
from graphmem.devices import Device, device_named
from graphmem.errors import UsageError, one_line
from graphmem.reports import Answer
from graphmem.reports.document import Document, Text, section, table
from graphmem.units import format_bytes, parse_bytes

_SIZE = r"([0-9.]+ (?:[KMG]iB|bytes))"
#: Figures of PyTorch's message (``CUDACachingAllocator.cpp``) and the words beside them.
_WORDS = {
    "asked_bytes": rf"Tried to allocate {_SIZE}",
    "capacity_bytes": rf"total capacity of {_SIZE}",
    "free_bytes": rf"of which {_SIZE} is free",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "limit_bytes": rf"{_SIZE} allowed",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch",
    "private_bytes": rf"with {_SIZE} allocated in private pools",
    "cached_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
#: So much of a log's end is read.
_LOG_BYTES = 1 << 20
_RECORD = (
    "torch.cuda.memory._record_memory_history() before the run, and graphmem.explain_oom(error) behind it, says who "
    "held the memory and which settings would have saved it."
)


@dataclass(frozen=True)
class OomMessage(Answer):
    """What the words of an out-of-memory error say, in bytes; None: they do not say it."""

    asked_bytes: int
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    limit_bytes: int | None = None
    allocated_bytes: int | None = None
    private_bytes: int | None = None
    cached_bytes: int | None = None

    def document(self, *, details: bool = False) -> Document:
        """The cause, as far as the message tells it."""
        rows = [(_MEANINGS[name], size) for name, size in asdict(self).items() if size is not None]
        title = f"Out of memory: {format_bytes(self.asked_bytes)} were asked for"
        sections = (
            section("", Text(list(self._sentences()), tone="no")),
            section("What the message says", table({"part": "", "size": "bytes"}, rows)),
            section("", Text([_RECORD])),
        )
        return Document("oom", title, sections, self.to_dict)

    def to_dict(self) -> Mapping[str, Any]:
        """The figures by name."""
        return {"schema": "graphmem.oom/1", **asdict(self)}

    def _sentences(self) -> Iterator[str]:
        free, cached = self.free_bytes or 0, self.cached_bytes or 0
        asked = format_bytes(self.asked_bytes)
        yield f"OUT OF MEMORY: {asked} were asked for, and the card had {format_bytes(free)} free."
        if cached >= self.asked_bytes:
            yield (
                f"PyTorch held {format_bytes(cached)} that nobody used, in pieces that were too small: "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may be enough."
            )
        elif free + cached < self.asked_bytes:
            missing = format_bytes(self.asked_bytes - free - cached)
            yield f"At least {missing} are missing, however well the memory is used: something has to become smaller."
        else:
            yield "Together with what PyTorch held unused it would have been enough: fragmentation is the cause."
        others = (self.capacity_bytes or 0) - free - (self.process_bytes or self.capacity_bytes or 0)
        if others > self.asked_bytes:
            yield f"Other processes hold {format_bytes(others)} of the card: without them it would have been enough."
        if self.limit_bytes is not None:
            yield f"The process may use {format_bytes(self.limit_bytes)} of the card, which is its own setting."


#: What each figure is, for people.
_MEANINGS = {
    "asked_bytes": "asked for",
    "capacity_bytes": "the card's",
    "free_bytes": "free on the card",
    "process_bytes": "held by this process",
    "limit_bytes": "that the process may use",
    "allocated_bytes": "allocated by PyTorch",
    "private_bytes": "of private pools (CUDA graphs)",
    "cached_bytes": "reserved by PyTorch, used by nobody",
}


@also_named("device", "gpu")
def explain_oom(
    what: BaseException | str | os.PathLike[str],
    *,
    device: str | Device | None = None,
    alloc_conf: str | None = None,
    batch: int | None = None,
) -> Answer:
    """Why a run was out of memory. ``what``: the error that it caught, its message, or the file of a snapshot or of a
    log with that message.

    Of a snapshot, and of an error in a process that records its memory
    (``torch.cuda.memory._record_memory_history()``), the answer is that of :func:`graphmem.replay`: who held it,
    and which settings would have saved it, each of them tried, on ``device`` where one is named. Without a record it is
    what the words of the error say.
    Raises :class:`graphmem.errors.GraphmemError`.
    """
    given: dict[str, Any] = {"alloc_conf": alloc_conf, "batch": batch}
    card = device_named(device) if isinstance(device, str) else device
    is_message = isinstance(what, BaseException) or "out of memory" in os.fspath(what)
    if not is_message:
        path = Path(str(what))
        if (logged := logged_message(path)) is not None:
            return logged
        from graphmem.planning.recordings import replay

        return replay(path, device=card, **given)
    message = parsed(str(what))
    recorded = _recorded_here() if isinstance(what, BaseException) else None
    if recorded is not None and recorded.death is not None:
        from graphmem.planning.post_mortem import replay_dead

        return replay_dead(recorded, device=card, **given)
    return message


def logged_message(path: Path) -> OomMessage | None:
    """The last out-of-memory error in the end of a log; None for a file that has none, or is no text."""
    if not os.path.isfile(path):  # a pipe is read once, by who replays it
        return None
    try:
        with path.open("rb") as file:
            file.seek(-min(_LOG_BYTES, path.stat().st_size), os.SEEK_END)
            end = file.read()
    except OSError:
        return None
    begin = -1 if b"\0" in end else end.rfind(b"Tried to allocate")
    return parsed(end[begin:].decode(errors="replace")) if begin >= 0 else None


def parsed(message: str) -> OomMessage:
    """The figures of an error's message. Raises :class:`UsageError` for one that is of something else."""
    words = " ".join(message.split())
    found = {name: match for name, pattern in _WORDS.items() if (match := re.search(pattern, words))}
    if "asked_bytes" not in found:
        raise UsageError(f"this is no out-of-memory error of PyTorch: {one_line(words)[:200]}")
    return OomMessage(**{name: parse_bytes(match[1].replace("bytes", "B")) for name, match in found.items()})


def _recorded_here() -> Any:
    """The recording of this process's own card, None where nothing was recorded."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    from graphmem.sources.snapshot import recording_of

    snapshot = torch.cuda.memory._snapshot()
    device = torch.cuda.current_device()
    return recording_of(snapshot, device) if any(snapshot["device_traces"][device : device + 1]) else None
