"""The uses of a number that a program reads, from its source, where the number itself cannot be followed.

A whole number goes into sizes, indices and bounds through C, where nobody can follow it. So the line that reads it is
looked up in the program: a number that only reaches logs, counts of metrics and divisions decides nothing. What is not
recognised as that decides.

A number is followed out of the function that reads it and into functions that it is given to, those of other files too:
who called is known from the lines that run, and what a name means in a file from the modules that are loaded.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Container, Iterator
from enum import Enum, auto
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType

from graphmem.capture.values.callers import Where, is_library

#: Functions that write a number down, and functions through which it goes on.
_LOGS = {
    "print", "str", "repr", "format", "info", "debug", "warning", "error", "critical", "log", "write", "add_scalar",
    "add_scalars", "set_postfix", "set_postfix_str", "set_description", "log_metrics", "log_dict", "update_metrics",
}  # fmt: skip
_PASSES = {
    "int", "float", "round", "sum", "max", "min", "abs", "item", "mean", "len", "zip", "concatenate", "stack",
    "asarray", "array", "list", "tuple", "sorted", "enumerate", "join", "dumps", "cast", "fromarray",
}  # fmt: skip
#: Methods of arrays and dictionaries that give numbers of them, as many or fewer.
_METHODS = {
    "mean", "sum", "argmax", "argmin", "max", "min", "astype", "flatten", "ravel", "squeeze", "std", "round", "items",
    "values", "get",
}  # fmt: skip
#: Methods of arrays and pictures that write them into a file.
_WRITE_THEMSELVES = {"save", "tofile"}
_GATHERS = {"append", "extend", "add"}
_WRITES = {
    ("torch", "save"), ("np", "save"), ("np", "savez"), ("numpy", "save"), ("json", "dump"), ("pickle", "dump"),
    ("yaml", "dump"), ("joblib", "dump"),
}  # fmt: skip
_FILES = {"copyfile", "copy2", "makedirs", "save_pretrained", "save_file"}
_WARNS = _LOGS | {"warn", "warning_once", "warn_once"}
_OF_TEXT = {"getattr", "str", "repr", "format", "join"}
#: What makes a whole number of a floating-point one, what selects by an array, and functions of a module of functions
#: through which a number goes on as another object.
_WHOLE = {"int", "range", "floor", "ceil", "trunc"}
_SELECTS = {"nonzero", "flatnonzero", "argwhere", "unique", "searchsorted", "compress", "extract"}
_MATHEMATICS = {"math", "np", "numpy"}
_CHOOSES = {"min", "max", "sorted"}
#: What gives each value behind its key or its place.
_IN_PAIRS = {"items", "enumerate"}
#: Those that read numbers; ``state_dict`` those of a gradient scaler.
_READS = {"item", "tolist", "numpy", "int", "float", "bool", "__int__", "__float__", "state_dict"}


def only_logs(
    file: str, line: int, is_number: bool = False, is_question: bool = False, frames: tuple[Where, ...] = ()
) -> bool:
    """Whether what is read at this line of a file is only written down. ``is_number``: of floats, what is not seen to
    decide is taken to be logged. ``is_question``: it is ``bool`` that reads, or a branch. ``frames``: the lines that
    run, this one first."""
    program = _parsed(file)
    if program is None:
        return is_number
    reads = program.reads_at(line)
    if is_question:
        reads = [node for node in reads if isinstance(node, ast.Call) and _name(node) == "bool"]
    value = _Value.FLOAT if is_number else _Value.WHOLE
    return bool(reads or is_number) and all(_Uses(program, value, frames).are_harmless(node) for node in reads)


def passes_if(file: str, line: int) -> bool | None:
    """The answer to a question at this line with which an assertion, or a check that raises, is passed; None at a line
    that is no such check."""
    program = _parsed(file)
    for check in program.checks_at(line) if program is not None else ():
        if _is_compared_with_answer(check.test):
            continue
        if isinstance(check, ast.Assert):
            return not _is_negated(check.test)
        if isinstance(check, ast.If) and isinstance(check.body[0], ast.Raise):
            return _is_negated(check.test)
    return None


def only_warns(file: str, line: int) -> bool:
    """Whether a question at this line is asked by a condition under which only a text is made and written down."""
    program = _parsed(file)
    if program is None:
        return False
    found = program.checks_at(line)
    return bool(found) and all(isinstance(one, ast.If) and _warns(program, one, one) for one in found)


def _warns(program: _Program, condition: ast.If, outer: ast.If) -> bool:
    return not condition.orelse and all(_is_of_warning(program, one, outer) for one in condition.body)


def _is_of_warning(program: _Program, statement: ast.stmt, outer: ast.If) -> bool:
    """Whether a statement writes a text down, or makes what only the statements under the condition read."""
    if isinstance(statement, ast.If):
        return _warns(program, statement, outer)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and _name(statement.value) in _WARNS
    if not isinstance(statement, (ast.Assign, ast.AugAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    calls = (node for node in ast.walk(statement.value) if isinstance(node, ast.Call))
    return all(_name(call) in _OF_TEXT for call in calls) and all(
        isinstance(target, ast.Name) and program.is_read_within(target.id, outer) for target in targets
    )


def compares_idly(frames: tuple[Where, ...]) -> bool:
    """Whether what is compared at the first of these lines, which run, decides nothing but what is written down: ``if
    accuracy > best: best = accuracy``, ``print(min(loss, 20))``."""
    program = _parsed(frames[0].file) if frames else None
    if program is None:
        return False
    found = [
        node
        for node in program.nodes_at(frames[0].line)
        if isinstance(node, ast.Compare) or (isinstance(node, ast.Call) and _name(node) in _CHOOSES)
    ]
    uses = _Uses(program, _Value.FLOAT, frames)
    return bool(found) and all(uses.are_harmless(node) for node in found)


def becomes_whole(frames: tuple[Where, ...]) -> bool:
    """Whether a floating-point number that is read at the first of these lines, which run, becomes a whole one behind a
    function that makes another object of it, of which nobody can tell then where it comes from:
    ``int(32 * math.sqrt(1 - x))``."""
    program = _parsed(frames[0].file) if frames else None
    if program is None:
        return False
    reads = program.reads_at(frames[0].line, "item")
    return not all(_Uses(program, _Value.FOLLOWED, frames).are_harmless(node) for node in reads)


def _is_compared_with_answer(test: ast.expr) -> bool:
    """Whether a test is of the kind ``question is False``."""
    others = [other for node in ast.walk(test) if isinstance(node, ast.Compare) for other in node.comparators]
    return any(isinstance(other, ast.Constant) and isinstance(other.value, bool) for other in others)


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


_Function = ast.FunctionDef | ast.Lambda


class _Program:
    """A parsed file, with what stands around every node."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self.tree, self.file = tree, file
        self.parents: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }

    def reads_at(self, line: int, *names: str) -> list[ast.AST]:
        """The outermost calls at a line that read numbers; a question without one is its own expression. ``names``:
        only such calls."""
        wanted = names or _READS
        calls = [node for node in self.nodes_at(line) if isinstance(node, ast.Call) and _name(node) in wanted]
        return [node for node in calls if not any(self._is_inside(node, other) for other in calls)]

    def nodes_at(self, line: int) -> Iterator[ast.expr]:
        """The expressions of which a part stands at the line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr) and node.lineno <= line <= (node.end_lineno or line):
                yield node

    def _is_inside(self, node: ast.AST, other: ast.AST) -> bool:
        up = self.parents.get(node)
        while up is not None and up is not other and not isinstance(up, ast.stmt):
            up = self.parents.get(up)
        return up is other

    def checks_at(self, line: int) -> list[ast.Assert | ast.If]:
        """Assertions and conditions whose test stands at the line."""
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.Assert, ast.If)) and node.lineno <= line <= (node.test.end_lineno or node.lineno)
        ]

    def scope(self, node: ast.AST) -> ast.AST:
        """The function around a node, or the file."""
        up = self.parents.get(node)
        while up is not None and not isinstance(up, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)):
            up = self.parents.get(up)
        return up or self.tree

    def name_around(self, node: ast.AST) -> str:
        """The name of the function around a node, "" for none."""
        function = node if isinstance(node, ast.Lambda) else self.scope(node)
        up = self.parents.get(function)
        targets = up.targets if isinstance(function, ast.Lambda) and isinstance(up, ast.Assign) else [function]
        return next((str(getattr(one, "id", getattr(one, "name", ""))) for one in targets), "")

    def calls(self, name: str) -> list[ast.Call]:
        """The calls of a function of this name."""
        return [one for one in ast.walk(self.tree) if name and isinstance(one, ast.Call) and _name(one) == name]

    def results(self, node: ast.AST, frames: tuple[Where, ...]) -> Iterator[tuple[_Program, ast.Call]]:
        """The calls whose result is what the function around a node returns: those of this file, and that of another
        one which waits for it now."""
        name = self.name_around(node)
        for call in self.calls(name):
            yield self, call
        inner = [number for number, one in enumerate(frames) if (one.file, one.function) == (self.file, name)]
        outer = frames[inner[0] + 1] if inner and inner[0] + 1 < len(frames) else None
        if outer is None or outer.file == self.file:
            return
        program = _parsed(outer.file)
        if program is not None:
            for call in program.calls(name):
                if call.lineno <= outer.line <= (call.end_lineno or call.lineno):
                    yield program, call

    def parameter(self, call: ast.Call, given: ast.AST) -> tuple[_Program, _Function, str] | None:
        """The function of a program's own file that is called, and the name that it has for an argument."""
        found = self._called(call)
        if found is None:
            return None
        program, function = found
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if isinstance(given, ast.keyword):
            every = (*names, *(one.arg for one in function.args.kwonlyargs))
            return (program, function, given.arg) if given.arg in every else None
        if given not in call.args:
            return None
        is_method = isinstance(program.parents.get(function), ast.ClassDef) and names[:1] == ["self"]
        at = call.args.index(given) + is_method
        return (program, function, names[at]) if at < len(names) else None

    def _called(self, call: ast.Call) -> tuple[_Program, _Function] | None:
        own = self._functions(_name(call))
        if own:
            return (self, own[0]) if len(own) == 1 else None
        code = _code_of(call.func, self.file)
        program = None if code is None or is_library(code.co_filename) else _parsed(code.co_filename)
        if code is None or program is None:
            return None
        firsts = {
            min([one.lineno, *(of.lineno for of in getattr(one, "decorator_list", []))]): one
            for one in program._functions()
        }
        return (program, firsts[code.co_firstlineno]) if code.co_firstlineno in firsts else None

    def _functions(self, name: str | None = None) -> list[_Function]:
        found = (node for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.Lambda)))
        return [one for one in found if name in (None, getattr(one, "name", None) or self.name_around(one))]

    def loads(self, name: str, node: ast.AST) -> list[ast.Name]:
        """Where a variable of the function around a node is read."""
        uses = (one for one in ast.walk(self.scope(node)) if isinstance(one, ast.Name) and one.id == name)
        return [one for one in uses if isinstance(one.ctx, ast.Load)]

    def loads_behind(self, name: str, node: ast.AST) -> list[ast.Name]:
        """The same of those that run after ``node``: behind it, in a loop around both, or in a function inside."""
        scope, line = self.scope(node), getattr(node, "lineno", 0)
        loops = [one for one in ast.walk(scope) if isinstance(one, (ast.For, ast.While)) and self._holds(one, node)]
        return [
            one
            for one in self.loads(name, node)
            if one.lineno >= line or self.scope(one) is not scope or any(self._holds(loop, one) for loop in loops)
        ]

    def _holds(self, outer: ast.AST, node: ast.AST) -> bool:
        up: ast.AST | None = node
        while up is not None and up is not outer:
            up = self.parents.get(up)
        return up is outer

    def is_read_within(self, name: str, statement: ast.AST) -> bool:
        """Whether a variable is read under a statement only."""
        within = set(ast.walk(statement))
        return all(one in within for one in self.loads(name, statement))


class _Value(Enum):
    """Kinds of values, by what is to be found of them in the source."""

    WHOLE = auto()  #: a whole number: it decides where it is not seen to be logged
    FLOAT = auto()  #: a floating-point number, or an array: it is harmless where it is not seen to decide
    FOLLOWED = auto()  #: a floating-point number that records itself what it decides
    LOST = auto()  #: one computed of that by a function that makes another object: harmless until it becomes whole


#: What a number that records its decisions itself is followed through.
_OF_OBJECTS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.keyword, ast.Return, ast.Assign, ast.AnnAssign)
_DECIDING = (
    ast.BoolOp, ast.If, ast.While, ast.IfExp, ast.Assert, ast.Subscript, ast.Slice, ast.For, ast.comprehension,
)  # fmt: skip


class _Uses:
    """The uses of a value from an expression on. ``followed``: names that are judged elsewhere already."""

    def __init__(
        self, program: _Program, value: _Value, frames: tuple[Where, ...] = (), followed: set[object] | None = None
    ) -> None:
        self._is_chosen = False  # what a number chooses may be large: to be dropped is not to be written down
        self._program, self._value, self._frames = program, value, frames
        self._is_object = value in (_Value.FOLLOWED, _Value.LOST)
        self._followed: set[object] = set() if followed is None else followed

    def are_harmless(self, node: ast.AST) -> bool:
        """Whether nothing is decided by an expression's value."""
        up = self._program.parents.get(node)
        if self._is_object and not isinstance(up, _OF_OBJECTS):
            return True
        if isinstance(up, (ast.FormattedValue, ast.Expr)):
            return not (self._is_chosen and isinstance(up, ast.Expr))
        if isinstance(up, ast.BinOp):
            is_share = isinstance(up.op, ast.Div) and self._value is _Value.WHOLE  # no whole number any more
            return (self._of(_Value.FLOAT) if is_share else self).are_harmless(up)
        if isinstance(up, ast.UnaryOp):
            return self._is_object or (not isinstance(up.op, ast.Not) and self.are_harmless(up))
        if isinstance(
            up, (ast.keyword, ast.Compare, ast.GeneratorExp, ast.ListComp, ast.Dict, ast.List, ast.Tuple, ast.Starred)
        ):
            return self.are_harmless(up)
        if isinstance(up, ast.If) and not self._is_object:
            return node is up.test and self._is_idle(up)
        if isinstance(up, ast.BoolOp) and not any(isinstance(one, ast.Call) for one in ast.walk(up)):
            return self.are_harmless(up)
        if isinstance(up, ast.IfExp):  # one of the two that a condition chooses from
            return node is not up.test and self.are_harmless(up)
        if isinstance(up, ast.Attribute) and up.attr in _METHODS | _WRITE_THEMSELVES:
            call = self._program.parents.get(up)
            return isinstance(call, ast.Call) and (up.attr in _WRITE_THEMSELVES or self.are_harmless(call))
        if isinstance(up, ast.comprehension) and node is up.iter:
            return self._are_harmless_items(up)
        if isinstance(up, ast.For) and node is up.iter and self._value is _Value.WHOLE:
            return self._is_harmless_target(up.target, up)
        if isinstance(up, ast.Subscript) and isinstance(up.ctx, ast.Load):  # a part of it, or what it chooses
            self._is_chosen |= node is up.slice
            return (node is up.value or self._value is _Value.WHOLE) and self.are_harmless(up)
        return self._is_harmless_statement(up, node)

    def _are_harmless_items(self, loop: ast.comprehension) -> bool:
        """Whether every use of what a comprehension goes over is, whose names nobody else sees. The first of a pair may
        be a key or a place, which is no value."""
        target = loop.target
        if isinstance(loop.iter, ast.Call) and _name(loop.iter) in _IN_PAIRS and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        parts = list(ast.walk(target))
        names = {one.id for one in parts if isinstance(one, ast.Name)}
        used = (one for one in ast.walk(self._program.parents[loop]) if isinstance(one, ast.Name) and one.id in names)
        is_plain = all(isinstance(one, (ast.Name, ast.Tuple, ast.Store)) for one in parts)
        return is_plain and all(self.are_harmless(one) for one in used if isinstance(one.ctx, ast.Load))

    def _is_harmless_statement(self, up: ast.AST | None, node: ast.AST) -> bool:
        if isinstance(up, ast.Call) and up.func is not node:
            return self._is_harmless_call(up, node)
        if isinstance(up, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = up.targets if isinstance(up, ast.Assign) else [up.target]
            return all(self._is_harmless_target(target, up) for target in targets)
        if isinstance(up, (ast.Return, ast.Lambda)):
            return self._is_harmless_result(up)
        return self._value is not _Value.WHOLE and not isinstance(up, _DECIDING)

    def _is_idle(self, condition: ast.If) -> bool:
        """Whether a condition decides only what is written down, and which numbers are kept to compare with."""
        return all(self._is_idle_statement(one, condition.test) for one in (*condition.body, *condition.orelse))

    def _is_idle_statement(self, statement: ast.stmt, test: ast.expr) -> bool:
        if isinstance(statement, ast.If):
            return self._is_idle(statement)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return _name(statement.value) in _WARNS | _FILES or _writes(statement.value)
        if not isinstance(statement, (ast.Assign, ast.AugAssign)):
            return isinstance(statement, ast.Pass)
        compared = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
        parts = [one for one in ast.walk(statement.value) if isinstance(one, ast.expr)]
        is_plain = all(
            isinstance(one, (ast.Constant, ast.Tuple, ast.BinOp)) or (isinstance(one, ast.Name) and one.id in compared)
            for one in parts
        )
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        within = set(ast.walk(test))
        names = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.expr)]
        return is_plain and all(
            isinstance(one, ast.Tuple)
            or (isinstance(one, ast.Name) and self._is_harmless_name(one.id, statement, within))
            for one in names
        )

    def _of(self, value: _Value) -> _Uses:
        return self if value is self._value else _Uses(self._program, value, self._frames, self._followed)

    def _in(self, program: _Program) -> _Uses:
        """The same value in another file."""
        uses = _Uses(program, self._value, self._frames, self._followed)
        uses._is_chosen = self._is_chosen
        return uses

    def _is_harmless_call(self, call: ast.Call, given: ast.AST) -> bool:
        name, is_whole = _name(call), self._value is _Value.WHOLE
        if not is_whole and self._makes_whole(name, call):
            if self._is_object:
                return self._value is _Value.FOLLOWED
            return name == "int" and self._of(_Value.WHOLE).are_harmless(call)
        if not is_whole and (_is_mathematics(call) or name in ("float", "round")):
            return (self._of(_Value.LOST) if self._is_object else self).are_harmless(call)
        if name in _LOGS or _writes(call):
            return True
        if name in _PASSES or (is_whole and _is_mathematics(call)):
            return self.are_harmless(call)
        if name in _GATHERS and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            return self._is_object or self._is_harmless_name(call.func.value.id, call)
        return self._is_harmless_inside(call, given)

    def _makes_whole(self, name: str, call: ast.Call) -> bool:
        """Whether a function makes a whole number of a floating-point one, or selects by an array."""
        if self._is_object:
            return name in _WHOLE or (name == "round" and len(call.args) == 1)
        return name in _WHOLE or name in _SELECTS or (name == "where" and len(call.args) == 1)

    def _is_harmless_inside(self, call: ast.Call, given: ast.AST) -> bool:
        """Whether nothing is decided by an argument in a function of the program."""
        found = self._program.parameter(call, given)
        if found is None:
            return self._value is not _Value.WHOLE
        program, function, name = found
        first = function.body if isinstance(function, ast.Lambda) else function.body[0]
        return self._in(program)._is_harmless_name(name, first)

    def _is_harmless_result(self, node: ast.Return | ast.Lambda) -> bool:
        """Whether the function's callers, of which a whole number has to have some, decide nothing by its result."""
        if not self._is_new(f"{self._program.name_around(node)}()"):
            return True
        results = list(self._program.results(node, self._frames))
        return bool(results or self._value is not _Value.WHOLE) and all(
            self._in(program).are_harmless(call) for program, call in results
        )

    def _is_harmless_target(self, target: ast.AST, statement: ast.AST) -> bool:
        if isinstance(target, ast.Tuple):
            return all(self._is_harmless_target(one, statement) for one in target.elts)
        if isinstance(target, ast.Name):
            return self._is_harmless_name(target.id, statement)
        if isinstance(target, ast.Subscript):
            return self._is_object or self._is_harmless_item(target)
        return self._value is not _Value.WHOLE

    def _is_harmless_item(self, target: ast.Subscript) -> bool:
        """Whether a value decides nothing that is kept in a dictionary: under a name, as logs are, or under any key of
        a variable whose every use is harmless."""
        if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
            return True
        return isinstance(target.value, ast.Name) and self._is_harmless_name(target.value.id, target)

    def _is_harmless_name(self, name: str, node: ast.AST, within: Container[ast.AST] = ()) -> bool:
        """Whether every use of a variable of the function around ``node`` is, but for those ``within`` others."""
        scope = self._program.scope(node)
        if not self._is_new(f"{name} of {getattr(scope, 'lineno', 0)}"):
            return True
        if any(isinstance(one, (ast.Global, ast.Nonlocal)) and name in one.names for one in ast.walk(scope)):
            return self._value is not _Value.WHOLE
        loads = (one for one in self._program.loads_behind(name, node) if one not in within)
        return all(self.are_harmless(one) for one in loads if not self._is_gathering(one))

    def _is_new(self, name: str) -> bool:
        key = self._value, self._program.file, name
        is_new = key not in self._followed
        self._followed.add(key)
        return is_new

    def _is_gathering(self, node: ast.AST) -> bool:
        """Whether it is the list in ``list.append(value)``, or the dictionary in ``dictionary[key] = value``."""
        up = self._program.parents.get(node)
        if isinstance(up, ast.Subscript):
            return node is up.value and isinstance(up.ctx, ast.Store)
        return isinstance(up, ast.Attribute) and up.attr in _GATHERS


def _code_of(function: ast.expr, file: str) -> CodeType | None:
    """The code of a Python function that a file knows by this name, or that a module which it knows has."""
    if isinstance(function, ast.Attribute):
        module = _known_as(function.value, file)
        found = vars(module).get(function.attr) if isinstance(module, ModuleType) else None
    else:
        found = _known_as(function, file)
    return found.__code__ if isinstance(found, FunctionType) else None


def _known_as(name: ast.expr, file: str) -> object:
    """The object that a name means in a file that is loaded as a module; None for what nobody knows."""
    if not isinstance(name, ast.Name):
        return None
    loaded = (getattr(module, "__dict__", {}) for module in list(sys.modules.values()))
    return next((names[name.id] for names in loaded if names.get("__file__") == file and name.id in names), None)


def _writes(call: ast.Call) -> bool:
    """Whether it is ``torch.save``, ``json.dump`` or the like, which write a file."""
    function = call.func
    module = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(module, ast.Name) and (module.id, _name(call)) in _WRITES


def _is_mathematics(call: ast.Call) -> bool:
    """Whether it is of a function of ``math`` or numpy."""
    function = call.func
    module = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(module, ast.Name) and module.id in _MATHEMATICS


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _parsed(file: str) -> _Program | None:
    linecache.checkcache(file)
    return _parsed_text("".join(linecache.getlines(file)), file)


@lru_cache(maxsize=64)
def _parsed_text(text: str, file: str) -> _Program | None:
    try:
        return _Program(ast.parse(text), file) if text else None
    except (SyntaxError, ValueError, RecursionError):
        return None
