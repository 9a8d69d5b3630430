"""What the list of operators that take nothing but their outputs says, beside the rules."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import graphmem

TARGET = Path(graphmem.__file__).parent / "capture" / "kernels" / "parts" / "outputs_only.json"


def read() -> dict[str, Any]:
    """``proven`` and ``taking``, as :mod:`graphmem.capture.kernels.parts.known` says."""
    found: dict[str, Any] = json.loads(TARGET.read_text(encoding="utf-8"))
    return found


def write(document: dict[str, Any]) -> None:
    """One line an operator, so that a diff shows which ones moved."""
    parts = []
    for title, content in document.items():
        text = json.dumps(content)
        if isinstance(content, dict):
            body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(content[name])}" for name in sorted(content))
            text = f"{{\n{body}\n}}"
        parts.append(f"{json.dumps(title)}: {text}")
    TARGET.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def table() -> None:
    """How many operators each kind of recording proves."""
    document = read()
    kinds: collections.Counter[str] = collections.Counter()
    for proofs in document["proven"].values():
        kinds.update(kind for kind in proofs if kind != "bytes")
    print(f"{len(document['proven'])} operators take nothing but their outputs on {document['torch']}")
    print(*(f"  {count} by {kind}" for kind, count in kinds.items()), sep="\n")
    print(f"{len(document['taking'])} take more; {len(unmodelled(document))} of these have no model")


def differ() -> None:
    """Operators that take more than their outputs and are not modelled, with a case that shows it."""
    document = read()
    for name in unmodelled(document):
        print(f"{name}: {document['taking'][name]}")


def unmodelled(document: dict[str, Any]) -> list[str]:
    """Operators that take more than their outputs, without a rule or a body."""
    from graphmem.capture.operators.facts import facts_of
    from graphmem.capture.record.explained import overloads_named

    return [
        name
        for name in sorted(document["taking"])
        if not any(facts_of(func).is_modelled for func in overloads_named(name))
    ]
