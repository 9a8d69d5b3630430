"""Steps of JAX programs, run by JAX's real CUDA client on the stub driver: ``jax/steps.jsonl``.

GRAPHMEM_JAX_PYTHON names the interpreter of an environment with ``jax[cuda13]``, optax and flax, GRAPHMEM_JAX_STUB a
stub that was built for it (``make PYTHON=... BUILD=...`` in tests/oracles/stub_cuda). ``record`` runs the named cases
anew, each in a process of its own, and keeps beside the figures what a prediction starts from: the program as it was
followed, with XLA's assignments (``jax/followed/NAME.json.gz``), so that ``table`` and the tests need no JAX. ``record
--follow`` makes those alone. Kernels are not tried out (``--xla_gpu_autotune_level=0``), but
for ``record --tuned``: what the same takes where they are (level 3: results are not checked, as the stub's have no
values; its clock makes all kernels equally fast), in ``jax/tuned.jsonl``. Sharded steps run in a process a card, which
see each other and a NCCL that moves nothing; the figures are those of the first.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from graphmem.allocators.tensorflow_bfc import TensorFlowBFC
from graphmem.devices import device_named
from graphmem.replay import replay
from graphmem.runtimes.jax.options import JaxOptions
from graphmem.runtimes.jax.program import read_program, trace_of
from graphmem.runtimes.jax.target import target_config
from tests import places
from tests.recorded import stub
from tests.recorded.case import Documents

FILE = places.GOLDEN / "jax" / "steps.jsonl"
TUNED = FILE.parent / "tuned.jsonl"
FOLLOWED = FILE.parent / "followed"
STEPS, SHARDED = (Path(__file__).parent / "cases" / "jax_steps" / name for name in ("steps.py", "sharded.py"))
CALLS = 3
#: The card that the stub stands for.
CARD, TOTAL_MIB = "H200-141GB", 143156
_PROGRAM = places.ROOT / "tests" / "oracles" / "jax" / "record_steps.py"
#: Figures that are compared, by the names of ``Device.memory_stats``.
FIGURES = ("bytes_in_use", "peak_bytes_in_use", "largest_alloc_size", "pool_bytes", "num_allocs")


def recorded(file: Path = FILE) -> Documents:
    """What was recorded, by case."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["case"]: row for row in rows}


def cases() -> list[str]:
    """The names of all cases, in the order of their files, which import JAX."""
    listed = (file.read_text(encoding="utf-8").partition("for function in (")[2] for file in (STEPS, SHARDED))
    return [name for text in listed for name in re.findall(r"\w+", text.partition(")")[0])]


@cache
def sharded() -> Mapping[str, int]:
    """The sharded cases, and how many cards each wants."""
    text = SHARDED.read_text(encoding="utf-8").partition("\nCARDS = ")[2]
    found: dict[str, int] = ast.literal_eval(text[: text.index("}") + 1])
    return found


def _file(name: str) -> Path:
    return SHARDED if name in sharded() else STEPS


def followed(name: str) -> dict[str, Any]:
    """The program of a case as it was followed."""
    found: dict[str, Any] = json.loads(gzip.decompress((FOLLOWED / f"{name}.json.gz").read_bytes()))
    return found


@cache
def predicted(name: str) -> Mapping[str, int]:
    """The figures of the allocator at the end of a case."""
    allocator = TensorFlowBFC(recorded()[name]["rows"][0]["bytes_limit"], JaxOptions(preallocate=False).bfc())
    replay(trace_of(read_program(followed(name)), name), allocator)
    return allocator.stats()


def differing(name: str) -> dict[str, tuple[int, int]]:
    """Figures that are not as recorded: (recorded, predicted)."""
    last = recorded()[name]["rows"][-1]
    found = predicted(name)
    return {figure: (last[figure], found[figure]) for figure in FIGURES if last[figure] != found[figure]}


def tried() -> tuple[list[int], list[int]]:
    """By how many bytes the peak, and the pool, of steps are larger where kernels are tried out for them; in order."""
    found = [(row["rows"][-1], recorded()[name]["rows"][-1]) for name, row in recorded(TUNED).items()]
    used, grown = (
        sorted(tuned[figure] - plain[figure] for tuned, plain in found)
        for figure in ("peak_bytes_in_use", "pool_bytes")
    )
    return used, grown


class _Kind:
    def record(self, arguments: list[str]) -> int:
        for name in _named([one for one in arguments if not one.startswith("--")]):
            tuned = "--tuned" in arguments
            if not tuned:
                _follow(name)
            if "--follow" in arguments:
                continue
            row = _run(name, level=3 if tuned else 0)
            if row is None:
                print(f"{name}: failed", file=sys.stderr)
                continue
            file = TUNED if tuned else FILE
            _write(file, {**recorded(file), name: row})
            print(name, row["rows"][-1]["peak_bytes_in_use"], flush=True)
        return 0

    def table(self, arguments: list[str]) -> int:
        for name in recorded():
            if not arguments or any(part in name for part in arguments):
                print(_row(name), flush=True)
        return 0

    differ = table


def _row(name: str) -> str:
    last, differs = recorded()[name]["rows"][-1], differing(name)
    words = ", ".join(f"{figure} {found:,}" for figure, (_, found) in differs.items())
    return (
        f"{name:18} peak {last['peak_bytes_in_use']:>13,} pool {last['pool_bytes']:>13,} "
        f"{f'differs: {words}' if differs else 'equal'}"
    )


def _named(parts: list[str]) -> list[str]:
    return [name for name in cases() if not parts or any(part in name for part in parts)]


def _write(file: Path, found: Documents) -> None:
    lines = [json.dumps(found[name], separators=(",", ":")) for name in cases() if name in found]
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _follow(name: str) -> None:
    """Let graphmem follow the program of a case."""
    asked = {
        "text": f"{_file(name)}:{name}", "shapes": None, "batch": None, "seq_len": None, "iterations": CALLS,
        "cards": sharded().get(name, 1), "target": target_config(device_named(CARD)),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "step.json")
        request.write_text(json.dumps(asked))
        command = [os.environ["GRAPHMEM_JAX_PYTHON"], "-m", "graphmem.sources.jax_program", str(request), str(result)]
        environment = {**os.environ, "PYTHONPATH": str(places.ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
        document = json.loads(result.read_text())
    if "error" in document:
        raise SystemExit(f"{name}: {document['error']}")
    FOLLOWED.mkdir(parents=True, exist_ok=True)
    data = json.dumps(document, separators=(",", ":")).encode()
    (FOLLOWED / f"{name}.json.gz").write_bytes(gzip.compress(data, 9, mtime=0))


def _run(name: str, *, level: int) -> dict[str, Any] | None:
    python, build = os.environ["GRAPHMEM_JAX_PYTHON"], Path(os.environ["GRAPHMEM_JAX_STUB"])
    loaded = [build / "libfakecuda.so", *sorted((build / "xlalib").iterdir())]
    environment = {
        **os.environ,
        "FAKE_CUDNN_DEVPROP": str(stub.CUDNN_CARD),
        "FAKE_CUDA_NAME": "NVIDIA H200",
        "FAKE_CUDA_TOTAL_MIB": str(TOTAL_MIB),
        "FAKE_CUDA_SENT": "1",
        "LD_LIBRARY_PATH": str(build / "cudalib"),
        "LD_PRELOAD": os.pathsep.join(map(str, loaded)),
        "XLA_FLAGS": f"--xla_gpu_autotune_level={level}",
    }
    cards, port = sharded().get(name, 1), _free_port()
    command = [python, str(_PROGRAM), str(_file(name)), name, str(CALLS)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(cards), str(port)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for rank in range(cards)
    ]  # fmt: skip
    said = [process.communicate(timeout=1500)[0].decode() for process in started]
    rows = [line for line in said[0].splitlines() if line.startswith("{")]
    return json.loads(rows[-1]) if rows else None


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


KIND = _Kind()
