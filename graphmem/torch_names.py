"""PyTorch's private names: every one that graphmem uses is asked for here, with the loss without it.

PyTorch promises nothing of a name with an underscore, and a new version may have it no more. So nobody spells one:

    _task = private("torch._C._current_graph_task_id", "backward passes are not told from forward passes", lambda: -1)

is the object itself where PyTorch has it, so that a call costs what it costs anywhere. Where PyTorch lacks it, that is
the third argument, and :func:`absences` shows it to the reader of an answer; without a third argument it is something
that raises :class:`MissingName` as soon as it is used. Replaced names are declared by ``Patches.replace``, which passes
over those that are gone. ``python -m graphmem.torch_names FILE`` writes all declarations as JSON, found in the code.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphmem.base import deferred, versions
from graphmem.errors import CaptureError

GONE: Any = type("gone", (), {"__repr__": lambda self: "gone"})()


class MissingName(CaptureError):
    """This PyTorch lacks a private name of ``path`` without which nothing can be answered."""

    def __init__(self, absence: Absence) -> None:
        super().__init__(str(absence))
        self.path = absence.path


@dataclass(frozen=True)
class Absence:
    """A name that this PyTorch lacks: its path, and the loss, as a clause."""

    path: str
    lost: str

    def __str__(self) -> str:
        return f"{versions.of_this_pytorch()}; {self.path} is gone: {self.lost}"


_absent: dict[str, Absence] = {}


def absences() -> tuple[Absence, ...]:
    """Of the names asked for so far, those that this PyTorch lacks."""
    return tuple(_absent.values())


def private(
    path: str,
    lost: str,
    instead: object = GONE,
    *,
    since: versions.Version | None = None,
    until: versions.Version | None = None,
) -> Any:
    """The object of a private name of torch, such as ``torch._C._current_graph_task_id``.

    ``lost``: a clause on the loss without it, ``instead`` stands in its place. Known versions before ``since``, and
    from ``until`` on, never had it: its absence there is no loss.
    """
    found = find(path)
    if found is not GONE:
        return found
    if not _is_elsewhere(since, until):
        note(path, lost)
    return _Missing(Absence(path, lost)) if instead is GONE else instead


def private_names(lost: str, *paths: str) -> tuple[str, ...]:
    """The same names, declared, for :meth:`Patches.wrap` and :func:`find`."""
    del lost
    return paths


def _is_elsewhere(since: versions.Version | None, until: versions.Version | None) -> bool:
    if since is None and until is None:
        return False
    version = versions.installed()
    return version is not None and ((since is not None and version < since) or (until is not None and version >= until))


def note(path: str, lost: str) -> None:
    """This PyTorch lacks a name, and goes on without it."""
    _absent.setdefault(path, Absence(path, lost))


def find(path: str) -> Any:
    """The object that has this name, or :data:`GONE`."""
    holder = owner(path)
    return GONE if holder is GONE else _attribute(holder, path.rpartition(".")[2], path)


def owner(path: str) -> object:
    """The module or class that has, or would have, the name; :data:`GONE` without one."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for end in range(2, len(parts)):
        found = _attribute(found, parts[end - 1], ".".join(parts[:end]))
        if found is GONE:
            break
    return found


def _attribute(holder: object, name: str, path: str) -> object:
    """An attribute, or a module below a module."""
    if deferred.is_waiting(path.rpartition(".")[0]):  # to ask it for an attribute runs it
        with contextlib.suppress(ImportError):
            return importlib.import_module(path)
    try:
        return getattr(holder, name)
    except AttributeError:
        if not hasattr(holder, "__path__"):
            return GONE
    try:
        return importlib.import_module(path)
    except ImportError:
        return GONE


class _Missing:
    """Stands for a name that is gone: whatever is done with it raises :class:`MissingName`."""

    _absence: Absence

    def __init__(self, absence: Absence) -> None:
        self.__dict__["_absence"] = absence

    def _raise(self, *_: object, **__: object) -> Any:
        raise MissingName(self._absence)

    __setattr__: Any = _raise
    __call__ = __enter__ = __exit__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = _raise
    __getitem__ = __iter__ = __contains__ = __bool__ = __or__ = _raise

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):  # asked by Python itself, and by those who look around
            raise AttributeError(name)
        raise MissingName(self._absence)


# --- errors that speak of one -----------------------------------------------------------------------------------------


def explained(error: BaseException) -> str | None:
    """Of an error that PyTorch or graphmem raised for want of a name of PyTorch: a line that names the version.

    None for every other, for errors that other people's code raised, and for names that CUDA builds alone have.
    """
    if re.search(r"has no attribute '_?[cC]uda", str(error)):
        return None
    package = _package(error)
    is_of_torch = "torch" in str(error) + _place(error) or (type(error) is NameError and package == "torch")
    if not (isinstance(error, (AttributeError, ImportError, NameError)) and is_of_torch):
        return None
    if package not in ("torch", "graphmem"):
        return None
    return f"{versions.of_this_pytorch()}, and something in it is gone or named otherwise: {error}"


def _place(error: BaseException) -> str:
    return type(getattr(error, "obj", None)).__module__


def _package(error: BaseException) -> str:
    """The package of the code that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else str(at.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


# --- the manifest -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Declaration:
    """A declared name. ``kind``: ``needed``, ``optional`` (something stands in its place), ``replaced``; ``file``: the
    path below the package; ``since`` and ``until``: the versions that have it."""

    path: str
    kind: str
    lost: str
    file: str
    since: str = ""
    until: str = ""


def declarations() -> list[Declaration]:
    """All of them, read from the package's code."""
    package = Path(__file__).parent
    found = [one for file in sorted(package.rglob("*.py")) for one in _declared_in(file, package)]
    return sorted(found, key=lambda one: (one.path, one.file))


def _declared_in(file: Path, package: Path) -> Iterator[Declaration]:
    text = file.read_text(encoding="utf-8")
    if "torch" not in text:
        return
    reasons: dict[str, str] = {}  # by the name of the variable
    for node in sorted(ast.walk(ast.parse(text)), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _text(node.value):
            reasons[node.targets[0].id] = _text(node.value)
        kind = _kind(node)
        if kind is None or not isinstance(node, ast.Call):
            continue
        arguments = [reasons.get(one.id, "") if isinstance(one, ast.Name) else _text(one) for one in node.args]
        lost, paths = (arguments[0], arguments[1:]) if kind == "listed" else (arguments[1], arguments[:1])
        bounds = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg in ("since", "until")}
        versions_of = [_words(bounds.get(name)) for name in ("since", "until")]
        for path in paths:
            kind_of = "replaced" if kind == "listed" else kind
            yield Declaration(path, kind_of, lost, file.relative_to(package).as_posix(), *versions_of)


def _kind(node: ast.AST) -> str | None:
    """The kind of name that a call declares; None for other calls."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "private_names":
        return "listed"
    if not _text(node.args[0]).startswith("torch."):
        return None
    if isinstance(node.func, ast.Name) and node.func.id == "private":
        return "optional" if len(node.args) > 2 else "needed"
    function = node.func
    is_patch = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return "replaced" if is_patch and ast.unparse(function) in ("patches.replace", "patches.wrap") else None


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _words(version: versions.Version | None) -> str:
    return "" if version is None else versions.words(version)


#: The manifest beside this file.
MANIFEST = Path(__file__).with_suffix(".json")


def manifest() -> str:
    """The declarations as JSON, one a line."""
    lines = ",\n".join(json.dumps({k: v for k, v in asdict(one).items() if v}) for one in declarations())
    return f"[\n{lines}\n]\n"


def lacking() -> tuple[Declaration, ...]:
    """Of the manifest those that the installed PyTorch lacks, where its version should have them. Imports PyTorch."""
    known = [Declaration(**one) for one in json.loads(MANIFEST.read_text(encoding="utf-8"))]
    return tuple(
        one for one in known if find(one.path) is GONE and not _is_elsewhere(_version(one.since), _version(one.until))
    )


def _version(text: str) -> versions.Version | None:
    return versions.version_of(text) if text else None


def main(say: Callable[[str], object] = print) -> None:
    """Write the manifest into the files that are named, or print it."""
    for name in sys.argv[1:]:
        Path(name).write_text(manifest(), encoding="utf-8")
    if len(sys.argv) == 1:
        say(manifest())


if __name__ == "__main__":
    main()
