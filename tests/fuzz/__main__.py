"""Run many cases: ``python -m tests.fuzz --kinds all --count 100000 --seed 1``; one again: ``--only onnx:17 --seed 1``.

Cases run in a worker process with a limit on memory; one that crashes or hangs for good is noted and the next worker
goes on behind it. Prints a table, and every problem with the command that repeats it; exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from tests.fuzz.judge import LONGEST_WAIT, emptied, problem_of
from tests.fuzz.kinds import KINDS, make

#: Bytes of address space of a worker: PyTorch's libraries alone map some 5 GiB.
MEMORY = 12 << 30


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kinds", default="all", help=f"all, or some of {','.join(KINDS)}")
    parser.add_argument("--count", type=int, default=1000, help="cases of all kinds together, or of each one named")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--only", metavar="KIND:INDEX", help="one case, in this process, with what it said")
    parser.add_argument("--worker", nargs=3, metavar=("KIND", "START", "END"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _work(given.worker[0], given.seed, int(given.worker[1]), int(given.worker[2]))
        return 0
    if given.only:
        kind, index = given.only.split(":")
        return _once(kind, given.seed, int(index))
    kinds = list(KINDS) if given.kinds == "all" else given.kinds.split(",")
    counts = {k: round(given.count * KINDS[k][1]) if given.kinds == "all" else given.count for k in kinds}
    failed = False
    print(f"{'kind':<14}{'cases':>8}{'done':>8}{'refused':>8}{'problems':>9}{'slowest':>9}{'time':>8}", flush=True)
    for kind, count in counts.items():
        failed |= _run(kind, given.seed, given.start, given.start + count)
    return int(failed)


def _run(kind: str, seed: int, start: int, end: int) -> bool:
    """All cases of a kind; whether any was a problem."""
    begun, rows = time.monotonic(), []
    position = start
    while position < end:
        for row in _worker(kind, seed, position, end):
            rows.append(row)
            position = row["index"] + 1
    problems = [row for row in rows if row["problem"]]
    slowest = max((row["seconds"] for row in rows), default=0.0)
    done = Counter(row["code"] for row in rows if not row["problem"])
    refused = len(rows) - len(problems) - done[0]
    taken = time.monotonic() - begun
    figures = f"{len(rows):>8}{done[0]:>8}{refused:>8}{len(problems):>9}{slowest:>7.1f} s{taken:>6.0f} s"
    print(f"{kind:<14}{figures}", flush=True)
    for row in problems:
        print(f"  --only {kind}:{row['index']} --seed {seed}: {row['problem']}: {row['detail'][-400:]!r}", flush=True)
    return bool(problems)


def _worker(kind: str, seed: int, start: int, end: int) -> list[dict[str, Any]]:
    """What one worker found, the case that ended it included."""
    command = [sys.executable, "-m", "tests.fuzz", "--seed", str(seed), "--worker", kind, str(start), str(end)]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "MPLCONFIGDIR": f"{folder}/matplotlib"}
        environment = {**os.environ, **caches, "TMPDIR": folder, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, capture_output=True, env=environment, check=False)
    rows = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
    reached = rows[-1]["index"] + 1 if rows else start
    if reached < end:
        said = done.stderr.decode(errors="replace")[-2000:]
        rows.append(
            {"index": reached, "problem": f"ended with {done.returncode}", "detail": said, "seconds": 0.0, "code": -1}
        )
    return rows


def _work(kind: str, seed: int, start: int, end: int) -> None:
    """Run cases and write a line for each; the real standard output is for that alone."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="work-") as work:
        for number in range(3):  # what is imported and compiled once is no part of any case
            _answer(kind, -1, number, Path(work))
        for index in range(start, end):
            faulthandler.dump_traceback_later(2 * LONGEST_WAIT, exit=True)  # where a signal does not get through
            _report(answers, _answer(kind, seed, index, Path(work)))
            faulthandler.cancel_dump_traceback_later()


def _answer(kind: str, seed: int, index: int, work: Path) -> dict[str, Any]:
    folder, scratch = emptied(work / "case"), emptied(work / "scratch")
    case = make(kind, seed, index, folder)
    begun = time.process_time()
    problem, detail, code = problem_of(case, scratch)
    seconds = time.process_time() - begun
    return {"index": index, "problem": problem, "detail": detail, "seconds": seconds, "code": code}


def _report(answers: TextIO, row: dict[str, Any]) -> None:
    answers.write(json.dumps(row) + "\n")
    answers.flush()


def _once(kind: str, seed: int, index: int) -> int:
    with tempfile.TemporaryDirectory() as work:
        folder, scratch = emptied(Path(work) / "case"), emptied(Path(work) / "scratch")
        case = make(kind, seed, index, folder)
        print(case.arguments, dict(case.environment))
        os.environ["GRAPHMEM_DEBUG"] = "1"
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.stat().st_size < 3000:
                print(path.name, path.read_bytes())
        problem, detail, code = problem_of(case, scratch)
        print("code", code, problem or "no problem", detail, sep="\n")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
