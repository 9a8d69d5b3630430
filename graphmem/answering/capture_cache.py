"""Captured runs on the disk, for the next question about the same model: it imports no PyTorch.

An entry is found by what is known before a capture: the question as far as a trace depends on it
(:class:`graphmem.answering.question.CaptureKey`), the model's name, graphmem's own files, Python, its search path, the
folder one is in, and the variables that libraries read without Python's knowing. It serves while all that the capture
was seen to depend on (:mod:`graphmem.base.dependencies`) is as it was. An entry is data: a digest, and JSON that is
read into a few kinds of values. One that is damaged, or from elsewhere, serves nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from graphmem.answering.question import CaptureKey, Question
from graphmem.base.dependencies import CannotTell, Watch, Written, importable, state_of_folder, still_holds
from graphmem.base.figures import Communicator
from graphmem.base.plain import NotPlain, plain, restored
from graphmem.base.records import dataclass
from graphmem.base.textbook import Sharded, Transformer
from graphmem.cudnn.library import WORKER, CudnnAnswers
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import GraphmemError, UsageError
from graphmem.run import Run
from graphmem.sources.zoo import ZOO, zoo_module
from graphmem.trace import from_json, to_json
from graphmem.units import parse_bytes

#: Where the entries are, or ``off``; and how many bytes they may have together.
FOLDER, LIMIT = "GRAPHMEM_CACHE", "GRAPHMEM_CACHE_LIMIT"
OFF = ("off", "0", "no", "false")
DEFAULT_LIMIT = "1GiB"

_SCHEMA = "graphmem.capture/1"
_ENTRY, _HITS = ".capture", "hits"
#: An entry is unpacked up to this many bytes.
_LARGEST = 2**30
#: Beginnings of variables that are read by C++ too, which tells nobody.
_VARIABLES = ("PYTORCH_", "TORCH", "TRANSFORMERS_", "HF_", "CUDA_", "CUDNN_", "NVIDIA_", "NCCL_", "GRAPHMEM_", "KERAS_",
              "OMP_", "MKL_", "PYTHON", "TF_", "XLA_", "LD_")  # fmt: skip
#: The values that a run is made of, beside its trace.
_KINDS = (Run, Code, Diagnostic, Communicator, Sharded, Transformer, CudnnAnswers)


@dataclass(frozen=True)
class Contents:
    """What a cache holds: entries, their bytes, the most they may have, and how many questions they answered."""

    entries: int
    bytes: int
    limit_bytes: int
    hits: int


def default_folder() -> Path | None:
    """The folder that the environment names, else the usual one of the system; None where the cache is off."""
    named = os.environ.get(FOLDER, "")
    if named.lower() in OFF:
        return None
    if named:
        return Path(named).expanduser().absolute()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "graphmem" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "graphmem"
    given = os.environ.get("XDG_CACHE_HOME", "")  # a relative one is to be ignored (XDG Base Directory Specification)
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "graphmem"


@dataclass(frozen=True)
class SizeAnswer:
    """What :class:`graphmem.answering.sized.SizedRuns` answered at a size, and what it knew then.

    ``run``: None where a template does not serve the size. ``learned``: the captures of the template, in words; ``""``
    without one; it serves sizes ``above`` one. ``output_bytes``: at the sizes that were captured for it.
    """

    run: Run | None
    is_proven: bool
    refused: str
    learned: str
    above: int
    output_bytes: tuple[tuple[int, int], ...]


Kept = TypeVar("Kept")


class CaptureCache:
    """The captured runs in a folder, which several processes may share. Nothing here raises but for options that are
    wrong: what cannot be read or written is as if it were not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.limit_bytes = parse_bytes(os.environ.get(LIMIT) or DEFAULT_LIMIT)
        except UsageError as error:
            raise UsageError(f"{LIMIT}: {error}") from None
        self._watch = Watch()
        self._python = _of_this_python()

    # --- a question ---

    def place(self, question: Question, key: CaptureKey, *also: object) -> Path | None:
        """The file of a question with this key; ``also``: what more decides what is in it. None where nothing is kept:
        for models that are objects, or programs, and in a process that has changed since it began."""
        models = question.model if isinstance(question.model, (list, tuple)) else [question.model]
        if question.example_inputs is not None or not all(isinstance(one, (str, os.PathLike)) for one in models):
            return None
        names = [os.fspath(one) for one in models]
        return self.place_of(names, key, _of_zoo(names), *also)

    def place_of(self, *asked: object) -> Path | None:
        """The file of anything that is answered here, by all that is asked; None where nothing is kept."""
        try:
            if _of_this_python() != self._python:
                return None
            known = plain((_SCHEMA, os.getcwd(), self._python, *asked))
        except (NotPlain, OSError):
            return None
        text = json.dumps(known, separators=(",", ":"))
        return self.folder / (hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40] + _ENTRY)

    def recalled(self, path: Path) -> Run | None:
        """The run at a place; None where there is none that holds."""
        return self._recalled(path, lambda document: _run(document["run"], document["captured_at"]))

    def recalled_sizes(self, path: Path) -> dict[str, SizeAnswer] | None:
        """What was kept by :meth:`keep_sizes`; None where there is nothing that holds."""
        return self._recalled(
            path, lambda document: {name: _answer(one, document["captured_at"]) for name, one in document["sizes"]}
        )

    def recalled_values(self, path: Path) -> dict[str, Any] | None:
        """What was kept by :meth:`keep_values`; None where there is nothing that holds."""
        return self._recalled(path, lambda document: dict(document["values"]))

    def keep_values(self, path: Path, model: object, values: Mapping[str, Any], dependencies: Written) -> None:
        """Keep values for JSON that another process found, and what they depend on."""
        document = {"schema": _SCHEMA, "model": str(model), "captured_at": time.time(), "dependencies": dependencies,
                    "values": dict(values)}  # fmt: skip
        with contextlib.suppress(OSError, TypeError, ValueError):
            self._write(path, document)

    def _recalled(self, path: Path, read: Callable[[Any], Kept]) -> Kept | None:
        document = _read(path)
        if document is None:
            return None
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, GraphmemError, OSError):
            if still_holds(document["dependencies"]):
                found = read(document)
                self._count(path)
                return found
        return None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """What runs until the end is a capture, or loads its model."""
        with self._watch.on(allowed=WORKER):
            yield

    def keep(self, path: Path, model: object, run: Run) -> None:
        """Keep a run that was captured under :meth:`watched`, where all that it depends on can be told."""
        if _can_be_kept(run):
            self._keep(path, model, (run,), lambda: {"run": _document(run)})

    def keep_sizes(self, path: Path, model: object, answers: Mapping[str, SizeAnswer]) -> None:
        """Keep what a question was answered at several sizes, each by a name, under :meth:`watched`, where all that it
        depends on can be told."""
        runs = [answer.run for answer in answers.values() if answer.run is not None]
        if all(map(_can_be_kept, runs)):
            self._keep(path, model, runs, lambda: {"sizes": [(name, _as_json(one)) for name, one in answers.items()]})

    def _keep(self, path: Path, model: object, runs: Iterable[Run], made: Callable[[], dict[str, Any]]) -> None:
        with contextlib.suppress(CannotTell, NotPlain, OSError):
            for run in runs:
                if run.cudnn is not None:
                    self._watch.add(*_files_of(run.cudnn.details()))
            document = {"schema": _SCHEMA, "model": str(model), "captured_at": time.time(),
                        "dependencies": self._watch.written(), **made()}  # fmt: skip
            self._write(path, document)

    # --- the folder ---

    def contents(self) -> Contents:
        """What there is."""
        sizes = [found.st_size for _, found in self._entries()]
        hits = 0
        with contextlib.suppress(OSError):
            hits = (self.folder / _HITS).stat().st_size
        return Contents(len(sizes), sum(sizes), self.limit_bytes, hits)

    def clear(self) -> None:
        """Remove all entries, and the count of hits; nothing else that lies there."""
        for path in [*(path for path, _ in self._entries()), self.folder / _HITS]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _entries(self) -> list[tuple[Path, os.stat_result]]:
        """The entries, the one that was used last at the end."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"*{_ENTRY}"):
                with contextlib.suppress(OSError):
                    found.append((path, path.stat()))
        return sorted(found, key=lambda entry: entry[1].st_mtime_ns)

    def _count(self, path: Path) -> None:
        """An entry has answered: it is the one that is removed last, and the file of hits is a byte longer."""
        with contextlib.suppress(OSError):
            os.utime(path)
            with open(self.folder / _HITS, "ab") as hits:
                hits.write(b".")

    def _write(self, path: Path, document: dict[str, Any]) -> None:
        """Write an entry whole, then remove those that were not used for longest while there are too many."""
        packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode("utf-8", "surrogatepass"), 1)
        if len(packed) > self.limit_bytes:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", suffix=".part", delete=False) as file:
            try:
                file.write(hashlib.sha256(packed).digest() + packed)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        entries = self._entries()
        total = sum(found.st_size for _, found in entries)
        for oldest, found in entries:
            if total <= self.limit_bytes:
                return
            with contextlib.suppress(OSError):
                oldest.unlink()
            total -= found.st_size


def _read(path: Path) -> Any:
    """The document of an entry; None for a file that is not there, or not whole."""
    try:
        data = path.read_bytes()
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            return None
        unpacked = zlib.decompressobj().decompress(data[32:], _LARGEST)
        document = json.loads(unpacked.decode("utf-8", "surrogatepass"))
        return document if document["schema"] == _SCHEMA else None
    except (OSError, ValueError, KeyError, TypeError, zlib.error, RecursionError):
        return None


def _of_this_python() -> tuple[Any, ...]:
    """What a capture depends on before it begins: this program, this Python, where it looks for modules, and the
    environment as C++ reads it."""
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and name not in (FOLDER, LIMIT)
    }
    package = Path(__file__).parents[1]
    searched = tuple((path, importable(path)) for path in sys.path)
    python = (sys.version, tuple(sys.flags), sys.executable, platform.machine())
    return state_of_folder(str(package)), python, searched, variables


def _of_zoo(models: Iterable[str]) -> str:
    """The state of the zoo's files, of a model that is one of it."""
    if not any(one.startswith(ZOO) for one in models):
        return ""
    return state_of_folder(os.path.dirname(str(zoo_module("manifest").__file__)))


def _can_be_kept(run: Run) -> bool:
    return run.planned is None and run.ending is None and run.graph is None and run.with_room is None


def _as_json(answer: SizeAnswer) -> dict[str, Any]:
    """An answer as plain values. Raises :class:`NotPlain`."""
    return {"run": answer.run and _document(answer.run), "rest": plain(replace(answer, run=None))}


def _answer(document: dict[str, Any], captured_at: float) -> SizeAnswer:
    run = document["run"] and _run(document["run"], captured_at)
    known: SizeAnswer = restored(document["rest"], (SizeAnswer,))
    return replace(known, run=run)


def answered_until_now(run: Run) -> Run:
    """The run with what cuDNN has answered, whatever it is asked later."""
    cudnn = run.cudnn and CudnnAnswers(run.cudnn.notes(), run.cudnn.refused(), run.cudnn.details())
    return replace(run, cudnn=cudnn)


def _document(run: Run) -> dict[str, Any]:
    """A run as plain values. Raises :class:`NotPlain`."""
    other = run.other_loop and _document(run.other_loop)
    known = replace(answered_until_now(run), trace=None, other_loop=None)  # type: ignore[arg-type]
    return {"trace": to_json(run.trace), "rest": plain(known), "other_loop": other}


def _run(document: dict[str, Any], captured_at: float | None = None) -> Run:
    """The run of a document. Raises what reading a damaged one comes to."""
    other = document["other_loop"] and _run(document["other_loop"])
    known: Run = restored(document["rest"], _KINDS)
    when = known.captured_at if captured_at is None else float(captured_at)
    return replace(known, trace=from_json(document["trace"]), other_loop=other, captured_at=when)


def _files_of(details: dict[str, Any]) -> list[str]:
    """The library that was asked. Raises :class:`CannotTell` where one could not be."""
    if "unusable" in details:
        raise CannotTell("a cuDNN that could not be asked may be one later")
    return [details["library"]] if "library" in details else []


#: The cache of this process; None where it has none. A command has one, as nobody else shares its process.
in_use: CaptureCache | None = None


def use(folder: Path | None) -> None:
    """Keep the runs of this process in a folder from now on; None: no longer. For commands: in a process that others
    share, a capture may depend on what they have done in it. Raises :class:`GraphmemError` for a wrong limit."""
    global in_use
    in_use = None if folder is None else CaptureCache(folder)
