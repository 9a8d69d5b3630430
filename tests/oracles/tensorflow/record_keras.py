"""Record training steps of Keras models in TensorFlow on the CPU, whose memory comes from TensorFlow's own allocator.

    python tests/oracles/tensorflow/record_keras.py OUTPUT.json.gz [NAME ...]

Every case runs in a process of its own. The result has the form that
tests/allocators/test_tensorflow_bfc_golden.py reads. Recording again gives a few events more or fewer, and other
addresses.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 3
CASES: tuple[dict[str, Any], ...] = (
    {"model": "mlp", "batch": 128, "opt": "sgd"},
    {"model": "mlp", "batch": 256, "opt": "adam"},
    {"model": "cnn", "batch": 32, "opt": "adam"},
    {"model": "cnn", "batch": 128, "opt": "sgd"},
    {"model": "resnet50", "batch": 4, "opt": "adam"},
)
MARK_COLUMNS = ["mark", "bytes_in_use", "peak_bytes_in_use", "pool_bytes", "peak_pool_bytes", "num_allocs", "largest"]


def record(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in this process, which has no TensorFlow yet."""
    from recording import Recording

    sys.path.insert(0, str(Path(__file__).parents[3]))
    from models_zoo import keras_models

    recording = Recording()
    import keras
    import numpy as np

    recording.mark("start")
    keras.utils.set_random_seed(0)
    model = keras_models.compiled(case["model"], case["opt"])
    recording.mark("compiled")
    shape = model.input_shape[1:]
    images, labels = np.ones((case["batch"], *shape), "float32"), np.zeros((case["batch"],), "int32")
    for step in range(STEPS):
        model.train_on_batch(images, labels)
        recording.mark(f"step{step + 1}")
    names: dict[str, int] = {}
    events = [
        event if event[0] == "m" else [*event[:-1], names.setdefault(event[-1], len(names))]
        for event in recording.events()
    ]

    def total(variables: list[Any]) -> int:
        return sum(int(np.prod(variable.shape)) * np.dtype(variable.dtype).itemsize for variable in variables)

    return {
        "events": events,
        "names": list(names),
        "marks": recording.marks,
        "mark_columns": MARK_COLUMNS,
        "variable_bytes": total(model.variables),
        "opt_bytes": total(model.optimizer.variables),
        "tf": importlib.metadata.version("tensorflow-cpu"),
        "keras": keras.__version__,
    }


def main() -> None:
    if sys.argv[1] == "--case":
        Path(sys.argv[3]).write_text(json.dumps(record(json.loads(sys.argv[2]))))
        return
    cases = []
    for case in CASES:
        if len(sys.argv) > 2 and case["model"] not in sys.argv[2:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            subprocess.run([sys.executable, __file__, "--case", json.dumps(case), str(result)], check=True)
            cases.append({"case": case, "result": json.loads(result.read_text())})
        print(case, len(cases[-1]["result"]["events"]), "events")
    source = "Keras training on the CPU, memory from TensorFlow's BFC allocator, oneDNN off, one thread, no XLA"
    document = json.dumps({"source": source, "cases": cases}, separators=(",", ":")).encode()
    Path(sys.argv[1]).write_bytes(gzip.compress(document, 9, mtime=0))


if __name__ == "__main__":
    main()
