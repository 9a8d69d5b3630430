"""``graphmem doctor``: versions from metadata, exit codes, the same as JSON, and nothing imported."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

from graphmem.base import versions
from graphmem.cli import doctor
from graphmem.cli.main import cli
from graphmem.torch_names import Declaration
from tests import places

_INSTALLED = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "onnxruntime": "1.32.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    packages = dict(_INSTALLED)

    def version(package: str) -> str:
        if package not in packages:
            raise importlib.metadata.PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "find_library", lambda _: None)
    return packages


def _run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *words])


def _document(*words: str) -> Any:
    return json.loads(_run("--format", "json", *words).stdout)


def _finding(name: str) -> Any:
    return next(one for one in _document()["libraries"] if one["name"] == name)


def test_what_is_known_is_no_reason_to_worry(installed: dict[str, str]) -> None:
    result = _run()
    assert result.exit_code == 0
    assert "2.13.0+cpu" in result.stdout
    assert "newer" not in result.stdout.replace("newest", "")


def test_a_newer_version_is_told(installed: dict[str, str]) -> None:
    installed["torch"] = "2.99.1"
    result = _run()
    assert result.exit_code == 0
    assert f"PyTorch 2.99.1 is newer than {versions.words(versions.NEWEST)}, the newest known" in result.stdout
    assert _finding("PyTorch")["state"] == "newer"


def test_an_older_version_is_told(installed: dict[str, str]) -> None:
    installed["torch"] = "2.4.1"
    assert _run().exit_code == doctor.NOT_AS_KNOWN
    assert _finding("PyTorch")["state"] == "older"


def test_what_does_not_load_is_told_with_its_reason(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    installed["torchvision"] = "0.28.0"
    reason = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision.py").write_text(f"raise RuntimeError({reason!r})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = _run()
    assert result.exit_code == doctor.NOT_AS_KNOWN
    assert f"torchvision 0.28.0 does not load: RuntimeError: {reason}." in " ".join(result.stdout.split())
    assert _finding("torchvision")["state"] == "broken"
    (tmp_path / "torchvision.py").write_text("")
    assert _finding("torchvision")["state"] == "installed"


def test_an_extra_brings_what_is_missing(installed: dict[str, str]) -> None:
    del installed["onnxruntime"]
    finding = _finding("ONNX Runtime")
    assert (finding["state"], finding["extra"]) == ("not installed", "ort")
    assert "graphmem[ort]" in " ".join(_run().stdout.split())


def test_a_cudnn_outside_python_has_its_version_in_its_name(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "libcudnn.so.9.20.0").touch()
    (tmp_path / "libcudnn.so.9").symlink_to(tmp_path / "libcudnn.so.9.20.0")
    monkeypatch.setattr(doctor, "find_library", lambda _: str(tmp_path / "libcudnn.so.9"))
    assert _finding(doctor.CUDNN)["installed"] == "9.20.0"


def test_names_that_are_gone_are_told(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Declaration("torch._C._gone", "optional", "something", "capture/patches.py")
    monkeypatch.setattr(doctor, "lacking", lambda: (gone,))
    result = _run("--names")
    assert result.exit_code == doctor.NOT_AS_KNOWN
    assert "torch._C._gone: something" in result.stdout
    assert _document("--names")["names"][0]["path"] == "torch._C._gone"
    assert _document()["names"] is None


def test_nothing_is_imported() -> None:
    code = (
        "import atexit, sys\nsys.argv = ['graphmem', 'doctor']\nfrom graphmem.cli.start import main\n"
        "heavy = {'torch', 'transformers', 'onnxruntime', 'tensorflow', 'vllm'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules))))\nmain()"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=places.ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_installed_pytorch_has_every_name_that_is_declared() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "graphmem", "doctor", "--names", "--format", "json"]
    ran = subprocess.run(command, cwd=places.ROOT, capture_output=True, text=True, check=False)
    assert json.loads(ran.stdout)["names"] == []


def test_newest_versions_are_those_that_the_rest_of_the_package_follows() -> None:
    from graphmem.runtimes.tensorflow.card import VERSION
    from graphmem.serving.vllm import versions as vllm

    newest = {library.name: library.newest for library in doctor.LIBRARIES}
    tomllib = pytest.importorskip("tomllib")
    if not (places.ROOT / "pyproject.toml").exists():
        pytest.skip("needs the checkout: the tests of an installed package are away from it")
    pinned = tomllib.loads((places.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    for name, package in (("transformers", "transformers"), ("Keras", "keras")):
        assert any(entry.startswith(f"{package}=={newest[name]}.") for entry in pinned), name
    assert newest["TensorFlow"] == VERSION
    assert newest["vLLM"] == versions.words(vllm.NEWEST)
