"""The packed files of decision trees: ``plans/FAMILY.trees``.

A file is a header in text and its content, which the header's last line measures:

- the line ``graphmem cuDNN trees 1``; lines ``key: value``, what was asked and how well the trees do; the line
  ``content: BYTES bytes, sha256 DIGEST``; an empty line. ``head -c 1000`` shows it.
- three tables in text, one name a line, each ended by an empty line: features, forms, and sections with their number of
  nodes.
- the nodes of all sections, 5 bytes each, little-endian: of a branch the number of its feature and the threshold in
  fp32; of a leaf 255, the number of its form in 16 bits, its percentage and 0. A branch is followed by its low and then
  its high side.

Nothing in it is compressed, so that equal trees are equal bytes whatever library compresses.
The files are written by ``python -m tests.oracles.cudnn``.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from dataclasses import field

from graphmem.base.records import dataclass
from graphmem.errors import GraphmemError

MAGIC = "graphmem cuDNN trees 1"
_CONTENT = re.compile(r"(\d{1,9}) bytes, sha256 ([0-9a-f]{64})")
LEAF = 255
BRANCH_NODE, LEAF_NODE = struct.Struct("<Bf"), struct.Struct("<BHBB")
_NODE_BYTES = 5


class PackedError(GraphmemError):
    """A file of trees is damaged: its bytes are not those that were built."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A form, and the percentage of cuDNN's answers at this leaf that it fits."""

    form: str
    percent: int


@dataclass(frozen=True, slots=True)
class Branch:
    """``low`` where the feature is at most the threshold, ``high`` above."""

    feature: str
    threshold: float
    low: Branch | Leaf
    high: Branch | Leaf


Node = Branch | Leaf


@dataclass
class Trees:
    """Trees by section, decoded when they are asked for, and the header's lines."""

    header: dict[str, str]
    _features: list[str]
    _forms: list[str]
    _nodes: dict[str, memoryview]
    _decoded: dict[str, Node] = field(default_factory=dict)

    @property
    def sections(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    def get(self, section: str) -> Node | None:
        """The tree of a section; None if there is none. Raises :class:`PackedError` where its nodes make no tree."""
        if section not in self._decoded:
            if section not in self._nodes:
                return None
            self._decoded[section] = _decode(self._nodes[section], self._features, self._forms, section)
        return self._decoded[section]

    def nodes(self, section: str) -> int:
        """Branches and leaves of a section's tree."""
        return len(self._nodes[section]) // _NODE_BYTES


def unpack(data: bytes, name: str) -> Trees:
    """The trees of a file's bytes. Raises :class:`PackedError`, which names the file, if they are damaged."""
    try:
        return _unpack(data)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise PackedError(f"{name} is damaged: {error}; install graphmem again") from None


def read_header(data: bytes) -> tuple[dict[str, str], int]:
    """The header's lines by key, and where the content begins. Raises ``ValueError`` if that is none."""
    end = data.find(b"\n\n")
    first, *lines = data[: max(end, 0)].decode().split("\n")
    if first != MAGIC:
        raise ValueError(f"it does not begin with {MAGIC!r}")
    return dict(line.split(": ", 1) for line in lines), end + 2


def _unpack(data: bytes) -> Trees:
    """The trees in the bytes of a file. Raises :class:`ValueError` where its length or its sum is another."""
    header, start = read_header(data)
    measured = _CONTENT.fullmatch(header.pop("content", ""))
    content = memoryview(data)[start:]
    if measured is None or len(content) != int(measured[1]):
        wanted = measured[1] if measured else "as many as its header says"
        raise ValueError(f"it has {len(content)} bytes of content, not {wanted}")
    if hashlib.sha256(content).hexdigest() != measured[2]:
        raise ValueError("its content has not the sum that its header says")
    features, at = _table(data, start)
    forms, at = _table(data, at)
    sections, at = _table(data, at)
    nodes: dict[str, memoryview] = {}
    for line in sections:
        section, count = line.rsplit(": ", 1)
        size = int(count) * _NODE_BYTES
        nodes[section] = memoryview(data)[at : at + size]
        at += size
    if at != len(data):
        raise ValueError(f"its sections end at byte {at} of {len(data)}")
    return Trees(header, features, forms, nodes)


def _table(data: bytes, at: int) -> tuple[list[str], int]:
    if data[at : at + 1] == b"\n":
        return [], at + 1
    end = data.index(b"\n\n", at)
    return data[at:end].decode().split("\n"), end + 2


def _decode(nodes: memoryview, features: list[str], forms: list[str], section: str) -> Node:
    """Nodes are read from the last to the first, when both sides of a branch are known."""
    sides: list[Node] = []
    try:
        for at in range(len(nodes) - _NODE_BYTES, -1, -_NODE_BYTES):
            if nodes[at] == LEAF:
                _, form, percent, _ = LEAF_NODE.unpack_from(nodes, at)
                sides.append(Leaf(forms[form], percent))
            else:
                feature, threshold = BRANCH_NODE.unpack_from(nodes, at)
                if math.isnan(threshold):
                    raise PackedError(f"the trees of cuDNN's plans are damaged: {section!r} compares with no number")
                low = sides.pop()
                sides.append(Branch(features[feature], threshold, low, sides.pop()))
    except IndexError:
        sides = []
    if len(sides) != 1:
        raise PackedError(f"the trees of cuDNN's plans are damaged: {section!r} is no tree; install graphmem again")
    return sides[0]
