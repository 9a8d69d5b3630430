"""Run a step of a JAX program with the real CUDA client, and write the figures of its allocator after every call.

    python record_steps.py STEPS.py CASE CALLS [RANK RANKS PORT]

prints one JSON line: the allocator's figures (``Device.memory_stats``) before the first call and after each. On the
stub driver this works without a card: what would keep JAX from trying is put aside, and NVIDIA's libraries that it
loads by itself are left out, as the stub answers in their place. STEPS.py is a file of
``tests/recorded/cases/jax_steps``. With ``RANKS`` it is one process of several, each with one card.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_FIGURES = (
    "bytes_in_use", "peak_bytes_in_use", "largest_alloc_size", "pool_bytes", "peak_pool_bytes", "num_allocs",
    "bytes_limit",
)  # fmt: skip

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def main(path: str, name: str, calls: str, *ranks: str) -> None:
    device = _card(*ranks)
    import jax

    cases = _loaded(path)
    function, shapes = cases.CASES[name]()
    arguments = list(jax.tree.map(lambda leaf: _placed(leaf, device), shapes))
    rows = [_figures(device)]
    if name in cases.PROGRAMS:
        out = function(*arguments)
        jax.block_until_ready(out)
        rows.append(_figures(device))
    else:
        carried = cases.CARRIED.get(name, {0: 0})
        for _ in range(int(calls)):
            out = function(*arguments)
            jax.block_until_ready(out)
            for argument, output in carried.items():
                arguments[argument] = out if output is None else out[output]
            rows.append(_figures(device))
    versions = {"jax": jax.__version__, "device": device.device_kind}
    print(json.dumps({"case": name, **versions, "rows": rows}), flush=True)


def _card(rank: str = "0", ranks: str = "1", port: str = "") -> Any:
    """The card of JAX's CUDA client, real or pretended; of several processes this one's."""
    import jax_plugins.xla_cuda13 as plugin
    from jax._src import hardware_utils

    plugin._load_nvidia_libraries = lambda: None
    hardware_utils.has_visible_nvidia_gpu = lambda: True
    import jax

    if ranks != "1":
        jax.distributed.initialize(f"127.0.0.1:{port}", int(ranks), int(rank), local_device_ids=[0])
    return jax.local_devices(backend="cuda")[0]


def _loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("steps", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["steps"] = module  # where flax looks for it
    spec.loader.exec_module(module)
    return module


def _placed(leaf: Any, device: Any) -> Any:
    """A leaf on the card; NumPy's arrays stay on the host."""
    import jax
    import numpy as np

    if isinstance(leaf, np.ndarray):
        return leaf
    if leaf.sharding is not None:
        parts = leaf.sharding.shard_shape(leaf.shape)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda _: np.zeros(parts, leaf.dtype))
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.device_put(np.zeros((*leaf.shape, 2), np.uint32), device))
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), device)


def _figures(device: Any) -> Sequence[int | None]:
    found = device.memory_stats()
    return {name: found.get(name) for name in _FIGURES}


if __name__ == "__main__":
    main(*sys.argv[1:])
