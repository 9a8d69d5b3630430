"""A TensorFlow process on the CPU whose memory comes from its own BFC allocator, with every request written down."""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

from record_bfc import build

#: One thread and no oneDNN, so that the order of requests repeats; the CPU allocator becomes the BFC one.
ENVIRONMENT = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_CPU_BFC_MEM_LIMIT_IN_MB": "65536",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
}


class Recording:
    """Create it before TensorFlow allocates anything; ``events`` and ``marks`` are the recording so far."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        import tensorflow  # noqa: F401 - its library must be loaded before the hook

        self._folder = tempfile.TemporaryDirectory()
        library = build("bfc_hook.cc", Path(self._folder.name) / "hook.so", "-shared", "-fPIC", "-ldl")
        self._hook = ctypes.CDLL(str(library))
        if self._hook.hook_install() != 3:
            raise SystemExit("this TensorFlow keeps its allocator elsewhere; look at bfc_hook.cc")
        self.marks: list[list[Any]] = []

    def mark(self, text: str) -> None:
        """Note a moment and the statistics at it."""
        values = (ctypes.c_longlong * 6)()
        self._hook.hook_stats(values)
        self._hook.hook_mark(text.encode())
        self.marks.append([text, *values])

    def events(self) -> list[list[Any]]:
        """``[a, id, requested, chunk, address, operator]``, ``[f, id, operator]`` and ``[m, text]``, in order."""
        path = Path(self._folder.name) / "events"
        self._hook.hook_dump(str(path).encode())
        found: list[list[Any]] = []
        living: dict[int, int] = {}
        for line in path.read_text().splitlines():
            kind, requested, chunk, address, _, name = line.split("\t")
            if kind == "m":
                found.append(["m", name])
            elif kind == "a":
                living[int(address)] = len(found)
                found.append(["a", len(found), int(requested), int(chunk), int(address), name])
            else:
                found.append(["f", living.pop(int(address), -1), name])
        return found
