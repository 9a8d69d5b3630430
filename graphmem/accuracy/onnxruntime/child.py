"""The measuring process of an ONNX session: one case in the installed onnxruntime, on the CPU.

``python -m graphmem.accuracy.onnxruntime.child`` reads a case as JSON from stdin and prints one line of JSON, as
:mod:`graphmem.accuracy.child` does for PyTorch on a card. A process measures one case: an environment is for ever.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from graphmem.accuracy.case import Case
from graphmem.accuracy.onnxruntime import capi
from graphmem.accuracy.onnxruntime.session import CpuSession
from graphmem.accuracy.record import OK, ONNXRUNTIME_CPU, Machine
from graphmem.errors import GraphmemError, UsageError
from graphmem.graph.asked import Asked
from graphmem.graph.model import Graph
from graphmem.runtimes.onnxruntime.options import Options, parse_options
from graphmem.sources.onnx_file import read_onnx

_CPUINFO = Path("/proc/cpuinfo")


def run_case(case: Case) -> dict[str, object]:
    """Measure one case: the arena's peaks, and the arena after every run. Raises what goes wrong."""
    options = options_of(case)
    graphs = runs_of(case)
    environment = capi.environment()
    settings = options.session
    session = CpuSession(
        Path(case.model),
        environment,
        level=options.level,
        threads=settings.intra_op_num_threads,
        memory_pattern=settings.enable_mem_pattern,
    )
    arena = session.arena()
    seen = []
    for graph in graphs:
        values = session.run({name: graph.tensors[name].shape for name in graph.inputs})
        values.release()
        seen.append(capi.statistics(arena))
    versions = {"onnxruntime": capi.library_version(), "graphmem": version("graphmem")}
    return {
        "status": OK,
        "machine": asdict(Machine.of_cpu(ONNXRUNTIME_CPU, cpu_name(), versions)),
        "measured": {
            "requested_bytes": None,
            "allocated_bytes": seen[-1]["MaxInUse"],
            "reserved_bytes": seen[-1]["TotalAllocated"],
            "retries": 0,
            "device": None,
            "iterations": [_iteration(stats) for stats in seen],
        },
    }


def _iteration(stats: dict[str, int]) -> dict[str, int]:
    return {
        "allocated_peak_bytes": stats["MaxInUse"],
        "reserved_peak_bytes": stats["TotalAllocated"],
        "in_use_bytes": stats["InUse"],
        "allocations": stats["NumAllocs"],
        "extensions": stats["NumArenaExtensions"],
    }


def runs_of(case: Case) -> list[Graph]:
    """The graph of every run, its inputs bound to their shapes; nothing is optimized."""
    model = read_onnx(case.model).model_of(Asked(case.batch), case.shapes or None)
    (graphs,) = model.sessions
    return list(graphs) * (case.iterations if len(graphs) == 1 else 1)


def options_of(case: Case) -> Options:
    """The session's options. Raises :class:`UsageError` for those that only a prediction knows, and for other
    providers."""
    options = parse_options(case.alloc_conf)
    plain = Options(level=options.level)
    session = type(plain.session)(
        provider="cpu",
        enable_mem_pattern=options.session.enable_mem_pattern,
        intra_op_num_threads=options.session.intra_op_num_threads,
    )
    if options != Options(level=options.level, session=session):
        raise UsageError(
            "a measured ONNX session runs on the CPU and takes provider:cpu, graph_optimization_level, "
            f"enable_mem_pattern and intra_op_num_threads, not {case.alloc_conf!r}"
        )
    return options


def cpu_name() -> str:
    """The kind of CPU: ONNX Runtime lays out convolutions by the width of its vectors."""
    try:
        flags = set(_CPUINFO.read_text(encoding="utf-8").split())
    except OSError:
        flags = set()
    width = next((words for flag, words in (("avx512f", ", AVX-512"), ("avx2", ", AVX2")) if flag in flags), "")
    return f"{platform.machine()}{width}"


def main() -> None:
    """Read ``{"case"}`` from stdin and print the answer as the last line."""
    case = Case.from_json(json.load(sys.stdin)["case"])
    try:
        answer = run_case(case)
    except (capi.OrtError, GraphmemError) as error:
        sys.exit(" ".join(str(error).split()))
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the environment's destructor would call back into Python


if __name__ == "__main__":
    main()
