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
    from graphmem.capture.kernels import rule_of
    from graphmem.capture.operators.fused_optimizer_steps import FUSED_STEPS
    from graphmem.capture.operators.made_of_operators import BODIES, COMPARISONS
    from graphmem.capture.operators.selecting import SELECTING

    modelled = {str(func) for table in (BODIES, COMPARISONS, SELECTING, FUSED_STEPS) for func in table}
    return [name for name in sorted(document["taking"]) if rule_of(name) is None and name not in modelled]
