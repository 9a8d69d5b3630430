"""What jobs ask a scheduler for, read from the JSON of an answer: cards, their memory, memory of the host."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphmem.reports.document import Document, clean
from graphmem.units import GIB, MIB, format_bytes

#: Of a process in host memory beside its tensors: Python, libraries, the CUDA runtime. Assumed; nothing predicts it.
BESIDE_TENSORS_BYTES = 4 * GIB
_PROFILE = re.compile(r":([0-9]g\.[0-9]+gb)$")


@dataclass(frozen=True)
class Job:
    """``profile``: of a MIG instance, "" for a whole card. ``card_bytes``: what the whole card has to have, as
    nvidia-smi counts; ``host_bytes``: of all processes of a node. ``about``: sentences for the reader."""

    model: str
    profile: str
    cards: int
    nodes: int
    card_bytes: int
    host_bytes: int
    about: tuple[str, ...]


def jobs_of(document: Document) -> tuple[Job, ...]:
    """The job of an estimate, or those of jobs that share cards, one a card; none of another answer."""
    data = document.data()
    schema = data.get("schema")
    if schema == "graphmem.pack/1":
        return tuple(map(_sharing, data["cards"]))
    return (_job_of(data),) if schema == "graphmem.estimate/1" else ()


def _job_of(data: Mapping[str, Any]) -> Job:
    processes = data["details"].get("processes") or {}
    world = int(processes.get("world_size", 1))
    cards = min(world, int(processes.get("nproc_per_node") or world))
    predicted, most = data["peak"]["device_bytes"], data["certainty"]["levels"]["device"]["most_bytes"]
    needed = max(predicted, most or 0)
    besides = data["card"]["whole_bytes"] - data["card"]["process_bytes"] if data["card"] else 0
    tensors = data["host"]["host_bytes"] + data["host"]["pinned_bytes"]
    return Job(
        clean(data["model"]),
        _profile(data["gpu"]),
        cards,
        -(-world // cards),
        needed + besides,
        cards * (tensors + BESIDE_TENSORS_BYTES),
        tuple(map(clean, _sentences(data, most, tensors))),
    )


def _sharing(card: Mapping[str, Any]) -> Job:
    """The processes that share a card, as one job: a scheduler gives a card to one."""
    jobs = card["jobs"]
    name = " ".join((card["gpu"], str(card["number"]), *dict.fromkeys(job["name"] for job in jobs)))
    said = [f"{card['gpu']} #{card['number']}, for {len(jobs)} processes that share it, to be started by this job"]
    said += [f"{one['name']} needs {format_bytes(one['device_bytes'])}, at most {format_bytes(one['most_bytes'])}"
             for one in jobs]  # fmt: skip
    host = sum(job["host_bytes"] + BESIDE_TENSORS_BYTES for job in jobs)
    most = sum(job["most_bytes"] for job in jobs)
    return Job(clean(name), _profile(card["gpu"]), 1, 1, most, host, tuple(map(clean, said)))


def _profile(gpu: str) -> str:
    found = _PROFILE.search(gpu)
    return found[1] if found else ""


def _sentences(data: Mapping[str, Any], most: int | None, tensors: int) -> Iterator[str]:
    yield f"{data['model']}: {data['step']}"
    known = f"at most {format_bytes(most)}" if most is not None else "nothing bounds it above"
    yield f"a process needs {format_bytes(data['peak']['device_bytes'])} of GPU memory, {known}"
    fit = data["fits"]
    if fit is not None:
        words = {"yes": "fits", "no": "DOES NOT FIT"}.get(fit["verdict"], "may not fit")
        yield f"it {words} on {fit['gpu']}, which has {format_bytes(fit['capacity_bytes'])}"
    yield (
        f"host memory: {format_bytes(tensors)} of tensors in a process, and {format_bytes(BESIDE_TENSORS_BYTES)} "
        "assumed for Python, libraries and the CUDA runtime; not counted: workers of data loaders, files in memory"
    )


def whole_mebibytes(size: int) -> int:
    """Bytes in MiB, rounded up."""
    return -(-size // MIB)


#: Of any other answer, as a comment.
NO_JOB = "# no job: graphmem analyze gives one by this format, graphmem pack one for each card\n"
