"""``module.py:factory`` and ``package.module:factory``: the user's own Python, which is the only code that runs."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from graphmem.errors import SourceError
from graphmem.sources.base import TorchModel, call_factory


def load_factory(text: str) -> TorchModel:
    """Import the module and find the factory; it is called later, on fake tensors.

    Raises :class:`SourceError` when the module cannot be imported or has no such function.
    """
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise SourceError(f"{text!r} is not of the form module.py:factory")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_name(where)
    factory = getattr(module, name, None)
    if factory is None:
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, functions, n=3)
        listed = ", ".join(sorted(functions)) or "none"
        hint = f"; did you mean {' or '.join(close)}?" if close else f"; it has: {listed}"
        raise SourceError(f"{where} has no function {name!r}{hint}")
    if not callable(factory):
        raise SourceError(f"{name} in {where} is a {type(factory).__name__}, not a function")
    return TorchModel(text, lambda sizes: call_factory(factory, name, sizes))


def _import_file(path: Path) -> ModuleType:
    if not path.exists():
        raise SourceError(f"{path} does not exist")
    if not path.is_file():
        raise SourceError(f"{path} is not a file")
    module_name = f"graphmem_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"{path} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.resolve().parent))  # so that it finds its neighbours, as a script would
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise SourceError(f"importing {path} raised {type(error).__name__}: {_first_line(error)}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _import_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SourceError(f"no Python module {error.name!r} (for a file, write path/to/file.py:factory)") from None
    except Exception as error:
        raise SourceError(f"importing {name} raised {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
