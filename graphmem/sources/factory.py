"""``module.py:factory`` and ``package.module:factory``: the user's own Python, which is the only code that runs."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from graphmem.base.spellings import meant
from graphmem.devices import DEFAULT_DEVICE, device_named
from graphmem.errors import SourceError, said
from graphmem.sources.base import TorchModel, call_factory


def load_factory(text: str) -> TorchModel:
    """Import the module and find the factory; it is called later, on fake tensors. Raises :class:`SourceError`."""
    factory, name = find_factory(text)
    return TorchModel(text, lambda sizes: call_factory(factory, name, sizes))


def find_factory(text: str, what: str = "function") -> tuple[Callable[..., Any], str]:
    """The function that ``module.py:factory`` or ``package.module:factory`` names, and its name. ``what`` messages call
    it.

    Raises :class:`SourceError` when the module cannot be imported or has no such function.
    """
    factory, name = find_object(text, what)
    if not callable(factory):
        where = text.rpartition(":")[0]
        raise SourceError(f"{name} in {where} is a {type(factory).__name__}, not a{'n' * (what[0] in 'aeiou')} {what}")
    return factory, name


def find_object(text: str, what: str = "function") -> tuple[Any, str]:
    """The same of any object of the module."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise SourceError(f"{text!r} is not of the form module.py:{what}, a file of yours and a {what} in it")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_name(where)
    found = getattr(module, name, None)
    if found is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        listed = ", ".join(sorted(functions)) or "none"
        raise SourceError(f"{where} has no {what} {name!r}{meant(name, functions) or f'; it has: {listed}'}")
    return found, name


def _import_file(path: Path) -> ModuleType:
    if not path.exists():
        raise SourceError(f"{path} does not exist")
    if not path.is_file():
        raise SourceError(f"{path} is not a file")
    module_name = f"graphmem_user_{path.stem}"
    loader = _AsItIsNow(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None  # there is a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))  # so that it finds its neighbours, as a script would
    try:
        with _beside_a_card():
            loader.exec_module(module)
    except Exception as error:
        raise SourceError(f"importing {path}{_line_of(error, path)} raised {_raised(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


class _AsItIsNow(importlib.machinery.SourceFileLoader):
    """Compiles a file each time. Python's cached bytecode goes by whole seconds and the file's length, so a file that
    is edited and asked about within a second would be answered as it was; and no folder appears beside the file."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _beside_a_card() -> contextlib.AbstractContextManager[None]:
    """``device = "cuda" if torch.cuda.is_available() else "cpu"`` at the top of a file means the card. Which one is
    analysed is not known yet, so it is taken to be the default one."""
    try:
        from graphmem.capture.device.cuda_namespace import card_at_import
    except ImportError:  # a Keras model beside another backend
        return contextlib.nullcontext()
    return card_at_import(device_named(DEFAULT_DEVICE))


def _import_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None:  # a library's own words for a part of it that did not import
            raise SourceError(f"importing {name} raised {_raised(error)}") from None
        hint = _CUDA_ONLY if error.name in _CUDA_PACKAGES else "for a file, write path/to/file.py:factory"
        raise SourceError(f"no Python module {error.name!r} ({hint})") from None
    except Exception as error:
        raise SourceError(f"importing {name} raised {_raised(error)}") from error


#: Packages of CUDA kernels, which do not install or import without a card.
_CUDA_PACKAGES = frozenset(
    ("flash_attn", "xformers", "mamba_ssm", "causal_conv1d", "apex", "transformer_engine", "triton", "deepspeed")
)
_CUDA_ONLY = (
    "a package of CUDA kernels; import it only where it is there, or choose the PyTorch implementation for the analysis"
)


def _line_of(error: BaseException, path: Path) -> str:
    """``:12``, the line of the file that raised; "" where none of its lines ran."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f":{lines[-1]}" if lines else ""


def _raised(error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    hint = f" ({_CUDA_ONLY})" if missing.partition(".")[0] in _CUDA_PACKAGES else ""
    return f"{said(error)}{hint}"
