"""Steps of vLLM 0.32.0's own scheduler: ``vllm/scheduler.json.gz``, random loads with the answer to every step.

GRAPHMEM_VLLM_PYTHON names an interpreter that finds vllm (an unpacked wheel on PYTHONPATH is enough) and PyTorch for
the CPU. ``record`` steps the loads again, ``table`` shows how many steps are equal.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from graphmem.serving.base import Request
from graphmem.serving.vllm.connectors import Connector, Host, Receiver, Sender
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.serving.vllm.scheduler import Scheduler
from tests import places

FILE = places.GOLDEN / "vllm" / "scheduler.json.gz"
_PROGRAM = places.ROOT / "tests" / "oracles" / "vllm" / "step_scheduler.py"

Load = dict[str, Any]
Step = list[Any]


@cache
def loads() -> list[Load]:
    """All recorded loads with their steps."""
    found: list[Load] = json.loads(gzip.decompress(FILE.read_bytes()))
    return found


def scheduler(load: Load) -> Scheduler:
    """Ours, as the engine's was made."""
    in_flight = load["batches_in_flight"] * load["max_num_batched_tokens"]
    layout = Layout(tuple(Group(Spec(1, window), 1) for window in load["windows"]), load["block_size"], in_flight)
    options = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "batches_in_flight", "prefix_caching")
    connector: Connector | None = None
    if "host_blocks" in load:
        connector = Host(load["host_blocks"], load["block_size"])
    elif "role" in load:
        connector = Sender() if load["role"] == "prefill" else Receiver()
    return Scheduler(layout, load["blocks"], **{name: load[name] for name in options}, connector=connector)


def stepped(load: Load) -> list[Step]:
    """Every step of ours, as the recorder writes them."""
    ours, requests = scheduler(load), load["requests"]
    arrivals = deque(sorted(range(len(requests)), key=lambda number: requests[number][0]))
    pending: deque[Any] = deque()
    loads: deque[tuple[int, int]] = deque()
    steps: list[Step] = []
    alive = 0
    while arrivals or alive:
        while arrivals and (requests[arrivals[0]][0] <= len(steps) or not alive):
            number = arrivals.popleft()
            arrival, prompt, output, *shared = requests[number]
            ours.add(number, Request(arrival, prompt, output, tuple(map(tuple, shared[0])) if shared else ()))
            alive += 1
        batch = ours.schedule()
        loads.extend((len(steps) + load.get("transfer_steps", 0), number) for number, _ in ours.transfers())
        used = ours.used_blocks
        pending.append(batch)
        done: list[int] = []
        if len(pending) >= load["batches_in_flight"]:
            done = sorted(ours.update(pending.popleft()))
            while loads and loads[0][0] <= len(steps) + 1 - load["batches_in_flight"]:
                ours.transferred(loads.popleft()[1])
            alive -= len(done)
        steps.append([[[entry[0].number, entry[1]] for entry in batch.entries], batch.preempted, used, done])
        assert len(steps) <= 20_000, "the load does not end"
    return steps


class Scheduling:
    """The kind."""

    def record(self, arguments: list[str]) -> int:
        """Step the loads of the golden again, or those of the JSON file that is named."""
        python = os.environ.get("GRAPHMEM_VLLM_PYTHON")
        if not python:
            raise SystemExit("GRAPHMEM_VLLM_PYTHON says with what to record")
        asked = json.loads(Path(arguments[0]).read_text()) if arguments else loads()
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder, "loads.json"), Path(folder, "out.json")
            source.write_text(json.dumps([{key: load[key] for key in load if key != "steps"} for load in asked]))
            subprocess.run([python, str(_PROGRAM), str(source), str(out)], check=True)
            FILE.write_bytes(gzip.compress(out.read_bytes(), mtime=0))
        return 0

    def table(self, arguments: list[str]) -> int:
        """Steps, preemptions and how many steps are equal, a load a line."""
        for number, load in enumerate(loads()):
            ours = stepped(load)
            equal = sum(one == other for one, other in zip(ours, load["steps"], strict=False))
            preempted = sum(len(step[1]) for step in load["steps"])
            print(f"{number:3} {len(load['steps']):6} steps {preempted:4} preemptions {equal:6} equal")
        return 0

    differ = table


KIND = Scheduling()
