"""Train a Keras model with TensorFlow's CUDA build, and write what its allocator says after every step.

    python record_steps.py MODELS.py:FACTORY STEPS [memory_growth | memory_limit=MIB] [train_on_batch | fit] [FLAGS]

prints one JSON line: bytes after the model was built, and for every step what is in use, the peak so far and what the
driver gave (on the stub driver). The last step is measured again with its own peak (``steady``): without what compiling
and trying out took. A second line holds the device's requests of the last step, where TF_CPP_VMODULE makes the
allocator log them; :mod:`tests.recorded.tensorflow_steps` reads it. FLAGS, for example 110, are what every step reads
back as truth values: the condition of a loop whose sequences have a length is computed on the card.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from typing import Any

#: After the first step so many single bytes are read back as true: a loss scaler then finds all gradients finite.
_FLAGS = 16

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def main(
    model_of: str, steps: str, memory: str = "memory_growth", loop: str = "train_on_batch", flags: str = ""
) -> None:
    import tensorflow as tf

    [card] = tf.config.list_physical_devices("GPU")
    if memory == "memory_growth":
        tf.config.experimental.set_memory_growth(card, True)
    elif memory.startswith("memory_limit="):
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=int(memory.partition("=")[2]))
        tf.config.set_logical_device_configuration(card, [limit])
    stub = ctypes.CDLL(None)
    for name in ("fake_cuda_used", "fake_cuda_peak"):
        getattr(stub, name).restype = ctypes.c_ulonglong

    def in_use() -> dict[str, int]:
        try:
            found: dict[str, int] = tf.config.experimental.get_memory_info("GPU:0")
        except ValueError:  # the driver's own pool keeps no statistics
            found = {"current": stub.fake_cuda_used(), "peak": stub.fake_cuda_peak()}
        return found

    model, x, y = _factory(model_of)()
    rows: list[dict[str, int]] = []
    built = in_use()["current"]

    def prime(values: str) -> None:
        for value in values:
            stub.fake_cuda_prime(bytes([int(value)]), ctypes.c_size_t(1))

    def after_step() -> None:
        now = in_use()
        rows.append({"current": now["current"], "peak": now["peak"], "reserved": stub.fake_cuda_used()})
        prime(flags or "1" * _FLAGS)
        if len(rows) == int(steps) and memory != "cuda_malloc_async":
            tf.config.experimental.reset_memory_stats("GPU:0")
            print("the last step", file=sys.stderr, flush=True)

    prime(flags)
    batches = None if loop != "fit" else tf.data.Dataset.from_tensors((x, y)).prefetch(2)
    for _ in range(int(steps) + 1):
        if loop == "fit":
            model.fit(batches, epochs=1, verbose=0)
        else:
            model.train_on_batch(x, y)
        after_step()
    last = rows.pop()
    steady = last["peak"] if memory != "cuda_malloc_async" else None
    variables = sum(v.value.shape.num_elements() * v.value.dtype.size for v in model.variables)
    versions = {"tensorflow": tf.__version__, "keras": importlib.import_module("keras").__version__}
    print(json.dumps({**versions, "built": built, "variables": variables, "steps": rows, "steady": steady}))


def _factory(model_of: str) -> Any:
    path, _, name = model_of.rpartition(":")
    spec = importlib.util.spec_from_file_location("models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
