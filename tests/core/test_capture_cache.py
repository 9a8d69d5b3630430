"""Captures on the disk: an entry serves while all that it depends on is as it was, and harms nobody."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphmem.answering import capture_cache, runs
from graphmem.answering.capture_cache import CaptureCache, SizeAnswer
from graphmem.answering.question import Question, capture_key
from graphmem.answering.runs import RunCache, silent
from graphmem.answering.sized import SizedRuns
from graphmem.base.dependencies import CannotTell, still_holds
from graphmem.base.figures import Communicator
from graphmem.base.plain import NotPlain, plain, restored
from graphmem.base.textbook import Sharded, Transformer
from graphmem.cli.main import cli
from graphmem.cudnn.library import CudnnAnswers
from graphmem.devices import custom_device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import UsageError
from graphmem.planning.fit import fit
from graphmem.run import Run
from graphmem.trace import Category, TraceBuilder, same
from graphmem.units import GIB, MIB

# --- dependencies -----------------------------------------------------------------------------------------------------

#: A computation that looks at something of every kind, in a process of its own, as hooks stay.
_COMPUTES = """
import glob, json, os, subprocess, sys
sys.path.insert(0, os.getcwd())
from graphmem.base.dependencies import CannotTell, Watch
watch = Watch()
with watch.on(allowed=(sys.executable, "-c", "pass")):
    import model
    sys.path.remove(os.getcwd())
    open("config.json").read()
    os.path.exists("weights.bin"), os.environ.get("N_LAYERS"), os.environ.copy(), glob.glob("shards/*")
    exec(sys.argv[1])
try:
    print(json.dumps(watch.written()))
except CannotTell as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text("import layers\n")
    (tmp_path / "layers.py").write_text("WIDTH = 1\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "one").touch()
    monkeypatch.chdir(tmp_path)
    time.sleep(0.03)  # older than the computation by more than a tick of the file system
    return tmp_path


def _computed(also: str = "") -> Any:
    root = str(Path(capture_cache.__file__).parents[2])
    command = [sys.executable, "-c", _COMPUTES, also]
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    os.environ["PYTHONPATH"] = root
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def _same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")


def _edited(path: str) -> Callable[[], object]:
    """Another text of the same length and the same time."""

    def edit() -> None:
        before = os.stat(path)
        Path(path).write_text(Path(path).read_text().replace("1", "2").replace("{}", "[]").replace("layers", "layerz"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return edit


#: What somebody may do between two questions, each of which makes another answer.
CHANGES: dict[str, Callable[[], object]] = {
    "the model's module": _edited("model.py"),
    "a module that it imports": _edited("layers.py"),
    "a file that it reads": _edited("config.json"),
    "a file that is gone": lambda: os.unlink("config.json"),
    "a file that it looked for": lambda: Path("weights.bin").touch(),
    "a file in a folder that it listed": lambda: Path("shards/two").touch(),
    "a module that comes first": lambda: Path("json.py").touch(),
    "a package that is installed": lambda: os.mkdir("flash_attn-2.dist-info"),
    "a package beside the model": lambda: os.mkdir("flash_attn"),
    "a variable that it read": lambda: os.environ.__setitem__("N_LAYERS", "3"),
}
#: What makes no other.
NO_CHANGES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "a report": lambda: Path("report.json").touch(),
    "another time of a file": lambda: os.utime("config.json", (1, 1)),
    "another terminal": lambda: os.environ.__setitem__("TERM", "dumb"),
}


def test_an_answer_holds_until_something_that_it_depends_on_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is made, noticed and undone; one process learns the dependencies of all."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("N_LAYERS", raising=False)
    written = _computed()
    before = set(folder.rglob("*"))
    files = {path: path.read_bytes() for path in before if path.is_file()}
    for holds, changes in ((True, NO_CHANGES), (False, CHANGES)):
        for name, change in changes.items():
            change()
            assert still_holds(written) is holds, name
            made = [path for path in folder.rglob("*") if path not in before]
            for path in sorted(made, reverse=True):  # what a folder holds before the folder
                path.rmdir() if path.is_dir() else path.unlink()
            for path, content in files.items():
                path.write_bytes(content)
            monkeypatch.delenv("N_LAYERS", raising=False)
            assert still_holds(written), name


@pytest.mark.parametrize(
    ("also", "why"),
    [
        ("subprocess.run(['true'])", "it calls subprocess.Popen"),
        ("import socket; socket.getaddrinfo('localhost', 80)", "it calls socket.getaddrinfo"),
        ("open('config.json', 'w').write('[]')", "changed meanwhile"),
    ],
)
def test_what_cannot_be_written_down_is_not_kept(folder: Path, also: str, why: str) -> None:
    assert why in _computed(also)


@pytest.mark.parametrize(
    "also", ["subprocess.run([sys.executable, '-c', 'pass'])", "import ctypes.util; ctypes.util.find_library('none')"]
)
def test_a_process_that_answers_by_known_files_is_allowed(folder: Path, also: str) -> None:
    assert "read" in _computed(also)


# --- entries ----------------------------------------------------------------------------------------------------------


class _Watched:
    """Stands for a watch that saw one file."""

    def __init__(self) -> None:
        self.state = "1"
        self.seen: list[str] = []

    def add(self, *files: str) -> None:
        self.seen += files

    @contextlib.contextmanager
    def on(self, allowed: Any = ()) -> Iterator[None]:
        yield

    def written(self) -> dict[str, Any]:
        if self.state == "unknown":
            raise CannotTell("it asks the network")
        return {"read": {}, "others": [], "states": self.state, "folders": {}, "searched": {}, "variables": {}}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> _Watched:
    watched = _Watched()
    monkeypatch.setattr(capture_cache, "still_holds", lambda written: written["states"] == watched.state)
    return watched


def _cache(folder: Path, watched: _Watched) -> CaptureCache:
    cache = CaptureCache(folder)
    cache._watch = watched  # type: ignore[assignment]
    return cache


def _run(size: int = 1024) -> Run:
    builder = TraceBuilder("a step")
    storage = builder.alloc(size, builder.operator("aten.mm", source="train.py:3"), Category.ACTIVATION)
    builder.free(storage, 0)
    asked = CudnnAnswers(["asked"], [Code.CUDNN_NO_PLAN.about(reason="none")], {"library": "/lib/libcudnn.so.9"})
    sharded = Sharded("FSDP", 10, 2, 3, 4, False, Transformer(1, 2, 3, 4, 5, True, False), (("bucket", 3),))
    return Run(
        builder.build(), "hf:gpt2", notes=("a note",), assumed={Code.NOTE.about(): 3}, cudnn=asked,
        weights=("float32",), card_answers={"name": "T4", "allocator": (1, 2, ("pytorch", None, (2, 13)))},
        limit=(1, 2, (None, None, (2, 13))), communicators=(Communicator(2),), sharded=sharded, loop="hold",
    )  # fmt: skip


def _place(cache: CaptureCache, **options: Any) -> Path:
    question = Question("hf:gpt2", **options)
    place = cache.place(question, capture_key(question))
    assert place is not None
    return place


def test_a_run_comes_back_as_it_was(tmp_path: Path, watched: _Watched) -> None:
    cache, run = _cache(tmp_path, watched), _run()
    place = _place(cache)
    assert cache.recalled(place) is None
    cache.keep(place, "hf:gpt2", run)
    found = _cache(tmp_path, watched).recalled(place)
    assert found is not None
    assert same(found.trace, run.trace)
    assert watched.seen == ["/lib/libcudnn.so.9"]
    different = [name for name, value in vars(run).items() if name != "trace" and getattr(found, name) != value]
    assert different == ["captured_at"]
    assert cache.contents() == capture_cache.Contents(1, place.stat().st_size, 2**30, 1)


def test_it_does_not_come_back_once_something_has_changed(tmp_path: Path, watched: _Watched) -> None:
    cache = _cache(tmp_path, watched)
    cache.keep(_place(cache), "hf:gpt2", _run())
    watched.state = "2"
    assert cache.recalled(_place(cache)) is None
    cache.keep(_place(cache), "hf:gpt2", _run(2048))
    found = cache.recalled(_place(cache))
    assert found is not None
    assert found.trace.storages[0].bytes == 2048


@pytest.mark.parametrize(
    "changes",
    [{"batch": 2}, {"seq_len": 8}, {"training": False}, {"iterations": 2}, {"torch_version": "2.6"}, {"device": "T4"},
     {"build_on": "device"}, {"trust": True}],
)  # fmt: skip
def test_another_question_has_another_place(tmp_path: Path, watched: _Watched, changes: dict[str, Any]) -> None:
    cache = _cache(tmp_path, watched)
    assert _place(cache, **changes) != _place(cache)


@pytest.mark.parametrize("same_trace", [{"alloc_conf": "expandable_segments:True"}, {"top": 3}, {"margin": "p99"}])
def test_the_same_trace_has_one_place(tmp_path: Path, watched: _Watched, same_trace: dict[str, Any]) -> None:
    cache = _cache(tmp_path, watched)
    assert _place(cache, **same_trace) == _place(cache)


def test_other_surroundings_have_another_place(
    tmp_path: Path, watched: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graphmem" / "answering").mkdir(parents=True)
    monkeypatch.setattr(capture_cache, "__file__", str(tmp_path / "graphmem" / "answering" / "capture_cache.py"))
    places = [_place(_cache(tmp_path, watched))]
    monkeypatch.setenv("TERM", "dumb")
    assert _place(_cache(tmp_path, watched)) == places[0]
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    places.append(_place(_cache(tmp_path, watched)))
    monkeypatch.setattr(sys, "version", "3.99")
    places.append(_place(_cache(tmp_path, watched)))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    places.append(_place(_cache(tmp_path, watched)))
    (tmp_path / "graphmem" / "rules.json").write_text("{}")  # of graphmem itself
    places.append(_place(_cache(tmp_path, watched)))
    monkeypatch.chdir(tmp_path)
    places.append(_place(_cache(tmp_path, watched)))
    assert len(set(places)) == len(places)


def test_objects_and_changed_processes_have_no_place(
    tmp_path: Path, watched: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _cache(tmp_path, watched)
    question = Question(lambda: None)
    assert cache.place(question, capture_key(question)) is None
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    question = Question("hf:gpt2")
    assert cache.place(question, capture_key(question)) is None


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:99] + b"?" + data[100:], lambda _: b""])
def test_a_damaged_entry_is_none(tmp_path: Path, watched: _Watched, damage: Callable[[bytes], bytes]) -> None:
    cache = _cache(tmp_path, watched)
    place = _place(cache)
    cache.keep(place, "hf:gpt2", _run())
    place.write_bytes(damage(place.read_bytes()))
    assert cache.recalled(place) is None


@pytest.mark.parametrize(
    "document",
    [[], {}, {"rest": None}, {"rest": ["value", "Popen", {"args": "true"}]}, {"rest": ["value", "Run", {"shell": 1}]},
     {"rest": ["value", "Run", []]}, {"rest": ["mapping", 3]}, {"rest": ["member", "Code", "NONE"]},
     {"rest": ["value", "Run", {"trace": None}], "trace": "{}"}],
)  # fmt: skip
def test_a_foreign_entry_is_none(tmp_path: Path, watched: _Watched, document: Any) -> None:
    cache = _cache(tmp_path, watched)
    whole = {"schema": capture_cache._SCHEMA, "captured_at": 1, "dependencies": watched.written(), "run": document}
    cache._write(tmp_path / "x.capture", whole)
    assert cache.recalled(tmp_path / "x.capture") is None


def test_what_is_not_plain_or_known_is_not_kept(tmp_path: Path, watched: _Watched) -> None:
    cache, run = _cache(tmp_path, watched), _run()
    cache.keep(_place(cache), "hf:gpt2", Run(run.trace, card_answers={"name": object()}))
    watched.state = "unknown"
    cache.keep(_place(cache), "hf:gpt2", run)
    assert list(tmp_path.iterdir()) == []


def test_those_that_were_not_used_for_longest_are_removed(
    tmp_path: Path, watched: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = _cache(tmp_path, watched)
    places = [_place(cache, batch=batch) for batch in (1, 2, 3)]
    for age, place in ((30, places[0]), (20, places[1])):
        cache.keep(place, "hf:gpt2", _run())
        os.utime(place, (time.time() - age,) * 2)
    assert cache.recalled(places[0]) is not None  # it is used now
    monkeypatch.setenv(capture_cache.LIMIT, str(places[0].stat().st_size * 5 // 2))
    _cache(tmp_path, watched).keep(places[2], "hf:gpt2", _run())
    assert [place.exists() for place in places] == [True, False, True]
    monkeypatch.setenv(capture_cache.LIMIT, "much")
    with pytest.raises(UsageError, match="much"):
        CaptureCache(tmp_path)


def test_a_folder_that_cannot_be_written_is_none(tmp_path: Path, watched: _Watched) -> None:
    (tmp_path / "file").touch()
    cache = _cache(tmp_path / "file" / "cache", watched)
    cache.keep(_place(cache), "hf:gpt2", _run())
    cache.clear()
    assert cache.recalled(_place(cache)) is None
    assert cache.contents().entries == 0


# --- what a search of sizes was answered ------------------------------------------------------------------------------


def test_the_answers_of_a_search_come_back_until_something_has_changed(tmp_path: Path, watched: _Watched) -> None:
    cache = _cache(tmp_path, watched)
    learned = SizeAnswer(_run(), True, "", "at batch 2, 3, 9", 1, ((2, 8), (3, 12), (9, 36)))
    none = SizeAnswer(None, False, "a step of its own", "", 1, ())
    cache.keep_sizes(_place(cache), "hf:gpt2", {"capture 9": learned, "template 8": none})
    found = cache.recalled_sizes(_place(cache))
    assert found is not None
    assert list(found) == ["capture 9", "template 8"]
    assert found["template 8"] == none
    run = found["capture 9"].run
    assert run is not None
    assert same(run.trace, _run().trace)
    assert run.captured_at is not None
    assert replace(found["capture 9"], run=None) == replace(learned, run=None)
    assert cache.recalled(_place(cache)) is None  # it is no run
    watched.state = "2"
    assert cache.recalled_sizes(_place(cache)) is None


def test_one_that_cannot_be_kept_keeps_the_others_off_the_disk(tmp_path: Path, watched: _Watched) -> None:
    cache = _cache(tmp_path, watched)
    answers = {
        name: SizeAnswer(replace(_run(), ending=ending), True, "", "", 1, ())  # type: ignore[arg-type]
        for name, ending in (("a", None), ("b", object()))
    }
    cache.keep_sizes(_place(cache), "hf:gpt2", answers)
    assert cache.recalled_sizes(_place(cache)) is None


@pytest.mark.slow
def test_the_second_search_captures_nothing_and_a_further_one_what_it_needs(
    tmp_path: Path, watched: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "from torch import nn, rand\n"
        "def build(batch=2):\n    return nn.Linear(1 << 12, 1 << 12), rand(batch, 1 << 12)\n"
    )
    monkeypatch.chdir(tmp_path)
    cache = _cache(tmp_path / "kept", watched)
    monkeypatch.setattr(capture_cache, "in_use", cache)
    captured: list[int | None] = []
    record = runs.record

    def noted(question: Question, *others: Any) -> Run:
        captured.append(question.batch)
        return record(question, *others)

    monkeypatch.setattr(runs, "record", noted)

    def found(**options: Any) -> tuple[Any, list[int | None]]:
        captured.clear()
        answer = fit("net.py:build", device=device, **options).to_dict()
        for estimate in (answer["estimate"], answer["above"]["estimate"], answer["safe"]["estimate"]):
            (estimate or {"details": {}})["details"].pop("captured", None)
        return answer, list(captured)

    device = custom_device(GIB, like="T4")
    first, captures = found()
    assert captures[:2] == [2, 3]
    second, captures = found()
    assert captures == []
    assert second == first
    spared, captures = found(spare_bytes=100 * MIB)
    assert captures[:2] == [2, 3]
    monkeypatch.setattr(capture_cache, "in_use", None)
    assert spared == found(spare_bytes=100 * MIB)[0]
    monkeypatch.setattr(capture_cache, "in_use", cache)
    watched.state = "2"
    assert found()[1][:2] == [2, 3]


def test_a_search_that_ends_early_keeps_what_it_was_answered_then(
    tmp_path: Path, watched: _Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions may end, where a search begins once more; and cuDNN's counters go on."""
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "from torch import nn, rand\ndef build(batch=2):\n    return nn.Linear(4, 4), rand(batch, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(capture_cache, "in_use", _cache(tmp_path / "kept", watched))

    def search(keeps: str) -> SizedRuns:
        return SizedRuns("batch", lambda size: Question("net.py:build", batch=size), RunCache(), keeps=keeps)

    sized = search("up to 9")
    first = sized.capture(2, silent)
    sized.__exit__(UsageError)
    monkeypatch.setattr(runs, "record", None)
    with search("up to 9") as again:
        assert same(again.capture(2, silent).trace, first.trace)
    counting = {"plans_asked": 1}
    live = replace(_run(), cudnn=_Asked(counting))  # type: ignore[arg-type]
    kept = capture_cache.answered_until_now(live)
    counting["plans_asked"] = 2
    assert kept.cudnn is not None
    assert kept.cudnn.details() == {"plans_asked": 1}


class _Asked:
    """Stands for a cuDNN that is still asked."""

    def __init__(self, counting: dict[str, int]) -> None:
        self._counting = counting

    def notes(self) -> list[str]:
        return []

    def refused(self) -> list[Diagnostic]:
        return []

    def details(self) -> dict[str, Any]:
        return dict(self._counting)


def test_values_are_equal_after_the_way_through_json() -> None:
    value = {("a", 1): [1.5, float("inf"), None, True], "b": (Diagnostic(Code.NOTE, "x"), frozenset((2, 1)))}
    assert restored(json.loads(json.dumps(plain(value))), (Code, Diagnostic)) == value
    with pytest.raises(NotPlain):
        restored(plain(value), (Code,))
    with pytest.raises(NotPlain):
        plain(object())


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_folder_is_the_system_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv(capture_cache.FOLDER, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert capture_cache.default_folder() == tmp_path / "graphmem"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "me")
    assert capture_cache.default_folder() == tmp_path / "me" / ".cache" / "graphmem"
    monkeypatch.setenv(capture_cache.FOLDER, "off")
    assert capture_cache.default_folder() is None


def test_the_command_shows_and_empties_it(tmp_path: Path, watched: _Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capture_cache.FOLDER, str(tmp_path))
    (tmp_path / "mine.txt").touch()
    cache = _cache(tmp_path, watched)
    cache.keep(_place(cache), "hf:gpt2", _run())
    cache.recalled(_place(cache))

    def said(*words: str) -> str:
        result = CliRunner().invoke(cli, ["cache", *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    found = json.loads(said("--format", "json"))
    assert (found["entries"], found["hits"], found["limit_bytes"]) == (1, 1, 2**30)
    assert said("path") == f"{tmp_path}\n"
    assert "entries  0" in said("clear")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    monkeypatch.setenv(capture_cache.FOLDER, "off")
    assert said("path") == "off\n"
    assert "none" in said()


_ANSWERS = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
sys.argv = ["graphmem", *sys.argv[1:]]
from graphmem.cli.start import main
main()
"""


@pytest.mark.slow
def test_the_second_question_imports_no_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answer but for where it comes from; a model that is edited, and --no-cache, are captured anew."""
    pytest.importorskip("torch")
    (folder / "net.py").write_text(
        "from torch import nn, rand\nimport layers\ndef build(batch=2):\n"
        "    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers.WIDTH)]), rand(batch, 64)\n"
    )
    monkeypatch.setenv(capture_cache.FOLDER, str(folder / ".cache"))
    monkeypatch.setenv("PYTHONPATH", str(Path(capture_cache.__file__).parents[2]))

    def answered(*words: str, command: str = "analyze") -> tuple[dict[str, Any], bool]:
        line = [sys.executable, "-c", _ANSWERS, command, "net.py:build", *words, "--format", "json"]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        return json.loads(done.stdout), done.stderr.splitlines()[-1] == "True"

    first, imported = answered("--gpu", "RTX-4090")
    assert imported
    second, imported = answered("--gpu", "RTX-4090")
    assert not imported
    assert second["details"].pop("captured")["from"] == "disk"
    assert second == first
    anew, imported = answered("--gpu", "RTX-4090", "--no-cache")
    assert imported
    assert anew == first
    other, imported = answered("--gpu", "RTX-4090", "--alloc-conf", "expandable_segments:True", "--budget", "1GiB")
    assert not imported
    assert other["allocator"] != first["allocator"]
    sized = [answered("--gpu-memory", "1GiB", command="fit") for _ in range(2)]
    assert [imported for _, imported in sized] == [True, False]
    largest = [found["largest"] for found, _ in sized]
    _edited("layers.py")()
    edited, imported = answered("--gpu", "RTX-4090")
    assert imported
    assert edited["peak"] != first["peak"]
    fewer, imported = answered("--gpu-memory", "1GiB", command="fit")
    assert imported
    assert largest[0] == largest[1] != fewer["largest"]
