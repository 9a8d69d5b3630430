"""The report of a recorded run that ran out of memory, as rows of text: for a terminal and for a page.

``dead`` is ``details["out_of_memory"]`` of an estimate: :class:`graphmem.planning.post_mortem.PostMortem` as values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphmem.reports.document import Section, section, table
from graphmem.units import format_bytes

Dead = Mapping[str, Any]


def sections(dead: Dead) -> Iterator[Section]:
    """How the memory lay, who held it, and which settings would have done."""
    yield section("When the recorded run died", table({"part": "", "": "bytes", "meaning": ""}, _heap_rows(dead)))
    yield section(
        "Who held the rest (requested bytes)",
        table({"held": "bytes", "blocks": "figure", "source": ""}, list(_holder_rows(dead))),
    )
    title = "What would have saved it, each tried by a replay in the room that the run had"
    yield section(title, table({"change": "", "outcome": ""}, list(_attempt_rows(dead))))


def sentences(dead: Dead) -> Sequence[str]:
    """The cause of the failure and the first change that would have prevented it."""
    asked = f"RAN OUT OF MEMORY: {format_bytes(dead['requested_bytes'])} were asked for{_made_by(dead)}"
    if dead["missing_bytes"]:
        free, missing = format_bytes(dead["driver_free_bytes"]), format_bytes(dead["missing_bytes"])
        segment = format_bytes(dead["segment_bytes"])
        why = f"No free block was large enough; of the {segment} of a new segment the card had {free}"
        lines = [f"{asked}. {why}, {missing} missing."]
    else:
        lines = [f"{asked}. The card had enough; a limit of the process refused it."]
    saving = [one["change"] for one in dead["attempts"] if one["saves"]]
    lines.append(f"Would have saved it: {saving[0]}." if saving else "Nothing that was tried would have saved it.")
    if not dead["agrees"]:
        lines.append(
            "The replay does not die of the same request: the settings are others, or the recording begins later than "
            "the run."
        )
    return lines


def _heap_rows(dead: Dead) -> list[tuple[str, int, str]]:
    """Rows (name, bytes, words) of the memory when the run died."""
    largest = ", ".join(format_bytes(size) for size in dead["holes"][:3])
    room = (
        "held by PyTorch, and free on the card"
        if dead["missing_bytes"]
        else "at most: its limit is not in the snapshot"
    )
    rows = (
        ("the run could have had", "room_bytes", room),
        ("held by PyTorch", "reserved_bytes", "after it had given back what it could"),
        ("in blocks", "allocated_bytes", ""),
        ("in holes between them", "hole_bytes", f"{dead['hole_count']} holes: {largest}"),
        ("largest for this request", "usable_bytes", "in segments of its kind and stream"),
    )
    return [(name, dead[key], words) for name, key, words in rows]


def _holder_rows(dead: Dead) -> Iterator[tuple[int, str, str]]:
    """Rows (bytes, blocks, source line) of the blocks that were alive when the run died."""
    for one in dead["holders"]:
        plural = "s" if one["blocks"] > 1 else ""
        yield one["bytes"], f"{one['blocks']} block{plural}", _place(one)


def _attempt_rows(dead: Dead) -> Iterator[tuple[str, str]]:
    """(change, how the run ends with it)."""
    for one in dead["attempts"]:
        yield one["change"], _outcome(one)
    if dead["repeats"] and all(one["batch"] is None for one in dead["attempts"]):
        yield "a batch of one less", "not tried: give --batch N, the batch of the run"
    elif not dead["repeats"]:
        yield "a smaller batch", "not tried: no iteration of the recording ends, which would show what depends on it"
    yield "recomputing, precision, optimizer", "not in a recording: graphmem advise MODEL -b N --gpu NAME tries them"


def _outcome(attempt: Mapping[str, Any]) -> str:
    if attempt["saves"]:
        return f"YES, {format_bytes(attempt['spare_bytes'])} never taken"
    missing = f", {format_bytes(attempt['missing_bytes'])} missing" if attempt["missing_bytes"] is not None else ""
    return f"no{missing}{', of an earlier request' if attempt['earlier'] else ''}"


def _made_by(dead: Dead) -> str:
    return f" by {_place(dead)}" if _place(dead) else ""


def _place(one: Mapping[str, Any]) -> str:
    return " at ".join(one[name] for name in ("operator", "source") if one[name])
