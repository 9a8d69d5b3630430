"""Answers as jobs: each a process of ``graphmem`` of its own, with limits, in an empty folder; and their memory.

A process that dies without a word (killed, out of memory of the machine) is started once more. Equal questions share
one job, and answers are remembered up to a number of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from graphmem import __version__
from graphmem.errors import UsageError

#: Ends of the names of files that are read; others are refused, also files of fine-tuning tools, which name folders.
SUFFIXES = (".onnx", ".json", ".pickle", ".pkl", ".gguf")
_DATA = re.compile(rb'<script type="application/json" id="graphmem-[a-z-]+">\n?(.*?)\n?</script>', re.DOTALL)
#: Exit codes of a command that may have given an answer: done, the step fails on any card, does not fit.
_ANSWERED = (0, 1, 3)
#: How often an analysis is started again that somebody killed, as a system that is short of memory does.
_AGAIN = 4
#: Seconds between two looks at a job, for those who wait.
_BEAT = 0.2


@dataclass(frozen=True)
class Limits:
    """Limits of the service: processes at once, jobs that wait, and of each process seconds and bytes of memory;
    bytes of an upload, and of all uploads and answers that are kept."""

    workers: int = 2
    waiting: int = 64
    seconds: float = 300.0
    memory_bytes: int = 8 << 30
    upload_bytes: int = 512 << 20
    kept_bytes: int = 2 << 30


@dataclass
class Job:
    """A question being answered. ``state``: waiting, running, done, failed or cancelled; ``is_lost``: whether it failed
    through no fault of the question; ``page``: the report, and ``answer`` the JSON document in it, which is that of
    the command."""

    number: str
    words: Sequence[str]
    state: str = "waiting"
    error: str = ""
    is_lost: bool = False
    page: bytes = b""
    answer: bytes = b""
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    task: asyncio.Task[None] | None = None
    finished: asyncio.Event = field(default_factory=asyncio.Event)

    def told(self) -> dict[str, Any]:
        """What is told of it while one waits."""
        seconds = self.seconds if self.finished.is_set() else time.monotonic() - self.began
        return {"job": self.number, "state": self.state, "seconds": round(seconds, 2), "error": self.error or None}


class Busy(Exception):
    """More jobs wait than the service keeps."""


class Jobs:
    """The jobs and the uploaded files, in a folder that is removed at the end."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.limits = limits
        self._folder = folder
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._files: OrderedDict[str, Path] = OrderedDict()
        self._slots = asyncio.Semaphore(limits.workers)

    # --- files ---

    async def keep(self, name: str, parts: AsyncIterator[bytes]) -> str:
        """Keep an uploaded file; its number. Raises :class:`UsageError` for a name that is not taken, or too many
        bytes."""
        end = Path(name).suffix.lower()
        if end not in SUFFIXES:
            raise UsageError(f"files end in {', '.join(SUFFIXES)}, not {end or name!r}")
        digest, size = hashlib.sha256(), 0
        arriving = self._folder / f"arriving-{id(parts):x}"
        try:
            with arriving.open("wb") as file:
                async for part in parts:
                    size += len(part)
                    if size > self.limits.upload_bytes:
                        raise UsageError(f"files of up to {self.limits.upload_bytes >> 20} MiB are taken")
                    digest.update(part)
                    file.write(part)
            number = digest.hexdigest()[:24]
            kept = self._folder / f"{number}{end}"
            arriving.replace(kept)
        finally:
            arriving.unlink(missing_ok=True)
        self._files[number] = kept
        self._files.move_to_end(number)
        self._forget_files()
        return number

    def _forget_files(self) -> None:
        sizes = {number: path.stat().st_size for number, path in self._files.items()}
        while len(sizes) > 1 and sum(sizes.values()) > self.limits.kept_bytes:
            number, path = self._files.popitem(last=False)
            path.unlink(missing_ok=True)
            del sizes[number]

    def file(self, number: str) -> str:
        """The name of an uploaded file in the folder of a job. Raises :class:`UsageError` for one that is not there."""
        path = self._files.get(number)
        if path is None:
            raise UsageError(f"there is no file {number!r}; send it to /v1/files")
        return path.name

    # --- jobs ---

    def ask(self, words: Sequence[str]) -> tuple[Job, bool]:
        """The job of a command line, and whether it was there already. Raises :class:`Busy`."""
        key = hashlib.sha256(json.dumps([__version__, *words]).encode()).hexdigest()[:24]
        known = self._jobs.get(key)
        if known is not None and known.state not in ("cancelled", "failed"):
            self._jobs.move_to_end(key)
            return known, True
        if sum(one.state == "waiting" for one in self._jobs.values()) >= self.limits.waiting:
            raise Busy
        job = self._jobs[key] = Job(key, words)
        job.task = asyncio.create_task(self._run(job))
        self._forget_jobs()
        return job, False

    def job(self, number: str) -> Job | None:
        """The job of a number."""
        return self._jobs.get(number)

    def _forget_jobs(self) -> None:
        finished = [job for job in self._jobs.values() if job.finished.is_set()]
        kept = sum(len(job.page) for job in finished)
        for job in finished:
            if kept <= self.limits.kept_bytes and len(self._jobs) <= 10_000:
                return
            kept -= len(job.page)
            del self._jobs[job.number]

    async def cancel(self, job: Job) -> None:
        """End a job that is not finished; whoever waits for it is told."""
        if job.task is not None and not job.finished.is_set():
            job.state = "cancelled"
            job.task.cancel()
            await job.finished.wait()

    async def close(self) -> None:
        """End all jobs."""
        for job in list(self._jobs.values()):
            await self.cancel(job)

    async def _run(self, job: Job) -> None:
        try:
            async with self._slots:
                job.state = "running"
                code, said = await self._answer(job)
                for _ in range(_AGAIN):
                    if code in _ANSWERED or said:
                        break
                    code, said = await self._answer(job)  # it died without a word
            job.state = "done" if code in _ANSWERED and job.answer else "failed"
            job.is_lost = job.state == "failed" and not said
            job.error = (
                "" if job.state == "done" else said or f"the analysis was ended by the system ({code}); ask again"
            )
        except asyncio.CancelledError:
            job.state, job.error = "cancelled", "cancelled"
        finally:
            job.seconds = time.monotonic() - job.began
            job.finished.set()

    async def _answer(self, job: Job) -> tuple[int, str]:
        """Run the command line; its exit code, and the error that it printed."""
        folder = self._folder / f"job-{job.number}"
        folder.mkdir()
        try:
            for path in self._files.values():
                if any(path.name in word for word in job.words):
                    (folder / path.name).symlink_to(path)
            page = folder / "answer.html"
            command = (sys.executable, "-m", "graphmem", *_before(job.words, "--format=html", f"--output={page.name}"))
            process = await asyncio.create_subprocess_exec(
                *command, cwd=folder, env=_environment(folder), stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
                preexec_fn=lambda: _limit(self.limits),
            )  # fmt: skip
            said = await self._ended(process)
            if page.exists():
                job.page = page.read_bytes()
                found = _DATA.search(job.page)
                job.answer = found[1] if found else b""
            return process.returncode or 0, said
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _ended(self, process: asyncio.subprocess.Process) -> str:
        """The error of a process that has ended, or was ended because it took too long."""
        try:
            _, errors = await asyncio.wait_for(process.communicate(), self.limits.seconds)
        except asyncio.TimeoutError:
            return f"the analysis took more than {self.limits.seconds:.0f} s, which is all that this service gives it"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        said = re.findall(r"^(?:graphmem|Error): (.+)$", errors.decode(errors="replace"), re.MULTILINE)
        return str(said[-1]) if said else ""


async def beats(job: Job) -> AsyncIterator[Mapping[str, Any]]:
    """What is told of a job, again and again until it is finished."""
    while not job.finished.is_set():
        yield job.told()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(job.finished.wait(), _BEAT)
    yield job.told()


def _before(words: Sequence[str], *more: str) -> list[str]:
    """The words with more options, which stand before the arguments."""
    return [words[0], *more, *words[1:]] if "--" in words else [*words, *more]


#: What a process is told of the environment; nothing else of the service's own.
_KEPT = ("PATH", "PYTHONPATH", "LANG", "SYSTEMROOT", "XDG_CACHE_HOME", "LD_LIBRARY_PATH")


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "HOME": os.environ.get("HOME", str(folder)), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _limit(limits: Limits) -> None:
    """In the new process, before it is graphmem; nothing is imported there, which another thread might be doing."""
    if resource is None:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30,) * 2)
