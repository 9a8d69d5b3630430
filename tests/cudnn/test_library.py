"""Asking a cuDNN library: what is said where there is none, how plans are chosen, and what a driver's stand-in is.

Set GRAPHMEM_CUDNN to a cuDNN (9.8 or later) with NVIDIA's wheels beside it to compare its answers with recordings of
PyTorch's CUDA build: ``tests/capture/kernels/test_cudnn_plans.py``.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphmem.analyze import analyze
from graphmem.cli.main import cli
from graphmem.cudnn import library
from graphmem.cudnn.card import check_supported, clocks_are_assumed, description
from graphmem.cudnn.descriptors import CudnnError, Kind, Type
from graphmem.cudnn.driver import shared_library
from graphmem.cudnn.library import Cudnn, CudnnUnavailable, find_library
from graphmem.cudnn.plans import FALLBACK, INSTANT, Convolution, dense_strides, is_left_out, workspaces
from graphmem.cudnn.worker import LoadError, load, version_text
from graphmem.devices import all_devices, device_named
from graphmem.errors import UsageError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="cuDNN is asked on Linux only")
CONVOLUTION = Convolution(
    "forward", "float32", (8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56), (1, 1), (1, 1), (1, 1), False
)


# --- finding and loading ----------------------------------------------------------------------------------------------


def test_a_library_is_found_in_a_folder_and_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudnn.so.9").touch()
    for named in (folder / "libcudnn.so.9", folder, folder.parent, tmp_path):
        assert find_library(named) == str(folder / "libcudnn.so.9")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_library("installed") == str(folder / "libcudnn.so.9")
    monkeypatch.setattr(sys, "path", [])
    assert find_library("installed") == "libcudnn.so.9"  # the loader may know it


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CudnnUnavailable, match=r"there is no libcudnn\.so\.9 in"):
        find_library(tmp_path)
    with pytest.raises(CudnnUnavailable, match="there is no /nowhere; write the path"):
        find_library("/nowhere")


@pytest.mark.parametrize("named", ["", True, 9])
def test_what_is_no_path_is_refused(named: object) -> None:
    with pytest.raises(UsageError, match="cudnn is the path of libcudnn"):
        find_library(named)  # type: ignore[arg-type]


def test_other_systems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CudnnUnavailable, match="Linux only"):
        find_library("installed")


def test_a_file_that_is_no_library_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "libcudnn.so.9"
    path.write_text("not a library")
    with pytest.raises(CudnnUnavailable, match="cannot be asked: it cannot be loaded"):
        Cudnn(path, device_named("H200"))


def test_a_library_that_is_not_cudnn_is_named() -> None:
    import _ctypes

    with pytest.raises(LoadError, match="cudnnGetVersion"):
        load(_ctypes.__file__, [])


def test_versions_read_as_people_write_them() -> None:
    assert version_text(92000) == "9.20.0"
    assert version_text(90100) == "9.1.0"
    assert version_text(8907) == "8.9.7"


@pytest.mark.parametrize("command", [["analyze", "zoo:mlp"], ["export", "zoo:mlp"]])
def test_the_command_line_says_it_in_one_line(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--cudnn", "/nowhere"])
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[0].startswith("graphmem: --cudnn: there is no /nowhere")
    assert len(result.stderr.strip().splitlines()) == 1


# --- a library that is not one ----------------------------------------------------------------------------------------


def _pretend_worker(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, about: object = None) -> Path:
    """A worker that loads nothing: ``answer`` is Python that sets ``reply`` from ``question``. Returns the library."""
    about = about or {"version": 92000, "cudart": 13000, "path": "/lib/libcudnn.so.9", "driver": "stand-in"}
    script = folder / "worker.py"
    script.write_text(
        "import json, sys, os\nsys.stdin.readline()\n"
        f"print(json.dumps({about!r}), flush=True)\n"
        f"for line in sys.stdin:\n    question = json.loads(line)\n    {answer}\n"
        "    print(json.dumps(reply), flush=True)\n"
    )
    monkeypatch.setattr(library, "WORKER", (sys.executable, str(script)))
    named = folder / "libcudnn.so.9"
    named.touch()
    return named


def test_a_convolution_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = _pretend_worker(tmp_path, monkeypatch, "reply = {'workspaces': [5, 9, 5, 4, 7, 0, 3]}")
    with Cudnn(named, device_named("H200")) as cudnn:
        assert [cudnn.workspaces(CONVOLUTION) for _ in range(3)] == [(5, 9, 5, 4, 7, 0)] * 3
        assert cudnn.largest_workspace(CONVOLUTION) == 9
        assert cudnn.details()["plans_asked"] == 1
        assert cudnn.refused() == []
        assert cudnn.notes() == [
            "workspaces of convolutions and recurrent networks: asked from cuDNN 9.20.0 (/lib/libcudnn.so.9)"
        ]


def test_one_that_is_found_is_started_by_the_first_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = _pretend_worker(tmp_path, monkeypatch, "reply = {'workspaces': [5]}")
    monkeypatch.setattr(library, "_wheel", lambda: str(named))
    assert find_library("auto") == str(named)
    with Cudnn("auto", device_named("H200")) as cudnn:
        assert cudnn._worker is None
        assert (cudnn.notes(), cudnn.details()) == ([], {})
        assert cudnn.workspaces(CONVOLUTION) == (5,)
        assert "asked from cuDNN 9.20.0" in cudnn.notes()[0]


def test_one_that_is_found_and_cannot_be_asked_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libcudnn.so.9"
    path.write_text("not a library")
    monkeypatch.setattr(library, "_wheel", lambda: str(path))
    with Cudnn("auto", device_named("H200")) as cudnn:
        assert cudnn.workspaces(CONVOLUTION) is None
        assert cudnn.largest_workspace(CONVOLUTION) is None
        (note,) = cudnn.notes()
        assert note.startswith("workspaces of convolutions and recurrent networks: predicted, for ")
        assert "cannot be asked: it cannot be loaded" in note
        assert cudnn.refused() == []


def test_nothing_is_asked_where_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_wheel", lambda: None)
    monkeypatch.setattr(library, "_known_to_loader", lambda: None)
    assert find_library("auto") is None
    assert find_library("never") is None


def test_all_that_is_missing_beside_the_library_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "cudnn.c"
    source.write_text("long cudnnGetVersion(void){return 92000;} long cudnnGetCudartVersion(void){return 13000;}")
    built = tmp_path / "lib" / "libcudnn.so.9"
    built.parent.mkdir()
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    with pytest.raises(LoadError, match=r"needs libcublasLt.so.13 and libnvrtc.so.13.*graphmem\[cudnn\]"):
        load(str(built), [])


def test_convolutions_without_a_plan_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = _pretend_worker(tmp_path, monkeypatch, "reply = {'error': 'status 3000'}")
    with Cudnn(named, device_named("H200")) as cudnn:
        assert [cudnn.workspaces(CONVOLUTION) for _ in range(3)] == [None, None, None]
        assert [one.count for one in cudnn.refused()] == [3]
        assert "status 3000" in cudnn.refused()[0].message
        assert cudnn.details()["calls_without_a_plan"] == 3


def test_a_process_that_ends_is_started_again_and_then_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = _pretend_worker(tmp_path, monkeypatch, "os._exit(7)")
    with Cudnn(named, device_named("H200")) as cudnn:
        sizes = [cudnn.workspaces(replace(CONVOLUTION, dtype=dtype)) for dtype in ("float16", "bfloat16")]
        sizes += [cudnn.workspaces(replace(CONVOLUTION, tf32=False, deterministic=on)) for on in (False, True)]
        assert sizes == [None] * 4
        assert any("exit status 7" in one.message for one in cudnn.refused())
        assert any("ended 3 times" in one.message for one in cudnn.refused())


def test_a_library_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = _pretend_worker(tmp_path, monkeypatch, "pass", {"error": "it is cuDNN 9.1.0, and plans need 9.8"})
    with pytest.raises(CudnnUnavailable, match=r"cannot be asked: it is cuDNN 9\.1\.0"):
        Cudnn(named, device_named("H200"))


def test_an_analysis_says_whom_it_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    named = _pretend_worker(tmp_path, monkeypatch, f"reply = {{'workspaces': [{7 << 20}]}}")
    model, example = torch.nn.Conv2d(3, 8, 3), torch.empty(2, 3, 32, 32)
    asked = analyze(model, example, training=False, device="H200", cudnn=named)
    assert any("asked from cuDNN 9.20.0" in line for line in asked.assumptions)
    assert not any(item.message.startswith("workspaces of convolutions are predicted") for item in asked.diagnostics)
    found = json.loads(asked.to_json())["details"]["cudnn"]
    assert (found["version"], found["plans_asked"], found["plans_made"]) == ("9.20.0", 1, 1)
    assert asked.trace is not None
    labels = {storage.label: storage.bytes for storage in asked.trace.storages}
    assert labels["cuDNN workspace"] == 7 << 20
    predicted = analyze(model, example, training=False, device="H200")
    assert "cudnn" not in predicted.details
    assert predicted.trace is not None
    assert all(storage.bytes != 7 << 20 for storage in predicted.trace.storages)


def test_a_refusal_takes_the_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    named = _pretend_worker(tmp_path, monkeypatch, "reply = {'error': 'status 3000'}")
    model, example = torch.nn.Conv2d(16, 32, 3), torch.empty(2, 16, 32, 32)
    asked, predicted = (
        analyze(model, example, training=False, device="H200", cudnn=cudnn) for cudnn in (named, "never")
    )
    assert asked.peak == predicted.peak
    warnings = [item for item in asked.diagnostics if item.kind == "warning" and "did not plan" in item.message]
    assert [item.count for item in warnings] == [2]


# --- cards ------------------------------------------------------------------------------------------------------------


def test_every_cuda_card_has_a_description() -> None:
    for card in all_devices():
        if card.compute_capability is None:
            with pytest.raises(UsageError, match="no CUDA card"):
                description(card)
            continue
        fields = description(card)
        assert fields["multiProcessorCount"] == card.sm_count
        assert fields["deviceVer"] == 100 * card.compute_capability[0] + 10 * card.compute_capability[1]
        assert not clocks_are_assumed(card), "the table has no clocks of a Hopper card"


def test_clocks_nobody_wrote_down_are_said_to_be_assumed() -> None:
    assert clocks_are_assumed(replace(device_named("H200"), clocks_khz=None))
    assert not clocks_are_assumed(device_named("A100"))


def test_old_cards_need_a_cudnn_for_cuda_12() -> None:
    check_supported(device_named("V100"), 12090)
    check_supported(device_named("T4"), 13000)
    with pytest.raises(UsageError, match="does not run on V100"):
        check_supported(device_named("V100"), 13000)


# --- choosing among plans ---------------------------------------------------------------------------------------------


class _Offered:
    """Descriptors of a pretended cuDNN: (numerical notes, behavior notes, workspace or None if it does not build)."""

    def __init__(self, **modes: list[tuple[list[int], list[int], int | None]]) -> None:
        self.modes = {INSTANT: modes.get("instant", []), FALLBACK: modes.get("fallback", [])}
        self.mode = INSTANT
        self.attributes: dict[tuple[int, int], list[object]] = {}
        self.made: list[Kind] = []
        self.chosen: tuple[list[int], list[int], int | None] | None = None

    def make(self, kind: Kind) -> int:
        self.made.append(kind)
        return len(self.made)

    def set(self, of: int, name: int, kind: Type, values: list[object]) -> None:
        self.attributes[of, name] = list(values)
        if name == 200:
            self.mode = int(str(values[0]))

    def finalize(self, descriptor: int) -> None:
        if self.made[descriptor - 1] is Kind.PLAN and self.chosen is not None and self.chosen[2] is None:
            raise CudnnError("status 3000")

    def count(self, of: int, name: int, kind: Type) -> int:
        return len(self.modes[self.mode])

    def fill(self, of: int, name: int, kind: Kind, at_most: int) -> list[int]:
        if kind is Kind.ENGINE_CONFIG:
            return [1000 * (self.mode + 1) + index for index in range(at_most)]
        self.chosen = self.modes[of // 1000 - 1][of % 1000]
        return [of]

    def numbers(self, of: int, name: int, kind: Type, at_most: int) -> list[int]:
        assert self.chosen is not None
        notes, behavior, size = self.chosen
        return {1303: notes, 1305: behavior}.get(name, [size or 0])


def _sizes(offered: _Offered, convolution: Convolution = CONVOLUTION) -> list[int]:
    return workspaces(offered, 0, convolution, INSTANT)  # type: ignore[arg-type]


def test_the_first_plan_that_builds_is_taken() -> None:
    assert _sizes(_Offered(instant=[([], [], None), ([], [], 20), ([], [], 30)])) == [20, 30]
    assert _sizes(_Offered(instant=[([], [], None)], fallback=[([], [], 40)])) == [40]
    with pytest.raises(CudnnError, match="no plan"):
        _sizes(_Offered(instant=[([], [], None)]))


def test_engines_pytorch_leaves_out_are_left_out() -> None:
    offered: list[tuple[list[int], list[int], int | None]] = [([1], [], 10), ([4], [], 20), ([0], [], 30), ([], [], 40)]
    assert _sizes(_Offered(instant=offered)) == [20, 30, 40]
    assert _sizes(_Offered(instant=offered), replace(CONVOLUTION, deterministic=True)) == [30, 40]
    assert _sizes(_Offered(instant=offered), replace(CONVOLUTION, deterministic=True, tf32=False)) == [40]
    assert not is_left_out([0], replace(CONVOLUTION, dtype="float16", tf32=False))


def test_kernels_compiled_at_run_time_need_not_be_built() -> None:
    offered = _Offered(instant=[([], [0], 50)])
    assert _sizes(offered) == [50]
    assert Kind.PLAN not in offered.made


def test_all_plans_are_those_of_both_lists() -> None:
    offered = _Offered(instant=[([], [], 10), ([], [], None)], fallback=[([], [], 5)])
    assert _sizes(offered) == [10, 5]


def test_tensors_are_described_as_pytorch_does() -> None:
    offered = _Offered(instant=[([], [], 0)])
    _sizes(offered, replace(CONVOLUTION, dtype="float64", alignments=(8, 16, 32)))
    tensors = [index for index, kind in enumerate(offered.made, 1) if kind is Kind.TENSOR]
    assert [offered.attributes[index, 906] for index in tensors] == [[ord(name)] for name in "wxy"]
    assert [offered.attributes[index, 900] for index in tensors] == [[16], [8], [32]]
    convolution = offered.made.index(Kind.CONVOLUTION) + 1
    assert offered.attributes[convolution, 100] == [1]  # fp64 is summed in fp64, everything else in fp32
    assert dense_strides((2, 3, 4, 5), False) == [60, 20, 5, 1]
    assert dense_strides((2, 3, 4, 5), True) == [60, 1, 15, 3]
    assert dense_strides((2, 1, 4, 5), True) == [20, 1, 5, 1]


# --- the stand-in for a driver ----------------------------------------------------------------------------------------


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no stand-in for this machine")
def test_the_stand_in_has_every_function_and_no_device(tmp_path: Path) -> None:
    path = tmp_path / "driver.so"
    path.write_bytes(shared_library([b"cuInit", b"cuLaunchKernel"], platform.machine()))
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); ctypes.CDLL('libcuda.so.1');"
        "print(library.cuInit(0), library.cuLaunchKernel(), hasattr(library, 'cuMemAlloc'))"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["100", "100", "False"], ran.stderr
