"""A statement of a program that failed in an analysis, tried again on small tensors of the host.

PyTorch's own code runs there, without anything that a capture replaces: where the statement passes, the failure was the
analysis's and not the program's. What is tried is the expression that the traceback names, a call as a rule, with the
values of its variables; tensors are zeros of the same sizes. Where that cannot be known, nothing is.
"""

from __future__ import annotations

import ast
import copy
import linecache
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

import graphmem
from graphmem.capture.values import callers

_OURS = os.path.dirname(graphmem.__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Bytes of all tensors of a statement, beyond which it is not tried.
_MOST_BYTES = 256 << 20
#: What computes gradients needs the graph of earlier operators, which tensors of the host do not have.
_NEEDS_GRAPH = ("backward", "grad")


@dataclass(frozen=True)
class Retry:
    """An expression, and the values of the variables in it as they were in the analysis."""

    expression: ast.expr
    values: Mapping[str, Any]

    def passes(self) -> bool:
        """True if it can be evaluated on the host. To be asked after the capture."""
        made: dict[int, torch.Tensor] = {}
        try:
            variables = {name: _on_host(value, made) for name, value in self.values.items()}
            eval(compile(ast.Expression(self.expression), "<tried again>", "eval"), variables)
        except Exception:
            return False
        return True


def retry_of(error: BaseException) -> Retry | None:
    """What can be tried again of an error that was raised in a capture; None where nothing can: the program raised it
    itself, or tensors of the card and of the host meet, which fails on a card and not here."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if frames and _raises(*frames[-1]):
        return None
    outside = [(frame, tb.tb_lasti) for tb in _entries(error) if _is_theirs(frame := tb.tb_frame)]
    expression = None if not outside else _expression(*outside[-1])
    if expression is None or _called(expression) in _NEEDS_GRAPH:
        return None
    frame = outside[-1][0]
    known = {**frame.f_builtins, **frame.f_globals, **callers.variables(frame)}
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    values = {name: known[name] for name in names if name in known}
    tensors = {id(one): one for value in values.values() for one in _tensors(value)}
    if len({one.device.type for one in tensors.values() if one.dim()}) > 1:
        return None
    size = sum(one.numel() * one.itemsize for one in tensors.values())
    return Retry(_for_host(expression), values) if tensors and size <= _MOST_BYTES else None


def _entries(error: BaseException) -> Iterator[Any]:
    entry = error.__traceback__
    while entry is not None:
        yield entry
        entry = entry.tb_next


def _is_theirs(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith((_OURS, _TORCH, "<"))


def _raises(frame: FrameType, line: int) -> bool:
    """True if this line raises an error on purpose, in the program or where graphmem fails as a card does."""
    if frame.f_code.co_filename.startswith(_TORCH):
        return False
    return linecache.getline(frame.f_code.co_filename, line).strip().startswith(("raise ", "assert "))


def _expression(frame: FrameType, instruction: int) -> ast.expr | None:
    """The expression that was evaluated; None before Python 3.11, and for statements."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return None
    wanted = list(positions())[instruction // 2]
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.expr, ast.AugAssign)):
            continue
        if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == wanted:
            return _of_update(node) if isinstance(node, ast.AugAssign) else node
    return None


def _of_update(node: ast.AugAssign) -> ast.expr:
    """``x += y`` as ``x + y``."""
    target = copy.deepcopy(node.target)
    target.ctx = ast.Load()
    return ast.fix_missing_locations(ast.copy_location(ast.BinOp(target, node.op, node.value), node))


def _called(expression: ast.expr) -> str:
    """The name of the function that is called."""
    function = expression.func if isinstance(expression, ast.Call) else expression
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _ForHost(ast.NodeTransformer):
    """``"cuda:0"`` is ``"cpu"``, and ``x.cuda()`` is ``x.cpu()``."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_card = isinstance(node.value, str) and node.value.startswith("cuda")
        return ast.copy_location(ast.Constant("cpu"), node) if is_card else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Attribute(node.value, "cpu", node.ctx), node) if node.attr == "cuda" else node


def _for_host(expression: ast.expr) -> ast.expr:
    changed = _ForHost().visit(copy.deepcopy(expression))
    assert isinstance(changed, ast.expr)
    return changed


def _tensors(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a value: in modules, collections, and attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *nn.Module.buffers(value))
    elif depth and isinstance(value, (list, tuple, set)):
        yield from (one for item in value for one in _tensors(item, depth - 1))
    elif depth and isinstance(value, Mapping):
        yield from (one for item in value.values() for one in _tensors(item, depth - 1))


def _on_host(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """The value with tensors of the host in place of those of the analysis."""
    if isinstance(value, torch.Tensor):
        return made.setdefault(id(value), _zeros(value))
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return "cpu"
    if isinstance(value, nn.Module):
        replaced = {id(one): _zeros(one) for one in _tensors(value)}
        return copy.deepcopy(value, replaced)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_on_host(item, made) for item in value)
    if type(value) is dict:
        return {key: _on_host(item, made) for key, item in value.items()}
    return value


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Zeros with the sizes, strides, type and class of a tensor of the analysis."""
    zeros = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
    kind = type(like)
    if not kind.__module__.startswith(("torch.", "graphmem.")):  # a class of the program's
        zeros = zeros.as_subclass(kind)
    if isinstance(like, nn.Parameter):
        return nn.Parameter(zeros, requires_grad=like.requires_grad)
    if like.requires_grad:
        zeros.requires_grad_()
        zeros = zeros if like.is_leaf else zeros.clone()
    return zeros
