"""Turn recordings of Keras steps into records that ``graphmem accuracy`` reads, with their allocations beside them.

    python -m tests.oracles.tensorflow.keras_records models_zoo/measured/tensorflow-cpu RECORDING.json.gz ...

A RECORDING is what ``record_keras.py`` wrote.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphmem.accuracy.case import case_of
from graphmem.accuracy.record import OK, TENSORFLOW_CPU, Machine, Measured, Record
from graphmem.training import Training

STEPS = 3


def name_of(recorded: dict[str, Any]) -> str:
    """What the record of a recorded case is called."""
    case = recorded["case"]
    return f"keras-{case['model']}_{case['opt']}-b{case['batch']}"


def record_of(recorded: dict[str, Any], folder: Path) -> Record:
    """The record of one recorded case; writes its allocations into ``folder``."""
    case, result = recorded["case"], recorded["result"]
    name = f"{case['model']}_{case['opt']}"
    model = f"keras:models_zoo/keras_models.py:{name}"
    step = Training(optimizer=case["opt"], optimizer_args=(("momentum", 0.9),) if case["opt"] == "sgd" else ())
    made = case_of(model, step, case["batch"], None, STEPS, "allow_growth=true", "tensorflow")
    made = replace(made, name=name_of(recorded))
    trace = folder / f"{name}-b{case['batch']}.json.gz"
    _write_events(trace, result["events"])
    marks = [mark for mark in result["marks"] if mark[0].startswith("step")]
    iterations = tuple({"allocated_peak_bytes": mark[2], "reserved_peak_bytes": mark[4]} for mark in marks)
    machine = Machine.of_cpu(TENSORFLOW_CPU, "CPU", {"tensorflow": result["tf"], "keras": result["keras"]})
    measured = Measured(None, marks[-1][2], marks[-1][4], 0, None, iterations)
    return Record(made, OK, machine, measured, trace=trace.name)


def _write_events(path: Path, events: list[list[Any]]) -> None:
    """``[number, bytes asked, address]`` of an allocation, ``[number]`` of a free; a number is used once."""
    rows = [[e[1], e[2], e[4]] if e[0] == "a" else [e[1]] for e in events if e[0] in "af"]
    base = min(row[2] for row in rows if len(row) == 3)
    rows = [[row[0], row[1], row[2] - base] if len(row) == 3 else row for row in rows]
    with gzip.GzipFile(path, "wb", mtime=0) as file:
        file.write(json.dumps({"schema": 1, "events": rows}, separators=(",", ":")).encode())


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    records: dict[str, Record] = {}
    for path in sys.argv[2:]:
        for recorded in json.loads(gzip.decompress(Path(path).read_bytes()))["cases"]:
            if name_of(recorded) not in records:  # of two recordings the first counts
                records[name_of(recorded)] = record_of(recorded, folder)
    lines = [record.to_line() + "\n" for record in records.values()]
    (folder / "keras.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
