"""Record what a real CPU session allocates: its arena's statistics, or every event of an allocator of ours.

    python tests/oracles/onnxruntime/record_session.py < JOB.json > RESULT.json

A job is ``{"model": path, "runs": [{input: shape}, ...], "level": "all", "mode": "arena" | "trace", "pattern": 1,
"arena": {...}, "config": {...}, "shrink": 0}``. Each job needs a process of its own, since an environment is for ever.
One intra-op thread, so that working buffers do not depend on the machine. Inputs are 0.5, or 0 if they are integers.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

LEVELS = {"disabled": 0, "basic": 1, "extended": 2, "layout": 3, "all": 99}
LOGGED = re.compile(r"Extended allocation by|Reserving|memory pattern|shrunk")


def record(job: dict[str, Any]) -> dict[str, Any]:
    """Run ``job`` in a process of its own; returns its result, or what it said on standard error."""
    done = subprocess.run([sys.executable, __file__], input=json.dumps(job), capture_output=True, text=True)
    if done.returncode or not done.stdout:
        return {"error": (done.stderr or f"exit code {done.returncode}")[-600:]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Environment:
    """The environment of the process, with an allocator of ours (``trace``) or an arena as configured."""

    def __init__(self, mode: str = "arena", arena: dict[str, int] | None = None) -> None:
        import capi

        self.recorder: Recorder | None = None
        self.env = capi.environment(self._logged)
        self.info = capi.memory_info(True)
        if mode == "trace":
            capi.register_tracer(self.env, self._event)
        elif arena:
            capi.register_arena(self.env, self.info, arena)

    def _logged(self, text: str) -> None:
        if self.recorder is not None and LOGGED.search(text):
            self.recorder.log.append([self.recorder.phase, re.sub(r"0x[0-9a-f]+", "PTR", text)])

    def _event(self, kind: str, size: int, number: int) -> None:
        if self.recorder is not None:
            self.recorder.events.append([self.recorder.phase, kind, size, number])


class Recorder:
    """One session. ``log``, ``events`` and ``stats`` fill while it runs."""

    def __init__(self, job: dict[str, Any], environment: Environment) -> None:
        import capi

        self.api, self.job, self.environment = capi, job, environment
        environment.recorder = self
        self.phase = "init"
        self.log: list[list[Any]] = []
        self.events: list[list[Any]] = []
        self.stats: dict[str, dict[str, int]] = {}
        self.env, self.info = environment.env, environment.info
        self.session = self._session()
        self.allocator = None
        if job.get("mode") != "trace":
            pointer = capi.POINTER
            self.allocator = capi.made("CreateAllocator", (pointer, self.session), (pointer, self.info))
        self.note("init")

    def _session(self) -> Any:
        api, job, pointer = self.api, self.job, self.api.POINTER
        options = api.made("CreateSessionOptions")
        entries = dict(job.get("config", {}))
        if job.get("mode") == "trace" or job.get("arena"):
            entries["session.use_env_allocators"] = "1"
        for key, value in entries.items():
            api.call(
                "AddSessionConfigEntry", (pointer, options), (c.c_char_p, key.encode()), (c.c_char_p, value.encode())
            )
        api.call("SetIntraOpNumThreads", (pointer, options), (c.c_int, job.get("threads", 1)))
        level = LEVELS[job.get("level", "all")]
        api.call("SetSessionGraphOptimizationLevel", (pointer, options), (c.c_int, level))
        api.call("EnableMemPattern" if job.get("pattern", 1) else "DisableMemPattern", (pointer, options))
        model = job["model"].encode()
        return api.made("CreateSession", (pointer, self.env), (c.c_char_p, model), (pointer, options))

    def note(self, tag: str) -> None:
        if self.allocator is not None:
            self.stats[tag] = self.api.statistics(self.allocator)

    def run(self, number: int, shapes: dict[str, Any], shrink: bool = False) -> None:
        """One run; an input is given by its shape, or as an array."""
        import numpy as np

        api, pointer = self.api, self.api.POINTER
        inputs, outputs = self.signature
        options = api.made("CreateRunOptions")
        if shrink:
            key, value = b"memory.enable_memory_arena_shrinkage", b"cpu:0"
            api.call("AddRunConfigEntry", (pointer, options), (c.c_char_p, key), (c.c_char_p, value))
        names, values, kept = [], [], []
        plain = api.memory_info(False)
        for name, (kind, dtype) in inputs.items():
            shape = getattr(shapes[name], "shape", shapes[name])
            array = np.full(shape, 0.5 if np.issubdtype(dtype, np.floating) else 0, dtype)
            array[...] = shapes[name] if isinstance(shapes[name], np.ndarray) else array
            dims = (c.c_int64 * max(1, len(shape)))(*shape)
            kept += [array, dims]
            names.append(name.encode())
            values.append(api.made(
                "CreateTensorWithDataAsOrtValue", (pointer, plain), (pointer, array.ctypes.data),
                (c.c_size_t, array.nbytes), (c.POINTER(c.c_int64), dims), (c.c_size_t, len(shape)), (c.c_int, kind),
            ))  # fmt: skip
        self.phase = f"run{number}"
        results = (pointer * len(outputs))()
        text, handles = c.POINTER(c.c_char_p), c.POINTER(pointer)
        api.call(
            "Run", (pointer, self.session), (pointer, options), (text, (c.c_char_p * len(names))(*names)),
            (handles, (pointer * len(values))(*values)), (c.c_size_t, len(names)),
            (text, (c.c_char_p * len(outputs))(*(name.encode() for name in outputs))), (c.c_size_t, len(outputs)),
            (handles, results),
        )  # fmt: skip
        self.note(f"run{number}_held")
        self.phase = f"release{number}"
        release = api.function("ReleaseValue", pointer, result=None)
        for value in (*results, *values):
            release(value)
        self.note(f"run{number}_released")

    @property
    def signature(self) -> tuple[dict[str, tuple[int, Any]], list[str]]:
        import onnx

        model = onnx.load(self.job["model"], load_external_data=False)
        constants = {tensor.name for tensor in model.graph.initializer}
        inputs = {}
        for value in model.graph.input:
            kind = value.type.tensor_type.elem_type
            if value.name not in constants:
                inputs[value.name] = (kind, onnx.helper.tensor_dtype_to_np_dtype(kind))
        return inputs, [value.name for value in model.graph.output]


def main() -> None:
    job = json.load(sys.stdin)
    recorder = Recorder(job, Environment(job.get("mode", "arena"), job.get("arena")))
    for number, shapes in enumerate(job["runs"], 1):
        recorder.run(number, shapes, bool(job.get("shrink")) and number == len(job["runs"]))
    result = {
        "version": recorder.api.VERSION, "stats": recorder.stats, "log": recorder.log, "events": recorder.events,
    }  # fmt: skip
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the environment's destructors would call back into Python


if __name__ == "__main__":
    main()
