"""Starting Python on the stub of the CUDA driver (``tests/oracles/stub_cuda``).

GRAPHMEM_CUDA_PYTHON names the interpreter of an environment with a CUDA build of PyTorch, GRAPHMEM_STUB_DRIVER the
built ``libfakecuda.so``; without them those that ``tests/oracles/stub_cuda/setup.sh`` makes are used.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import places

FOLDER = places.ROOT / "tests" / "oracles" / "stub_cuda"
#: What cuDNN is told of the card where it plans for real: an H200, from public figures.
CUDNN_CARD = FOLDER / "h200.json"
#: The real cuDNN chooses plans and says what they take; without it plans take nothing.
REAL_CUDNN = {"FAKE_CUDNN_REAL": "1", "FAKE_CUDNN_DEVPROP": str(CUDNN_CARD)}


def python() -> Path:
    """The interpreter with a CUDA build of PyTorch."""
    return Path(os.environ.get("GRAPHMEM_CUDA_PYTHON") or FOLDER / "venv" / "bin" / "python")


def driver() -> Path:
    """The stub that is loaded before it."""
    return Path(os.environ.get("GRAPHMEM_STUB_DRIVER") or FOLDER / "build" / "libfakecuda.so")


def is_here() -> bool:
    """Whether this process runs on the stub."""
    return hasattr(ctypes.CDLL(None), "fake_cuda_used")


def counter(name: str) -> int | None:
    """A figure of the stub (``used``, ``peak``, ``launches``, ``base`` ...); None on a real card."""
    function = getattr(ctypes.CDLL(None), f"fake_cuda_{name}", None)
    if function is None:
        return None
    function.restype = ctypes.c_ulonglong
    return int(function())


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment of a process on the stub. Triton finds the driver by path and compiles in the process itself."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTORCH_", "FAKE_CU"))}
    libraries = str(driver().parent / "cudalib")
    triton = {
        "TRITON_LIBCUDA_PATH": libraries,
        "LD_LIBRARY_PATH": libraries,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    sent = {"FAKE_CUDA_SENT": "1"} if os.environ.get("GRAPHMEM_TRUE_VALUES") else {}
    return {**kept, **triton, **sent, "HF_HUB_OFFLINE": "1", "LD_PRELOAD": str(driver()), **extra}


def run(arguments: Sequence[str], extra: Mapping[str, str] = {}) -> int:
    """``python ARGUMENTS`` on the stub, in the checkout; its exit status.

    Raises ``FileNotFoundError`` when the interpreter or the stub is not there.
    """
    for path in (python(), driver()):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; tests/oracles/stub_cuda/setup.sh makes it")
    return subprocess.run([str(python()), *arguments], env=environment(extra), cwd=places.ROOT, check=False).returncode
