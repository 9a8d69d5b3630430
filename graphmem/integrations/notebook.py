"""``%load_ext graphmem``, and ``%%graphmem --gpu T4`` above a cell: what it would need on that card.

The cell is run by ``graphmem run`` in another process, behind the cells that ran before it, as the notebook of them all
would be: nothing of it happens in the kernel.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: A cell that is no part of the program: it asks this question.
_MAGIC = "%%graphmem"


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython: cells may begin with ``%%graphmem``."""
    shell.register_magic_function(lambda line, cell: _cell(shell, line, cell), "cell", "graphmem")


def _cell(shell: Any, line: str, cell: str) -> None:
    """Show what the cell needs. ``line`` has options of ``graphmem run``; ``--alone``: without the cells before it."""
    options = shlex.split(line)
    before = [] if "--alone" in options else earlier(shell.history_manager.input_hist_raw)
    options = [option for option in options if option != "--alone"]
    with tempfile.TemporaryDirectory(prefix="graphmem-") as folder:
        answer = Path(folder, "answer")
        program = Path(folder, "cells.ipynb")
        program.write_text(json.dumps(notebook([*before, cell])), encoding="utf-8")
        command = [sys.executable, "-m", "graphmem", "run", "--format", "notebook", *options, "-o", str(answer)]
        ran = subprocess.run([*command, str(program)], capture_output=True, text=True, check=False)
        if ran.stdout:
            print(ran.stdout, end="")
        if answer.exists():
            _show(answer.read_text(encoding="utf-8"))
        if ran.returncode not in (0, 3) or not answer.exists():
            print(ran.stderr, end="", file=sys.stderr)


def earlier(inputs: Any) -> list[str]:
    """The cells that ran, but for questions like this one."""
    return [text for text in list(inputs)[:-1] if text.strip() and not text.lstrip().startswith(_MAGIC)]


def notebook(texts: list[str]) -> dict[str, Any]:
    """A notebook of these cells."""
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": text} for text in texts]
    return {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": cells}


def _show(answer: str) -> None:
    from IPython.display import HTML, display

    display(HTML(answer))
