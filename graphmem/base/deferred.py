"""Modules of libraries that run once somebody uses them, and not where they are imported.

Libraries import at their beginning what few of their users need: PyTorch's compiler, SciPy's optimizers, DTensors. In a
process that is our own such a module is there at once, as it always is, and its code runs when one of its names is
asked for. Who takes names from it that are known here (``from scipy.optimize import linear_sum_assignment``) gets a
:class:`_Later` for each, which is the object as soon as it is used; once the module has run, other modules have the
object itself. What waits is the same afterwards, whoever used it first.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from graphmem.base.records import dataclass


@dataclass(frozen=True)
class Waiting:
    """A module that waits, with all that lies below it."""

    name: str
    #: Names, of it and of modules below it, that others take without using them, or to compare with.
    taken: frozenset[str] = frozenset()
    #: Those of them that are classes whose objects are made and kept.
    made: frozenset[str] = frozenset()
    #: Modules below it that need nothing of it, and run where they are imported.
    ready: tuple[str, ...] = ()
    #: Names, and what stands for each of them until somebody asks for a name that is not known here.
    meanwhile: Mapping[str, object] = field(default_factory=dict)


#: What an import asks a module for, whether it has it or not.
_OF_IMPORTS = frozenset(("__path__", "__file__", "__cached__", "__wrapped__", "__warningregistry__"))
#: In which the code of a module runs, apart from what goes on where it was used.
Apart = Callable[[], contextlib.AbstractContextManager[object]]

_running = threading.RLock()
_apart: list[Apart] = [contextlib.nullcontext]
_taken: list[tuple[dict[str, Any], _Later]] = []
_afterwards: list[tuple[str, Callable[[Any], object]]] = []


def defer(waiting: Iterable[Waiting]) -> None:
    """Let modules wait from now on, those that were not imported before."""
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.update({one.name: one for one in waiting if one.name not in sys.modules})


def run_all() -> None:
    """Run what was imported and waits; from now on nothing does."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for module in list(sys.modules.values()):
        _ran(module)


def is_waiting(name: str) -> bool:
    """True for a module that was imported and has not run."""
    return isinstance(sys.modules.get(name), _Module)


def run(name: str) -> Any:
    """The module of this name, which has run."""
    return _ran(importlib.import_module(name))


@contextlib.contextmanager
def running(apart: Apart) -> Iterator[None]:
    """Until the end, modules run in this context."""
    _apart.append(apart)
    try:
        yield
    finally:
        _apart.remove(apart)


def module_of(path: str) -> str:
    """The module that has the name of this path, if it waits; else nothing."""
    while path := path.rpartition(".")[0]:
        if is_waiting(path):
            return path
    return ""


def afterwards(name: str, do: Callable[[Any], object]) -> Callable[[], None]:
    """Call a function with a module that waits, once it has run; unless what is returned is called before."""
    entry = name, do
    _afterwards.append(entry)
    return lambda: _afterwards.remove(entry) if entry in _afterwards else None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders find, and lets it wait."""

    def __init__(self) -> None:
        self.waiting: dict[str, Waiting] = {}
        self._asked: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        waiting = self._that_waits(name)
        if waiting is None or name in self._asked:
            return None
        self._asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, waiting)
        return spec

    def _that_waits(self, name: str) -> Waiting | None:
        """What a module waits for: it is named, or lies below one that waits still."""
        if name in self.waiting:
            return self.waiting[name]
        parent = sys.modules.get(name.rpartition(".")[0])
        if not isinstance(parent, _Module):
            return None
        waiting = _facts(parent).waiting
        return None if name in waiting.ready else replace(waiting, meanwhile={})


class _Loader(importlib.abc.Loader):
    def __init__(self, original: Any, waiting: Waiting) -> None:
        self.original, self.waiting = original, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.original.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.original  # type: ignore[union-attr]
        vars(module).update(self.waiting.meanwhile, __waiting__=self)
        module.__class__ = _Module

    def __getattr__(self, name: str) -> object:
        return getattr(self.original, name)


class _Module(ModuleType):
    """A module whose code has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if name in _OF_IMPORTS:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        waiting = _facts(self).waiting
        if name not in waiting.taken:
            return getattr(_ran(self), name)
        later = _Later(self, name, name in waiting.made)
        taker = _taking(sys._getframe(1))
        if taker is not None:
            _taken.append((taker, later))
        return later

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) or name.startswith("__")):
            _ran(self)
        ModuleType.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return dir(_ran(self))


def _facts(module: ModuleType) -> _Loader:
    return vars(module)["__waiting__"]  # type: ignore[no-any-return]


def _taking(frame: FrameType | None) -> dict[str, Any] | None:
    """The names of the module that takes one at its beginning; None where a function does."""
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame.f_globals if frame is not None and frame.f_code.co_name == "<module>" else None


def _ran(module: ModuleType) -> ModuleType:
    """The module, which has run, the packages that it lies in first."""
    if not isinstance(module, _Module):
        return module
    with _running:
        _ran(sys.modules.get(module.__name__.rpartition(".")[0], sys))
        if isinstance(module, _Module):  # nor did its package, or another thread, run it
            _run(module)
    return module


def _run(module: ModuleType) -> None:
    """Run a module's code, and put its objects where they were taken."""
    loader = vars(module).pop("__waiting__")
    for name in loader.waiting.meanwhile:
        vars(module).pop(name)
    module.__class__ = ModuleType
    try:
        with _apart[-1]():
            loader.original.exec_module(module)
    except BaseException as error:
        sys.modules.pop(module.__name__, None)
        if isinstance(error, AttributeError):  # which would say that the module has no such name
            raise ImportError(f"{module.__name__} did not run: {error}", name=module.__name__) from error
        raise
    taken = [one for one in _taken if one[1]._of is module]
    _taken[:] = [one for one in _taken if one[1]._of is not module]
    for names, later in taken:
        for name in [name for name, value in names.items() if value is later]:
            names[name] = getattr(module, later._name)
    for one in [one for one in _afterwards if one[0] == module.__name__]:
        _afterwards.remove(one)
        one[1](module)


class _Later:
    """An object of a module that waits: using it runs the module. Until then nothing is an instance of it, but for
    what a class of its name is in."""

    def __init__(self, of: ModuleType, name: str, makes: bool) -> None:
        self._of, self._name, self._makes = of, name, makes

    def _object(self) -> Any:
        return getattr(_ran(self._of), self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._object(), name)

    def __mro_entries__(self, bases: object) -> tuple[Any, ...]:
        return (self._object(),)

    def __instancecheck__(self, instance: object) -> bool:
        return self.__subclasscheck__(instance.__class__)

    def __subclasscheck__(self, kind: type) -> bool:
        if isinstance(self._of, _Module) and all(one.__name__ != self._name for one in kind.__mro__):
            return False
        return issubclass(kind, self._object())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._makes and isinstance(self._of, _Module):
            return _Made(self, args, kwargs)
        return self._object()(*args, **kwargs)


class _Made(_Later):
    """An object of a class that waits."""

    def __init__(self, later: _Later, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(later._of, later._name, False)
        self._made: Any = None
        self._arguments = args, kwargs

    def _object(self) -> Any:
        if self._made is None:
            args, kwargs = self._arguments
            self._made = super()._object()(*args, **kwargs)
        return self._made

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._object().__class__

    def __bool__(self) -> bool:
        return True


def _forwarded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(self._object(), *others)


_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "and", "or", "getitem")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in _OPERATORS},
    **{"__hash__": hash, "__bool__": bool, "__iter__": iter, "__index__": operator.index},
    "__ror__": lambda found, other: other | found,
}
for _name, _function in _FUNCTIONS.items():
    setattr(_Later, _name, _forwarded(_function))
