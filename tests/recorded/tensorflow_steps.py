"""Training steps of Keras models, run by TensorFlow's CUDA build on the stub driver: ``tensorflow/steps.jsonl``.

GRAPHMEM_TENSORFLOW_PYTHON names the interpreter of an environment with ``tensorflow[and-cuda]``, GRAPHMEM_STUB_DRIVER
a stub that was built for it (tests/oracles/stub_cuda). ``record`` runs the named cases anew, each in a process of its
own; ``table`` shows every recorded peak beside the prediction. Kernels run one after another in an order that varies
a little between runs (the executor's threads): peaks of one program differ by up to 20 KB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import places
from tests.recorded import stub
from tests.recorded.case import Documents

FILE = places.GOLDEN / "tensorflow" / "steps.jsonl"
MODELS = Path(__file__).parent / "cases" / "keras_steps" / "models.py"
STEPS = 3
_PROGRAM = places.ROOT / "tests" / "oracles" / "tensorflow" / "record_steps.py"
#: The card that the stub stands for.
CARD, TOTAL_MIB = "H200-141GB", 143771


@dataclass(frozen=True)
class Case:
    """``model``: a function of :data:`MODELS`; ``memory`` as of ``record_steps.py``; ``options`` are graphmem's for the
    same. Those ``kept_back`` were recorded before the rules were written and looked at after the last."""

    model: str
    memory: str = "memory_growth"
    options: str = "allow_growth:true"
    environment: Mapping[str, str] = field(default_factory=dict)
    kept_back: bool = False


_OPEN = (
    "mlp", "mlp_eager", "mlp_sgd", "mlp_mixed", "mlp_xla", "mlp_wide", "cnn", "cnn_bfloat16", "cnn_xla", "resnet",
    "resnet_sgd", "resnet50", "lstm", "bidirectional", "simple_rnn", "attention", "attention_xla", "decoder",
)  # fmt: skip
_KEPT_BACK = (
    "autoencoder", "two_towers", "mobilenet", "unet", "conv1d", "lstm_tagger", "vit", "attention_mixed",
)  # fmt: skip
CASES = {
    **{name: Case(name) for name in _OPEN},
    **{name: Case(name, kept_back=True) for name in _KEPT_BACK},
    "mlp_at_once": Case("mlp", "whole_limit", ""),
    "cnn_limited": Case("cnn", "memory_limit=1024", "memory_limit:1024"),
    "cnn_async": Case("cnn", "cuda_malloc_async", "", {"TF_GPU_ALLOCATOR": "cuda_malloc_async"}),
}


def recorded() -> Documents:
    """What was recorded, by case."""
    if not FILE.exists():
        return {}
    rows = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return {row["case"]: row for row in rows}


class _Kind:
    def record(self, arguments: list[str]) -> int:
        found = recorded()
        for name in _named(arguments):
            row = _run(CASES[name])
            if row is None:
                print(f"{name}: failed", file=sys.stderr)
                continue
            found[name] = {"case": name, **row}
            print(name, row["steps"][-1]["peak"], row["steady"], flush=True)
            lines = [json.dumps(found[known], separators=(",", ":")) for known in CASES if known in found]
            FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return 0

    def table(self, arguments: list[str]) -> int:
        raise NotImplementedError

    differ = table


def _named(parts: list[str]) -> list[str]:
    return [name for name in CASES if not parts or any(part in name for part in parts)]


def _run(case: Case) -> dict[str, Any] | None:
    python = Path(os.environ["GRAPHMEM_TENSORFLOW_PYTHON"])
    [site] = python.parents[1].glob("lib/python3.*/site-packages")
    libraries = [stub.driver().parent / "cudalib", *site.glob("nvidia/*/lib")]
    environment = {
        **os.environ,
        **stub.REAL_CUDNN,
        "FAKE_CUDNN_PATH": str(site / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"),
        "FAKE_CUDA_TOTAL_MIB": str(TOTAL_MIB),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "LD_PRELOAD": str(stub.driver()),
        **case.environment,
    }
    command = [str(python), str(_PROGRAM), f"{MODELS}:{case.model}", str(STEPS), case.memory]
    # Nobody may wait for what a failing run prints without end.
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=1500, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    rows = [line for line in done.stdout.decode().splitlines() if line.startswith("{")]
    return json.loads(rows[-1]) if rows else None


KIND = _Kind()
