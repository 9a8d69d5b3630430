"""Options and fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests import places

# No deadline: a busy machine is not a failure. In CI the same examples every time, so that a change is judged alone.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# Cards that the developer measured change no expectation.
os.environ["GRAPHMEM_DEVICES"] = os.devnull + ".json"

GOLDEN = places.GOLDEN


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write the golden files instead of comparing")


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
