"""Figures of public logs of vLLM beside their predictions: ``golden/serving/vllm_logs.json``, one entry a log.

An entry has settings and figures of a start, no text of the log. ``python -m tests.serving.public_logs`` writes the
table of reports/serving_logs.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from graphmem.devices import device_named
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.sources.hub import known_models
from graphmem.units import GIB
from tests import places

FILE = places.GOLDEN / "serving" / "vllm_logs.json"
REPORT = places.ROOT / "reports" / "serving_logs.md"
_ARGUMENTS = ("enable_expert_parallel", "use_flashinfer_sampler")
_BEGIN, _END = "<!-- logs: begin -->\n", "<!-- logs: end -->\n"

Log = dict[str, Any]


@cache
def logs() -> dict[str, Log]:
    """The logs by name."""
    return {log["name"]: log for log in json.loads(FILE.read_text())["logs"]}


@cache
def _configuration(name: str) -> dict[str, Any]:
    own: dict[str, Any] | None = json.loads(FILE.read_text())["models"].get(name)
    if own is None:
        return known_models()[name]
    like = own.get("like")
    return own if like is None else {**known_models()[like], **own}


@dataclass(frozen=True)
class Compared:
    """GiB of the KV cache: printed, predicted, and predicted with the growth outside torch that the log prints."""

    printed: float
    predicted: float
    given: float

    @property
    def share(self) -> float:
        """How far off, of what was printed, given what belongs to the machine."""
        return self.given / self.printed - 1


def served(log: Log) -> Served:
    """The prediction of a log's start."""
    card = device_named(log["gpu"])
    if "total_gib" in log:
        card = replace(card, capacity_bytes=round(log["total_gib"] * GIB))
    settings = dict(log["settings"])
    arguments = tuple((name, str(settings.pop(name)).lower()) for name in _ARGUMENTS if name in settings)
    major, minor = log["version"].split(".")
    model = ServedModel(log["model"], _configuration(log["model"]))
    question = Question(model, card, version=(int(major), int(minor)), arguments=arguments, **settings)
    return engine_named("vllm").serve(question)


@cache
def compared(name: str) -> Compared:
    """A log's KV cache and the predicted one."""
    log = logs()[name]
    answer = served(log)
    predicted = answer.kv_cache.available_bytes / GIB
    outside = log["printed"].get("outside torch")
    charged = sum(part.bytes for part in answer.parts if part.name == "outside torch") / GIB
    given = predicted if outside is None else predicted + charged - outside
    return Compared(log["printed"]["KV cache"], predicted, given)


def table() -> str:
    """All logs as a table, with the shares within bounds before it."""
    found = {name: compared(name) for name in logs()}
    good = sum(abs(one.share) <= 0.02 for one in found.values())
    fair = sum(abs(one.share) <= 0.05 for one in found.values())
    alone = sum(abs(one.predicted / one.printed - 1) <= 0.02 for one in found.values())
    lines = [
        f"{len(found)} logs: the KV cache is within 2 % in {good}, within 5 % in {fair}; with nothing taken from the "
        f"log but settings and the card's memory, within 2 % in {alone}.",
        "",
        "| log | version | card | KV cache printed (GiB) | predicted | given the growth outside torch | off |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found.items():
        log = logs()[name]
        cards = log["settings"].get("tensor_parallel_size", 1)
        given = f"{one.given:.2f}" if "outside torch" in log["printed"] else ""
        lines.append(
            f"| {name} | {log['version']} | {cards} x {log['gpu']} | {one.printed:.2f} | {one.predicted:.2f} "
            f"| {given} | {one.share:+.2%} |"
        )
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The report with the table of today."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    REPORT.write_text(with_table(REPORT.read_text()))
