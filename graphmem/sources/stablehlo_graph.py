"""A StableHLO program as a :class:`graphmem.plan_memory.Graph`: every operation makes a buffer of its own, as written.

The text is read by MLIR itself, which comes with JAX (``pip install jax``). What XLA would make of the program (fused
operations, its own order and addresses) is not in it: ``graphmem analyze jax:file.py:step`` answers that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from graphmem.errors import SourceError, first_line
from graphmem.plan_memory.graphs import Buffer, Graph, Node
from graphmem.plan_memory.peaks import peak

#: Operations that give their operands as they lie.
_VIEWS = frozenset(("stablehlo.reshape", "stablehlo.optimization_barrier", "sdy.sharding_constraint"))
#: Operations that give something else when they run again.
_RANDOM = frozenset(("stablehlo.rng", "stablehlo.infeed", "stablehlo.recv"))
#: Attributes of arguments that the program may overwrite: JAX writes them for ``donate_argnums``.
_DONATED = ("tf.aliasing_output", "jax.buffer_donor")


def from_stablehlo(program: Any) -> Graph:
    """The memory of a StableHLO program: its text, an MLIR ``Module``, or what ``jax.jit(f).lower(...)`` returns.

    Sizes are those of tensors' types. Arguments are held, but for donated ones. Calls stand in the place where they
    are; ``reshape`` gives a view, and a loop what it carries unchanged. An operation with regions (``while``, ``case``)
    holds the most that one of them does, as scratch. A node costs the bytes that it makes.

    Raises :class:`graphmem.errors.SourceError` for what is no program of tensors with sizes.
    """
    text = _text(program)
    try:
        from jax.interpreters.mlir import make_ir_context
        from jaxlib.mlir import ir
    except ImportError as error:
        raise SourceError(f"StableHLO is read by MLIR, which comes with JAX (pip install jax): {error}") from None
    with make_ir_context():
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            said = [line.strip() for line in str(error).splitlines() if "error:" in line] or [first_line(error)]
            raise SourceError(f"this is no StableHLO: {said[0]}") from None
        functions = {_name(one): one.operation for one in module.body.operations if one.operation.name == "func.func"}
        if "main" not in functions:
            raise SourceError("the program has no function main")
        main = functions["main"]
        return _Reader(functions).graph(main.regions[0].blocks[0], _donated(main))


def _text(program: Any) -> str:
    if isinstance(program, str):
        return program
    if type(program).__name__ == "Lowered":
        text: str = program.as_text(debug_info=True)
        return text
    if type(program).__name__ == "Module":
        return str(program)
    raise SourceError(
        f"a {type(program).__name__} is no StableHLO; give its text, a Module, or what jax.jit(f).lower(...) returns"
    )


def _name(function: Any) -> str:
    return str(function.attributes["sym_name"]).strip('"')


def _donated(function: Any) -> set[int]:
    """The arguments that the program may overwrite."""
    given = function.attributes.get("arg_attrs", ())
    return {number for number, names in enumerate(given) if any(name in names for name in _DONATED)}


class _Reader:
    """Makes the graph of a block; ``functions``: those that calls name. ``lies_in``: the buffer of each value."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        self.buffers: list[Buffer] = []
        self.nodes: list[Node] = []
        self.lies_in: dict[Any, int] = {}

    def graph(self, block: Any, donated: Collection[int] = ()) -> Graph:
        """The graph of a block, whose arguments, and values from outside, are held unless ``donated``."""
        for number, value in enumerate((*block.arguments, *_from_outside(block))):
            self._make(value, held=number not in donated)
        outputs = self._read(block)
        return Graph(tuple(self.nodes), tuple(self.buffers), tuple(dict.fromkeys(outputs)))

    def _make(self, value: Any, held: bool = False) -> None:
        self.lies_in[value] = len(self.buffers)
        self.buffers.append(Buffer(value.get_name(), _bytes(value.type), held))

    def _read(self, block: Any) -> list[int]:
        """Append the nodes of a block; the buffers that it returns."""
        for one in block.operations:
            operation = one.operation
            operands = [self.lies_in[value] for value in operation.operands]
            if operation.name.endswith(".return"):
                return operands
            if operation.name == "func.call":
                inner = self._functions[str(operation.attributes["callee"]).strip('@"')].regions[0].blocks[0]
                self.lies_in.update(zip(inner.arguments, operands, strict=True))
                self.lies_in.update(zip(operation.results, self._read(inner), strict=True))
            elif operation.name in _VIEWS:
                self.lies_in.update(zip(operation.results, operands, strict=True))
            else:
                self.nodes.append(self._node(operation, operands))
        return []

    def _node(self, operation: Any, operands: Sequence[int]) -> Node:
        first, kept = len(self.buffers), _unchanged(operation)
        for number, result in enumerate(operation.results):
            if number in kept:
                self.lies_in[result] = operands[number]
            else:
                self._make(result)
        inner = [block for region in operation.regions for block in region.blocks]
        around = [self.lies_in[value] for block in inner for value in _from_outside(block)]
        made = self.buffers[first:]
        return Node(
            f"{made[0].name} {operation.name}" if made else operation.name,
            reads=tuple(dict.fromkeys((*operands, *around))),
            makes=tuple(range(first, len(self.buffers))),
            scratch=max((self._most_inside(block) for block in inner), default=0),
            cost=float(sum(one.bytes for one in made)),
            module=_where(operation),
            repeatable=operation.name not in _RANDOM,
        )

    def _most_inside(self, block: Any) -> int:
        """The most bytes that a block holds beside its arguments and what it reads from outside."""
        graph = _Reader(self._functions).graph(block)
        return peak(graph, "live") - sum(one.bytes for one in graph.buffers if one.held)


def _from_outside(block: Any) -> list[Any]:
    """The values that operations of a block, or of blocks within, read and that none of these makes."""
    made, read = set(block.arguments), {}
    for one in block.operations:
        operation = one.operation
        inner = (value for region in operation.regions for within in region.blocks for value in _from_outside(within))
        read.update(dict.fromkeys(value for value in (*operation.operands, *inner) if value not in made))
        made.update(operation.results)
    return list(read)


def _unchanged(operation: Any) -> set[int]:
    """What a loop carries and its body returns as it came."""
    if operation.name != "stablehlo.while":
        return set()
    body = operation.regions[1].blocks[0]
    returned = body.operations[len(body.operations) - 1].operation.operands
    return {number for number, value in enumerate(returned) if value == body.arguments[number]}


def _bytes(kind: Any) -> int:
    """Bytes of a value by its type. Raises :class:`SourceError` for sizes that are not known."""
    found = re.fullmatch(r"tensor<((?:[\d?]+x)*)(complex<)?[a-z]+(\d+)\w*>?(?:, .*)?>", str(kind))
    if found is None:
        if str(kind).endswith("token"):
            return 0
        raise SourceError(f"the size of {kind} is not known")
    if "?" in found[1]:
        raise SourceError(f"{kind} has dimensions without sizes; lower the program for given shapes")
    count = math.prod(int(size) for size in found[1].split("x")[:-1])
    return -(-count * max(int(found[3]), 8 if found[3] == "1" else 1) * (2 if found[2] else 1) // 8)


def _where(operation: Any) -> str:
    """The name that JAX gave the operation, such as ``jit(step)/dot_general``."""
    found = re.match(r'loc\("([^"]*)"', str(operation.location))
    return found[1] if found else ""
