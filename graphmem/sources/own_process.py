"""A question that a process of its own answers, as a library must not be imported in this one: JSON there and back.

The program is a module with ``answer(step, sys.argv)`` at its end, which is asked by ``answer_of(its name, ...)``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphmem.base.processes import last_line
from graphmem.errors import GraphmemError, SourceError


def answer_of(program: str, asked: Mapping[str, Any], failed: str, **variables: str) -> dict[str, Any]:
    """What the module ``program`` answers, with these variables in its environment. Raises :class:`SourceError` that
    begins with ``failed`` where it ends without an answer."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "step.json")
        request.write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", program, str(request), str(result)]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if not result.exists():
            raise SourceError(f"{failed}: {last_line(done.stderr, f'exit status {done.returncode}')}")
        document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return document


def answer(
    step: Callable[[dict[str, Any]], dict[str, Any]], arguments: Sequence[str], words: Callable[[Exception], str]
) -> None:
    """Answer the request in the first file of a command line into the second; an error as ``{"error": TEXT}``, in
    ``words`` where it is the user's own code's."""
    _, request, result = arguments
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    try:
        document = step(asked)
    except GraphmemError as error:
        document = {"error": str(error)}
    except Exception as error:
        document = {"error": f"{asked['text']}: {words(error)}"}
    Path(result).write_text(json.dumps(document), encoding="utf-8")
