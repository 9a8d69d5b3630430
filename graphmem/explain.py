"""What graphmem knows of an operator of PyTorch, and where that is written.

    python -m graphmem.explain aten.index_put_              every overload
    python -m graphmem.explain aten.index_put_.default      one

The namespace ``aten`` may be left out, and ``::`` stands for the first dot.
"""

from __future__ import annotations

import sys

from graphmem.errors import UsageError


def explain(name: str) -> str:
    """What is known of the operator ``name``, as text of several lines.

    Raises :class:`UsageError` for a name that the installed PyTorch does not know, with those that are like it, and
    where PyTorch is not installed.
    """
    try:
        from graphmem.capture.record import explained
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "explaining an operator needs PyTorch; install it with: pip install 'graphmem[torch]'"
        ) from None
    return explained.explain(name)


def main() -> None:
    """Print what is known of the operators that are named; an unknown name is one line on stderr and exit code 1."""
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
