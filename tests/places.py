"""Where things lie: the checkout and the recordings that tests compare with."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path

Version = tuple[int, int]


def installed_torch() -> Version | None:
    """(major, minor) of the installed PyTorch, None where there is none."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None


def nearest(installed: Version | None, recorded: Sequence[Version]) -> Version:
    """The newest recorded version that is not newer than the installed one: what it is compared with. Without an
    installed one the newest; the oldest where all are newer."""
    return max((version for version in recorded if installed is None or version <= installed), default=min(recorded))


#: The checkout.
ROOT = Path(__file__).resolve().parent.parent
#: Recordings of real programs, by what was recorded.
GOLDEN = ROOT / "tests" / "golden"
#: Of PyTorch's CUDA builds, on the stub driver: a folder a version, in it one a kind.
PYTORCH_VERSIONS = GOLDEN / "pytorch"
RECORDED: tuple[Version, ...] = tuple(
    sorted(
        (int(found[1]), int(found[2]))
        for folder in PYTORCH_VERSIONS.iterdir()
        if (found := re.fullmatch(r"(\d+)\.(\d+)", folder.name))
    )
)


def of_torch(version: Version) -> Path:
    """The recordings of one version of PyTorch."""
    return PYTORCH_VERSIONS / ".".join(map(str, version))


#: Versions of which every kind was recorded. To record a newer one, copy the folder of the one before and record anew.
WHOLE: tuple[Version, ...] = tuple(version for version in RECORDED if (of_torch(version) / "functions").is_dir())
#: The recordings that the installed PyTorch is compared with, and their version.
PYTORCH_VERSION: Version = nearest(installed_torch(), WHOLE)
PYTORCH = of_torch(PYTORCH_VERSION)
#: Of ONNX Runtime's CPU build.
ONNXRUNTIME = GOLDEN / "onnxruntime"
#: Of TensorFlow's CPU build.
TENSORFLOW = GOLDEN / "tensorflow"
