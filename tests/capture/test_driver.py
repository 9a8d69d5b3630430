"""A driver's libraries where there is none: NVML's bindings, extensions that are linked against the CUDA driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from graphmem.capture.device import driver_library  # noqa: E402
from tests.support.captures import record  # noqa: E402

#: The bindings as far as a program asks them here, with the private functions that all copies have.
_BINDINGS = """
import ctypes
class NVMLError(Exception): pass
def _LoadNvmlLibrary(): raise NVMLError("no library")
def _nvmlGetFunctionPointer(name): raise NVMLError("no function")
def _call(name, *args):
    code = _nvmlGetFunctionPointer(name)(*args)
    if code: raise NVMLError(code)
def nvmlInit():
    _LoadNvmlLibrary()
    _call("nvmlInitWithFlags", 0)
def nvmlDeviceGetCount():
    count = ctypes.c_uint()
    _call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    return count.value
class _Device(ctypes.Structure): pass
def nvmlDeviceGetHandleByIndex(index):
    device = ctypes.POINTER(_Device)()
    _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
    return device
def nvmlDeviceGetIndex(handle):
    index = ctypes.c_uint()
    _call("nvmlDeviceGetIndex", handle, ctypes.byref(index))
    return index.value
def nvmlDeviceGetName(handle):
    name = ctypes.create_string_buffer(96)
    _call("nvmlDeviceGetName", handle, name, ctypes.c_uint(96))
    return name.value.decode()
class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]
def nvmlDeviceGetMemoryInfo(handle):
    memory = _Memory()
    _call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return memory
def nvmlDeviceGetFanSpeed(handle):
    _call("nvmlDeviceGetFanSpeed", handle, ctypes.byref(ctypes.c_uint()))
"""


def test_nvml_shows_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text(_BINDINGS)
    monkeypatch.syspath_prepend(tmp_path)

    def step() -> None:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        held = torch.empty(1 << 20, device="cuda")
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        assert (pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetIndex(handle)) == (1, 0)
        assert pynvml.nvmlDeviceGetName(handle) == torch.cuda.get_device_name()
        assert (memory.free, memory.total) == torch.cuda.mem_get_info()
        assert memory.used == memory.total - memory.free
        with pytest.raises(pynvml.NVMLError, match="3"):
            pynvml.nvmlDeviceGetFanSpeed(handle)
        with pytest.raises(pynvml.NVMLError, match="2"):
            pynvml.nvmlDeviceGetHandleByIndex(7)
        del held

    try:
        record(step)
        with pytest.raises(Exception, match="no library"):
            sys.modules["pynvml"].nvmlInit()
    finally:
        sys.modules.pop("pynvml", None)


_USES = """
import ctypes, pathlib, sys
from graphmem.capture.device.driver_library import inert_library
path = pathlib.Path(sys.argv[1])
path.write_bytes(inert_library(["cuInit", "cuMemMap"], sys.argv[2]))
library = ctypes.CDLL(str(path))
assert (library.cuInit(0), library.cuMemMap()) == (100, 100)
assert not hasattr(library, "cuMemUnmap")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libcuda.so.1 is Linux's")
def test_the_inert_library_is_one_to_the_loader(tmp_path: Path) -> None:
    import platform

    subprocess.run([sys.executable, "-c", _USES, str(tmp_path / "libcuda.so.1"), platform.machine()], check=True)


def test_an_extension_is_loaded_once_its_functions_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension, loaded = tmp_path / "kernels.so", []
    extension.write_bytes(driver_library.inert_library(["cuMemMap", "cublasCreate", "cuInit"], "x86_64"))
    monkeypatch.setattr(driver_library.ctypes, "CDLL", lambda path, _: loaded.append(Path(path).read_bytes()))
    monkeypatch.setattr(driver_library.platform, "machine", lambda: "aarch64")

    def load(said: str) -> Callable[[object], str]:
        def once(_: object) -> str:
            if not loaded:
                raise ImportError(said)
            return "module"

        return once

    with pytest.raises(ImportError, match=r"libfoo"):
        driver_library._loaded(load("libfoo.so: cannot open shared object file"), str(extension), None)
    for said in ("libcuda.so.1: cannot open shared object file", "kernels.so: undefined symbol: cuMemMap"):
        loaded.clear()
        assert driver_library._loaded(load(said), str(extension), None) == "module"
        assert driver_library.driver_functions(loaded[0]) == ["cuInit", "cuMemMap"]


@pytest.mark.parametrize("end", [0, 6, 40, 70, 120, 300])
def test_a_file_that_is_cut_off_names_nothing(end: int) -> None:
    whole = driver_library.inert_library(["cuInit"], "x86_64")
    assert driver_library.driver_functions(whole[:end]) == []
