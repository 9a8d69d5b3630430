"""The values that the body of a ``for`` loop computes from its items, to be known for all of them ahead.

    for epoch in range(30):
        if epoch == 10: unfreeze()          lambda epoch: epoch == 10
        size = 64 * 2**(epoch // 10)        lambda epoch: 64 * 2**(epoch // 10)

        step = epoch * steps + i
        if step % 500 == 0: sample()        lambda i: (epoch * steps + i) % 500 == 0

They say which of the items make another run. Expressions that call, but for a few functions without effects, are left
out, and those that other names decide which the body binds; what only goes to a log is left out too, and a number that
an item is merely counted on from (``epoch + 1``).
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import TypeGuard

_PURE = (
    ast.Attribute, ast.BinOp, ast.BoolOp, ast.Compare, ast.Constant, ast.Dict, ast.IfExp, ast.List, ast.Name, ast.Set,
    ast.Slice, ast.Subscript, ast.Tuple, ast.UnaryOp,
)  # fmt: skip
_PURE_FUNCTIONS = frozenset(
    {"abs", "bool", "divmod", "float", "int", "isinstance", "len", "max", "min", "pow", "range", "round", "str", "sum"}
)
#: Functions and methods whose arguments are for people, files and schedules.
_TOLD = frozenset(
    {"add_scalar", "critical", "debug", "exception", "format", "info", "log", "log_metrics", "print", "report", "save"}
    | {"save_checkpoint", "save_pretrained", "set_description", "set_epoch", "set_postfix", "state_dict", "step"}
    | {"update_description", "warn", "warning", "write"}
)
_COLLECTING = frozenset({"add", "append", "extend", "insert"})
_ITEM, _OTHER = "__graphmem_item__", "__graphmem_other__"
#: More are of no loop around training.
_MOST_KEYS = 12


def derived(loop: ast.For) -> list[ast.expr]:
    """Functions of an item, one for each value."""
    names = bound([loop.target])
    body, others = _written_out(loop, names)
    found = {ast.unparse(part): part for part in values_of(body, names, others)}
    return [_of_item(loop.target, part) for part in found.values()] if len(found) <= _MOST_KEYS else []


def _written_out(loop: ast.For, names: set[str]) -> tuple[list[ast.stmt], set[str]]:
    """The body with the names written out that are bound once, to what is computed of ``names`` (``step = epoch *
    steps + i``), and the other names that it binds."""
    body = copy.deepcopy(loop.body)
    others = bound(body) - names
    stores = Counter(part.id for node in body for part in ast.walk(node) if _binds(part))
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(target, ast.Name) or stores[target.id] != 1 or not isinstance(node, ast.Assign):
            continue
        if _is_pure(node.value) and names & _read(node.value) and not others & _read(node.value):
            others.discard(target.id)
            body = [_Put(target.id, node.value).visit(one) for one in body]
    return body, others


class _Put(ast.NodeTransformer):
    """Puts a value in the place of a name that is read."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self._value) if node.id == self._name and isinstance(node.ctx, ast.Load) else node


def _binds(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_handed_on(loop: ast.For, own: Container[str]) -> bool:
    """Whether a call in the loop, of no function of the ``own`` file, is given its number: ``loss(x, epoch)``."""
    names = bound([loop.target])
    calls = (node for node in ast.walk(loop) if isinstance(node, ast.Call) and not _is_told(node))
    for node in calls:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = (*node.args, *(word.value for word in node.keywords))
        is_given = any(isinstance(value, ast.Name) and value.id in names for value in given)
        if is_given and called not in own and called not in _PURE_FUNCTIONS and called not in _COLLECTING:
            return True
    return False


def _of_item(target: ast.expr, value: ast.expr) -> ast.expr:
    """``lambda item: [value for target in (item,)][0]``"""
    item = ast.Tuple([ast.Name(_ITEM, ast.Load())], ast.Load())
    listed = ast.ListComp(copy.deepcopy(value), [ast.comprehension(_only(target, _read(value)), item, [], 0)])
    arguments = ast.arguments([], [ast.arg(_ITEM)], None, [], [], None, [])
    return ast.Lambda(arguments, ast.Subscript(listed, ast.Constant(0), ast.Load()))


def _only(target: ast.expr, names: set[str]) -> ast.expr:
    """A target with those of its parts that bind one of ``names``, and a place for each other: what is there may not be
    known ahead, as the batch of ``for i, (x, y) in enumerate(loader)``."""
    if not names & bound([target]):
        return ast.Name(_OTHER, ast.Store())
    if isinstance(target, (ast.Tuple, ast.List)) and not any(isinstance(one, ast.Starred) for one in target.elts):
        return ast.Tuple([_only(one, names) for one in target.elts], ast.Store())
    return copy.deepcopy(target)


def bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that are bound in them."""
    return {part.id for node in nodes for part in ast.walk(node) if _binds(part)}


def _read(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def values_of(nodes: Iterable[ast.AST], names: set[str], others: set[str]) -> Iterator[ast.expr]:
    """The largest expressions that read one of ``names``, none of ``others``, and can be evaluated ahead."""
    for node in nodes:
        if isinstance(node, (ast.JoinedStr, ast.FunctionDef, ast.ClassDef, ast.Lambda)) or _is_told(node):
            continue
        if isinstance(node, ast.If) and all(map(_is_told, (*node.body, *node.orelse))):
            continue
        if isinstance(node, ast.expr) and _is_pure(node) and not others & _read(node):
            if names & _read(node) and not _only_counts(node):
                yield node
            continue
        yield from values_of(_parts(node), names, others)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement or an expression consists of: of ``data[i].to(device)`` the object, not its method."""
    for part in ast.iter_child_nodes(node):
        is_method = isinstance(node, ast.Call) and part is node.func and isinstance(part, ast.Attribute)
        yield part.value if is_method else part  # type: ignore[attr-defined]


def _is_told(node: ast.AST) -> bool:
    """Whether a statement or a call only tells something."""
    if isinstance(node, ast.Expr):
        return _is_told(node.value)
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Pass)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _TOLD


def _is_pure(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        is_known = isinstance(node.func, ast.Name) and node.func.id in _PURE_FUNCTIONS and not node.keywords
        return is_known and all(map(_is_pure, node.args))
    if not isinstance(node, _PURE) or isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return False
    return all(_is_pure(part) for part in ast.iter_child_nodes(node) if isinstance(part, (ast.expr, ast.Slice)))


def _only_counts(node: ast.expr) -> bool:
    """``epoch``, ``epoch + 1``, and tuples of such."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        return isinstance(node.right, ast.Constant) and _only_counts(node.left)
    if isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
        return all(map(_only_counts, [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]))
    return isinstance(node, (ast.Name, ast.Constant))
