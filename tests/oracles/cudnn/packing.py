"""Writes the packed files of decision trees that ``graphmem.cudnn.predicted.packed`` reads, and shows trees as text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from graphmem.cudnn.predicted.packed import BRANCH_NODE, LEAF, LEAF_NODE, MAGIC, Branch, Leaf, Node

MOST_FORMS = 1 << 16


def pack(header: Mapping[str, str], trees: Mapping[str, Node]) -> bytes:
    """A file's bytes. Thresholds have to be fp32; raises ``ValueError`` for values that the format cannot hold."""
    walked = {section: list(_walk(trees[section])) for section in sorted(trees)}
    every = [node for nodes in walked.values() for node in nodes]
    features = sorted({node.feature for node in every if isinstance(node, Branch)})
    forms = sorted({node.form for node in every if isinstance(node, Leaf)})
    if len(features) >= LEAF or len(forms) > MOST_FORMS:
        raise ValueError(f"{len(features)} features and {len(forms)} forms are more than the format holds")
    feature_numbers = {name: number for number, name in enumerate(features)}
    form_numbers = {name: number for number, name in enumerate(forms)}
    sections = [f"{section}: {len(nodes)}" for section, nodes in walked.items()]
    tables = "".join("".join(f"{line}\n" for line in table) + "\n" for table in (features, forms, sections))
    content = tables.encode() + b"".join(_encoded(node, feature_numbers, form_numbers) for node in every)
    lines = [MAGIC, *(f"{key}: {value}" for key, value in header.items())]
    if any("\n" in line or not line.strip() for line in [*lines, *features, *forms, *sections]):
        raise ValueError("lines are neither empty nor broken")
    lines.append(f"content: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    return "\n".join([*lines, "", ""]).encode() + content


def _walk(node: Node) -> Iterator[Node]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Branch):
            waiting += [node.high, node.low]


def _encoded(node: Node, features: dict[str, int], forms: dict[str, int]) -> bytes:
    if isinstance(node, Leaf):
        return LEAF_NODE.pack(LEAF, forms[node.form], node.percent, 0)
    encoded = BRANCH_NODE.pack(features[node.feature], node.threshold)
    if BRANCH_NODE.unpack(encoded)[1] != node.threshold:
        raise ValueError(f"the threshold {node.threshold} is no fp32 value")
    return encoded


def render(node: Node) -> str:
    """A tree as text, one node a line, a branch's sides below it and further in; for reviewers."""
    lines: list[str] = []
    waiting: list[tuple[Node, str]] = [(node, "")]
    while waiting:
        node, indent = waiting.pop()
        if isinstance(node, Leaf):
            lines.append(f"{indent}= {node.form}, {node.percent} %")
        else:
            lines.append(f"{indent}{node.feature} <= {node.threshold:.9g}")
            waiting += [(node.high, f"{indent}| "), (node.low, f"{indent}  ")]
    return "\n".join(lines) + "\n"
