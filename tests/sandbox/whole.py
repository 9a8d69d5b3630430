"""Whole programs that save, rotate, resume and delete: each in a copy of a folder with files of earlier runs.

    python -m tests.sandbox.whole record [NAME ...]     # really, on the stub driver (tests/README.md)

A record holds what the program printed in lines that begin with SEE, and what it did to the folder: files that it
wrote with their bytes, files that it deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import places
from tests.recorded import stub

PROGRAMS = Path(__file__).parent / "programs"
GOLDEN = Path(__file__).parent / "recorded.json"
_TRUE_VALUES = "from tests.recorded import true_values; import runpy, sys; sys.argv = sys.argv[1:]\n" + (
    "with true_values.follow('/dev/null'): runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True)
class Outcome:
    """What a program saw and did. ``written``: path below its folder -> bytes."""

    seen: list[str]
    written: dict[str, int]
    deleted: list[str]


def contents(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Each entry below a folder: hash of its content (or where a link leads), permissions, time of its last change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        if path.is_symlink():
            content = f"link to {os.readlink(path)}"
        else:
            content = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (content, status.st_mode, status.st_mtime_ns if path.is_file() else 0)
    return found


def seen(output: str) -> list[str]:
    """The lines by which a program says what it sees of its files."""
    return [line for line in output.splitlines() if line.startswith("SEE")]


def really(program: Path, earlier: Path) -> Outcome:
    """Run a program on the stub driver in a copy of ``earlier``. Raises :class:`RuntimeError` where it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / program.stem
        shutil.copytree(earlier, folder)
        before = contents(folder)
        extra = {**stub.REAL_CUDNN, "TRUE_VALUES_SELECT": "all", "PYTHONPATH": str(places.ROOT)}
        command = [str(stub.python()), "-c", _TRUE_VALUES, str(program)]
        done = subprocess.run(command, cwd=folder, env=stub.environment(extra), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program.stem} ended with {done.returncode}: {done.stderr[-2000:]}")
        after = contents(folder)
        changed = [name for name in after if after[name] != before.get(name) and not (folder / name).is_dir()]
        written = {name: (folder / name).lstat().st_size for name in changed}
    files_gone = [name for name, (content, *_) in before.items() if name not in after and content != "folder"]
    return Outcome(seen(done.stdout), written, files_gone)


def record(names: list[str]) -> None:
    """Record the named programs, or all."""
    records = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        earlier = Path(scratch) / "earlier"
        subprocess.run([sys.executable, "-m", "tests.sandbox.earlier_run", str(earlier)], cwd=places.ROOT, check=True)
        for program in sorted(PROGRAMS.glob("*.py")):
            if not names or program.stem in names:
                records[program.stem] = asdict(really(program, earlier))
                print(program.stem, "recorded", flush=True)
    GOLDEN.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[2:])
