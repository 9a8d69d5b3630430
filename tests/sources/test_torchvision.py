"""A torchvision that was made for another PyTorch: one clear message, or none where it is not needed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from graphmem.errors import SourceError
from graphmem.sources import load

BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"


@pytest.fixture
def broken_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}
    for name in kept:
        del sys.modules[name]
    yield
    sys.modules.pop("torchvision", None)
    sys.modules.update(kept)


@pytest.mark.usefixtures("broken_torchvision")
def test_transformers_is_told_that_there_is_none() -> None:
    pytest.importorskip("transformers")
    from graphmem.sources.huggingface import without_broken_torchvision

    import_utils = importlib.import_module("transformers.utils.import_utils")
    assert without_broken_torchvision()
    assert not import_utils.is_torchvision_available()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("torchvision")
    assert not without_broken_torchvision()  # there is none any more


@pytest.mark.usefixtures("broken_torchvision")
def test_a_torchvision_model_says_what_to_install() -> None:
    with pytest.raises(SourceError, match="install the version of torchvision that was made for it"):
        load("torchvision:resnet18")
