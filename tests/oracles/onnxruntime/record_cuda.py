"""Record what sessions of ONNX Runtime's CUDA provider hold: their arenas after every run, and what the driver gave.

    python tests/oracles/onnxruntime/record_cuda.py < JOB.json > RESULT.json

in an environment with onnxruntime-gpu, on a card or on the stub driver (``tests/oracles/stub_cuda``). A job is
``{"sessions": [{"model": path, "runs": [{input: shape}, ...]}], "provider": {option: value}, "session": {key: value},
"level": "all", "pattern": 1, "values": {input: number}, "run": {key: value}, "binding": {...}, "environment": {...}}``.
Sessions are loaded one after another and run in turns. Inputs are 0.5, or 0 if they are integers, or what ``values``
says. A ``user_compute_stream`` of the provider is a stream made here. ``environment`` configures an arena of the card
that sessions with ``session.use_env_allocators`` share. ``binding`` says what runs are bound to: see :class:`Binding`.
Each job needs a process of its own, since an environment is for ever.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from graphmem.accuracy.onnxruntime import capi
from graphmem.accuracy.onnxruntime.session import CpuSession

#: More slots of ``OrtApi`` (onnxruntime_c_api.h): those only recordings need.
capi.SLOTS.update({
    "CreateTensorAsOrtValue": 48, "RunWithBinding": 133, "CreateIoBinding": 134, "BindInput": 136, "BindOutput": 137,
    "BindOutputToDevice": 138, "SessionOptionsAppendExecutionProvider_CUDA_V2": 204, "CreateCUDAProviderOptions": 205,
    "UpdateCUDAProviderOptions": 206, "CreateAndRegisterAllocatorV2": 259,
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
        if "user_compute_stream" in provider:
            provider["user_compute_stream"] = str(stream())

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

    def run_bound(self, binding: Any, entries: dict[str, str] | None) -> None:
        """Run what is bound."""
        options = capi.made("CreateRunOptions")
        for key, value in (entries or {}).items():
            capi.call(
                "AddRunConfigEntry", (capi.POINTER, options), (c.c_char_p, key.encode()), (c.c_char_p, value.encode())
            )
        capi.call("RunWithBinding", (capi.POINTER, self.handle), (capi.POINTER, options), (capi.POINTER, binding))

    def arena_of(self, name: str, kind: int = 1, memory: int = 0) -> Any:
        """The arena of a device: ``Cuda``, ``CudaPinned``, ``Cpu``."""
        info = capi.made(
            "CreateMemoryInfo", (c.c_char_p, name.encode()), (c.c_int, kind), (c.c_int, 0), (c.c_int, memory)
        )  # fmt: skip
        return capi.made("CreateAllocator", (capi.POINTER, self.handle), (capi.POINTER, info))


@dataclass
class Binding:
    """What the runs of a session are bound to: ``inputs`` and ``outputs`` are of the ``caller`` (memory on the card
    that the arena never sees), of the ``session`` (its arena's), or of the ``host``. What is bound is bound ``anew``
    for every run, or once."""

    session: CudaSession
    model: str
    inputs: str
    outputs: str
    anew: bool = True
    handle: Any = None

    def run(self, feeds: dict[str, Any], entries: dict[str, str] | None) -> None:
        """Bind, and run once."""
        if self.handle is None:
            self.handle = capi.made("CreateIoBinding", (capi.POINTER, self.session.handle))
        if self.anew or not self.bound:
            self._bind(feeds)
        self.session.run_bound(self.handle, entries)

    bound = False

    def _bind(self, feeds: dict[str, Any]) -> None:
        self.bound = True
        for name, (kind, _) in self.session.inputs.items():
            value = self._value(self.inputs, feeds[name], kind)
            self._call("BindInput", name, value)
            capi.function("ReleaseValue", capi.POINTER, result=None)(value)
        if self.outputs == "caller":
            for name, array in outputs_of(self.model, feeds).items():
                kind = helper.np_dtype_to_tensor_dtype(array.dtype)
                self._call("BindOutput", name, self._value("caller", array, kind))
            return
        where = capi.memory_info(False) if self.outputs == "host" else memory_of_card()
        for name in self.session.outputs:
            self._call("BindOutputToDevice", name, where)

    def _call(self, function: str, name: str, value: Any) -> None:
        capi.call(function, (capi.POINTER, self.handle), (c.c_char_p, name.encode()), (capi.POINTER, value))

    def _value(self, where: str, array: Any, kind: int) -> Any:
        """A tensor like ``array``; what lies on the card has no values."""
        capi.kept.append(array)
        dims = (c.c_int64 * max(1, array.ndim))(*array.shape)
        shape = ((c.POINTER(c.c_int64), dims), (c.c_size_t, array.ndim), (c.c_int, kind))
        if where == "session":
            return capi.made("CreateTensorAsOrtValue", (capi.POINTER, self.session.arena_of("Cuda")), *shape)
        address, memory = array.ctypes.data, capi.memory_info(False)
        if where == "caller":
            address, memory = card_memory(array.nbytes), memory_of_card()
        data = ((capi.POINTER, memory), (capi.POINTER, address), (c.c_size_t, array.nbytes))
        return capi.made("CreateTensorWithDataAsOrtValue", *data, *shape)


def outputs_of(model: str, feeds: dict[str, Any]) -> dict[str, Any]:
    """The outputs that a session on the CPU gives: their shapes and types are wanted."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


def memory_of_card() -> Any:
    """Memory of the first card, as ONNX Runtime describes it."""
    return capi.made("CreateMemoryInfo", (c.c_char_p, b"Cuda"), (c.c_int, 0), (c.c_int, 0), (c.c_int, 0))


def card_memory(size: int) -> int:
    """The address of so many bytes of the card."""
    address = c.c_void_p()
    assert c.CDLL(None).cudaMalloc(c.byref(address), c.c_size_t(max(1, size))) == 0
    return address.value or 0


def stream() -> int:
    """A stream of the caller's."""
    made = c.c_void_p()
    assert c.CDLL(None).cudaStreamCreate(c.byref(made)) == 0
    return made.value or 0


def register_arena(environment: Any, configuration: dict[str, int]) -> None:
    """Give the environment an arena of the card."""
    keys = (c.c_char_p * len(configuration))(*(key.encode() for key in configuration))
    values = (c.c_size_t * len(configuration))(*configuration.values())
    arena = capi.made(
        "CreateArenaCfgV2", (_TEXTS, keys), (c.POINTER(c.c_size_t), values), (c.c_size_t, len(configuration))
    )
    capi.call(
        "CreateAndRegisterAllocatorV2", (capi.POINTER, environment), (c.c_char_p, b"CUDAExecutionProvider"),
        (capi.POINTER, memory_of_card()), (capi.POINTER, arena), (_TEXTS, None), (_TEXTS, None), (c.c_size_t, 0),
    )  # fmt: skip


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
    if "environment" in job:
        register_arena(environment, job["environment"])
    sessions: list[CudaSession] = []
    told: list[dict[str, Any]] = []
    bindings: list[Binding] = []
    for asked in job["sessions"]:
        sessions.append(CudaSession(Path(asked["model"]), environment, job))
        if "binding" in job:
            bindings.append(Binding(sessions[-1], asked["model"], **job["binding"]))
        told.append({"load": statistics(arenas(sessions[-1])), "runs": []})
    loaded = driver()
    values = job.get("values", {})
    for turn in range(max(len(asked["runs"]) for asked in job["sessions"])):
        for number, (asked, session, notes) in enumerate(zip(job["sessions"], sessions, told, strict=True)):
            if turn >= len(asked["runs"]):
                continue
            shapes = asked["runs"][turn]
            feeds = {
                name: feed(shapes[name], np.dtype(dtype), values.get(name))
                for name, (_, dtype) in session.inputs.items()
            }
            if bindings:
                bindings[number].run(feeds, job.get("run"))
            else:
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
