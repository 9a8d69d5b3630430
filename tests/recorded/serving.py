"""Starts of vLLM 0.32.0: ``vllm/runs.json.gz``, one entry a run, with its case (settings, configuration, environment)
and the engine's own figures; of other versions: ``vllm/versions.json.gz``; of SGLang: ``sglang/runs.json.gz``.

GRAPHMEM_VLLM_PYTHON and GRAPHMEM_SGLANG_PYTHON name the interpreters of their environments, GRAPHMEM_STUB_DRIVER the
stub. ``record NAME ...`` starts the engine with those cases again, ``table`` shows every recorded run beside the
prediction.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from graphmem.devices import Device, device_named
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.serving.vllm.engine import VLLM
from tests import places

FILE = places.GOLDEN / "vllm" / "runs.json.gz"
#: Runs of what those do not have: adapters, pipelines, experts shared out, drafts.
FAMILIES = places.GOLDEN / "vllm" / "families.json.gz"
#: Runs of models that take images, with the files of their processors.
ENCODERS = places.GOLDEN / "vllm" / "encoders.json.gz"
#: Runs of models that the engine runs by transformers' code, and of some that it has code for and graphmem has not.
CAPTURED = places.GOLDEN / "vllm" / "captured.json.gz"
#: Runs of other versions, each under its version's name, which the installed engine of that version repeats.
VERSIONS = places.GOLDEN / "vllm" / "versions.json.gz"
#: Runs of SGLang's scheduler.
SGLANG = places.GOLDEN / "sglang" / "runs.json.gz"
#: Engine -> (the variable that names its interpreter, the program that starts it).
_ENGINES = {
    name: (f"GRAPHMEM_{name.upper()}_PYTHON", places.ROOT / "tests" / "oracles" / name / "record_run.py")
    for name in ("vllm", "sglang")
}
#: The card of a compute capability that the stub stood for.
_CARDS = {
    "75": "T4", "80": "A100-80GB", "86": "RTX-3090", "89": "RTX-4090", "90": "H100", "100": "B200", "120": "RTX-5090"
}  # fmt: skip
_OPTIONS = (
    "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "kv_cache_dtype", "enforce_eager", "quantization", "block_size", "dtype",
)  # fmt: skip
#: Runs whose machine had not compiled their model before, as their logs say.
COLD = ("llama3-8b-graphs-srv", "pub-qwen3-32b-awq-4090-3584-cold", "pub-qwen3-32b-awq-4090-v1runner")
#: The second-level cache of the stub, whatever card it stands for.
_L2_BYTES = 52_428_800

Run = dict[str, Any]


@cache
def runs() -> dict[str, Run]:
    """All recorded runs by name."""
    return _read(FILE)


@cache
def families() -> dict[str, Run]:
    """Those of :data:`FAMILIES`. ``rank`` is the stage of the pipeline that was started, ``draft_config`` the draft
    model's configuration."""
    return _read(FAMILIES)


@cache
def encoders() -> dict[str, Run]:
    """Those of :data:`ENCODERS`. ``files`` are what lay beside the configuration, by name: how images are prepared, and
    a vocabulary of the special tokens alone."""
    return _read(ENCODERS)


@cache
def captured() -> dict[str, Run]:
    """Those of :data:`CAPTURED`."""
    return _read(CAPTURED)


@cache
def versions() -> dict[str, Run]:
    """Those of :data:`VERSIONS`. ``version`` is the engine's; ``warm``: the second of two starts is kept."""
    return _read(VERSIONS)


@cache
def sglang_runs() -> dict[str, Run]:
    """Those of :data:`SGLANG`: ``options`` are the command line, ``free`` in ``stages`` what the driver has."""
    return _read(SGLANG)


def _read(file: Path) -> dict[str, Run]:
    found: dict[str, Run] = json.loads(gzip.decompress(file.read_bytes()))
    return found


def card(run: Run) -> Device:
    """The card that the stub stood for; its board has no more than its driver gives."""
    stub = run["environment"]
    known = device_named(_CARDS[stub.get("FAKE_CUDA_CC", "90")])
    sms = int(stub.get("FAKE_CUDA_SMS", known.sm_count))
    return replace(
        known, capacity_bytes=run["total_memory"], board_bytes=run["total_memory"], sm_count=sms,
        l2_cache_bytes=_L2_BYTES, context_bytes=0, context_measured=True,
    )  # fmt: skip


def question(name: str, run: Run) -> Question:
    """What graphmem is asked of a run."""
    options = {option: run["settings"][option] for option in _OPTIONS if option in run["settings"]}
    others = {option: value for option, value in run["settings"].items() if option not in _OPTIONS}
    if "draft_config" in run:
        others["speculative_config"] = others["speculative_config"] | {"model": _draft(name)}
    path = _config(name) if "files" in run else None
    return Question(
        ServedModel(name, run["model_config"], path=path),
        card(run),
        entry="llm",
        cold=name in COLD or "cold" in run,
        alloc_conf=run["environment"].get("PYTORCH_CUDA_ALLOC_CONF", ""),
        arguments=(
            ("model_runner", run["resolved"]["model_runner"]),
            ("outside", "0"),
            ("load_format", "dummy"),
            *((option, value if isinstance(value, str) else json.dumps(value)) for option, value in others.items()),
        ),
        **options,
    )


@cache
def _config(name: str) -> Path:
    """A run's configuration in a folder with its files."""
    folder = Path(_FOLDERS.name, name)
    folder.mkdir()
    run = (families() | encoders())[name]
    for file, values in (("config.json", run["model_config"]), *run["files"].items()):
        (folder / file).write_text(json.dumps(values))
    return folder / "config.json"


@cache
def _draft(name: str) -> str:
    """A folder with the configuration of a run's draft model, as long as this process lives."""
    folder = Path(_FOLDERS.name, name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(families()[name]["draft_config"]))
    return str(folder)


_FOLDERS = tempfile.TemporaryDirectory()


def predicted(name: str) -> Served:
    """graphmem's answer to a run."""
    run = (runs() | families() | encoders() | captured())[name]
    asked = question(name, run)
    if "rank" in run:
        return VLLM().stages_of(asked)[run["rank"]]
    return engine_named("vllm").serve(asked)


class Serving:
    """The kind."""

    def record(self, arguments: list[str]) -> int:
        """Start the engine with the named cases, by default all, and write their figures anew."""
        stub = os.environ.get("GRAPHMEM_STUB_DRIVER")
        known = {
            FILE: dict(runs()), FAMILIES: dict(families()), ENCODERS: dict(encoders()), CAPTURED: dict(captured()),
            VERSIONS: dict(versions()), SGLANG: dict(sglang_runs()),
        }  # fmt: skip
        for name in arguments or [name for file in (FILE, FAMILIES, ENCODERS, CAPTURED) for name in known[file]]:
            recorded = next((recorded for recorded in known.values() if name in recorded), None)
            if recorded is None:
                raise SystemExit(f"{name!r} is none of {', '.join(one for found in known.values() for one in found)}")
            variable, program = _ENGINES["sglang" if recorded is known[SGLANG] else "vllm"]
            python = os.environ.get(variable)
            if not python or not stub:
                raise SystemExit(f"{variable} and GRAPHMEM_STUB_DRIVER say with what to record")
            answer = _started(python, stub, recorded[name], program)
            if answer is None:
                print(f"{name}: the engine did not start", file=sys.stderr)
                return 1
            recorded[name] = answer
        for file, recorded in known.items():
            file.write_bytes(gzip.compress(json.dumps(recorded, separators=(",", ":")).encode(), mtime=0))
        return 0

    def table(self, arguments: list[str]) -> int:
        """Every run: bytes and blocks, recorded and predicted."""
        for name, run in (runs() | families() | encoders() | captured()).items():
            try:
                cache = predicted(name).kv_cache
            except Exception as error:
                print(f"{name:36} {error}")
                continue
            difference = cache.available_bytes - run["available"]
            print(f"{name:36} {run['available']:>15,} {difference:>+14,} {run['blocks']:>8} {cache.blocks:>8}")
        return 0

    differ = table


def _started(python: str, stub: str, run: Run, program: Path) -> Run | None:
    with tempfile.TemporaryDirectory() as folder:
        case, out = Path(folder, "case.json"), Path(folder, "out.json")
        keys = (
            "settings", "options", "environment", "model_config", "rank", "draft_config", "cold", "files", "version",
            "warm",
        )  # fmt: skip
        case.write_text(json.dumps({key: run[key] for key in keys if key in run}))
        # Triton asks for the folder of the driver's library, which lies beside the stub.
        library = {"LD_PRELOAD": stub, "TRITON_LIBCUDA_PATH": str(Path(stub).parent / "cudalib")}
        environment = os.environ | run["environment"] | library
        environment["PYTHONPATH"] = os.pathsep.join((str(program.parent), str(program.parents[1])))
        if "warm" in run:
            caches = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
            environment |= dict.fromkeys(caches, str(Path(folder, "caches")))
        for _ in range(2 if "warm" in run else 1):
            subprocess.run([python, str(program), str(case), str(out)], env=environment, check=False)
        return json.loads(out.read_text()) if out.exists() else None


KIND = Serving()
