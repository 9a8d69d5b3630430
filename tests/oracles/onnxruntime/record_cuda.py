"""Record what sessions of ONNX Runtime's CUDA provider hold: their arenas after every run, and what the driver gave.

    python tests/oracles/onnxruntime/record_cuda.py < JOB.json > RESULT.json

in an environment with onnxruntime-gpu, on a card or on the stub driver (``tests/oracles/stub_cuda``). A job is
``{"sessions": [{"model": path, "runs": [{input: shape}, ...]}], "provider": {option: value}, "session": {key: value},
"level": "all", "pattern": 1, "values": {input: number}, "run": {key: value}}``. Sessions are loaded one after another
and run in turns. Inputs are 0.5, or 0 if they are integers, or what ``values`` says. Each job needs a process of its
own, since an environment is for ever.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from graphmem.accuracy.onnxruntime import capi
from graphmem.accuracy.onnxruntime.session import CpuSession

#: More slots of ``OrtApi`` (onnxruntime_c_api.h): those only recordings need.
capi.SLOTS.update({
    "SessionOptionsAppendExecutionProvider_CUDA_V2": 204, "CreateCUDAProviderOptions": 205,
    "UpdateCUDAProviderOptions": 206,
})  # fmt: skip
#: What is kept of an arena's statistics.
KEPT = ("InUse", "MaxInUse", "TotalAllocated", "NumAllocs", "NumReserves", "NumArenaExtensions")
_TEXTS = c.POINTER(c.c_char_p)


class Placements:
    """The providers of the nodes, from the log of a session's start: how many of each operator."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self._provider = ""

    def read(self, text: str) -> None:
        """One message of the log."""
        found = re.match(r"\s*(?:All nodes|Node\(s\)) placed on \[(\w+)\]", text)
        if found:
            self._provider = found.group(1)
            return
        node = re.match(r"^\s+(\w+) \((.*)\)$", text)
        if node and self._provider:
            counts = self.counts.setdefault(self._provider, {})
            counts[node.group(1)] = counts.get(node.group(1), 0) + 1


class CudaSession(CpuSession):
    """A session whose nodes run on the card where the provider has kernels for them."""

    def __init__(self, model: Path, environment: Any, job: dict[str, Any]) -> None:
        provider = {key: str(value) for key, value in job.get("provider", {}).items()}

        def configured(options: Any) -> None:
            cuda = capi.made("CreateCUDAProviderOptions")
            keys = (c.c_char_p * max(1, len(provider)))(*(key.encode() for key in provider))
            values = (c.c_char_p * max(1, len(provider)))(*(value.encode() for value in provider.values()))
            capi.call(
                "UpdateCUDAProviderOptions", (capi.POINTER, cuda), (_TEXTS, keys), (_TEXTS, values),
                (c.c_size_t, len(provider)),
            )  # fmt: skip
            capi.call("SessionOptionsAppendExecutionProvider_CUDA_V2", (capi.POINTER, options), (capi.POINTER, cuda))

        super().__init__(
            model, environment, level=job.get("level", "all"), threads=1, memory_pattern=bool(job.get("pattern", 1)),
            entries=job.get("session"), configure=configured,
        )  # fmt: skip

    def arena_of(self, name: str, kind: int = 1, memory: int = 0) -> Any:
        """The arena of a device: ``Cuda``, ``CudaPinned``, ``Cpu``."""
        info = capi.made(
            "CreateMemoryInfo", (c.c_char_p, name.encode()), (c.c_int, kind), (c.c_int, 0), (c.c_int, memory)
        )  # fmt: skip
        return capi.made("CreateAllocator", (capi.POINTER, self.handle), (capi.POINTER, info))


def arenas(session: CudaSession) -> dict[str, Any]:
    """Allocators of the session by name: the card's, pinned host memory (OrtMemTypeCPU), the CPU's."""
    found = {}
    for name, memory in (("Cuda", 0), ("CudaPinned", -1), ("Cpu", 0)):
        try:
            found[name] = session.arena_of(name, memory=memory)
        except capi.OrtError:  # a session without the provider's nodes may have none
            continue
    return found


def statistics(allocators: dict[str, Any]) -> dict[str, dict[str, int]]:
    """What is kept of each arena's ``GetStats``; an allocator that is no arena has none."""
    kept = {}
    for name, allocator in allocators.items():
        try:
            found = capi.statistics(allocator)
        except capi.OrtError:
            continue
        kept[name] = {key: found[key] for key in KEPT if found.get(key)}
    return kept


def driver() -> dict[str, int]:
    """Bytes that the stub driver gave, and the most; nothing on a card."""
    library, found = c.CDLL(None), {}
    for name in ("used", "peak"):
        function = getattr(library, f"fake_cuda_{name}", None)
        if function is not None:
            function.restype = c.c_ulonglong
            found[name] = int(function())
    return found


def feed(shape: Any, dtype: Any, value: float | None) -> Any:
    """An input filled with one number."""
    if value is None:
        value = 0.5 if np.issubdtype(dtype, np.floating) or dtype.kind == "V" else 0
    return np.full(tuple(shape), value, dtype)


def main() -> None:
    job = json.load(sys.stdin)
    placements = Placements()
    environment = capi.environment(placements.read)
    sessions, told = [], []
    for asked in job["sessions"]:
        sessions.append(CudaSession(Path(asked["model"]), environment, job))
        told.append({"load": statistics(arenas(sessions[-1])), "runs": []})
    loaded = driver()
    values = job.get("values", {})
    for turn in range(max(len(asked["runs"]) for asked in job["sessions"])):
        for asked, session, notes in zip(job["sessions"], sessions, told, strict=True):
            if turn >= len(asked["runs"]):
                continue
            shapes = asked["runs"][turn]
            feeds = {
                name: feed(shapes[name], np.dtype(dtype), values.get(name))
                for name, (_, dtype) in session.inputs.items()
            }
            session.run(feeds, job.get("run")).release()
            notes["runs"].append(statistics(arenas(session)))
    result = {
        "version": capi.library_version(), "sessions": told, "driver": {"loaded": loaded, **driver()},
        "placed": placements.counts,
    }  # fmt: skip
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # the environment's destructors would call back into Python


if __name__ == "__main__":
    main()
