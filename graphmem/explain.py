"""Facts of an operator of PyTorch, and their places in the source.

    python -m graphmem.explain aten.index_put_              every overload
    python -m graphmem.explain aten.index_put_.default      one

The namespace ``aten`` may be left out, and ``::`` stands for the first dot. ``graphmem explain`` gives the same in any
report format.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from graphmem.errors import UsageError
from graphmem.reports import format_named
from graphmem.reports.document import Document, Facts, Text, section

#: Columns of the text: sentences stand beside their subjects.
_WIDTH = 120


def document(names: Sequence[str]) -> Document:
    """The facts of the operators of these names, a section an overload.

    Raises :class:`UsageError` for a name that the installed PyTorch does not know, with those that are like it, and
    where PyTorch is not installed.
    """
    try:
        from graphmem.capture.record.explained import explained
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "explaining an operator needs PyTorch; install it with: pip install 'graphmem[torch]'"
        ) from None
    found = [overload for name in names for overload in explained(name)]
    sections = [section(name, Text([schema]), Facts(facts)) for name, schema, facts in found]
    data = {
        "schema": "graphmem.operators/1",
        "operators": [{"name": name, "schema": schema, "known": facts} for name, schema, facts in found],
    }
    return Document("operators", ", ".join(names), sections, lambda: data, width=_WIDTH)


def explain(name: str) -> str:
    """The facts of the operator ``name``, as text of several lines. Raises as :func:`document`."""
    return format_named("text").render(document([name])).rstrip("\n")


def main() -> None:
    """Print the known facts of the named operators; an unknown name is one line on stderr and exit code 1."""
    names = sys.argv[1:]
    if not names or names[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        sys.exit(0 if names else 2)
    try:
        print("\n\n".join(explain(name) for name in names))
    except UsageError as error:
        print(f"graphmem: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
