"""Steps of engines' own schedulers: ``ENGINE/scheduler.json.gz``, random loads with the answer to every step.

vLLM 0.32.0: GRAPHMEM_VLLM_PYTHON names an interpreter that finds vllm (an unpacked wheel on PYTHONPATH is enough) and
PyTorch for the CPU. SGLang 0.5.23: GRAPHMEM_SGLANG_PYTHON and GRAPHMEM_STUB_DRIVER, as for its starts
(``tests/oracles/sglang``). ``record ENGINE`` steps the loads again, ``table`` shows how many steps are equal.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
from collections import deque
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from graphmem.serving.base import Request
from graphmem.serving.base import Scheduler as AnyScheduler
from graphmem.serving.sglang.scheduler import Scheduler as SGLangScheduler
from graphmem.serving.vllm.connectors import Connector, Host, Receiver, Sender
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.serving.vllm.scheduler import Scheduler
from tests import places

#: Engine -> the variable that names its interpreter.
ENGINES = {"vllm": "GRAPHMEM_VLLM_PYTHON", "sglang": "GRAPHMEM_SGLANG_PYTHON"}

Load = dict[str, Any]
Step = list[Any]


def _file(engine: str) -> Path:
    return places.GOLDEN / engine / "scheduler.json.gz"


@cache
def loads(engine: str) -> list[Load]:
    """All recorded loads with their steps."""
    found: list[Load] = json.loads(gzip.decompress(_file(engine).read_bytes()))
    return found


def _sglang(load: Load) -> AnyScheduler:
    options = ("page_size", "max_running_requests", "max_prefill_tokens", "context_length", "batches_in_flight")
    return SGLangScheduler(
        load["tokens"], chunked_prefill_size=load["chunked_prefill_size"] or -1,
        prefix_caching="--disable-radix-cache" not in load["options"], **{name: load[name] for name in options},
    )  # fmt: skip


def scheduler(load: Load) -> AnyScheduler:
    """Ours, as the engine's was made."""
    if "page_size" in load:
        return _sglang(load)
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
        used = ours.used_blocks * load.get("page_size", 1)
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


def _recorded(engine: str, python: str, loads: list[Load]) -> list[Load]:
    """Loads of one engine with their steps."""
    program = places.ROOT / "tests" / "oracles" / engine / "step_scheduler.py"
    environment = dict(os.environ)
    if engine == "sglang":
        stub = os.environ.get("GRAPHMEM_STUB_DRIVER", "")
        environment |= {"LD_PRELOAD": stub, "TRITON_LIBCUDA_PATH": str(Path(stub).parent / "cudalib")}
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "loads.json"), Path(folder, "out.json")
        source.write_text(json.dumps(loads))
        subprocess.run([python, str(program), str(source), str(out)], check=True, env=environment)
        found: list[Load] = json.loads(out.read_text())
    return found


class Scheduling:
    """The kind."""

    def record(self, arguments: list[str]) -> int:
        """``ENGINE [FILE]``: step the loads of its golden again, or those of a JSON file."""
        engine, *files = arguments or [""]
        python = os.environ.get(ENGINES.get(engine, ""))
        if not python:
            raise SystemExit(f"record ENGINE, one of {', '.join(ENGINES)}; {', '.join(ENGINES.values())} say with what")
        asked = json.loads(Path(files[0]).read_text()) if files else loads(engine)
        found: list[Load] = []
        for _, alike in groupby(asked, key=lambda load: load.get("options")):
            found += _recorded(engine, python, [{key: one[key] for key in one if key != "steps"} for one in alike])
        _file(engine).write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
        return 0

    def table(self, arguments: list[str]) -> int:
        """Steps, preemptions and how many steps are equal, a load a line."""
        for engine, number, load in ((one, *each) for one in ENGINES for each in enumerate(loads(one))):
            ours = stepped(load)
            equal = sum(one == other for one, other in zip(ours, load["steps"], strict=False))
            preempted = sum(len(step[1]) for step in load["steps"])
            print(f"{engine:6} {number:3} {len(load['steps']):6} steps {preempted:4} preemptions {equal:6} equal")
        return 0

    differ = table


KIND = Scheduling()
