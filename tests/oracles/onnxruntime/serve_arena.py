"""Sessions of the installed onnxruntime on the CPU, asked for over a pipe: what their arena holds after their runs.

    echo '{"model": "m.onnx", "level": "all", "runs": [{"x": [2, 3]}], "values": {"c": 1}}' | python serve_arena.py

answers each line with the statistics of the arena after the last run. An input is 0.5 everywhere, 0 where it holds
integers, or what ``values`` gives. A process of its own: the library must not be unloaded while its arenas live.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from graphmem.accuracy.onnxruntime import capi
from graphmem.accuracy.onnxruntime.session import CpuSession


def main() -> None:
    """Answer until the pipe ends."""
    environment = capi.environment()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            session = CpuSession(Path(asked["model"]), environment, level=asked["level"])
            arena = session.arena()
            for run in asked["runs"]:
                feeds = {
                    name: np.full(shape, asked["values"][name]) if name in asked["values"] else shape
                    for name, shape in run.items()
                }
                session.run(feeds).release()
            answer = capi.statistics(arena)
        except capi.OrtError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
