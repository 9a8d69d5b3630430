"""Remarks for the reader: on a run, on the card of a question, and on the card's effects on the run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from graphmem.answering.question import Question
from graphmem.base.figures import Figure
from graphmem.base.versions import beyond_known, other_compiler, version_notes, workspace_variables
from graphmem.devices import DEFAULT_DEVICE, Device
from graphmem.diagnostics import Code, Diagnostic, counted
from graphmem.estimate import Refusals, no_card_named
from graphmem.labels import WORKSPACES_OF_CUDNN
from graphmem.replay import Replay
from graphmem.run import Run
from graphmem.runtimes.base import Runs, Taken
from graphmem.trace import Trace
from graphmem.training import Training
from graphmem.training.program import ItemRun
from graphmem.units import format_bytes

#: The share of the reserved peak from which on a predicted workspace is worth a remark.
_NOTABLE = 0.02


# --- on a run ---------------------------------------------------------------------------------------------------------


def assumptions(question: Question, run: Run, taken: Taken) -> Iterator[str]:
    """Sentences on the assumptions of a run, and of its replay by a runtime."""
    if run.planned is None:
        yield from run.notes
        yield from version_notes(question.setting.torch_version, run.installed_version)
        yield from (f"{name}={text} of the environment" for name, text in workspace_variables(os.environ))
        yield from run.cudnn.notes() if run.cudnn is not None else ()
    yield from taken.assumptions


def diagnostics(question: Question, run: Run, taken: Taken) -> Iterator[Diagnostic]:
    """Those of the card, of a run and of its replay by a runtime."""
    yield from _of_card(question.setting.device)
    if run.planned is None:
        asked = question.setting.torch_version
        yield from beyond_known(asked)
        yield from other_compiler(asked, run.installed_version) if question.step.compile is not None else ()
        yield from (*counted(run.decided), *run.refusals, *counted(run.assumed))
        if run.ending is not None and run.ending.failed:
            code = Code.NOT_FOLLOWED if run.ending.how == "unfollowed" else Code.PROGRAM_FAILED
            yield code.about(ending=run.ending.words())
        if run.ending is not None and run.ending.how == "left":
            yield Code.PROGRAM_LEFT.about(ending=run.ending.words())
        yield from run.cudnn.refused() if run.cudnn is not None else ()
    yield from taken.diagnostics


def of_end(run: Run, runs: Runs, refusals: Refusals | None) -> Iterator[Diagnostic]:
    """On a run that memory ended, if nothing else is known to have ended it."""
    gave_up = refusals is not None and not refusals.went_on
    if (gave_up or runs.main.out_of_memory is not None) and not (run.ending is not None and run.ending.failed):
        yield Code.RUN_ENDS.about()


def details(question: Question, run: Run, replay: Replay) -> dict[str, Any]:
    """The ``details`` of an estimate that a run and its replay give."""
    found: dict[str, Any] = {}
    processes = question.step.processes if isinstance(question.step, Training) else None
    if run.recorded:
        found["recorded"] = dict(run.recorded)
    if run.groups and processes is not None:
        found["processes"] = {
            "world_size": processes.world_size,
            "rank": processes.rank,
            "nproc_per_node": processes.on_node,
            "groups": sorted({len(group) for group in run.groups}),
        }
    if run.ending is not None:
        found["program"] = {**asdict(run.ending), "words": run.ending.words()}
        if len(run.items) > 1:
            found["runs"] = [_peaks_of(item, replay) for item in run.items]
        if run.epochs:
            found["epochs"] = [asdict(epoch) for epoch in run.epochs]
        if run.sandbox:
            found["sandbox"] = run.sandbox
    if run.loop:
        found["loop"] = {"loop": run.loop, "output_bytes": run.output_bytes}
    if run.captured_at is not None:
        found["captured"] = {"from": "disk", "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.captured_at))}
    if run.cudnn is not None:
        found["cudnn"] = run.cudnn.details()
    return found


def _peaks_of(item: ItemRun, replay: Replay) -> dict[str, object]:
    """The most that was allocated and reserved while an item of a loop around training ran."""
    rows = slice(item.first, item.end)
    levels = {"allocated_bytes": replay.allocated_bytes[rows], "reserved_bytes": replay.reserved_bytes[rows]}
    peaks = {name: int(values.max(initial=0)) for name, values in levels.items()}
    return {"where": item.where, "item": item.item, **peaks}


# --- on a card --------------------------------------------------------------------------------------------------------


def _of_card(device: Device) -> Iterator[Diagnostic]:
    """Headlines that must be read before any figure for this card."""
    if device.compute_capability is None:
        known = _BY_MAKER.get(device.vendor, "what PyTorch does there is not known")
        if device.vendor == "Apple":
            from graphmem.devices import apple

            known += apple.other_sizes(device.name)
        yield Code.NOT_NVIDIA.about(card=device.name, stands_in=DEFAULT_DEVICE, by_maker=known)


#: Maker -> what of its cards is by PyTorch's source, and what is not (docs/modeling/other_makers.md).
_BY_MAKER = {
    "AMD": "the allocator is the same (HIP), and rocBLAS's workspace that of PyTorch's source; that of hipBLASLt is an "
    "interval, MIOpen's is not known, and the context is assumed",
    "Intel": "the allocator is that of PyTorch's source for XPU; workspaces of oneDNN and oneMKL are not known, and "
    "the context is assumed",
    "Apple": "heaps and limits are those of PyTorch's source for MPS; what MPSGraph takes beside them is not known, "
    "nor which operators copy; the card's memory is the working set that macOS recommends",
}


def device_notes(question: Question, context: Sequence[Figure]) -> Iterator[str]:
    """Sentences on the assumptions about the card of a question."""
    device = question.setting.device
    if question.device is None:
        yield no_card_named(device.name)
    if not device.context_measured:
        yield from (f"{figure.name} of {device.name}: {figure.source}" for figure in context)
    if device.capacity_assumed:
        yield f"capacity of {device.name}: {device.capacity_source}"


def of_replay(run: Run, trace: Trace, runs: Runs) -> Iterator[Diagnostic]:
    """On workspaces that the card refuses to libraries, from the allocator, and on workspaces that a cuDNN, if it were
    asked, would know."""
    if runs.limited is not None and runs.limited.later_plans:
        yield Code.LATER_PLAN.about(count=runs.limited.later_plans)
    yield from runs.diagnostics
    was_asked = run.cudnn is not None and run.cudnn.details().get("plans_asked")
    peak = runs.main.peak_reserved_bytes
    if not was_asked and trace.predicted_plans and peak:  # no peak: refused at once
        largest = _largest_workspace(trace)
        if _NOTABLE * peak <= largest:
            yield Code.PLANS_PREDICTED.about(largest=format_bytes(largest), share=largest / peak)


def _largest_workspace(trace: Trace) -> int:
    """Bytes of the largest workspace of cuDNN's; 0 without one."""
    if "largest workspace" not in trace.kept:
        workspaces = [index for label in WORKSPACES_OF_CUDNN for index in trace.labelled.get(label, ())]
        trace.kept["largest workspace"] = int(trace.columns.bytes[workspaces].max(initial=0))
    found: int = trace.kept["largest workspace"]
    return found
