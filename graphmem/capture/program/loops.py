"""The program's own files as they are imported: their ``for`` and ``while`` loops ask at the top whether they are over.

    for x in items: ...     for x in __graphmem_over__(items, "train.py:12"): ...
    while test: ...         __graphmem_loop_12__ = __graphmem_begin__("train.py:12")
                            while __graphmem_goes_on__(__graphmem_loop_12__) and (test): ...

Statements that call something may be left in it, as a loop of a library is, and the program goes on behind them:

    model.learn(steps)      try: model.learn(steps)
                            except __graphmem_left__: __graphmem_go_on__()

They give besides the names that they call, and every file gives those of its functions
(:mod:`graphmem.capture.program.training_calls`).

A number that a body counts on itself asks by how much (:mod:`graphmem.capture.program.counted`):

    step += 1               step += __graphmem_by__(__graphmem_loop_12__, 0, step, 1)

Lines stay where they are. Loops of generator functions are left alone: who asks them for an item expects one. What lies
in ``site-packages`` or the standard library is not read. To ``torch.compile`` the functions are what they stand for in
the file as it is written: the items, nothing, true, and the number.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, cast

from graphmem.base.imports import library_folder
from graphmem.base.rewritten import AS_WRITTEN, BEGIN, BY, CALLS, GO_ON, GOES_ON, LEFT, OVER
from graphmem.capture.device.unnoticed import with_shown_types
from graphmem.capture.program.asking import Loops
from graphmem.capture.program.counted import AnyLoop, counted
from graphmem.capture.program.derived import derived, is_handed_on
from graphmem.capture.program.leaving import Left
from graphmem.capture.program.loop import Loop
from graphmem.capture.program.training_calls import calls_by_function, calls_in

_COMPILES = ("torch.compile", "compile")
#: Methods in which no loop trains.
_OF_ONE_STEP = frozenset({"step", "update"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def compiled(source: str | bytes, filename: str) -> CodeType:
    """The code of a file, its loops rewritten. Raises :class:`SyntaxError` as Python does."""
    tree = with_ends(ast.parse(source, filename), filename)
    code: CodeType = compile(tree, filename, "exec", dont_inherit=True)
    return code


def with_ends(tree: ast.Module, filename: str) -> ast.Module:
    """The tree of a file of this name, its loops rewritten."""
    tree = with_shown_types(tree)
    calls = calls_by_function(tree)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    tree = _Rewritten(Path(filename).name, functions).visit(tree)
    if not any(
        ast.unparse(node) in _COMPILES for node in ast.walk(tree) if isinstance(node, (ast.Attribute, ast.Name))
    ):
        tree = _Behind().visit(tree)  # Dynamo compiles no part of a function with "try" in it, should its graph break
    tree.body.insert(_first_statement(tree), _registering(filename, calls))
    return ast.fix_missing_locations(tree)


def _first_statement(tree: ast.Module) -> int:
    """Where a statement may come: behind the docstring and imports from the future."""
    at = int(ast.get_docstring(tree, clean=False) is not None)
    while at < len(tree.body) and getattr(tree.body[at], "module", None) == "__future__":
        at += 1
    return at


def _registering(filename: str, calls: dict[str, tuple[str, ...]]) -> ast.stmt:
    """``__graphmem_calls__("train.py", learn=("backward", "sample"))``"""
    keywords = [ast.keyword(name, _names(called)) for name, called in calls.items()]
    return ast.Expr(ast.Call(ast.Name(CALLS, ast.Load()), [ast.Constant(filename)], keywords))


def _names(names: tuple[str, ...]) -> ast.expr:
    return ast.Tuple([ast.Constant(name) for name in names], ast.Load())


class _Rewritten(ast.NodeTransformer):
    def __init__(self, file: str, functions: set[str]) -> None:
        self._file, self._functions = file, functions
        self._around: list[AnyLoop] = []  # the loops of the same function around this one

    def _visit_function(self, node: Any) -> object:
        around, self._around = self._around, []
        visited = node if _yields(node) else self.generic_visit(node)
        self._around = around
        return visited

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        calls, keys, is_handed = calls_in(node), derived(node), is_handed_on(node, self._functions)
        counters = self._counters(node)
        self._visit_body(node)
        node.iter = self._call(OVER, node, calls, node.iter)
        node.iter.keywords.append(ast.keyword("name", ast.Constant(ast.unparse(node.target))))
        if keys:
            node.iter.keywords.append(ast.keyword("keys", ast.Tuple(keys, ast.Load())))
        if is_handed:
            node.iter.keywords.append(ast.keyword("is_handed_on", ast.Constant(True)))
        if not _does_every_so_often(node):
            name = "is_numbered" if _reads(node) else "is_even"
            node.iter.keywords.append(ast.keyword(name, ast.Constant(True)))
        if not counters:
            return [node]
        node.iter.keywords += counters
        node.iter = ast.NamedExpr(ast.Name(_name(node), ast.Store()), node.iter)
        return [node, _forgotten(node)]

    def visit_While(self, node: ast.While) -> list[ast.stmt]:
        """The loop, its state before it, which is deleted behind it."""
        calls, counters = calls_in(node), self._counters(node)
        self._visit_body(node)
        asked = self._call(BEGIN, node, calls)
        asked.keywords += counters
        begin = ast.Assign([ast.Name(_name(node), ast.Store())], asked)
        asked = ast.Call(ast.Name(GOES_ON, ast.Load()), [ast.Name(_name(node), ast.Load())], [])
        node.test = ast.BoolOp(ast.And(), [asked, node.test])
        return [_at(begin, node), _at(node, node), _forgotten(node)]

    def _visit_body(self, node: AnyLoop) -> None:
        self._around.append(node)
        self.generic_visit(node)
        self._around.pop()

    def _counters(self, node: AnyLoop) -> list[ast.keyword]:
        """``counters=((keys, early, ends, around), ...)``; lets the numbers that a loop counts on ask by how much."""
        found = counted(node, self._around)
        for place, one in enumerate(found):
            arguments = [ast.Name(_name(node), ast.Load()), ast.Constant(place), one.target, one.by]
            one.by = ast.copy_location(ast.Call(ast.Name(BY, ast.Load()), arguments, []), one.increment)
        told = [
            _tuple([_tuple(one.keys), ast.Constant(one.early), _tuple(one.ends), ast.Constant(one.around)])
            for one in found
        ]
        return [ast.keyword("counters", _tuple(told))] if told else []

    def _call(self, function: str, node: ast.stmt, calls: tuple[str, ...], *arguments: ast.expr) -> ast.Call:
        searches = [ast.Constant(True)] if _handles_memory(node) else []
        where = ast.Constant(f"{self._file}:{node.lineno}")
        keywords = [ast.keyword("calls", _names(calls))] if calls else []
        return ast.Call(ast.Name(function, ast.Load()), [*arguments, where, *searches], keywords)


class _Behind(ast.NodeTransformer):
    """Lets a module and its functions go on behind statements that are calls; methods may be compiled elsewhere."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node if _yields(node) else cast(ast.FunctionDef, self.generic_visit(node))

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if called is None or getattr(called, "attr", None) in _OF_ONE_STEP:
            return node
        behind = ast.Expr(ast.Call(ast.Name(GO_ON, ast.Load()), [], []))
        handler = ast.ExceptHandler(ast.Name(LEFT, ast.Load()), None, [_at(behind, node)])
        return _at(ast.Try([node], [ast.copy_location(handler, node)], [], []), node)


def _name(loop: AnyLoop) -> str:
    """The name of the loop's state in the program."""
    return f"__graphmem_loop_{loop.lineno}__"


def _forgotten(loop: AnyLoop) -> ast.stmt:
    return _at(ast.Assign([ast.Name(_name(loop), ast.Store())], ast.Constant(None)), loop)


def _tuple(parts: Sequence[ast.expr]) -> ast.expr:
    return ast.Tuple(list(parts), ast.Load())


def _at(node: ast.stmt, place: ast.stmt) -> ast.stmt:
    return ast.copy_location(node, place)


def _handles_memory(loop: ast.AST) -> bool:
    """Whether an iteration of the loop handles an error of memory, by what its ``except`` clauses name."""
    found: list[ast.AST] = list(ast.iter_child_nodes(loop))
    while found:
        node = found.pop()
        if isinstance(node, ast.ExceptHandler) and re.search("memory|oom", ast.unparse(node), re.IGNORECASE):
            return True
        if not isinstance(node, (*_FUNCTIONS, ast.For, ast.While)):
            found.extend(ast.iter_child_nodes(node))
    return False


def _does_every_so_often(loop: ast.For) -> bool:
    """Whether some iterations do what their neighbours do not: a test in the loop takes a remainder, or asks whether
    its number is some other than the first."""
    tests = [node.test for node in ast.walk(loop) if isinstance(node, (ast.If, ast.IfExp, ast.While))]
    return any(_is_of_single_numbers(part, loop.target) for test in tests for part in ast.walk(test))


def _reads(loop: ast.For) -> bool:
    """Whether a loop reads the name of its items."""
    name = loop.target.id if isinstance(loop.target, ast.Name) else ""
    parts = (part for node in loop.body for part in ast.walk(node))
    return any(isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load) for part in parts)


def _is_of_single_numbers(test: ast.AST, item: ast.expr) -> bool:
    if isinstance(test, ast.BinOp):
        return isinstance(test.op, ast.Mod)
    if not isinstance(test, ast.Compare) or not any(isinstance(op, (ast.Eq, ast.NotEq, ast.In)) for op in test.ops):
        return False
    sides = (test.left, *test.comparators)
    is_of_item = any(ast.unparse(part) == ast.unparse(item) for side in sides for part in ast.walk(side))
    return is_of_item and not any(isinstance(side, ast.Constant) and side.value == 0 for side in sides)


def _yields(function: ast.AST) -> bool:
    """Whether a function is a generator."""
    found: list[ast.AST] = list(ast.iter_child_nodes(function))
    while found:
        node = found.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, _FUNCTIONS):
            found.extend(ast.iter_child_nodes(node))
    return False


# --- what rewritten loops call ----------------------------------------------------------------------------------------


def functions(loops: Loops) -> dict[str, Callable[..., Any]]:
    """By name: what rewritten code calls. Dynamo traces the functions beside them (``_torchdynamo_inline``), for a loop
    that is compiled is never left, and nothing of ours may break its graph."""

    def over(items: Iterable[Any], where: str, searches: bool = False, **options: Any) -> Iterator[Any]:
        return loops.over(items, where, searches, **options)

    def begin(where: str, searches: bool = False, **options: Any) -> Loop:
        return loops.begin(where, searches, **options)

    def goes_on(loop: Loop) -> bool:
        return loop.goes_on()

    def by(loop: Any, place: int, value: object, step: object) -> object:
        return loop.runs.counters[place].by(value, step)

    called: dict[str, Any] = {OVER: over, BEGIN: begin, GOES_ON: goes_on, BY: by, CALLS: loops.know}
    called |= {LEFT: Left, GO_ON: loops.go_on}
    for name in (OVER, BEGIN, GOES_ON, BY):
        called[name]._torchdynamo_inline = AS_WRITTEN[name]
    return called


# --- modules beside the program ---------------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    """Reads a file of the program; what is compiled is not kept."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compiled(self.get_data(path), path)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and those below the program's folder with rewritten loops."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if not self._is_own(Path(str(spec.origin))):
            return None
        spec.loader = _Loader(spec.loader.name, str(spec.loader.path))
        return spec

    def _is_own(self, file: Path) -> bool:
        return self._folder in file.parents and not library_folder(str(file))


@contextlib.contextmanager
def rewritten_loops(loops: Loops, folder: Path) -> Iterator[None]:
    """Modules below ``folder`` that are imported now ask ``loops``; they are forgotten at the end."""
    finder, before, called = _Finder(folder), set(sys.modules), functions(loops)
    names = {name: value for name, value in vars(builtins).items() if name in called}
    vars(builtins).update(called)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if isinstance(getattr(getattr(sys.modules[name], "__spec__", None), "loader", None), _Loader):
                del sys.modules[name]
        for name in called:
            delattr(builtins, name)
        vars(builtins).update(names)
