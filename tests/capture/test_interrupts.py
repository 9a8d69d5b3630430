"""Ctrl-C at any moment of an analysis leaves PyTorch as it was; the command ends with 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from graphmem import Training, analyze  # noqa: E402
from graphmem.capture import threads  # noqa: E402
from graphmem.capture.patches import Patches  # noqa: E402
from tests.capture.test_restores import state  # noqa: E402
from tests.support import platforms  # noqa: E402

pytestmark = platforms.SIGNALS

#: Moments of a whole analysis, evenly spread: layers are put on, the step runs, layers are taken off.
POINTS = (6, pytest.param(300, marks=pytest.mark.slow))


def _factory() -> Any:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.zeros(2, 8)


def _analysis() -> None:
    analyze(_factory, training=Training(amp="bf16"))


class _AtCall:
    """Sends SIGINT to this process when the ``number``-th Python function is called or returned from."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.seen = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        del frame, event, argument
        self.seen += 1
        if self.seen == self.number:
            signal.raise_signal(signal.SIGINT)


def _profiled(run: Callable[[], None], number: int) -> _AtCall:
    profile = _AtCall(number)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return profile


@pytest.mark.parametrize("points", POINTS)
def test_an_interrupted_analysis_leaves_pytorch_as_it_was(points: int) -> None:
    _profiled(_analysis, -1)  # what a process learns once it learns anew under a profiler
    before = state()
    whole = _profiled(_analysis, -1).seen
    stopped = 0
    for point in range(1, points + 1):
        try:
            _profiled(_analysis, whole * point // (points + 1))
        except KeyboardInterrupt:
            stopped += 1
        now = state()
        left = {key for key in before if before[key] is not now.get(key) and before[key] != now.get(key)}
        assert left == set(), f"interrupted after {point} of {points + 1}"
        assert Patches._active == []
        assert threads.current_threads() is None
    assert stopped > 0.9 * points  # Python drops what is raised in the callback of a weak reference
    _analysis()


def test_an_analysis_that_waits_can_be_interrupted() -> None:
    begun, done = threading.Event(), threading.Event()

    def hold() -> None:
        with threads.turn():
            begun.set()
            done.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    begun.wait(60)
    alarm = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    alarm.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _analysis()
    finally:
        done.set()
        holder.join()
    _analysis()


def test_an_interrupt_that_comes_while_an_object_dies_is_not_lost() -> None:
    class Short:
        pass

    went_on = []

    def factory() -> Any:
        object_ = Short()
        reference = weakref.ref(object_, lambda _: signal.raise_signal(signal.SIGINT))
        del object_
        went_on.append(reference())
        for _ in range(1000):
            time.sleep(0.01)
        return _factory()

    report = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        analyze(factory)
    assert went_on == [None]  # Python dropped it there
    assert sys.unraisablehook is report


def test_the_command_ends_with_130(tmp_path: Path) -> None:
    step = tmp_path / "step.py"
    step.write_text(
        "import pathlib, time, torch\n"
        "def step():\n"
        "    model = torch.nn.Linear(4, 4).cuda()\n"
        f"    pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "    while True:\n"
        "        model(torch.zeros(2, 4, device='cuda'))\n"
    )
    command = [sys.executable, "-m", "graphmem", "analyze", f"{step}:step"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if (tmp_path / "begun").exists():
            break
        time.sleep(0.1)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "graphmem: interrupted\n")
