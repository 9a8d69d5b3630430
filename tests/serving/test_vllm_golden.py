"""vLLM's own starts on the stub driver against the prediction: bytes for the KV cache, blocks, and what led to them."""

from __future__ import annotations

import pytest

from graphmem.serving.vllm.engine import VLLM
from tests.recorded.serving import predicted, question, runs

FOLLOWED = list(runs())


def test_all_runs_are_followed() -> None:
    assert len(FOLLOWED) == 24


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_kv_cache_is_the_engines(name: str) -> None:
    run, answer = runs()[name], predicted(name)
    cache = answer.kv_cache
    assert cache.available_bytes == run["available"]
    assert cache.block_bytes == max(group["layers"] * group["page_bytes"] for group in run["groups"])
    assert cache.blocks == run["blocks"]
    assert cache.tokens == run.get("tokens", cache.tokens)


@pytest.mark.parametrize("name", FOLLOWED)
def test_defaults_are_the_engines(name: str) -> None:
    settings = predicted(name).settings
    wanted = runs()[name]["resolved"] | {"model_runner": runs()[name]["resolved"]["model_runner"].upper()}
    assert {key: settings[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_parts_are_the_engines(name: str) -> None:
    run, parts = runs()[name], {part.name: part.bytes for part in predicted(name).parts}
    assert parts["weights"] == run["weights"]
    assert parts["activation peak"] == run["headroom"]
    assert parts.get("CUDA graphs, estimated", 0) == run["graphs_estimate"]
    held = ("weights", "buffers for batches", "buffers per sequence", "workspaces", "segment slack")
    assert sum(parts[part] for part in held) == run["consumed"]


@pytest.mark.parametrize("name", ["llama3-8b-eager", "opt-125m-eager", "gemma2-9b-eager"])
def test_the_allocator_reserves_what_was_reserved(name: str) -> None:
    """Segment for segment: what is reserved when weights are loaded, under the settings of that time."""
    from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
    from graphmem.replay import replay
    from graphmem.trace import EventKind

    trace = VLLM().trace(question(name, runs()[name]))
    played = replay(trace, PyTorchCachingAllocator())
    changes = [at for at, kind in enumerate(trace.kinds) if kind == EventKind.ALLOCATOR_SETTINGS]
    assert len(changes) == 4
    assert int(played.reserved_bytes[changes[2] - 1]) == runs()[name]["stages"]["after load_model"]["reserved"]
