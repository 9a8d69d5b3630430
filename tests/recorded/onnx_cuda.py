"""Sessions of ONNX Runtime's CUDA provider on the stub driver: ``onnxruntime/cuda/sessions.jsonl.gz``.

A line is a session: its question (``graph``, ``runs``, ``provider``, ``session``, ``values``, ``card``, ``binding``,
sessions ``beside`` it, what it ``shows``) and its ``answers``, or where it ``stops``. The graph lies beside them
without its weights (``graphs.zip``), so that a prediction needs no file of others. Initializers come from the arena in
the order of a hash map that address randomization turns over, so a process is one draw: ``answers`` are those of
several, each [in use after loading, [most in use, total] of every run].

    python -m tests.recorded onnxruntime_cuda record FOLDER [PART ...]     asks the kept questions again
    python -m tests.recorded onnxruntime_cuda record FOLDER --add FILE     and those of FILE (lines as above)

FOLDER has the models of ``tests.oracles.onnxruntime.cuda_models`` and the files of packages, under the names that the
lines give (``model``). GRAPHMEM_CUDA_PYTHON is an environment with onnxruntime-gpu 1.31.1 and NVIDIA's wheels.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from graphmem import analyze
from graphmem.accuracy.onnxruntime.graph import keep_graph
from graphmem.cudnn.card import description
from graphmem.devices import device_named
from graphmem.errors import GraphmemError
from graphmem.estimate import Estimate
from tests import places
from tests.recorded import stub

FOLDER = places.ONNXRUNTIME / "cuda"
SESSIONS, GRAPHS = FOLDER / "sessions.jsonl.gz", FOLDER / "graphs.zip"
_RECORDER = places.ROOT / "tests" / "oracles" / "onnxruntime" / "record_cuda.py"
#: Processes a session: what depends on the order of a hash map differs between them, unless initializers are reserved.
DRAWS = 3
#: Where nothing else is said.
CARD = "H200"
Line = dict[str, Any]
#: What of a question a recording's job is told as it stands.
_JOB = ("provider", "session", "level", "pattern", "values", "run", "binding", "environment")
_QUESTION = ("name", "model", "beside", "shows", "runs", "card", *_JOB)


def load() -> list[Line]:
    """The recorded sessions."""
    if not SESSIONS.exists():
        return []
    return [json.loads(line) for line in gzip.decompress(SESSIONS.read_bytes()).decode().splitlines()]


def options(line: Line) -> str:
    """The session's options as ``--alloc-conf`` takes them."""
    given = {**line.get("provider", {}), **line.get("session", {}), **line.get("run", {})}
    if "pattern" in line:
        given["enable_mem_pattern"] = line["pattern"]
    if "binding" in line:
        given["io_binding"] = f"{line['binding']['inputs']}/{line['binding']['outputs']}"
    if "environment" in line:
        given |= line["environment"]
    if "level" in line:
        given["graph_optimization_level"] = line["level"]
    return ",".join(f"{key}:{value}" for key, value in given.items())


def shapes(line: Line) -> str:
    """The shapes of its runs as ``--shapes`` takes them."""
    return ";".join(
        ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in run.items()) for run in line["runs"]
    )


def scalars(line: Line) -> dict[str, tuple[float]]:
    """The values of inputs of one element, on which branches may depend."""
    (run, *_) = line["runs"]
    return {name: (value,) for name, value in line.get("values", {}).items() if math.prod(run[name]) == 1}


def kept_graphs(folder: Path) -> None:
    """Write the graphs of all sessions into ``folder``."""
    with zipfile.ZipFile(GRAPHS) as archive:
        archive.extractall(folder)


def predict(line: Line, graphs: Path, cudnn: str = "never") -> Estimate:
    """What graphmem says of a session."""
    return analyze(
        [str(graphs / graph) for graph in graphs_of(line)], runtime="onnxruntime", device=line.get("card", CARD),
        shapes=shapes(line), alloc_conf=options(line), cudnn=cudnn, input_values=scalars(line),
    )  # fmt: skip


# --- recording --------------------------------------------------------------------------------------------------------


@cache
def packages() -> Path:
    """The folder of packages that has NVIDIA's libraries."""
    code = "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('torch').origin).parents[1])"
    done = subprocess.run([str(stub.python()), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def environment(card: str, folder: Path) -> dict[str, str]:
    """Of a process on the stub, with a real cuDNN that plans for ``card``."""
    device = device_named(card)
    described = folder / f"{card}.json"
    described.write_text(json.dumps(description(device)))
    site = packages()
    nvidia = site / "nvidia"
    build = stub.driver().parent
    libraries = [build / "cudnnlib", build / "cudalib", nvidia / "cu13" / "lib", nvidia / "cudnn" / "lib"]
    major, minor = device.compute_capability or (9, 0)
    return stub.environment({
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "FAKE_CUDNN_REAL": "1",
        "FAKE_CUDNN_PATH": str(nvidia / "cudnn" / "lib" / "libcudnn.so.9"),
        "FAKE_CUDNN_DEVPROP": str(described),
        "FAKE_CUDA_CC": f"{major}{minor}",
        "FAKE_CUDA_SMS": str(device.sm_count),
        "FAKE_CUDA_TOTAL_MIB": "140000",
        "FAKE_CUDA_SENT": "1",
        "PYTHONPATH": str(places.ROOT),
    })  # fmt: skip


def answered(line: Line, models: Path, surroundings: dict[str, str]) -> Line:
    """The line with what the real sessions of it held. Raises ``RuntimeError`` with what ONNX Runtime said."""
    job: dict[str, Any] = {key: line[key] for key in _JOB if key in line}
    job["sessions"] = [{"model": str(models / model), "runs": line["runs"]} for model in (line["model"], *beside(line))]
    answers = []
    is_reserved = "session.use_device_allocator_for_initializers" in line.get("session", {})
    for _ in range(1 if is_reserved else DRAWS):
        done = subprocess.run(
            [str(stub.python()), str(_RECORDER)], input=json.dumps(job), capture_output=True, text=True,
            env=surroundings, cwd=places.ROOT, check=False, timeout=600,
        )  # fmt: skip
        if done.returncode or not done.stdout:
            if stops := stop_of(done.stderr):
                return {key: line[key] for key in _QUESTION if key in line} | {"stops": stops, "on_cpu": {}}
            raise RuntimeError(f"{line['name']}: {(done.stderr or str(done.returncode))[-400:]}")
        result = json.loads(done.stdout)
        told = result["sessions"][-1:] if "environment" in line else result["sessions"]  # all tell of a shared arena
        held = [
            together([session["runs"][run].get("Cuda", {}) for session in told]) for run in range(len(line["runs"]))
        ]
        answer = [sum(session["load"].get("Cuda", {}).get("InUse", 0) for session in told), held]
        if answer not in answers:
            answers.append(answer)
    last = told[-1]["runs"][-1]
    found = {key: line[key] for key in _QUESTION if key in line} | {
        "version": result["version"],
        "answers": sorted(answers),
        "counts": [last["Cuda"].get(key, 0) for key in ("NumAllocs", "NumReserves", "NumArenaExtensions")],
        "host": {
            name: [last[name].get(key, 0) for key in ("MaxInUse", "TotalAllocated")]
            for name in ("CudaPinned", "Cpu")
            if last.get(name)
        },
        "driver": result["driver"].get("peak"),
        "on_cpu": result["placed"].get("CPUExecutionProvider", {}),
    }  # fmt: skip
    return found


def stop_of(said: str) -> str:
    """Where ONNX Runtime stopped: at ``load``, at the ``capture`` of a CUDA graph, or at the node of this name; nothing
    where it is not known to us."""
    if "graph capture" in said:
        return "capture"
    if "smaller than requested bytes" not in said:
        return ""
    node = re.search("Name:'([^']*)'", said)
    return node.group(1) if node else "load"


def together(arenas: list[dict[str, int]]) -> list[int]:
    """(most in use, total) of several arenas, one of which runs at a time while the others hold what they hold."""
    rest = sum(arena.get("InUse", 0) for arena in arenas)
    most = max(arena.get("MaxInUse", 0) + rest - arena.get("InUse", 0) for arena in arenas)
    return [most, sum(arena.get("TotalAllocated", 0) for arena in arenas)]


def write(lines: Iterable[Line], models: Path) -> None:
    """Write sessions and graphs; equal graphs once."""
    FOLDER.mkdir(exist_ok=True)
    kept: dict[bytes, str] = {}
    if GRAPHS.exists():
        with zipfile.ZipFile(GRAPHS) as archive:
            kept = {archive.read(name): name for name in archive.namelist()}
    texts, used = [], {}
    for line in sorted(lines, key=lambda line: str(line["name"])):
        if "graph" not in line:
            first, *rest = [kept_as(models, model, kept) for model in (line["model"], *beside(line))]
            line = {**line, "graph": first} | ({"graphs_beside": rest} if rest else {})
        for graph in graphs_of(line):
            used[graph] = next(data for data, name in kept.items() if name == graph)
        texts.append(json.dumps(line, separators=(",", ":")))
    SESSIONS.write_bytes(gzip.compress(("\n".join(texts) + "\n").encode(), 9, mtime=0))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(used.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)
    GRAPHS.write_bytes(packed.getvalue())


def beside(line: Line) -> list[str]:
    """The models of the other sessions of its process."""
    return list(line.get("beside", ()))


def graphs_of(line: Line) -> list[str]:
    """The kept graphs of its sessions."""
    return [line["graph"], *line.get("graphs_beside", ())]


def kept_as(models: Path, model: str, kept: dict[bytes, str]) -> str:
    """The name under which a model's graph is kept; equal graphs have one."""
    with tempfile.TemporaryDirectory() as folder:
        data = keep_graph(models / model, Path(folder)).read_bytes()
    taken = set(kept.values())
    stem = model.removesuffix(".onnx").replace("/", "-")[-60:].lstrip("-.")
    name = next(name for n in range(99) if (name := f"{stem}{n or ''}.onnx") not in taken)
    return kept.setdefault(data, name)


# --- comparing --------------------------------------------------------------------------------------------------------


#: The cause whose interval belongs to a prediction: processes differ by it.
ORDER = "order of initializers"


def figures(estimate: Estimate) -> tuple[tuple[int, int], tuple[int, int]]:
    """Most in use of the arena, and its total: the least and the most of each over the orders of initializers."""
    found = []
    for level, size in (("allocated", estimate.peak.allocated_bytes), ("reserved", estimate.peak.reserved_bytes)):
        spreads = [cause.spread(level) for cause in estimate.doubts.causes if cause.name == ORDER]
        found.append((size + sum(s.least or 0 for s in spreads), size + sum(s.most or 0 for s in spreads)))
    return found[0], found[1]


def recorded(line: Line) -> list[tuple[int, int]]:
    """(most in use, total) at the end, of each process that differed."""
    return sorted({tuple(answer[1][-1]) for answer in line["answers"]})


def error(predicted: tuple[int, int], seen: Iterable[int]) -> float:
    """The share by which a predicted interval and the figures that were seen are apart; 0 where they meet."""
    low, high = min(values := list(seen)), max(values)
    if predicted[0] <= high and low <= predicted[1]:
        return 0.0
    near, nearest = (predicted[1], low) if predicted[1] < low else (predicted[0], high)
    return (near - nearest) / nearest if nearest else float(near > 0)


def wanted(arguments: list[str]) -> Iterator[Line]:
    """The recorded sessions whose name or mechanism contains one of the arguments."""
    for line in load():
        if not arguments or any(part in line["name"] or part == line.get("shows") for part in arguments):
            yield line


@dataclass(frozen=True)
class Row:
    """A session beside its prediction; ``off``: by how much most in use and total are, None where it is refused."""

    name: str
    shows: str
    off: tuple[float, float] | None
    said: str
    estimate: Estimate | None = None

    def text(self) -> str:
        """As a line of the table."""
        off = "refused" if self.off is None else f"in use {self.off[0]:+8.2%} total {self.off[1]:+8.2%}"
        return f"{self.name:52s} {self.shows:10s} {off} {self.said}"


def stop_predicted(estimate: Estimate) -> str:
    """Where a prediction says that memory runs out, as :func:`stop_of` tells it."""
    failed = estimate.fit.failed_at if estimate.fit else None
    return "" if failed is None else "load" if failed.phase == "load" else failed.module


def row_of(line: Line, graphs: Path, cudnn: str = "never") -> Row:
    """A recorded session beside its prediction from the kept ``graphs``."""
    shows = line.get("shows", "")
    try:
        estimate = predict(line, graphs, cudnn)
    except GraphmemError as refused:
        is_right = line.get("stops") == "capture" and "enable_cuda_graph" in str(refused)
        return Row(line["name"], shows, (0, 0) if is_right else None, str(refused)[:120])
    if "stops" in line:
        stops = stop_predicted(estimate)
        right = (0, 0) if stops == line["stops"] else (1, 1)
        return Row(line["name"], shows, right, f"stops at {stops} recorded {line['stops']}", estimate)
    seen = recorded(line)
    used, total = figures(estimate)
    off = error(used, (a for a, _ in seen)), error(total, (b for _, b in seen))
    if "memory.enable_memory_arena_shrinkage" in line.get("run", {}):  # recorded is what is left after the run
        off = off[0], 0.0
    return Row(line["name"], shows, off, f"{used} {total} recorded {seen}", estimate)


def compared(arguments: list[str], cudnn: str = "never") -> Iterator[Row]:
    """The recorded sessions with their predictions."""
    with tempfile.TemporaryDirectory() as folder:
        kept_graphs(Path(folder))
        for line in wanted(arguments):
            yield row_of(line, Path(folder), cudnn)


class _Sessions:
    """The sessions as a kind of recording."""

    def record(self, arguments: list[str]) -> int:
        models, *rest = Path(arguments[0]), *arguments[1:]
        kept = {line["name"]: line for line in load()}
        asked = kept
        if "--add" in rest:
            at = rest.index("--add")
            asked = {line["name"]: line for line in map(json.loads, Path(rest[at + 1]).read_text().splitlines())}
            del rest[at : at + 2]
        with tempfile.TemporaryDirectory() as folder:
            for name, line in asked.items():
                if rest and not any(part in name for part in rest):
                    continue
                try:
                    kept[name] = answered(line, models, environment(line.get("card", CARD), Path(folder)))
                except (RuntimeError, subprocess.TimeoutExpired) as refused:
                    print(" ".join(str(refused).split())[-300:], file=sys.stderr, flush=True)
                else:
                    print(name, kept[name].get("answers") or kept[name]["stops"], flush=True)
        write(kept.values(), models)
        return 0

    def table(self, arguments: list[str]) -> int:
        rows = []
        for row in compared(arguments, os.environ.get("GRAPHMEM_CUDNN", "never")):
            print(row.text(), flush=True)
            rows.append(row)
        for shows in (*sorted({row.shows for row in rows}), ""):
            some = [row for row in rows if shows in ("", row.shows)]
            equal = sum(row.off == (0, 0) for row in some)
            near = sum(row.off is not None and max(map(abs, row.off)) <= 0.05 for row in some)
            print(f"{shows or 'all':12s} {equal} of {len(some)} equal, {near} within 5 %")
        return 0

    differ = table


KIND = _Sessions()
