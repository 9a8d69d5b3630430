"""The package under another installed PyTorch: ``python -m tests.recorded versions differ PYTHON [VERSION]``.

PYTHON is the interpreter of an environment with the package and the torch to try (CPU or CUDA build); VERSION the one
to predict, by default the installed one. The modules of :data:`MODULES` are analysed in both environments; what this
one predicts for the same version is printed beside it. Exits 1 if one cannot be analysed.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests import places
from tests.recorded import stub

MODULES = {
    "linear": "nn.Linear(64, 64), torch.zeros(4, 8, 64)",
    "embedding": "nn.Embedding(100, 64), torch.zeros(4, 8, dtype=torch.long)",
    "attention": "nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.zeros(4, 8, 64)",
    "convolution": "nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.zeros(2, 3, 16, 16)",
    "rms_norm": "nn.RMSNorm(64), torch.zeros(4, 8, 64)",
    "group_norm": "nn.GroupNorm(1, 3), torch.zeros(2, 3, 16, 16)",
    "lstm": "nn.Sequential(nn.LSTM(64, 64, batch_first=True)), torch.zeros(4, 8, 64)",
    "activations": "nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Mish(), nn.Dropout(0.1)), torch.zeros(4, 8, 64)",
}

_CHILD = """
import json, sys
import torch
from torch import nn
import graphmem
from graphmem.base import versions

steps = {"training": graphmem.Training(), "inference": graphmem.Inference()}
if versions.installed_version() >= versions.COMPILER_FOLLOWED_SINCE:
    steps["compiled"] = graphmem.Training(compile="default")
for name, text in json.loads(sys.argv[1]).items():
    for kind, step in steps.items():
        if kind == "compiled" and name != "linear":
            continue
        try:
            options = {"training": step, "device": "h100-80gb", "torch_version": sys.argv[2]}
            estimate = graphmem.analyze(lambda: eval(text), **options)
            print(json.dumps([f"{name} {kind}", estimate.peak.allocated_bytes]))
        except graphmem.GraphmemError as error:
            print(json.dumps([f"{name} {kind}", str(error)]))
"""


def peaks(python: str, version: str) -> dict[str, int | str]:
    """Peak allocated bytes by module and step, or the error, as the interpreter ``python`` predicts them."""
    command = [python, "-c", _CHILD, json.dumps(MODULES), version]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900, cwd=places.ROOT).stdout
    return dict(json.loads(line) for line in out.splitlines())


class _Versions:
    """Recordings of older versions: record with ``--python`` of the environment that has the version."""

    def record(self, arguments: list[str]) -> int:
        """Record the runs and sequences that are there of the version that the interpreter has."""
        from tests.recorded.allocator.kind import sequences
        from tests.recorded.steps.kind import Runs

        version = _version_of(str(stub.python()))
        runs = Runs(places.PYTORCH_VERSIONS / version / "steps").record(arguments)
        return sequences(places.PYTORCH_VERSIONS / version / "allocator").record(arguments) or runs

    def table(self, arguments: list[str]) -> int:
        """How close predictions of the installed version's own runs come, compiled ones too, by parts of their
        names."""
        from tests.recorded.steps.kind import Runs

        installed = places.installed_torch()
        if installed is None or not (places.of_torch(installed) / "steps").is_dir():
            print(f"no steps were recorded of PyTorch {installed}")
            return 0
        folders = (places.of_torch(installed) / kind for kind in ("steps", "compiled"))
        return max(Runs(folder).table(arguments) for folder in folders if folder.is_dir())

    def differ(self, arguments: list[str]) -> int:
        """``PYTHON [VERSION]``: the package there and here; exits 1 if one of the modules cannot be analysed."""
        if not arguments:
            raise SystemExit("versions differ PYTHON [VERSION]: the interpreter of another environment with graphmem")
        python = arguments[0]
        version = arguments[1] if len(arguments) > 1 else _version_of(python)
        theirs, ours = peaks(python, version), peaks(sys.executable, version)
        print(f"{'torch ' + version:24s} {'there':>14s} {'here':>14s}")
        for name, peak in theirs.items():
            print(f"{name:24s} {peak!s:>14s} {ours.get(name, '-')!s:>14s}")
        return int(any(isinstance(peak, str) for peak in theirs.values()))


def _version_of(python: str) -> str:
    command = [python, "-c", "import torch; print('.'.join(torch.__version__.split('.')[:2]))"]
    return subprocess.check_output(command, text=True).strip()


KIND = _Versions()
