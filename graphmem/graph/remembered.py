"""A cache of shapes: what was inferred for a node is used again for every equal node, and for other input sizes.

A rule sees the operator, its attributes and which of its inputs and outputs are there, and of its inputs the types, the
shapes and what is known of their elements; it does not see names. Two nodes that are alike in all of this have equal
outputs. A file of twelve layers asks the rules of one, and one that is bound to another size asks about what the size
changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import onnx

from graphmem.base.records import dataclass
from graphmem.graph.folding import Value
from graphmem.graph.model import TensorSpec

#: So many answers are kept, more than a file of a thousand different operators has at a dozen sizes.
MOST = 1 << 14


@dataclass(frozen=True, slots=True)
class Answer:
    """The type, the shape and the known elements of each output that is there. ``source``: whose rules these are where
    ONNX has none; ``is_alike``: equal nodes have equal outputs, and no option of the user decides them."""

    outputs: tuple[tuple[str, tuple[Any, ...], Value | None], ...]
    source: str = ""
    is_alike: bool = True


class Remembered:
    """The answers about the nodes of a file."""

    def __init__(self) -> None:
        self._forms: dict[int, tuple[onnx.NodeProto, bytes]] = {}  # by the identity of a node, which is kept
        self._answers: dict[Hashable, Answer] = {}

    def question(
        self, proto: onnx.NodeProto, specs: Mapping[str, TensorSpec], values: Mapping[str, Value]
    ) -> Hashable | None:
        """All that rules see of a node; None where there is more than is compared here."""
        given: list[Hashable] = []
        for name in proto.input:
            if not name:
                given.append(None)
                continue
            spec, value = specs[name], values.get(name)
            if spec.items is not None or (value is not None and value.dtype.hasobject):
                return None
            known = None if value is None else (value.dtype.str, value.shape, value.tobytes())
            given.append((spec.dtype, spec.shape, known))
        return self._form(proto), tuple(given)

    def answer(self, question: Hashable | None) -> Answer | None:
        """The answer that an equal question had."""
        return self._answers.get(question)

    def keep(self, question: Hashable | None, answer: Answer) -> None:
        """Remember an answer; of too many, all others are forgotten."""
        if question is None:
            return
        if len(self._answers) >= MOST:
            self._answers.clear()
        self._answers[question] = answer

    def _form(self, proto: onnx.NodeProto) -> bytes:
        """The node without names: of its inputs which are the same tensor, of its outputs which are there."""
        known = self._forms.get(id(proto))
        if known is None:
            copy = onnx.NodeProto()
            copy.CopyFrom(proto)
            copy.name = copy.doc_string = ""
            copy.input[:] = _numbered(copy.input)
            copy.output[:] = ["" if not name else "x" for name in copy.output]
            known = self._forms[id(proto)] = proto, copy.SerializeToString(deterministic=True)
        return known[1]


def _numbered(names: Sequence[str]) -> list[str]:
    places: dict[str, int] = {}
    return [str(places.setdefault(name, len(places))) if name else "" for name in names]
