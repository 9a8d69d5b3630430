"""The JSON documents that answers are written as, and their JSON Schemas (``graphmem schema NAME``).

A document is described once, in :data:`DOCUMENTS`: a dictionary by its keys (one that ends in ``?`` may be missing,
``*`` is any key), a list by what is in it, a value by the name of its type (:data:`TYPES`, several with ``|`` between)
or ``#`` and another document or part; a tuple is one of several. Within one version of a document keys are added, so
what is not described is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from graphmem.errors import UsageError

Shape: TypeAlias = "str | list[Any] | dict[str, Any] | tuple[Any, ...]"

#: Types of values by name. All sizes are bytes.
TYPES: Mapping[str, Mapping[str, Any]] = {
    "text": {"type": "string"},
    "flag": {"type": "boolean"},
    "size": {"type": "integer", "minimum": 0},
    "whole": {"type": "integer"},
    "number": {"type": "number"},
    "null": {"type": "null"},
    "any": {},
}

_LEVELS = {f"{name}_bytes": "size" for name in ("requested", "allocated", "reserved", "device")}
_RANGE = {"least_bytes": "whole|null", "most_bytes": "whole|null"}
_RANGES = {f"{name}?": _RANGE for name in ("requested", "allocated", "reserved", "device")}
_CHANGE = {"before": "size|null", "after": "size|null", "change": "whole|null"}
_BY_LINK = {"near": "number|null", "far": "number|null", "host": "number|null"}

#: What several documents hold.
PARTS: Mapping[str, Shape] = {
    "moment": {"event": "whole", "phase": "text", "operator": "text", "module": "text", "source": "text"},
    "fit": {
        "gpu": "text", "capacity_bytes": "size", "device_bytes": "size", "margin_bytes": "whole", "fits": "flag",
        "needs_cache_flush": "flag", "failed_at": "#moment|null", "others_bytes": "size", "unlimited_bytes": "size",
        "probability": "number|null", "margin": "number|null", "refusals": "#refusals|null", "verdict": "text",
    },
    "refusals": {
        "count": "size", "first_bytes": "size", "place": "text", "went_on": "flag", "needed_bytes": "size",
        "later_bytes": "size|null",
    },
    "cause": {
        "name": "text", "basis": "text", "bound": "text", "source": "text", "expected_inside": "number|null",
        "measured_runs": "size|null", "recorded": "any", "remedy": "text", "off_by": _RANGES,
    },
    "certainty": {"levels": _RANGES, "causes": ["#cause"]},
    "card": {
        "process_bytes": "size", "others_bytes": "size", "driver_bytes": "size|null", "whole_bytes": "size",
        "context": [{"name": "text", "bytes": "size", "least_bytes": "size", "most_bytes": "size", "source": "text"}],
        "loads": {"*": "any"},
    },
    "diagnostic": {
        "code": "text", "kind": "text", "effect": "text", "place": "text", "message": "text", "count": "size",
    },
    "layout": {
        "layout": {"*": "any"}, "words": "text", "options": "text", "status": "text", "reason": "text|null",
        "alloc_conf": "text|null", "bound_bytes": "size", "bound": [{"name": "text", "bytes": "size"}],
        "sent": _BY_LINK, "sending_seconds": "number|null", "recomputing_seconds": "number|null",
        "waiting_seconds": "number|null", "captured": "#captured|null",
    },
    "captured": {"allocated_bytes": "size", "reserved_bytes": "size", "device_bytes": "size", "fit": "#fit|null"},
}  # fmt: skip

#: The documents by name, each without its version and the key that names both.
DOCUMENTS: Mapping[str, dict[str, Any]] = {
    "estimate": {
        "model": "text", "runtime": "text", "allocator": "text", "step": "text", "gpu": "text", "peak": _LEVELS,
        "ideal_bytes": "size", "phases": [{"iteration": "whole", "name": "text", **_LEVELS}], "moment": "#moment",
        "last_growth": "#moment|null", "breakdown": {"*": "size"}, "fits": "#fit|null", "certainty": "#certainty|null",
        "card": "#card|null", "host": {"host_bytes": "size", "pinned_bytes": "size", "managed_bytes": "size"},
        "assumptions": ["text"], "diagnostics": ["#diagnostic"], "details": {"*": "any"},
        "pools": [{"label": "text", "count": "size", "reserved_bytes": "size", "requested_bytes": "size"}],
        "held": [{"bytes": "size", "source": "text", "*": "any"}],
        "top": [{
            "bytes": "size", "category": "text", "label": "text", "operator": "text", "module": "text",
            "source": "text", "phase": "text",
        }],
    },
    "fit": {
        "size": "text", "largest": "size", "estimate": "#estimate|null",
        "safe": {"value": "size", "estimate": "#estimate|null"},
        "above": {"value": "size", "estimate": "#estimate|null"}, "stopped_by": "text",
        "tried": [{"value": "size", "device_bytes": "size"}],
    },
    "advice": {
        "base": "#estimate",
        "advice": [{
            "change": "text", "options": "text", "saved_bytes": "whole|null", "device_bytes": "size|null",
            "fits": "flag|null", "verdict": "text|null", "reason": "text|null",
        }],
    },
    "sweep": {
        "rows": [{"settings": {"*": "any"}, "estimate": "#estimate|null", "error": "text|null", "figures?": "any"}],
    },
    "comparison": {
        "before": "any", "after": "any", "fits": {"before": "text|null", "after": "text|null"},
        "peak": dict.fromkeys(("requested", "allocated", "reserved", "device"), _CHANGE),
        "breakdown": {"*": _CHANGE},
    },
    "check": {
        "passes": "flag",
        "rows": [{
            "name": "text", "estimate": "#estimate|null", "error": "text|null", "budget_bytes": "size|null",
            "locked_bytes": "size|null", "change_bytes": "whole|null", "trouble": ["text"],
        }],
    },
    "serving": {
        "engine": "text", "engine_version": "text", "basis": "text", "model": "text", "gpu": "text", "cards": "size",
        "starts": "flag", "refusal": "text|null", "settings": {"*": "any"}, "total_bytes": "size",
        "requested_bytes": "size", "weights_bytes": "size",
        "waterfall": [{"name": "text", "bytes": "whole", "note": "text"}],
        "kv_cache": {
            "available_bytes": "whole", "block_size": "size", "block_bytes": "size", "blocks": "whole",
            "tokens": "whole", "concurrency": "number", "longest": "whole", "groups": [["any"]],
        },
        "cuda_graphs_bytes": "size", "fragmentation_bytes": "size", "outside": [{"name": "text", "*": "any"}],
        "lengths": {"*": "size"}, "concurrency_at_lengths": "number|null", "load": "number|null",
        "cards_for_load": [{"gpu": "text", "cards": "size", "memory_bytes": "size", "concurrency": "number"}],
        "changes": [{"option": "text", "tokens": "whole", "gained_tokens": "whole"}],
        "found": ({"*": "whole"}, "null"), "notes": ["text"], "assumptions": ["text"],
        "over_time": ({"described": "text", "rules": "text", "*": "any"}, "null"),
    },
    "plan": {
        "model": "text", "parameters": "size", "step": "text", "global_batch": "size", "seq_len": "size|null",
        "cluster": {"gpu": "text", "gpus": "size", "gpus_per_node": "size", "capacity_bytes": "size"},
        "links": _BY_LINK, "captured": "size", "fitting": ["#layout"], "others": ["#layout"],
        "advice": [{
            "change": "text", "option": "text", "saved_bytes": "whole|null", "device_bytes": "size|null",
            "reason": "text|null",
        }],
        "files": [{"name": "text", "text": "text"}], "assumptions": ["text"], "notes": ["text"],
    },
    "pack": {
        "cards": [{
            "gpu": "text", "number": "size", "room_bytes": "size", "trouble": "number|null",
            "jobs": [{"name": "text", "device_bytes": "size", "most_bytes": "size|null", "unbounded": ["text"]}],
        }],
        "cards_there": "size", "left_out": [{"name": "text", "count": "size", "reason": "text"}],
    },
    "gpus": {"default": "text", "gpus": [{"name": "text", "capacity_bytes": "size", "*": "any"}]},
    "zoo": {"models": [{"name": "text", "family": "text", "model": "text", "batch": "size", "*": "any"}]},
    "doctor": {
        "libraries": [{
            "name": "text", "installed": "text", "state": "text", "newest": "text", "oldest": "text", "extra": "text",
            "without": "text", "trouble": "text",
        }],
        "names": "any",
    },
    "cache": {"folder": "text|null", "entries?": "size", "bytes?": "size", "limit_bytes?": "size", "hits?": "size"},
    "operators": {"operators": [{"name": "text", "schema": "text|null", "known": [["text"]]}]},
}  # fmt: skip


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a document by its name, ``estimate`` or ``graphmem.estimate/1``. Raises
    :class:`UsageError`."""
    short = name.removeprefix("graphmem.").partition("/")[0]
    if short not in DOCUMENTS:
        raise UsageError(f"no document {name!r}; accepted: {', '.join(DOCUMENTS)}")
    needed: dict[str, Any] = {}
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"graphmem.{short}/1"}
    return {**whole, **_of_document(short, needed), "$defs": needed}


def _of_document(name: str, needed: dict[str, Any]) -> dict[str, Any]:
    found = _of({"schema": "text", **DOCUMENTS[name]}, needed)
    found["properties"]["schema"] = {"const": f"graphmem.{name}/1"}
    return found


def _of(shape: Shape, needed: dict[str, Any]) -> dict[str, Any]:
    """The schema of a shape; ``needed`` gets those that it refers to."""
    if isinstance(shape, list):
        return {"type": "array", "items": _of(shape[0], needed)}
    if isinstance(shape, dict):
        keys = {key.removesuffix("?"): _of(value, needed) for key, value in shape.items() if key != "*"}
        required = [key for key in shape if key != "*" and not key.endswith("?")]
        found = {"type": "object", "properties": keys, "required": required}
        return {**found, "additionalProperties": _of(shape["*"], needed)} if shape.get("*", "any") != "any" else found
    choices = [_of(one, needed) for one in shape] if isinstance(shape, tuple) else list(_choices(shape, needed))
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _choices(words: str, needed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for word in words.split("|"):
        if not word.startswith("#"):
            yield dict(TYPES[word])
            continue
        name = word[1:]
        if name not in needed:
            needed[name] = {}  # one that refers to itself
            needed[name] = _of(PARTS[name], needed) if name in PARTS else _of_document(name, needed)
        yield {"$ref": f"#/$defs/{name}"}
