"""Options that would bring more room in the KV cache, each by an answer of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphmem.errors import UsageError
from graphmem.serving.base import Engine, Question, Served, for_searches

#: Changes that bring less than this part of the tokens are not worth a line.
_LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Change:
    """An option that would change the number of tokens, and by how much."""

    option: str
    tokens: int
    gained_tokens: int


#: An option as people write it, and the fields of the question that it changes.
_Option = tuple[str, dict[str, Any]]


def changes_of(engine: Engine, question: Question, served: Served) -> tuple[Change, ...]:
    """Options that bring tokens, the most first."""
    changes = []
    for option, values in _options(question, served):
        try:
            answer = engine.serve(question.with_(**values))
        except UsageError:
            continue
        gained = answer.kv_cache.tokens - served.kv_cache.tokens
        if answer.refusal is None and gained > _LEAST_GAIN * max(1, served.kv_cache.tokens):
            changes.append(Change(option, answer.kv_cache.tokens, gained))
    return tuple(sorted(changes, key=lambda change: -change.gained_tokens))


def _options(question: Question, served: Served) -> Iterator[_Option]:
    """Those that may bring some; an engine whose settings do not name one has it not."""
    settings, requests = served.settings, served.settings["max_num_seqs"]
    tokens = settings.get("max_num_batched_tokens")
    if question.kv_cache_dtype == "auto":
        yield "--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"}
    if tokens is not None and requests > 256:
        yield "--max-num-seqs 256", {"max_num_seqs": 256}
    if tokens is not None and tokens > 2048 >= requests:
        yield "--max-num-batched-tokens 2048", {"max_num_batched_tokens": 2048}
    if settings.get("enforce_eager") is False:
        yield "--enforce-eager", {"enforce_eager": True}
    if settings.get("gpu_memory_utilization", 1) < 0.95:
        yield "--gpu-memory-utilization 0.95", {"gpu_memory_utilization": 0.95}
    yield f"--tp {2 * served.cards}", {"tensor_parallel_size": 2 * served.cards}
    yield from _fewer_items(question, settings.get("limit_mm_per_prompt") or {})


def _fewer_items(question: Question, limits: Mapping[str, int]) -> Iterator[_Option]:
    """Of a model that takes more than text: each other modality left out, and all."""
    given = {name.replace("-", "_"): text for name, text in question.arguments}
    others = tuple(one for one in question.arguments if one[0].replace("-", "_") != "limit_mm_per_prompt")
    allowed = [name for name, limit in limits.items() if limit]
    for name in allowed if len(allowed) > 1 else ():
        value = json.dumps({**json.loads(given.get("limit_mm_per_prompt", "{}")), name: 0})
        yield f"--limit-mm-per-prompt '{value}'", {"arguments": (*others, ("limit_mm_per_prompt", value))}
    if allowed:
        yield "--language-model-only", {"arguments": (*others, ("language_model_only", "true"))}


def beside(engine: Engine, question: Question, served: Served) -> tuple[Question, Served] | None:
    """The answer to which changes are held, with its question: this one, or a quick one where each change would be a
    start of the engine; None where there is no quick one."""
    if served.basis != "engine":
        return question, served
    quick = for_searches(engine, question)
    answer = served if quick == question else engine.serve(quick)
    return None if answer.basis in ("engine", "captures") else (quick, answer)


def cross_check(served: Served, other: Served) -> str:
    """What our account says beside the engine's own answer."""
    blocks, difference = other.kv_cache.blocks, other.kv_cache.blocks - served.kv_cache.blocks
    differs = f"{blocks:,} blocks ({difference:+,})" if difference else "the same number of blocks"
    return f"graphmem's own account of the engine's code, by which advice is told, has {differs}"
