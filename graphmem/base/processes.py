"""What processes of our own that ended have said."""

from __future__ import annotations


def last_line(said: bytes, otherwise: str) -> str:
    """The last line of a process's standard error, where Python says what an exception is; ``otherwise`` for none."""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else otherwise
