"""Hides fake tensors from libraries, so that they run the code that they run on a card.

Libraries ask whether a tensor is fake, and then take the path they keep for exporters: transformers builds a 4-D mask
that no card makes (``is_tracing`` in ``transformers/utils/import_utils.py``, 5.x). PyTorch's own code has to know, so
the class is hidden by who asks: outside ``torch``, ``torch._subclasses.FakeTensor`` is a class without instances, and
``is_fake`` is false (DeepSpeed holds that function since its own import: it is changed from within).

``type(x)`` of a fake tensor is the class that a card's tensor has: ``torch.Tensor``, ``Parameter``, a library's own.
``type(batch) is torch.Tensor`` decides whether an everyday ``move()`` moves it. The interpreter answers ``type``, so
the calls are rewritten as a file is imported: ``__graphmem_type__(x)``, a function of ours, stands in their place. In
the program's own files that are all of them (:mod:`graphmem.capture.program.loops`), in libraries' those of files that
name ``Tensor`` or ``Parameter`` and compare or look up what ``type`` gives. PyTorch's own code has to know. Files that
were imported before the capture stay as they are, and so does ``x.__class__``.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch.nn.parameter import Parameter, UninitializedBuffer, UninitializedParameter

from graphmem.base.garbage import MANY, looking_after
from graphmem.base.imports import is_watched, library_folder
from graphmem.capture.device.factories import LazyBuffer, LazyParameter
from graphmem.capture.device.fake_tensors import library_class
from graphmem.capture.threads import current_threads
from graphmem.capture.torch_internals import FakeTensor
from graphmem.capture.values.callers import package_that_asks
from graphmem.torch_names import private

_KNOWS = ("torch", "graphmem")
_LOST = "a library that recognises fake tensors takes the path it keeps for exporters"
fake_tensor: Any = private("torch._subclasses.fake_tensor", _LOST)
_subclasses: Any = private("torch._subclasses", _LOST)
_FAKE_TENSOR = FakeTensor
_recognises: Any = private("torch._subclasses.fake_tensor.is_fake", _LOST, None)
_is_fake: Any = _recognises and FunctionType(_recognises.__code__, _recognises.__globals__)
#: Under this name :func:`_answer` is found by what stands in the body of ``is_fake``.
_ANSWER = "_graphmem_is_fake"


class NoTensor:
    """Stands for ``FakeTensor`` in libraries: nothing is an instance of it."""


class Hiding(ModuleType):
    """A module of PyTorch that shows ``FakeTensor`` to PyTorch and to graphmem only."""

    @property
    def FakeTensor(self) -> Any:  # noqa: N802 - PyTorch's name
        return NoTensor if current_threads() is not None and package_that_asks() not in _KNOWS else _FAKE_TENSOR


def _body(x: object) -> bool:
    return _graphmem_is_fake(x)  # type: ignore[name-defined,no-any-return]  # noqa: F821


def _answer(x: object) -> bool:
    hidden = current_threads() is not None and package_that_asks(frames_between=1) not in _KNOWS
    return not hidden and bool(_is_fake(x))


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Until the end, code outside PyTorch does not recognise fake tensors by their class."""
    hidden = (_subclasses, fake_tensor)
    before = [module.__class__ for module in hidden]
    for module in hidden:
        module.__class__ = Hiding
    setattr(fake_tensor, _ANSWER, _answer)
    code = _recognises and _recognises.__code__
    if code is not None:
        _recognises.__code__ = _body.__code__
    try:
        with _shown_types():
            yield
    finally:
        if code is not None:
            _recognises.__code__ = code
        delattr(fake_tensor, _ANSWER)
        for module, kind in zip(hidden, before, strict=True):
            module.__class__ = kind


# --- ``type(x)`` ------------------------------------------------------------------------------------------------------


TYPE = "__graphmem_type__"
#: Packages that know of fake tensors, or of none.
_LEFT = frozenset({"torch", "torchgen", "functorch", "graphmem", "numpy", "scipy", "pandas", "sympy", "triton"})
_NAMES_TENSORS = re.compile(rb"\b(?:Tensor|Parameter)\b")
_BYTECODE = ".pyc"
#: Names the rules by which files are rewritten: this file.
_RULES = zlib.crc32(Path(__file__).read_bytes())
#: It begins with what is to be found, which makes the search ten times as quick.
_USES_TYPE = re.compile(
    rb"type\((?:(?<=\btype\()[^()\n]*\)\s*(?:(?:is|in|not)\b|[!=]=)|(?<=[\[(]type\()[^()\n]*\)[\])])"
)
_LAZY: dict[type, type] = {LazyParameter: UninitializedParameter, LazyBuffer: UninitializedBuffer}


def shown_type(value: object) -> type:
    """``type(value)``, as it is on a card."""
    kind = type(value)
    if not isinstance(value, FakeTensor) or current_threads() is None:
        return kind
    if kind is FakeTensor:
        return Parameter if isinstance(value, Parameter) else Tensor
    return _LAZY.get(kind) or library_class(kind)


def with_shown_types(tree: ast.Module) -> ast.Module:
    """``tree`` with each ``type(x)`` as a call of :func:`shown_type`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "type" and not isinstance(node.args[0], ast.Starred):
            node.func = ast.copy_location(ast.Name(TYPE, ast.Load()), node.func)
    return tree


class _Loader(importlib.machinery.SourceFileLoader):
    """Reads a file of a library. The bytecode of one that is rewritten lies beside Python's own, under another name;
    Python itself compares it with its source, and writes it."""

    _is_rewritten = False

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        self._is_rewritten = os.path.exists(_kept(importlib.util.cache_from_source(path))) or _is_to_be_rewritten(
            self.get_data(path)
        )
        return super().get_code(fullname)

    def exec_module(self, module: ModuleType) -> None:
        """Thousands of modules make a million objects, of which none is garbage: Python looks when they are there. A
        module of the program's own may be all of it, and looks as it runs."""
        with looking_after(MANY) if library_folder(self.path) else contextlib.nullcontext():
            super().exec_module(module)

    def source_to_code(  # type: ignore[override]  # as Python's own, which its stubs take for one without ``self``
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> CodeType:
        if self._is_rewritten:
            data = with_shown_types(ast.parse(data, path))
        code: CodeType = compile(data, path, "exec", dont_inherit=True, optimize=_optimize)
        return code

    def get_data(self, path: str) -> bytes:
        return super().get_data(_kept(path) if self._is_rewritten and path.endswith(_BYTECODE) else path)

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        if not self._is_rewritten:
            super().set_data(path, data, _mode=_mode)
        elif library_folder(self.path):  # beside the program's own files nothing is left
            super().set_data(_kept(path), data, _mode=_mode)


def _kept(bytecode: str) -> str:
    """The file of a rewritten module's bytecode, by that of Python's own (``cache_from_source``)."""
    return f"{bytecode.removesuffix(_BYTECODE)}.graphmem-{_RULES:08x}{_BYTECODE}"


def _is_to_be_rewritten(source: bytes) -> bool:
    if b"type(" not in source or (b"Tensor" not in source and b"Parameter" not in source):  # all but a few
        return False
    return bool(_USES_TYPE.search(source) and _NAMES_TENSORS.search(source))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of libraries as Python does."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _LEFT | sys.stdlib_module_names or current_threads() is None:
            return None
        if is_watched(fullname):
            return None  # it asks once more, and executes what is found here
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        spec.loader = _Loader(spec.loader.name, str(spec.loader.path))
        return spec


def _type_function() -> Callable[[object], type]:
    """The function that files call; to Dynamo, which knows what a fake tensor stands for, it is ``type``."""

    def type_of(value: object) -> type:
        return shown_type(value)

    type_of._torchdynamo_inline = type  # type: ignore[attr-defined]
    return type_of


# Files that were rewritten stay imported when the capture is over.
setattr(builtins, TYPE, _type_function())


@contextlib.contextmanager
def _shown_types() -> Iterator[None]:
    """Libraries that are imported until the end read the classes that a card's tensors have."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
