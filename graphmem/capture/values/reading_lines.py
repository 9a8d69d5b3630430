"""What a program does with a number that it reads: its own source tells, where the number itself cannot.

A whole number goes into sizes, indices and bounds through C, where nobody can follow it. So the line that reads it is
looked up in the program: a number that only reaches logs, counts of metrics and divisions decides nothing. What is not
recognised as that decides.
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache

#: Functions that write a number down, and functions through which it goes on.
_LOGS = {
    "print", "str", "repr", "format", "info", "debug", "warning", "error", "critical", "log", "write", "add_scalar",
    "add_scalars", "set_postfix", "set_postfix_str", "set_description", "log_metrics", "log_dict", "update_metrics",
}  # fmt: skip
_PASSES = {"int", "float", "round", "sum", "max", "min", "abs", "item", "mean", "len"}
_GATHERS = {"append", "extend", "add"}
_READS = {"item", "tolist", "numpy", "int", "float", "bool", "__int__", "__float__"}


def only_logs(file: str, line: int, is_number: bool = False, is_question: bool = False) -> bool:
    """Whether what is read at this line of a file is only written down. ``is_number``: of floats, what is not seen to
    decide is taken to be logged. ``is_question``: it is ``bool`` that reads, or a branch."""
    program = _parsed(file)
    if program is None:
        return is_number
    reads = program.reads_at(line)
    if is_question:
        reads = [node for node in reads if isinstance(node, ast.Call) and _name(node) == "bool"]
    return bool(reads or is_number) and all(_Use(program, is_number).is_harmless(node) for node in reads)


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


def _is_compared_with_answer(test: ast.expr) -> bool:
    """Whether a test is of the kind ``question is False``."""
    others = [other for node in ast.walk(test) if isinstance(node, ast.Compare) for other in node.comparators]
    return any(isinstance(other, ast.Constant) and isinstance(other.value, bool) for other in others)


def _is_negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


class _Program:
    """A parsed file, with what stands around every node."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }

    def reads_at(self, line: int) -> list[ast.AST]:
        """The outermost calls at a line that read numbers; a question without one is its own expression."""
        calls = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line) and _name(node) in _READS
        ]
        return [node for node in calls if not any(self._is_inside(node, other) for other in calls)]

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


class _Use:
    """Where a value goes from an expression."""

    def __init__(self, program: _Program, is_number: bool) -> None:
        self._program = program
        self._otherwise = is_number
        self._followed: set[str] = set()

    def is_harmless(self, node: ast.AST) -> bool:
        up = self._program.parents.get(node)
        if isinstance(up, (ast.FormattedValue, ast.Expr, ast.keyword)):
            return not isinstance(up, ast.keyword) or self.is_harmless(up)
        if isinstance(up, ast.BinOp) and isinstance(up.op, ast.Div) and not self._otherwise:
            return _Use(self._program, is_number=True).is_harmless(up)  # a share is no whole number any more
        if isinstance(up, (ast.BinOp, ast.UnaryOp, ast.Dict, ast.List, ast.Tuple, ast.Starred)):
            is_negation = isinstance(up, ast.UnaryOp) and isinstance(up.op, ast.Not)
            return not is_negation and self.is_harmless(up)
        if isinstance(up, ast.Call) and up.func is not node:
            return self._is_harmless_call(up)
        if isinstance(up, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = up.targets if isinstance(up, ast.Assign) else [up.target]
            return all(self._is_harmless_target(target, up) for target in targets)
        decides = (ast.Compare, ast.BoolOp, ast.If, ast.While, ast.IfExp, ast.Assert, ast.Subscript, ast.Slice, ast.For)
        return self._otherwise and not isinstance(up, (*decides, ast.comprehension))

    def _is_harmless_call(self, call: ast.Call) -> bool:
        name = _name(call)
        if name in _LOGS:
            return True
        if self._otherwise and name in ("int", "range"):
            return False
        if name in _PASSES:
            return self.is_harmless(call)
        if name in _GATHERS and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            return self._is_harmless_name(call.func.value.id, call)
        return self._otherwise

    def _is_harmless_target(self, target: ast.AST, statement: ast.AST) -> bool:
        if isinstance(target, ast.Name):
            return self._is_harmless_name(target.id, statement)
        if isinstance(target, ast.Subscript):
            return isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)
        return self._otherwise

    def _is_harmless_name(self, name: str, node: ast.AST) -> bool:
        """Whether every use of a variable is; one that is followed already is judged there."""
        if name in self._followed:
            return True
        self._followed.add(name)
        scope = self._program.scope(node)
        if any(isinstance(one, (ast.Global, ast.Nonlocal)) and name in one.names for one in ast.walk(scope)):
            return self._otherwise
        uses = [one for one in ast.walk(scope) if isinstance(one, ast.Name) and one.id == name]
        loads = [one for one in uses if isinstance(one.ctx, ast.Load) and not self._is_gathering(one)]
        return all(self.is_harmless(one) for one in loads)

    def _is_gathering(self, node: ast.AST) -> bool:
        """Whether it is the list in ``list.append(value)``."""
        up = self._program.parents.get(node)
        return isinstance(up, ast.Attribute) and up.attr in _GATHERS


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _parsed(file: str) -> _Program | None:
    linecache.checkcache(file)
    return _parsed_text("".join(linecache.getlines(file)))


@lru_cache(maxsize=64)
def _parsed_text(text: str) -> _Program | None:
    try:
        return _Program(ast.parse(text)) if text else None
    except (SyntaxError, ValueError, RecursionError):
        return None
