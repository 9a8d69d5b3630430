"""Kernels in Triton, of programs and of libraries: launched without effect, as on a card they take no memory.

A kernel reads and writes the tensors that it is given, whose values nobody knows then. Where Triton is installed, its
launches do nothing (``KernelInterface.__getitem__``, ``triton/runtime/jit.py``, 3.x). Where it is not, a program's own
files find a stand-in of the few names that kernels are written with, and libraries would fall back to PyTorch's
operators, which take other memory: those whose kernels are known launch them all the same, the others are named.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from graphmem.base.imports import library_folder
from graphmem.capture.device.pretend_device import cards
from graphmem.capture.device.watched_imports import patched_imports
from graphmem.capture.patches import Patches
from graphmem.capture.values.callers import namespace_that_imports
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError

#: Modules with such kernels, functions whose names end so, and the flag whether Triton is there. TRL 1.16:
#: log-probabilities of a language model's head, vocabulary chunk by chunk.
_MODULES = {"trl.kernels.chunked_logprob": "_TRITON_AVAILABLE", "trl.kernels.chunked_divergence": None}
_KERNEL = "_kernel"
#: What such modules ask of Triton on the host, for the size of a grid (``triton/__init__.py``, 3.x).
_HOST_SIDE = SimpleNamespace(cdiv=lambda x, y: -(-x // y), next_power_of_2=lambda n: 1 << (n - 1).bit_length())
#: Packages with kernels of a card, whose absence sends a program or a library another way.
_OF_CARDS = ("triton", "flash_attn", "xformers", "causal_conv1d", "mamba_ssm", "liger_kernel", "apex")
#: Packages that have their own answer where Triton is missing, or ask for everything there is.
_QUIET = ("torch", "graphmem", "transformers", "trl", "bitsandbytes", "diffusers", "accelerate", "peft", "triton")

Remark = Callable[[Diagnostic], None]


@contextlib.contextmanager
def triton_kernels(forget: Callable[[torch.Tensor], None], remark: Remark) -> Iterator[None]:
    """Until the end kernels have no effect; ``forget`` gets every tensor that one is given, ``remark`` every launch
    by a program, and imports that fail."""
    is_installed = importlib.util.find_spec("triton") is not None
    launched = _Launched(forget, remark)
    with Patches() as patches:
        missing = _Missing(patches, launched, remark)

        def follow(made: Patches, module: ModuleType) -> None:
            if module.__name__ == _JIT:
                made.set(module.KernelInterface, "__getitem__", lambda kernel, _: partial(launched, kernel))
            elif module.__name__ == _DRIVER:
                if isinstance(vars(module.DriverConfig).get("active"), property):  # since 3.4
                    made.set(module.DriverConfig, "active", property(lambda _: _Driver()))
            else:
                _launch_nothing(made, module, _MODULES[module.__name__], forget)

        sys.meta_path.append(missing)
        try:
            with patched_imports(dict.fromkeys((_JIT, _DRIVER) if is_installed else _MODULES, follow)):
                yield
        finally:
            sys.meta_path.remove(missing)
            missing.forget_stand_ins()


_JIT, _DRIVER = "triton.runtime.jit", "triton.runtime.driver"
#: What an autotuner writes to empty the card's cache (``get_empty_cache_for_benchmark``, triton/backends/nvidia, 3.7).
_EMPTIED_BYTES = 256 << 20


class _Driver:
    """Triton's driver, as the host asks it: which card there is (``CudaDriver``, triton/backends/nvidia, 3.7)."""

    utils = property(lambda self: self)

    def is_active(self) -> bool:
        return True

    def get_current_target(self) -> object:
        compiler = importlib.import_module("triton.backends.compiler")
        major, minor = torch.cuda.get_device_capability()
        return compiler.GPUTarget("cuda", major * 10 + minor, 32)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return cards().own

    def get_current_device(self) -> int:
        return int(torch.cuda.current_device())

    def get_current_stream(self, _: object = None) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def get_device_properties(self, _: object) -> dict[str, int]:
        known = torch.cuda.get_device_properties()
        return {
            "max_shared_mem": known.shared_memory_per_block_optin,
            "max_num_regs": known.regs_per_multiprocessor,
            "multiprocessor_count": known.multi_processor_count,
            "warpSize": known.warp_size,
        }


class _Launched:
    """A launch by a program: its tensors are forgotten, its autotuner's buffer is allocated."""

    def __init__(self, forget: Callable[[torch.Tensor], None], remark: Remark) -> None:
        self._forget, self._remark = forget, remark
        self._tuned: set[Any] = set()

    def __call__(self, kernel: object, *args: object, **kwargs: object) -> None:
        layers: list[Any] = [kernel]  # what chooses its options, and the function last
        while hasattr(layers[-1], "fn"):
            layers.append(layers[-1].fn)
        names = inspect.signature(layers[-1]).parameters
        given = dict(zip(names, args, strict=False)) | kwargs
        for tuner in layers:
            if len(getattr(tuner, "configs", ())) > 1:
                self._tune(tuner, given)
        for value in given.values():
            if isinstance(value, torch.Tensor):
                self._forget(value)
        self._remark(Code.TRITON_LAUNCHED.about(kernel=getattr(layers[-1], "__name__", "?")))

    def _tune(self, tuner: Any, given: dict[str, Any]) -> None:
        """An autotuner measures its configurations once for each key, a cache to be emptied in between. One that keeps
        what it found on the disk has done so in a run before (``Autotuner.check_disk_cache``, 3.7)."""
        if getattr(tuner, "cache_results", False):
            return
        keys = [given[name] for name in tuner.keys if name in given]
        dtypes = [value.dtype for value in given.values() if isinstance(value, torch.Tensor)]
        key = (id(tuner), str(keys), tuple(dtypes))
        if key not in self._tuned:
            self._tuned.add(key)
            torch.empty(_EMPTIED_BYTES // 4, dtype=torch.int, device=cards().own)


# --- programs where Triton is not installed ---------------------------------------------------------------------------


class _Missing(importlib.abc.MetaPathFinder):
    """Asked last, so for packages that are not installed. It names the packages of cards, and a program's own files
    find a stand-in for Triton, which is not for PyTorch and libraries: they ask which Triton there is.

    A module that is found is everybody's, so from the first stand-in on ``__import__`` itself is replaced, which knows
    who imports. Not before: Python calls its own ``__import__`` without a call, and PyTorch imports in every operator.
    """

    def __init__(self, patches: Patches, launched: _Launched, remark: Remark) -> None:
        self._patches = patches
        self._is_here = patches.threads.only(lambda: True)
        self._stand_in = _Triton(launched)
        self._remark = remark
        self._placed: list[str] = []
        self._placed_before = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A stand-in for Triton, where one of the program's own files imports it; None for all else, so that the import
        fails, with a remark where a package of cards is missing."""
        package = name.partition(".")[0]
        if package not in _OF_CARDS or not self._is_here():
            return None
        importer = namespace_that_imports()
        if importer is None:
            return None
        if package == "triton" and _is_own(importer):
            return self._place(name)
        if name == package and _package(importer) not in _QUIET:
            self._remark(_missing(package, importer))
        return None

    def forget_stand_ins(self) -> None:
        """Remove from ``sys.modules`` the stand-ins that imports have found: nobody else may find them."""
        while self._placed:
            sys.modules.pop(self._placed.pop(), None)

    def _place(self, name: str) -> importlib.machinery.ModuleSpec:
        if not self._placed_before:
            self._patches.around(builtins, {"__import__": self._import})
            self._placed_before = True
        self._placed.append(name)
        return importlib.machinery.ModuleSpec(name, _Standing(self._stand_in.module(name)))

    def _import(
        self, original: Callable[..., ModuleType], name: str, globals: dict[str, object] | None = None,
        locals: object = None, fromlist: Sequence[str] | None = (), level: int = 0,
    ) -> ModuleType:  # fmt: skip
        self.forget_stand_ins()
        if level or name.partition(".")[0] != "triton" or not _is_own(globals or {}):
            return original(name, globals, locals, fromlist, level)
        return self._stand_in.module(name) if fromlist else self._stand_in


class _Standing(importlib.abc.Loader):
    """Loads a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, _: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, _: ModuleType) -> None:
        pass


def _missing(package: str, importer: dict[str, object]) -> Diagnostic:
    """Triton comes with every CUDA build of PyTorch, and packages that a program itself asks for may be there where it
    runs: a card then takes another way. Other uses by libraries are no part of the program that is analysed."""
    who = str(importer.get("__name__", ""))
    if package == "triton":
        return Code.TRITON_MISSING.about(place=who.partition(".")[0], importer=who)
    code = Code.PACKAGE_MISSING if _is_own(importer) else Code.OPTIONAL_MISSING
    return code.about(importer="the program" if who == "__main__" else who, package=package)


def _is_own(namespace: dict[str, object]) -> bool:
    """True if the code that imports is the program's own: no installed package, and not PyTorch."""
    return _package(namespace) not in _QUIET and not library_folder(str(namespace.get("__file__") or ""))


def _package(namespace: dict[str, object]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


class _Triton(ModuleType):
    """The names that kernels are written with; other names of Triton are refused."""

    cdiv, next_power_of_2 = staticmethod(_HOST_SIDE.cdiv), staticmethod(_HOST_SIDE.next_power_of_2)

    def __init__(self, launched: _Launched) -> None:
        super().__init__("triton")
        self.__path__: list[str] = []  # as packages have it
        self.language = _Language("triton.language")
        self._launched = launched

    def module(self, name: str) -> ModuleType:
        return self.language if name == self.language.__name__ else self

    def jit(self, function: object = None, **_: object) -> object:
        return self.jit if function is None else _OwnKernel(function, self._launched)

    def autotune(self, configs: Sequence[object], key: Sequence[str] = (), **_: object) -> Callable[..., _OwnKernel]:
        return lambda kernel: _OwnKernel(kernel, self._launched, configs, key)

    def heuristics(self, *_: object, **__: object) -> Callable[[object], object]:
        return lambda kernel: kernel

    def Config(self, *args: object, **kwargs: object) -> SimpleNamespace:  # noqa: N802 - Triton's name
        return SimpleNamespace(args=args, **kwargs)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(f"triton.{name} is asked for, and Triton is not installed; install it (it needs no card)")


class _Language(ModuleType):
    """``triton.language``: only kernels use it, and they never run."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Language(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **_: object) -> object:
        return args[0] if args else self


class _OwnKernel:
    """A kernel of the program, or its autotuner: ``kernel[grid](arguments)``."""

    def __init__(
        self, function: object, launched: _Launched, configs: Sequence[object] = (), keys: Sequence[str] = ()
    ) -> None:
        self.fn, self.configs, self.keys = function, configs, keys
        self._launched = launched

    def __getitem__(self, _: object) -> Callable[..., None]:
        return partial(self._launched, self)

    def run(self, *args: object, grid: object = None, warmup: bool = False, **kwargs: object) -> None:
        self[grid](*args, **kwargs)


# --- libraries where Triton is not installed --------------------------------------------------------------------------


def _launch_nothing(
    patches: Patches, module: ModuleType, flag: str | None, forget: Callable[[torch.Tensor], None]
) -> None:
    is_here = patches.threads.only(lambda: True)
    if flag is not None:
        patches.share(module, flag, _Flag(is_here, vars(module)[flag]))
    patches.share(module, "triton", _HOST_SIDE)
    for name, value in list(vars(module).items()):
        if name.endswith(_KERNEL) and isinstance(value, FunctionType):
            patches.share(module, name, _Kernel(value, forget))


class _Flag:
    """Triton is there for the threads of the capture."""

    def __init__(self, is_here: Callable[[], bool | None], found: bool) -> None:
        self._is_here = is_here
        self._found = found

    def __bool__(self) -> bool:
        return bool(self._is_here()) or self._found


class _Kernel:
    """A compiled kernel: ``kernel[grid](arguments)``. Called without a grid it is the function that it was."""

    def __init__(self, function: Callable[..., object], forget: Callable[[torch.Tensor], None]) -> None:
        self._function = function
        self._forget = forget

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._function(*args, **kwargs)

    def __getitem__(self, _: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: object, **kwargs: object) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                self._forget(value)
