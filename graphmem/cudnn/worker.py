"""The process that loads cuDNN and answers: ``python -m graphmem.cudnn.worker``, a line of JSON in, one out.

cuDNN gets a process of its own because it may not mix with another copy that PyTorch has loaded, nor may the stand-in
for the driver reach anybody else, and an error inside the library shall not end the analysis.

The first line names what to load: ``library``, ``device`` (cuDNN's description of it) and ``search`` (folders that may
hold ``nvidia`` wheels). The answer holds ``version``, ``cudart``, ``path`` and ``driver``, or ``error``.
Every further line is a convolution with ``mode`` (with ``modes``: as TensorFlow lists plans), whose answer is
``workspaces``, or a recurrent
``network`` with ``training``, whose answer is ``spaces`` (work, reserve); or ``error``.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphmem.cudnn.descriptors import CudnnError, Descriptor, Descriptors, Kind
from graphmem.cudnn.driver import load_driver
from graphmem.cudnn.plans import Convolution, tried_out, workspaces
from graphmem.cudnn.recurrent import Network, spaces

#: cuDNN 9.8 is the first that plans for a described device (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR).
OLDEST = 90800
#: The parts that look up functions of the driver, or (since some version after 9.20, by 9.28) are linked with it.
_ASKS_DRIVER = ("libcudnn_graph.so.9", "libcudnn_engines_runtime_compiled.so.9", "libcudnn_engines_tensor_ir.so.9")
#: Loaded by cuDNN on its own when an engine needs them; without them it leaves such engines out in silence.
_NEEDED = {"libcublasLt.so": "nvidia-cublas", "libnvrtc.so": "nvidia-cuda-nvrtc"}


class LoadError(Exception):
    """The library cannot be asked; the text is the reason."""


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is no answer
    request = json.loads(sys.stdin.readline())
    try:
        library, about = load(request["library"], [Path(folder) for folder in request["search"]])
        descriptors = Descriptors(library)
        device = describe(descriptors, request["device"])
    except (LoadError, CudnnError) as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return 1
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        if "network" in question:
            found = recurrent_answer(library, about["version"], request["device"], question)
        else:
            found = answer(descriptors, device, question)
        print(json.dumps(found), file=answers)
    return 0


def answer(descriptors: Descriptors, device: Descriptor, question: dict[str, Any]) -> dict[str, Any]:
    """The workspaces of a convolution's plans in bytes, or cuDNN's reason to make none."""
    modes, mode = question.pop("modes", None), question.pop("mode", None)
    try:
        if modes is not None:
            return {"workspaces": tried_out(descriptors, device, Convolution(**question), modes)}
        return {"workspaces": workspaces(descriptors, device, Convolution(**question), mode)}
    except CudnnError as error:
        return {"error": str(error)}
    finally:
        descriptors.release()


def recurrent_answer(
    library: ctypes.CDLL, version: int, device: dict[str, Any], question: dict[str, Any]
) -> dict[str, Any]:
    """Work and reserve space of a recurrent network in bytes, or the reason why cuDNN gives none."""
    network = question["network"]
    try:
        asked = Network(**{**network, "lengths": tuple(network["lengths"])})
        return {"spaces": spaces(library, version, device, asked, question["training"])}
    except CudnnError as error:
        return {"error": str(error)}


def load(name: str, search: list[Path]) -> tuple[ctypes.CDLL, dict[str, Any]]:
    """The library by its path, or by the name that the loader knows, and its own account of itself."""
    try:
        library = ctypes.CDLL(name)
        library.cudnnGetVersion.restype = ctypes.c_size_t
        version = int(library.cudnnGetVersion())
    except (OSError, AttributeError) as error:
        raise LoadError(f"it cannot be loaded: {error}") from None
    if version < OLDEST:
        raise LoadError(f"it is cuDNN {version_text(version)}, and plans without a device need 9.8 or later")
    path = Path(loaded_path("libcudnn.so") or name)
    library.cudnnGetCudartVersion.restype = ctypes.c_size_t
    cudart = int(library.cudnnGetCudartVersion())
    beside = path.resolve().parent
    driver = load_driver([file for name in _ASKS_DRIVER for file in sorted(beside.glob(name))])
    major = cudart // 1000
    missing = {
        f"{needed}.{major}": package
        for needed, package in _NEEDED.items()
        if not _loads(f"{needed}.{major}", path.resolve().parent, search)
    }
    if missing:
        raise LoadError(
            f"it needs {' and '.join(missing)}, neither beside it nor known to the loader; install "
            f"{' and '.join(missing.values())} for CUDA {major}, or graphmem[cudnn], which brings them"
        )
    return library, {"version": version, "cudart": cudart, "path": str(path), "driver": driver}


def version_text(version: int) -> str:
    """``9.20.0`` of 92000 (``CUDNN_VERSION`` of cudnn_version_v9.h; before version 9 of 1000s)."""
    major, rest = divmod(version, 10000) if version >= 90000 else divmod(version, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def loaded_path(name: str) -> str | None:
    """Where a library was loaded from."""
    found = re.findall(rf"\s(/\S*/{re.escape(name)}[.0-9]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return found[0] if found else None


def _loads(name: str, beside: Path, search: list[Path]) -> bool:
    for place in (name, *_places(name, beside, search)):
        try:
            ctypes.CDLL(place)
            return True
        except OSError:
            continue
    return False


def _places(name: str, beside: Path, search: list[Path]) -> Iterator[str]:
    """Beside cuDNN, and where NVIDIA's wheels put it (``nvidia/<part>/lib``)."""
    yield str(beside / name)
    for folder in (beside.parents[1], *(site / "nvidia" for site in search)):
        yield from map(str, sorted(folder.glob(f"*/lib/{name}")))


def describe(descriptors: Descriptors, device: dict[str, object]) -> Descriptor:
    """cuDNN's descriptor of a device, which stays."""
    described = descriptors.make(Kind.DEVICE)
    descriptors.set_text(described, 2702, json.dumps(device))
    descriptors.finalize(described)
    descriptors.mark()
    return described


if __name__ == "__main__":
    sys.exit(main())
