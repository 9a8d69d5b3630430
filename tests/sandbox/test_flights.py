"""What a sandbox keeps besides Python's own file calls: other programs, the network, attempts, permissions."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphmem.sandbox import MECHANISMS
from graphmem.sandbox.namespace import remove_tree
from tests.sandbox import operations
from tests.sandbox.test_operations import fly, outside, really, sums

every = pytest.mark.parametrize("mechanism", MECHANISMS)


def written(folder: Path, text: str) -> Path:
    path = folder.parent / f"{folder.name}.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def real(tmp_path: Path) -> Path:
    folder = tmp_path / "real"
    operations.prepare(folder)
    return folder


# --- other programs ---------------------------------------------------------------------------------------------------

CHILDREN = """
import os, subprocess, sys
def try_(what):
    try:
        print(what())
    except OSError as error:
        print(type(error).__name__)
    sys.stdout.flush()
try_(lambda: subprocess.run(["rm", "a.txt"]).returncode)
try_(lambda: subprocess.run(["bash", "-c", "echo shell > f; mv b.bin c.bin; rm -r sub"]).returncode)
try_(lambda: os.system("echo more >> data.db") >> 8)
try_(lambda: os.waitpid(os.posix_spawn("/bin/mkdir", ["mkdir", "made"], os.environ), 0)[1] >> 8)
try_(lambda: subprocess.run([sys.executable, "-c", "open('python', 'w').write('x')"]).returncode)
if os.fork() == 0:
    try:
        os.execvp("touch", ["touch", "touched"])
    except OSError:
        os._exit(1)
print(os.wait()[1] >> 8, sorted(os.listdir(".")))
"""


@pytest.mark.skipif(os.name != "posix", reason="programs of POSIX systems")
@every
def test_other_programs_change_nothing_real(mechanism: str, real: Path) -> None:
    copy = real.parent / "copy"
    shutil.copytree(real, copy, symlinks=True)
    program = written(real, CHILDREN)
    before = sums(real)
    printed, report = fly(mechanism, program, real)
    assert sums(real) == before
    if mechanism == "namespace":
        assert printed == really(program, copy)
        assert {Path(one["path"]).name for one in report["files"]["deleted"]} >= {"a.txt", "b.bin", "c.txt"}
        assert {Path(one["path"]).name for one in report["files"]["written"]} >= {"f", "c.bin", "touched", "python"}
    elif mechanism == "landlock":
        assert all(line != "0" for line in printed.splitlines())
        assert report["started"]["rm a.txt"] == 1
    else:
        assert printed.splitlines()[:-1] == ["PermissionError"] * 5
        assert {"what": "start", "to": "rm a.txt", "times": 1} in report["refused"]


@every
def test_a_program_left_behind_ends_with_it(mechanism: str, real: Path) -> None:
    if mechanism != "namespace":
        pytest.skip("of processes that are let start")
    program = written(real, "import subprocess\nprint(subprocess.Popen(['sleep', '100']).pid)")
    printed, _ = fly(mechanism, program, real)
    assert not Path(f"/proc/{printed.strip()}").exists()


# --- the network ------------------------------------------------------------------------------------------------------

NETWORK = """
import os, socket, sys, threading, urllib.request
def ask(url, data=None):
    try:
        print(urllib.request.urlopen(url, data, timeout=5).status)
    except OSError as error:
        print("refused")
ask(f"http://127.0.0.1:{os.environ['PORT']}/got")
ask(f"http://127.0.0.1:{os.environ['PORT']}/posted", b"secret")
ask("http://nowhere.invalid/")
ask("http://192.0.2.1/")
own = socket.create_server(("127.0.0.1", 0))
def answer():
    one, _ = own.accept()
    one.sendall(b"own")
threading.Thread(target=answer).start()
print(socket.create_connection(own.getsockname()).recv(9))
here, there = socket.socketpair()
here.sendall(b"pair"); print(there.recv(9))
if hasattr(socket, "AF_UNIX"):
    listening = socket.socket(socket.AF_UNIX); listening.bind("own.sock"); listening.listen()
    talking = socket.socket(socket.AF_UNIX); talking.connect("own.sock")
    print("unix")
import multiprocessing
with multiprocessing.Manager() as manager:
    print(len(manager.list([1, 2])))
"""


class _Server(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    asked: list[str] = []
    handler = type("Handler", (_Server,), {"asked": asked})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as listening:
        monkeypatch.setenv("PORT", str(listening.server_port))
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield asked
        listening.shutdown()


@every
def test_only_its_own_sockets_are_reached(mechanism: str, real: Path, server: list[str]) -> None:
    before = sums(real)
    printed, report = fly(mechanism, written(real, NETWORK), real)
    assert sums(real) == before
    assert server == []
    assert printed.split() == ["refused"] * 4 + ["b'own'", "b'pair'", "unix", "2"]
    refused = {(one["what"], one["to"]) for one in report["refused"]}
    assert refused >= {("look up", "nowhere.invalid"), ("connect to", "192.0.2.1:80")}


@every
def test_the_network_can_be_allowed(mechanism: str, real: Path, server: list[str]) -> None:
    program = written(real, NETWORK.split('ask("http://nowhere')[0])
    printed, _ = fly(mechanism, program, real, network=True)
    assert printed.split() == ["200", "200"]
    assert server == ["/got", "/posted"]


# --- attempts and permissions -----------------------------------------------------------------------------------------

TWICE = """
import os, shutil
print(sorted(os.listdir(".")), open("a.txt").read())
os.remove("b.bin"); shutil.rmtree("sub"); os.mkdir("sub"); open("a.txt", "a").write("again"); os.chdir("sub")
open("new", "w").write("n")
"""


@every
def test_a_second_attempt_finds_the_real_files(mechanism: str, real: Path) -> None:
    before = sums(real)
    printed, report = fly(mechanism, written(real, TWICE), real, attempts=3)
    assert sums(real) == before
    lines = printed.split("\n\n")[:3]
    assert len(set(lines)) == 1
    assert report["files"]["count"] == 2
    assert report["files"]["deleted_count"] == 3


ALLOWED = "import os\nos.makedirs('empty/x')\nopen('empty/x/f', 'w').write('f')\nos.remove('a.txt')\nopen('n', 'w')"


@every
def test_a_folder_can_be_allowed(mechanism: str, real: Path) -> None:
    fly(mechanism, written(real, ALLOWED), real, writes=[str(real / "empty")])
    assert (real / "empty/x/f").read_text() == "f"
    assert (real / "a.txt").exists()
    assert not (real / "n").exists()


@every
def test_all_writing_can_be_allowed(mechanism: str, real: Path) -> None:
    fly(mechanism, written(real, ALLOWED), real, everywhere=True)
    assert (real / "empty/x/f").exists()
    assert (real / "n").exists()
    assert not (real / "a.txt").exists()


# --- the report -------------------------------------------------------------------------------------------------------

REPORTED = """
import os, tempfile
with open("big", "wb") as f: f.truncate(5 << 30)
open("a.txt", "w").write("12345678")
os.rename("b.bin", "renamed.bin"); os.rename("sub", "folder")
os.remove("data.db")
open(os.path.join(tempfile.gettempdir(), "scratch-of-it"), "w").write("s")
"""


@every
def test_the_report_has_true_sizes(mechanism: str, real: Path) -> None:
    size = (real / "data.db").stat().st_size
    _, report = fly(mechanism, written(real, REPORTED), real)
    files = report["files"]
    at = lambda name: str(real / name)  # noqa: E731
    assert files["written"] == [{"path": at("big"), "bytes": 5 << 30}]
    assert files["overwritten"] == [{"path": at("a.txt"), "bytes": 8, "before_bytes": 6}]
    assert files["deleted"] == [{"path": at("data.db"), "bytes": size}]
    renamed = {(one["from"], one["path"], one["bytes"]) for one in files["renamed"]}
    assert renamed == {
        (at("b.bin"), at("renamed.bin"), 16384),
        (at("sub/c.txt"), at("folder/c.txt"), 5),
        (at("sub/deep/d.txt"), at("folder/deep/d.txt"), 5),
    }
    assert files["count"] == 5
    assert not (Path("/tmp") / "scratch-of-it").exists()


# --- the two processes ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="there is one process elsewhere")
@pytest.mark.parametrize("mechanism", ["namespace", "landlock"])
@pytest.mark.parametrize(("how", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("os._exit(3)", 3)])
def test_the_exit_code_is_the_programs(mechanism: str, how: str, code: int, real: Path, tmp_path: Path) -> None:
    program = written(real, f"import os, sys\nopen('x', 'w')\n{how}")
    command = [sys.executable, "-m", "tests.sandbox.flight", mechanism, str(program), str(tmp_path / "report")]
    environment = outside(TMPDIR=str(tmp_path))
    done = subprocess.run(command, cwd=real, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert not list(tmp_path.glob("graphmem-run-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="there is one process elsewhere")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_program(number: signal.Signals, real: Path, tmp_path: Path) -> None:
    program = written(real, "import time\nopen('x', 'w')\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)")
    command = [sys.executable, "-m", "tests.sandbox.flight", "namespace", str(program), str(tmp_path / "report")]
    environment = outside(TMPDIR=str(tmp_path))
    with subprocess.Popen(
        command, cwd=real, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode in (128 + number, 1 if number == signal.SIGINT else -1)
    assert not list(tmp_path.glob("graphmem-run-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
def test_a_start_in_a_namespace_does_little() -> None:
    text = """
import os, sys
from graphmem.sandbox import namespace, supervised
folder = supervised._temporary_folder()
if os.fork():
    sys.exit(os.wait()[1] >> 8)
one, calls = namespace.Namespace(folder), []
sys.setprofile(lambda frame, event, argument: calls.append(event))
one.enter()
sys.setprofile(None)
print(folder, len(calls))
"""
    done = subprocess.run([sys.executable, "-c", text], env=outside(), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(done.stderr.splitlines()[-1])
    folder, calls = done.stdout.split()
    remove_tree(folder)
    assert int(calls) < 50_000


def test_a_mechanism_that_does_not_exist_is_refused(real: Path) -> None:
    command = [sys.executable, "-m", "tests.sandbox.flight", "magic", "x.py", "r"]
    environment = outside()
    done = subprocess.run(command, cwd=real, env=environment, capture_output=True, text=True)
    assert "GRAPHMEM_SANDBOX is one of namespace, landlock, wrapped, not 'magic'" in done.stderr
