"""Recordings that programs of ``tests/oracles`` make, each in the environment that it names."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from tests import places

_ORACLES = places.ROOT / "tests" / "oracles"


@dataclass(frozen=True)
class Programs:
    """``commands``: by name, the arguments of Python; ``variable`` names the environment's interpreter, this one else.

    They are compared by tests alone: ``held_by``.
    """

    commands: dict[str, list[list[str]]]
    variable: str
    held_by: str

    def record(self, arguments: list[str]) -> int:
        """Run the programs of that name, by default all."""
        for name in arguments or self.commands:
            if name not in self.commands:
                raise SystemExit(f"{name!r} is none of {', '.join(self.commands)}")
            for command in self.commands[name]:
                if status := self._run(command):
                    print(f"{name}: {command[0]} ended with {status}", file=sys.stderr)
                    return status
        return 0

    def _run(self, command: list[str]) -> int:
        python = os.environ.get(self.variable) or sys.executable
        return subprocess.run([python, *command], cwd=places.ROOT, check=False).returncode

    def table(self, arguments: list[str]) -> int:
        print(f"held by tests: python -m pytest {self.held_by}")
        return 0

    differ = table


def _tensorflow(program: str, file: str) -> list[str]:
    return [str(_ORACLES / "tensorflow" / f"{program}.py"), str(places.TENSORFLOW / file)]


_KERNELS = str(_ORACLES / "onnxruntime" / "record_operators.py")
_SCRATCH = places.ROOT / "build"
_PLAIN, _BETWEEN = str(_SCRATCH / "plain.json"), str(_SCRATCH / "between.json")
ONNXRUNTIME = Programs(
    {
        "operators": [
            ["-c", f"import os; os.makedirs({str(_SCRATCH)!r}, exist_ok=True)"],
            [_KERNELS, "plain", _PLAIN],
            [_KERNELS, "between", _BETWEEN],
            [_KERNELS, "pack", _PLAIN, _BETWEEN, str(places.ONNXRUNTIME / "operators.json.gz")],
        ],
        "models": [["-m", "tests.oracles.onnxruntime.export_samples"]],
        "arena": [["-m", "tests.oracles.onnxruntime.record_arena"]],
        "sessions": [["-m", "tests.oracles.onnxruntime.record_sessions"]],
        "planner": [["-m", "tests.oracles.onnxruntime.record_planner"]],
        "exports": [
            ["-m", "tests.oracles.onnxruntime.export_models", str(_SCRATCH / "models")],
            ["-m", "tests.oracles.onnxruntime.record_exports", str(_SCRATCH / "models")],
        ],
    },
    "GRAPHMEM_ONNXRUNTIME_PYTHON",
    "tests/runtimes tests/graph/test_order.py tests/allocators/test_onnxruntime_arena_golden.py",
)
TENSORFLOW = Programs(
    {
        "allocator": [_tensorflow("record_bfc", "tf_bfc_traces.json.gz")],
        "forwarding": [_tensorflow("record_forwarding", "tf_forwarding.json")],
        "executor": [_tensorflow("record_executor", "tf_executor.json")],
        "keras": [[*_tensorflow("record_keras", "tf_train.json.gz"), "mlp", "cnn"]],
    },
    "GRAPHMEM_TENSORFLOW_PYTHON",
    "tests/runtimes tests/allocators/test_tensorflow_bfc_golden.py",
)
