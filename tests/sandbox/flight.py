"""Runs a Python file in a sandbox, as ``graphmem run`` does, but without PyTorch:

    python -m tests.sandbox.flight MECHANISM PROGRAM REPORT.json [ATTEMPTS]

The report, which is written from outside of the sandbox, is what ``details["sandbox"]`` of an estimate would be.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from graphmem import sandbox
from graphmem.base.files import write_whole


def main(mechanism: str, program: str, report: str, attempts: str = "1") -> None:
    os.environ[sandbox.VARIABLE] = mechanism
    permissions = sandbox.Permissions(**json.loads(os.environ.get("PERMISSIONS", "{}")))
    with sandbox.entered(permissions, own_process=True):
        for _ in range(int(attempts)):
            with sandbox.attempt(lambda: True) as happened:
                runpy.run_path(program, run_name="__main__")
    write_whole(Path(report), json.dumps(happened))


if __name__ == "__main__":
    main(*sys.argv[1:])
