"""Options and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import places
from tests.support.examples import USUAL, examples

# No deadline: a busy machine is not a failure. In CI the same examples every time, so that a change is judged alone.
settings.register_profile("default", deadline=None, max_examples=examples(USUAL))
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Shells start background jobs with Ctrl-C ignored, and what they start inherits that; tests of interrupts need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Cards that the developer measured change no expectation.
os.environ["GRAPHMEM_DEVICES"] = os.devnull + ".json"

# Nothing is kept between tests, nor in the developer's own folder.
os.environ["GRAPHMEM_CACHE"] = "off"

GOLDEN = places.GOLDEN


@pytest.fixture(autouse=True, scope="module")
def _settled_heap() -> None:
    """Collections of garbage look only at what a module has made: the heap of hours of tests takes a second each."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write the golden files instead of comparing")
    parser.addoption("--traces", metavar="FOLDER", help="published memory snapshots of real GPUs, to check against")
    parser.addoption("--part", metavar="N/M", help="run every Mth of the chosen tests, from the Nth on")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--traces"):
        if not Path(folder).is_dir():
            raise pytest.UsageError(f"--traces: {folder} is no folder")
        os.environ["GRAPHMEM_TRACES"] = os.path.abspath(folder)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one part: every Mth test, so that no part gets all that take long. ``-m`` has chosen before."""
    part = config.getoption("--part")
    if not part:
        return
    number, _, parts = part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise pytest.UsageError(f"--part wants N/M with 1 <= N <= M, not {part!r}")
    kept = items[int(number) - 1 :: int(parts)]
    chosen = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("reports/x.txt", text)`` compares with that file, or writes it under ``--update-goldens``."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; run pytest --update-goldens and review it"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs; if intended, run pytest --update-goldens"

    return check


@pytest.fixture
def cudnn_switches() -> Iterator[None]:
    """The test may set PyTorch's switches of cuDNN; they are put back after it."""
    cudnn = pytest.importorskip("torch").backends.cudnn
    before = cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark
    yield
    cudnn.deterministic, cudnn.allow_tf32, cudnn.benchmark = before


@pytest.fixture(autouse=True)
def validated_distributions() -> Iterator[None]:
    """A test that compiles outside of a capture ends the validation of distributions for the process, as programs do
    (``graphmem/capture/compile/frame_evaluation.py``): the tests after it begin with it."""
    yield
    if "torch.distributions" in sys.modules:
        sys.modules["torch.distributions"].Distribution.set_default_validate_args(__debug__)
