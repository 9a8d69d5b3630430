"""Record what a real CPU session allocates: its arena's statistics, or every event of an allocator of ours.

    python tests/oracles/onnxruntime/record_session.py < JOB.json > RESULT.json

A job is ``{"model": path, "runs": [{input: shape}, ...], "level": "all", "mode": "arena" | "trace", "pattern": 1,
"arena": {...}, "config": {...}, "shrink": 0}``. Each job needs a process of its own, since an environment is for ever.
One intra-op thread, so that working buffers do not depend on the machine. Inputs are 0.5, or 0 if they are integers.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from graphmem.accuracy.onnxruntime import capi as onnxruntime_capi
from graphmem.accuracy.onnxruntime.session import CpuSession

#: Regions of equal size are chosen by address, and malloc's threshold for mapping grows with what was freed, so that
#: where one region lies beside another is chance. Held at its default, each is mapped by itself, below those before.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
LOGGED = re.compile(r"Extended allocation by|Reserving|memory pattern|shrunk")


def record(job: dict[str, Any]) -> dict[str, Any]:
    """Run ``job`` in a process of its own; returns its result, or what it said on standard error."""
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(job), capture_output=True, text=True, env=os.environ | MAPPED
    )
    if done.returncode or not done.stdout:
        return {"error": (done.stderr or f"exit code {done.returncode}")[-600:]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Environment:
    """The environment of the process, with an allocator of ours (``trace``) or an arena as configured."""

    def __init__(self, mode: str = "arena", arena: dict[str, int] | None = None) -> None:
        import capi

        self.recorder: Recorder | None = None
        self.env = onnxruntime_capi.environment(self._logged)
        if mode == "trace":
            capi.register_tracer(self.env, self._event)
        elif arena:
            capi.register_arena(self.env, onnxruntime_capi.memory_info(True), arena)

    def _logged(self, text: str) -> None:
        if self.recorder is not None and LOGGED.search(text):
            self.recorder.log.append([self.recorder.phase, re.sub(r"0x[0-9a-f]+", "PTR", text)])

    def _event(self, kind: str, size: int, number: int) -> None:
        if self.recorder is not None:
            self.recorder.events.append([self.recorder.phase, kind, size, number])


class Recorder:
    """One session. ``log``, ``events`` and ``stats`` fill while it runs."""

    def __init__(self, job: dict[str, Any], environment: Environment) -> None:
        environment.recorder = self
        self.phase = "init"
        self.log: list[list[Any]] = []
        self.events: list[list[Any]] = []
        self.stats: dict[str, dict[str, int]] = {}
        traces = job.get("mode") == "trace"
        entries = dict(job.get("config", {}))
        if traces or job.get("arena"):
            entries["session.use_env_allocators"] = "1"
        self.session = CpuSession(
            Path(job["model"]), environment.env, level=job.get("level", "all"), threads=job.get("threads", 1),
            memory_pattern=bool(job.get("pattern", 1)), entries=entries,
        )  # fmt: skip
        self.arena = None if traces else self.session.arena()
        self.note("init")

    def note(self, tag: str) -> None:
        if self.arena is not None:
            self.stats[tag] = onnxruntime_capi.statistics(self.arena)

    def run(self, number: int, feeds: dict[str, Any], shrink: bool = False) -> None:
        """One run; an input is given by its shape, or as an array."""
        self.phase = f"run{number}"
        values = self.session.run(feeds, {"memory.enable_memory_arena_shrinkage": "cpu:0"} if shrink else {})
        self.note(f"run{number}_held")
        self.phase = f"release{number}"
        values.release()
        self.note(f"run{number}_released")


def main() -> None:
    job = json.load(sys.stdin)
    recorder = Recorder(job, Environment(job.get("mode", "arena"), job.get("arena")))
    for number, shapes in enumerate(job["runs"], 1):
        recorder.run(number, shapes, bool(job.get("shrink")) and number == len(job["runs"]))
    result = {
        "version": onnxruntime_capi.library_version(), "stats": recorder.stats,
        "log": recorder.log, "events": recorder.events,
    }  # fmt: skip
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the environment's destructors would call back into Python


if __name__ == "__main__":
    main()
