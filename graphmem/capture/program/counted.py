"""The numbers that a loop's body counts on itself, found in its source, and what it computes of them.

    while step < steps:
        ...
        step += 1                       step += __graphmem_by__(loop, 0, step, 1)
        if step % 500 == 0: sample()    lambda step: step % 500 == 0

A number is counted on in one place of its loop and bound in no other. Loops around it may count it on, by coming to
that loop again; one that binds it anew begins another count. Where a loop is over by its number (``while step <
steps``, ``if step == steps: break``) no further numbers follow.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphmem.capture.program.derived import bound, values_of

_LEAVES = (ast.Break, ast.Return, ast.Raise)
_LOOPS = (ast.For, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_ITEM = "__graphmem_number__"

AnyLoop = ast.For | ast.While


@dataclass
class Counted:
    """A number: the statement that counts it on; functions of it, the first so many (``early``) of what the loop
    computes before that statement, and those that are true where its loops end; of how many loops around its own each
    goes on counting."""

    increment: ast.AugAssign | ast.Assign
    keys: list[ast.expr]
    early: int
    ends: list[ast.expr]
    around: int

    @property
    def target(self) -> ast.expr:
        """What is counted on, to be read."""
        return _to_read(self.increment)

    @property
    def by(self) -> ast.expr:
        """By how much."""
        value = self.increment.value
        return value.right if isinstance(self.increment, ast.Assign) and isinstance(value, ast.BinOp) else value

    @by.setter
    def by(self, value: ast.expr) -> None:
        if isinstance(self.increment, ast.Assign) and isinstance(self.increment.value, ast.BinOp):
            self.increment.value.right = value
        else:
            self.increment.value = value


def counted(loop: AnyLoop, around: Sequence[AnyLoop]) -> list[Counted]:
    """Those of a loop of which its body computes something; ``around``: the loops around it, outermost first."""
    found = (_of_increment(one, loop, around) for one in _own(loop) if _is_increment(one))
    return [one for one in found if one is not None]


def _of_increment(increment: ast.AST, loop: AnyLoop, around: Sequence[AnyLoop]) -> Counted | None:
    assert isinstance(increment, (ast.AugAssign, ast.Assign))
    number = ast.unparse(_to_read(increment))
    if _times_bound(loop, number) != 1:
        return None
    outer = list(_counting_on(reversed(around), number))
    ends = [test for one in (loop, *outer) for test in _ends(one, number)]
    are_ends = {ast.unparse(test) for test, _ in ends}
    keys = {text: key for key in _computed([loop], loop, number) if (text := ast.unparse(key)) not in are_ends}
    if not keys:
        return None
    are_true = [_of_number(test if is_true else ast.UnaryOp(ast.Not(), test)) for test, is_true in ends]
    early = [key for key in keys.values() if (key.lineno, key.col_offset) < (increment.lineno, 0)]
    late = [key for key in keys.values() if key not in early]
    return Counted(increment, list(map(_of_number, (*early, *late))), len(early), are_true, len(outer))


def _is_increment(node: ast.AST) -> bool:
    """``n += 1``, ``self.n += 1``, ``n = n + 1``"""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Add) and _is_name(node.target)
    if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.value, ast.BinOp):
        return False
    target, value = node.targets[0], node.value
    return _is_name(target) and isinstance(value.op, ast.Add) and ast.unparse(value.left) == ast.unparse(target)


def _is_name(node: ast.expr) -> bool:
    """Whether an expression is a name, or an attribute of one."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))


def _to_read(increment: ast.AugAssign | ast.Assign) -> ast.expr:
    target = increment.target if isinstance(increment, ast.AugAssign) else increment.targets[0]
    read: ast.expr = ast.parse(ast.unparse(target), mode="eval").body
    return read


def _own(loop: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a loop's body that lie in no loop or function within it."""
    for node in ast.iter_child_nodes(loop):
        yield node
        if not isinstance(node, (*_LOOPS, *_FUNCTIONS)):
            yield from _own(node)


def _times_bound(loop: ast.AST, number: str) -> int:
    """In how many places of a loop a number is bound."""
    nodes = (node for node in ast.walk(loop) if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)))
    return sum(ast.unparse(node) == number for node in nodes)


def _counting_on(around: Iterator[AnyLoop], number: str) -> Iterator[AnyLoop]:
    for loop in around:
        if _times_bound(loop, number) != 1:
            return
        yield loop


# --- what is computed of a number -------------------------------------------------------------------------------------


class _Put(ast.NodeTransformer):
    """Puts :data:`_ITEM` in the place of a number that is read."""

    def __init__(self, number: str) -> None:
        self._number = number

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(getattr(node, "ctx", None), ast.Load) and ast.unparse(node) == self._number:
            return ast.Name(_ITEM, ast.Load())
        return super().generic_visit(node)

    visit_Name = visit_Attribute = generic_visit  # noqa: N815


def _ends(loop: AnyLoop, number: str) -> Iterator[tuple[ast.expr, bool]]:
    """The tests of a number that decide where the loop ends, and what they are there."""
    leaving = [node.test for node in _own(loop) if isinstance(node, ast.If) and isinstance(node.body[-1], _LEAVES)]
    for test in leaving:
        yield from ((part, True) for part in _computed(_parts(test, ast.Or), loop, number))
    if isinstance(loop, ast.While):
        yield from ((part, False) for part in _computed(_parts(loop.test, ast.And), loop, number))


def _parts(test: ast.expr, kind: type[ast.boolop]) -> list[ast.expr]:
    """Of ``a and b`` both; else the test itself."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, kind) else [test]


def _computed(nodes: Sequence[ast.AST], loop: AnyLoop, number: str) -> Iterator[ast.expr]:
    put = _Put(number)
    yield from values_of([put.visit(copy.deepcopy(node)) for node in nodes], {_ITEM}, bound([loop]) - {number})


def _of_number(value: ast.expr) -> ast.expr:
    """``lambda number: value``"""
    return ast.Lambda(ast.arguments([], [ast.arg(_ITEM)], None, [], [], None, []), value)
