"""The program's first lines: from here on a signal ends it in one line, while all else is still being imported.

A signal that comes earlier, while Python itself starts, is answered by Python.
"""

from __future__ import annotations

from graphmem.base import garbage
from graphmem.cli import endings


def main() -> None:
    """Entry point of the ``graphmem`` program and of ``python -m graphmem``."""
    endings.handle(endings.end)
    garbage.look_after(garbage.MANY)
    from graphmem.cli.main import main as run

    run()
