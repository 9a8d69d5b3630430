"""Which loops may yet train: those that call ``backward``, or a function of the program's own files that comes to it.

A buffer of replay is filled by forward passes that are all alike, and then the same loop trains: in a branch, as
``if step >= learning_starts: agent.learn()``, or in a function that returns early. Such a loop is not left before.

Functions and methods are told by their names alone. Branches whose tests cannot change while the loop runs are left
out, for an evaluation often shares its loop with training: ``if is_training: loss.backward()``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

#: How a backward pass is begun; Lightning's is the second.
_BACKWARD = frozenset({"backward", "manual_backward"})
#: Calls in a test that answer alike as long as a loop runs.
_STEADY = frozenset({"callable", "hasattr", "is_grad_enabled", "isinstance"})
_ORDERING = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NESTED = (*_FUNCTIONS, ast.Lambda, ast.ClassDef)


def calls_in(body: ast.For | ast.While | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """The names of what a loop or a function calls, in order of the alphabet: ``learn`` of ``agent.learn(batch)``."""
    bound = {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = (_name(node) for node in _reached(body.body, bound) if isinstance(node, ast.Call))
    return tuple(sorted(set(names) - {""}))


def calls_by_function(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """The names that every function and method of a file calls; those of one name are taken together."""
    calls: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS):
            calls.setdefault(node.name, set()).update(calls_in(node))
    return {name: tuple(sorted(called)) for name, called in calls.items() if called}


def come_to_training(names: Iterable[str], calls: Mapping[str, Iterable[str]]) -> bool:
    """Whether a call of one of ``names`` comes to a backward pass, by what every function ``calls``."""
    seen, found = set(names), list(names)
    while found:
        name = found.pop()
        if name in _BACKWARD:
            return True
        found.extend(called for called in calls.get(name, ()) if called not in seen)
        seen.update(calls.get(name, ()))
    return False


def _name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Name):
        return call.func.id
    if not isinstance(call.func, ast.Attribute):
        return ""
    is_of_module = call.func.attr == "train" and not call.args and not call.keywords  # model.train()
    return "" if is_of_module else call.func.attr


def _reached(statements: Iterable[ast.AST], bound: set[str]) -> Iterator[ast.AST]:
    """The nodes of the statements that may yet run while the loop does. Left out are the bodies of functions and
    classes defined there, and both branches of an ``if`` whose test cannot change; the test itself is there.
    ``bound``: names that the loop assigns."""
    found = list(statements)
    while found:
        node = found.pop()
        if isinstance(node, _NESTED):
            continue
        yield node
        if isinstance(node, ast.If) and not _can_change(node.test, bound):
            found.append(node.test)
        else:
            found.extend(ast.iter_child_nodes(node))


def _can_change(test: ast.expr, bound: set[str]) -> bool:
    """Whether a test may come out otherwise later: it names what is ``bound`` meanwhile, calls, counts, or compares by
    size."""
    for node in ast.walk(test):
        if isinstance(node, ast.Name) and node.id in bound:
            return True
        if isinstance(node, ast.Call) and _name(node) not in _STEADY:
            return True
        if isinstance(node, ast.BinOp) or (
            isinstance(node, ast.Compare) and any(isinstance(op, _ORDERING) for op in node.ops)
        ):
            return True
    return False
