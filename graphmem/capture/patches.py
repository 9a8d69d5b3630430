"""Replacements in PyTorch for the threads of one capture, undone at its end: of attributes, of answers of a module.

Another thread that uses a replaced name gets the original. The way depends on the replaced object:

- functions and methods: a function stands there that calls the one or the other (:func:`_function`);
- classes, tables and lists: an object stands there that is called, subclassed, tested against, read and written as the
  one or the other (:class:`_ObjectView`), because the code of a module reads its own names without asking anybody;
- properties and C's getters: a property with both (:func:`_property`);
- constants of a module, and names that it does not have: they leave the module's dictionary, and its ``__getattr__``
  answers for them (:class:`_Answers`, PEP 562), which the code of the module itself does not ask.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import re
import warnings
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, ClassVar

import torch
from torch.overrides import get_ignored_functions, handle_torch_function, has_torch_function

from graphmem import torch_names
from graphmem.base import versions
from graphmem.capture.threads import Threads, current_threads
from graphmem.capture.torch_internals import (
    DeviceContext,
    OpOverload,
    function_modes,
    has_kernel,
    pop_function_mode,
    push_function_mode,
)
from graphmem.torch_names import private

_overloaded_args: Any = private(
    "torch.overrides._get_overloaded_args", "factories are not replaced by classes of tensors", lambda _: ()
)
_FUNCTIONS: Any = private("torch._C._VariableFunctions", "factories are not replaced by classes of tensors", None)
_ABSENT: Any = type("absent", (), {"__repr__": lambda self: "absent"})()


@dataclass
class _Replaced:
    """One replacement: the object in the owner's own dictionary (or absent), and its replacement."""

    owner: Any
    name: str
    before: Any
    view: Any
    is_overlaid: bool = False  # by what the program itself has put in its place

    def install(self) -> None:
        if isinstance(self.view, _Answer):
            _Answers.of(self.owner).table[self.name] = self.view
            vars(self.owner).pop(self.name, None)
        else:
            setattr(self.owner, self.name, self.view)

    def lift(self) -> None:
        """Put back for a while what was there, unless the program has replaced the name since."""
        own = vars(self.owner).get(self.name, _ABSENT)
        self.is_overlaid = not isinstance(self.view, _Answer) and own is not self.view
        if not self.is_overlaid:
            self.put_back()

    def lower(self) -> None:
        """Install it again after :meth:`lift`, or for the first time."""
        if not self.is_overlaid:
            self.install()

    def put_back(self) -> None:
        """Safe to be done again where it was interrupted."""
        own = vars(self.owner)
        if isinstance(self.view, _Answer):
            # What somebody has assigned meanwhile stays: CUDA's start in another thread assigns some of these names.
            if self.before is not _ABSENT and self.name not in own:
                setattr(self.owner, self.name, self.before)
            _Answers.of(self.owner).forget(self.name, self.view)
        elif self.before is not _ABSENT:
            setattr(self.owner, self.name, self.before)
        elif self.name in own and (isinstance(self.owner, type) or own[self.name] is self.view):
            delattr(self.owner, self.name)


class Patches:
    """Attribute replacements, for the threads of the running capture, that are put back in reverse order.

    Made outside of a capture they are for the thread that makes them.
    """

    _active: ClassVar[list[Patches]] = []
    _lifts: ClassVar[int] = 0

    def __init__(self) -> None:
        threads = current_threads()
        self._own = threads is None
        self.threads = Threads({get_ident()}) if threads is None else threads
        self._undo: list[_Replaced] = []

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace ``owner.name``; an attribute that was only inherited, or absent, is deleted again on undo.

        Raises :class:`TypeError` for a value that other threads would see.
        """
        found = inspect.getattr_static(owner, name) if isinstance(value, property) else getattr(owner, name, _ABSENT)
        self.share(owner, name, _view(owner, found, value, self.threads))

    def table(self, owner: object, values: Mapping[str, object]) -> None:
        """Replace each of these names of ``owner``."""
        for name, value in values.items():
            self.set(owner, name, value)

    def where_found(self, owners: Iterable[object], values: Mapping[str, object]) -> None:
        """Replace each of these names in those of the ``owners`` that have it: modules import names from each other,
        and versions of PyTorch lack some."""
        for owner in owners:
            self.table(owner, {name: value for name, value in values.items() if hasattr(owner, name)})

    def around(self, owner: object, functions: Mapping[str, Callable[..., object]]) -> None:
        """Replace each of these functions that ``owner`` has by one that is given it before all other arguments."""
        for name, function in functions.items():
            if hasattr(owner, name):
                self.set(owner, name, around(function)(getattr(owner, name)))

    def replace(self, path: str, lost: str, value: object, *, since: versions.Version | None = None) -> None:
        """Replace a private name of torch; one that is gone is passed over, and the ``lost`` feature is noted."""
        self.wrap(path, lost, lambda _: value, since=since)

    def wrap(self, path: str, lost: str, make: Callable[[Any], Any], *, since: versions.Version | None = None) -> None:
        """Replace a private name of torch by the result of ``make`` for the original."""
        found = private(path, lost, None, since=since)
        if found is not None:
            self.set(torch_names.owner(path), path.rpartition(".")[2], make(found))

    def share(self, owner: object, name: str, value: object) -> None:
        """Replace ``owner.name`` for every thread, by an object that serves each thread itself."""
        if not self._undo:
            self._active.append(self)
        self._undo.append(_Replaced(owner, name, vars(owner).get(name, _ABSENT), value))
        if not self._lifts:
            self._undo[-1].install()

    def undo(self) -> None:
        while self._undo:
            self._undo[-1].put_back()
            self._undo.pop()
        if self in self._active:
            self._active.remove(self)
        if self._own:
            self.threads.end()

    @classmethod
    def undo_all(cls, threads: Threads) -> None:
        """Undo the replacements that an interrupted capture of these threads has left."""
        for patches in [patches for patches in reversed(cls._active) if patches.threads is threads]:
            patches.undo()

    @classmethod
    @contextlib.contextmanager
    def lifted(cls) -> Iterator[None]:
        """Until the end nothing of ours is replaced: for imports, which remember the names they find.

        An import may open a layer that imports in turn: the outermost call puts the replacements back, new ones too.
        """
        cls._lifts += 1
        try:
            if cls._lifts == 1:
                for entry in reversed(cls._entries()):
                    entry.lift()
            yield
        finally:
            cls._lifts -= 1
            if not cls._lifts:
                for entry in cls._entries():
                    entry.lower()

    @classmethod
    def _entries(cls) -> list[_Replaced]:
        return [entry for patches in cls._active for entry in patches._undo]


def around(function: Callable[..., object]) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """The replacement of a name for ``Patches.wrap``: ``function``, given the original before all other arguments."""

    def made_of(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            return function(original, *args, **kwargs)

        call.__module__ = function.__module__
        return call

    return made_of


def constant(value: object) -> Callable[..., object]:
    """A function that returns ``value``, whatever it is given."""
    return lambda *_, **__: value


# --- what stands in the place of a name -------------------------------------------------------------------------------


def _view(owner: object, found: Any, value: object, threads: Threads) -> object:
    """The object that every thread finds: threads of the capture find ``value``, others the original ``found``."""
    if isinstance(value, staticmethod):
        return staticmethod(_function(value.__func__, found, threads))
    if isinstance(value, property):
        return _property(value, found, threads)
    is_module = isinstance(owner, ModuleType)
    if found is _ABSENT and is_module:
        return _Answer(value, found, threads)
    if isinstance(found, (type, list, MutableMapping)):
        return _ObjectView(value, found, threads)
    if callable(value) and callable(found):
        return _function(value, found, threads)
    if is_module and not callable(found):
        return _Answer(value, found, threads)
    raise TypeError(f"{owner!r} cannot show {value!r} to one thread and {found!r} to another")


def _function(value: Callable[..., object], found: Callable[..., object], threads: Threads) -> Callable[..., Any]:
    adopts = threads.adopts

    def view(*args: object, **kwargs: object) -> object:
        if get_ident() in threads or adopts():
            return value(*args, **kwargs)
        return found(*args, **kwargs)

    def overridable(*args: object, **kwargs: object) -> object:
        if get_ident() in threads or adopts():
            if has_torch_function(args):  # by the class of an argument, or as a mode is on
                overloaded = _overloaded_args(args)
                if _has_mode():
                    result = _by_mode(overridable, overloaded, args, kwargs)
                    if result is not NotImplemented:
                        return result
                if overloaded:
                    return _overridden(overridable, found, overloaded, args, kwargs)
            return value(*args, **kwargs)
        return found(*args, **kwargs)

    return _described(overridable if _is_overridable(found) else view, value, found)


def _is_overridable(found: object) -> bool:
    """True if classes may replace a function by ``__torch_function__``: those that C++ makes, but for some, and the
    methods of ``torch/_tensor.py``."""
    if isinstance(found, FunctionType):
        return found.__module__ == "torch._tensor" and found not in get_ignored_functions()
    if isinstance(found, (MethodDescriptorType, WrapperDescriptorType)):
        by_cpp = issubclass(torch.Tensor, found.__objclass__)
    else:
        by_cpp = isinstance(found, BuiltinFunctionType) and found is getattr(_FUNCTIONS, found.__name__, None)
    return by_cpp and found not in get_ignored_functions()


def _has_mode() -> bool:
    """True if a mode of functions is asked first; the default device is looked up by the replacements themselves."""
    modes = function_modes()
    return bool(modes) and not isinstance(modes[-1], DeviceContext)


def _by_mode(view: object, overloaded: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The result by the innermost mode of functions, with the arguments that the program gave: C++ would hand it this
    function with those that the replacement has changed (``handle_torch_function_no_python_arg_parser``)."""
    mode = pop_function_mode()
    try:
        return mode.__torch_function__(view, tuple(type(arg) for arg in overloaded), args, kwargs)
    finally:
        push_function_mode(mode)


def _overridden(
    view: object, found: object, overloaded: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> object:
    """The result of an overloaded function by the class of an argument (NumPy's protocol, NEP 18). A class knows it by
    the face that was in PyTorch when the class was made: during the capture or before it, so both are tried."""
    kinds = tuple(type(arg) for arg in overloaded)
    for arg in overloaded:
        result = arg.__torch_function__(view, kinds, args, kwargs)
        if result is not NotImplemented:
            return result
    return handle_torch_function(found, overloaded, *args, **kwargs)


def _described(view: Any, value: Callable[..., Any], found: object) -> Callable[..., Any]:
    """``view`` with the name and the marks of the function it stands for."""
    for name in ("__name__", "__qualname__", "__doc__"):
        if isinstance(getattr(found, name, None), str):
            setattr(view, name, getattr(found, name))
    view.__module__ = getattr(value, "__module__", __name__)
    if isinstance(value, FunctionType):
        view._torchdynamo_inline = value  # Dynamo reads it in place of this one
    view.__original_fn = found
    if isinstance(found, FunctionType):  # TorchScript compiles the original (torch/jit/_script.py, ``_script_impl``)
        view.__script_if_tracing_wrapper = True
    return view  # type: ignore[no-any-return]


def _property(value: property, found: Any, threads: Threads) -> property:
    """``found`` is a property or one of C's getters; those of ``value`` are functions of the instance."""
    adopts, get_value = threads.adopts, value.fget

    def get(self: object) -> object:
        if get_ident() in threads or adopts():
            return get_value(self)  # type: ignore[misc]
        return found.__get__(self, type(self))

    def set_(self: object, assigned: object) -> None:
        if get_ident() in threads or adopts():
            value.__set__(self, assigned)
        else:
            found.__set__(self, assigned)

    return property(get, set_, doc=getattr(found, "__doc__", None))


class _ObjectView:
    """A class to those who call it, subclass it, or ask whether something is of it; a dict or a list to those who read
    or write it. Which one depends on the thread.

    Only its identity is its own: ``type(x) is torch.Stream`` is false while a capture lasts.
    """

    __slots__ = ("_found", "_threads", "_value")
    _found: object
    _threads: Threads
    _value: object

    def __init__(self, value: object, found: object, threads: Threads) -> None:
        for name, held in (("_value", value), ("_found", found), ("_threads", threads)):
            object.__setattr__(self, name, held)

    def _now(self) -> Any:
        return self._value if get_ident() in self._threads or self._threads.adopts() else self._found

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._now())

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (self._now(),)

    def __eq__(self, other: object) -> bool:
        return bool(self._now() == (other._now() if type(other) is _ObjectView else other))

    def __hash__(self) -> int:
        return hash(self._now())


def _handed_on(operation: Callable[..., object]) -> Callable[..., object]:
    """The method of a view that does so with the object of the calling thread."""
    return lambda view, *args, **kwargs: operation(view._now(), *args, **kwargs)


_OPERATIONS: dict[str, Callable[..., object]] = {
    "__call__": lambda now, *args, **kwargs: now(*args, **kwargs),
    "__instancecheck__": lambda now, instance: isinstance(instance, now),
    "__subclasscheck__": lambda now, subclass: issubclass(subclass, now),
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__delattr__": delattr,
    "__or__": operator.or_,
    "__ror__": lambda now, other: other | now,
    "__repr__": repr,
    "__contains__": operator.contains,
    "__iter__": iter,
    "__len__": len,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
}
for _name, _operation in _OPERATIONS.items():
    setattr(_ObjectView, _name, _handed_on(_operation))


@dataclass(frozen=True, eq=False)
class _Answer:
    """A constant of a module, or a name that it lacks."""

    value: Any
    found: Any
    threads: Threads


class _Answers:
    """``module.__getattr__``, which Python asks for names that are not in the module's dictionary."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._before = vars(module).get("__getattr__", _ABSENT)
        self.table: dict[str, _Answer] = {}

    @classmethod
    def of(cls, module: ModuleType) -> _Answers:
        """The one that is there, or a new one."""
        answers = vars(module).get("__getattr__")
        if not isinstance(answers, cls):
            answers = cls(module)
            setattr(module, "__getattr__", answers)  # noqa: B010
        return answers

    def __call__(self, name: str) -> object:
        answer = self.table.get(name)
        if answer is not None:
            here = get_ident() in answer.threads or answer.threads.adopts()
            if here or answer.found is not _ABSENT:
                return answer.value if here else answer.found
        if self._before is not _ABSENT:
            return self._before(name)
        raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")

    def forget(self, name: str, answer: _Answer) -> None:
        if self.table.get(name) is answer:
            del self.table[name]
        if not self.table:
            if self._before is _ABSENT:
                vars(self._module).pop("__getattr__", None)
            else:
                setattr(self._module, "__getattr__", self._before)  # noqa: B010


# --- kernels in the dispatcher ----------------------------------------------------------------------------------------


_found_kernel: Any = private(
    "torch._C._dispatch_get_computed_kernel_for_dispatch_key",
    "operators of other threads are taken apart while an analysis runs",
    None,
    since=(2, 9),
)
_KEYS: Any = private("torch._C.DispatchKey", "operators of other threads are taken apart while an analysis runs", None)


class Kernels:
    """Kernels of ``aten`` operators in PyTorch's dispatcher, for the threads of the running capture.

    Calls of another thread go to the kernel that was found, which PyTorch gives since 2.9; before, to ``elsewhere``, or
    to the operators that it is made of.
    """

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        self._threads = current_threads() or Threads({get_ident()})

    def set(
        self, op: OpOverload, kernel: Callable[..., Any], key: str, elsewhere: Callable[..., Any] | None = None
    ) -> None:
        """Put ``kernel`` at the dispatch key ``key`` of an operator's overload."""
        threads, adopts = self._threads, self._threads.adopts
        found = _found_kernel(op._name, getattr(_KEYS, key)).call_boxed if _found_kernel and _KEYS else None
        other = elsewhere or op.decompose

        def view(keys: object, *args: object, **kwargs: object) -> object:
            if get_ident() in threads or adopts():
                return kernel(*args, **kwargs)
            return other(*args, **kwargs) if found is None else found(keys, *args, **kwargs)

        overrides = has_kernel(op._name, key)
        with quiet_registration() if overrides else contextlib.nullcontext():
            self._library.impl(op, view, key, with_keyset=True)

    def undo(self) -> None:
        self._library._destroy()


# --- warnings ---------------------------------------------------------------------------------------------------------


class _Ours:
    """Stands for the regular expression of a warning's message in a filter: matches in the threads of a capture."""

    def __init__(self, message: str, threads: Threads) -> None:
        self._pattern = re.compile(message)
        self._threads = threads

    def match(self, text: str) -> bool:
        return get_ident() in self._threads and self._pattern.match(text) is not None


@contextlib.contextmanager
def ignored_warnings(message: str = "") -> Iterator[None]:
    """Warnings of the running capture that begin with ``message`` (a regular expression) are not shown.

    Not by ``warnings.catch_warnings``: that puts back the list of filters, which is the process's, and with it undoes
    another thread's changes meanwhile.
    """
    entry = ("ignore", _Ours(message, current_threads() or Threads({get_ident()})), Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, entry)
    _filters_mutated()
    try:
        yield
    finally:
        now: Any = warnings.filters
        for held in (filters, now):
            held[:] = [other for other in held if other is not entry]
        _filters_mutated()


_filters_mutated: Callable[[], None] = getattr(warnings, "_filters_mutated", lambda: None)
_quiet = False


@contextlib.contextmanager
def quiet_registration() -> Iterator[None]:
    """Silences PyTorch's warning that a kernel is overridden, which is intended.

    It comes once in a process. The list of filters is the process's too, so it is left alone afterwards.
    """
    global _quiet
    if _quiet:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
        _quiet = True
