"""Records entries of the operator database, line by line: ``python -m tests.recorded.op_db.worker FILE ENTRY ...``.

What the file says was done already is not done again. The process may end at any call.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.recorded.device import warm_up
from tests.recorded.op_db import runner
from tests.recorded.op_db.entries import Call, calls, entries, time_limit
from tests.recorded.record import launch_no_triton, record_changes

_SECONDS = 30
#: A call with more allocations and frees is recorded in a smaller form: a tensor unbound into 160,000 is no question
#: of its own, and takes a capture minutes.
_MOST_CHANGES = 5_000


def main(path: Path, names: list[str]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    done = {line.get("case") or line.get("done") for line in lines}
    launch_no_triton()
    warm_up()
    warm_up()
    gc.collect()
    gc.freeze()
    with path.open("a", buffering=1) as stream:

        def say(**document: Any) -> None:
            stream.write(json.dumps(document) + "\n")

        for name in names:
            if name in done:
                continue
            say(begin=name)
            for call in calls(name):
                if isinstance(call, Call):
                    if call.name not in done:
                        say(begin=call.name)
                        say(**_record(call))
                elif call[0] not in done:
                    say(case=call[0], error=call[1])
            say(done=name)
        say(end=True)


def _record(call: Call) -> dict[str, Any]:
    function = entries()[call.entry].op
    document: dict[str, Any] = {"case": call.name}
    for sample in call.samples:
        result = record_changes(functools.partial(_run, function, sample))
        document = {"case": call.name, "torch": torch.__version__, "sample": sample} | result
        if len(result.get("changes", ())) > _MOST_CHANGES:
            document = {"case": call.name, "error": f"more than {_MOST_CHANGES:,} allocations and frees"}
        elif "changes" in result:
            return document
    return document


def _run(function: Any, sample: Any, mark: Any) -> None:
    with time_limit(_SECONDS):
        runner.run(function, sample, mark)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
