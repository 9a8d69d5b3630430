"""The JSON documents that answers are written as, and their JSON Schemas (``graphmem schema NAME``).

A document is described once, in :data:`DOCUMENTS`: a dictionary by its keys (one that ends in ``?`` may be missing,
``*`` is any key), a list by what is in it (one of several is a row, whose last place may be missing where it ends in
``?``), a value by the name of its type (:data:`TYPES`, several with ``|`` between) or ``#`` and another document or
part; a tuple is one of several. Within one version of a document keys are added, so what is not described is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

_NAMES = ("requested", "allocated", "reserved", "device")
_LEVELS = {f"{name}_bytes": "size" for name in _NAMES}
_RANGE = {"least_bytes": "whole|null", "most_bytes": "whole|null"}
_RANGES = {f"{name}?": _RANGE for name in _NAMES}
_ADVICE: Shape = {
    "change": "text", "options": "text", "saved_bytes": "whole|null", "device_bytes": "size|null", "fits": "flag|null",
    "verdict": "text|null", "reason": "text|null",
}  # fmt: skip
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
        "context": ["#figure"], "loads": "#loads",
    },
    "term": {
        "name": "text", "printed": "number", "predicted": "number", "difference": "number", "is_size": "flag",
        "note": "text",
    },
    "figure": {"name": "text", "bytes": "size", "least_bytes": "size", "most_bytes": "size", "source": "text"},
    "loads": {
        "cudnn": "flag", "eager": "flag", "cuda": (["whole"], "null"), "nccl_version": (["whole"], "null"),
        "nccl_variables": [["text"]],
        "communicators": [{
            "ranks": "size", "peers": "size", "far_peers": "size|null", "on_node": "size|null", "place": "size",
            "gathers": "flag", "reduced_bytes": "size|null",
        }],
    },
    "diagnostic": {
        "code": "text", "kind": "text", "effect": "text", "place": "text", "message": "text", "count": "size",
    },
    "layout": {
        "layout": {
            "processes": "size", "on_node": "size", "wrapper": "text", "shard": "text", "tensor": "size",
            "expert": "size", "micro_batch": "size", "accumulate": "size", "recompute": "flag", "offload": "flag",
            "whole_gradients": "flag", "buckets": "text", "pipeline": "size", "in_flight": "size", "context": "size",
            "data": "size", "shards": "size",
        },
        "words": "text", "options": "text", "status": "text", "reason": "text|null",
        "alloc_conf": "text|null", "bound_bytes": "size", "bound": [{"name": "text", "bytes": "size"}],
        "sent": _BY_LINK, "sending_seconds": "number|null", "recomputing_seconds": "number|null",
        "waiting_seconds": "number|null", "captured": "#captured|null",
    },
    "captured": {"allocated_bytes": "size", "reserved_bytes": "size", "device_bytes": "size", "fit": "#fit|null"},
    "details": {
        "recorded?": {"*": "any"}, "processes?": {"*": "any"}, "program?": "#program", "runs?": ["#item"],
        "epochs?": ["#epoch"], "sandbox?": "#sandbox", "loop?": "#loop", "captured?": {"from": "text", "at": "text"},
        "cudnn?": {"*": "any"}, "least?": {"bytes": "size", "flushed_bytes": "size|null"}, "formulas?": "#formulas",
        "ranks?": "#ranks", "followed?": {"fullest": "size", "processes": ["#process"]},
        "out_of_memory?": "#out_of_memory", "reserved_bytes_by_run?": {"*": "size"},
        "reserved_bytes_with?": {"*": "size"}, "memory_limit_bytes?": "size", "garbage_collections?": "size",
        "one_region_bytes?": "size", "sufficient_memory_limit_bytes?": "size",
        "reserved_with_memory_growth_bytes?": "size", "regions_with_memory_growth?": ["text"], "*": "any",
    },
    "program": {
        "how": "text", "code": "whole", "error": "text", "words": "text", "steps?": "size", "jobs?": ["text"],
        "more?": "text",
    },
    "item": {"where": "text", "item": "any", "allocated_bytes": "size", "reserved_bytes": "size"},
    "epoch": {
        "where": "text", "read": "size", "whole": "flag", "shapes": "size", "smallest": "size", "median": "size",
        "largest": "size", "analysed": "size",
    },
    "sandbox": {
        "mechanism": "text", "folder": "text", "allowed": ["text"], "unavailable": {"*": "text"},
        "refused": [{"what": "text", "to": "text", "times": "size"}], "started": {"*": "size"},
        "files": {
            "count": "size", "bytes": "size", "written": ["#file"], "overwritten": ["#file"], "deleted": ["#file"],
            "deleted_count": "size", "deleted_bytes": "size", "renamed": ["#file"],
            "scratch": {"count": "size", "bytes": "size"},
        },
    },
    "file": {"path": "text", "bytes": "size", "before_bytes?": "size", "from?": "text"},
    "loop": {"loop": "text", "output_bytes": "size", "*": "any"},
    "formulas": {
        "framework": "text", "optimizer": "text", "model_states": {"formula": "text", "bytes": "size"},
        "simulated": {"model_states_bytes": "size", "allocated_bytes": "size", "reserved_bytes": "size"},
        "difference": {"*": "whole"}, "beyond": [{"bytes": "size", "source": "text", "option": "text"}],
        "activations?": {"formula": "text", "bytes": "size", "simulated_bytes": "size", "*": "any"},
    },
    "ranks": {
        "world_size": "size", "nproc_per_node": "size|null", "fullest": "size", "analysed": ["size"],
        "complete": "flag", "kinds": [{"ranks": ["size"], **_LEVELS}],
    },
    "process": {"words": "text", "ending": "text", "code": "whole", **_LEVELS},
    "out_of_memory": {
        **dict.fromkeys((
            "requested_bytes", "segment_bytes", "driver_free_bytes", "missing_bytes", "reserved_bytes",
            "allocated_bytes", "room_bytes", "hole_bytes", "hole_count", "usable_bytes",
        ), "size"),
        "operator": "text", "source": "text", "holes": ["size"], "agrees": "flag", "repeats": "flag",
        "holders": [{"bytes": "size", "blocks": "size", "operator": "text", "source": "text"}],
        "attempts": [{
            "change": "text", "options": "text", "saves": "flag", "spare_bytes": "size|null",
            "missing_bytes": "size|null", "earlier": "flag", "batch": "size|null",
        }],
    },
    "load": {
        "described": "text", "rules": "text", "max_wait": "number", "copies": "size|null", "cards": "size|null",
        "speed": {"step_seconds": "number", "tokens_per_second": "number", "assumed": "flag", "predicted?": "flag"},
        "max_tpot?": "number|null", "slow_copies?": "size|null", "answered?": "size",
        **dict.fromkeys(("price?", "price_of_all?", "answers_cost?"), "number|null"),
        "answer": {
            **dict.fromkeys((
                "requests", "finished", "refused", "left_waiting", "steps", "tokens_computed",
                "tokens_computed_again", "most_running", "most_waiting", "preemptions", "preempted_requests",
            ), "size"),
            **dict.fromkeys(("seconds", "mean_used", "most_used", "wait_p50", "wait_p99"), "number"),
            **dict.fromkeys(("ttft_p50?", "ttft_p99?", "tpot_p50?", "tpot_p99?"), "number"),
            **dict.fromkeys(("asked_tokens?", "found_tokens?", "loaded_tokens?"), "size"),
            "first_preemption": "number|null", "given_up_at": "number|null",
            "timeline": [{
                "seconds": "number", "used": "number", "running": "size", "waiting": "size", "preemptions": "size",
            }],
        },
        "tried": [{
            "copies": "size", "cards": "size", "most_used": "number", "preemptions": "size", "wait_p99": "number",
            **dict.fromkeys(("ttft_p99?", "tpot_p99?", "found?"), "number"),
            "enough": "flag", "followed": "number|null",
        }],
        "apart?": ({
            "prefill": "size", "decode": "size", "cards": "size", "ttft_p99": "number", "tpot_p99": "number",
            "moved_bytes": "number", "price_of_all": "number|null",
        }, "null"),
        "scaling?": ({
            **dict.fromkeys(("interval", "startup", "copy_hours", "fixed_hours"), "number"), "fixed": "size",
            "intervals": [{"seconds": "number", "requests": "size", "copies": "size|null"}],
            "cost": "number|null", "fixed_cost": "number|null",
        }, "null"),
    },
    "throughput": {
        "requests": "size", "context": "size", "answers": "#speeds", "prompts": "#speeds", "price": "number|null",
        "answers_cost": "#speeds|null", "prompts_cost": "#speeds|null",
    },
    "speeds": {"slow": "number", "expected": "number", "fast": "number"},
    "case": {
        "name": "text", "model": "text", "step": {"training": "flag", "*": "any"}, "batch": "size|null",
        "seq_len": "size|null", "iterations": "size", "alloc_conf": "text", "runtime": "text", "shapes": "text",
    },
    "record": {
        "schema": "whole", "case": "#case", "status": "text", "machine": "#machine|null", "measured": "#peaks|null",
        "error": "text", "date": "text", "seconds": "number", "cap_bytes": "size|null", "trace": "text",
    },
    "machine": {
        "source": "text", "gpu": "text", "capability": ["whole"], "sm_count": "size", "threads_per_sm": "size",
        "total_bytes": "size", "versions": {"*": "text"},
    },
    "peaks": {
        "requested_bytes": "size|null", "allocated_bytes": "size", "reserved_bytes": "size", "retries": "size",
        "iterations": [{"*": "size"}],
        "device": ({
            "meter": "text", "baseline_bytes": "size", "context_bytes": "size", "first_iteration_bytes": "size",
            "peak_bytes": "size",
        }, "null"),
    },
}  # fmt: skip

#: The documents by name, each without its version and the key that names both.
DOCUMENTS: Mapping[str, dict[str, Any]] = {
    "estimate": {
        "model": "text", "runtime": "text", "allocator": "text", "step": "text", "gpu": "text", "peak": _LEVELS,
        "ideal_bytes": "size", "phases": [{"iteration": "whole", "name": "text", **_LEVELS}], "moment": "#moment",
        "last_growth": "#moment|null", "breakdown": {"*": "size"}, "fits": "#fit|null", "certainty": "#certainty|null",
        "card": "#card|null", "host": {"host_bytes": "size", "pinned_bytes": "size", "managed_bytes": "size"},
        "assumptions": ["text"], "diagnostics": ["#diagnostic"], "details": "#details",
        "pools": [{"label": "text", "count": "size", "reserved_bytes": "size", "requested_bytes": "size"}],
        "held": [{"bytes": "size", "source": "text", "*": "any"}],
        "top": [{
            "bytes": "size", "category": "text", "label": "text", "operator": "text", "module": "text",
            "source": "text", "phase": "text",
        }],
        "at_peak?": ({"modules": {"*": "size"}, "lines": {"*": "size"}}, "null"),
    },
    "fit": {
        "size": "text", "largest": "size", "estimate": "#estimate|null",
        "safe": {"value": "size", "estimate": "#estimate|null"},
        "above": {"value": "size", "estimate": "#estimate|null"}, "stopped_by": "text",
        "tried": [{"value": "size", "device_bytes": "size"}],
    },
    "advice": {"base": "#estimate", "advice": [_ADVICE], "steps?": [_ADVICE]},
    "sweep": {
        "rows": [{"settings": {"*": "any"}, "estimate": "#estimate|null", "error": "text|null", "figures?": "any"}],
    },
    "comparison": {
        "before": "any", "after": "any", "ended_early": {"before": "flag", "after": "flag"},
        "fits": {"before": "text|null", "after": "text|null"},
        "card?": ({"gpu": "text", "bytes": "whole"}, "null"), "peak": dict.fromkeys(_NAMES, _CHANGE),
        "breakdown": {"*": _CHANGE},
        "modules?": ({"*": _CHANGE}, "null"), "lines?": ({"*": _CHANGE}, "null"),
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
        "by_length?": [{"tokens": "size", "requests": "number"}],
        "lengths": {"*": "size"}, "concurrency_at_lengths": "number|null", "load": "number|null",
        "cards_for_load": [{
            "gpu": "text", "cards": "size", "memory_bytes": "size", "concurrency": "number", "price?": "number|null",
            "name?": "text", "engines?": "size", "speed?": "number|null", "cost?": "number|null",
        }],
        "changes": [{"option": "text", "tokens": "whole", "gained_tokens": "whole"}],
        "found": ({"*": "whole"}, "null"), "notes": ["text"], "assumptions": ["text"],
        "over_time": "#load|null", "throughput?": "#throughput|null",
    },
    "serving_log": {
        "log": "text", "engine": "text", "printed_version": "text|null", "followed_version": "text", "basis": "text",
        "model": "text", "gpu": "text", "cards": "size", "settings": {"*": "text"}, "left_out": ["text"],
        "terms": ["#term"], "decides": "text|null", "differs": "text|null", "given_outside_torch": "#term|null",
        "refusal": "text|null", "notes": ["text"],
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
            "jobs": [{
                "name": "text", "device_bytes": "size", "most_bytes": "size|null", "host_bytes": "size",
                "unbounded": ["text"],
            }],
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
    "trace": {
        "source": "text", "notes": {"*": "text"}, "phases": [["whole", "text"]],
        "operators": [["text", "text", "size", "text"]],
        "storages": [["size", "text", "whole", "text", "text", "size?"]],
        "events": {"kind": ["size"], "subject": ["whole"], "operator": ["size"], "stream": ["whole"]},
        "pools?": [["text", "flag", "flag"]], "fractions?": ["number"], "plans?": [[["size"], ["size"]]],
        "settings?": ["text"], "predicted_plans?": "size", "garbage_bytes?": "size",
    },
    "oom": {
        "asked_bytes": "size",
        **dict.fromkeys((
            "capacity_bytes", "free_bytes", "process_bytes", "limit_bytes", "allocated_bytes", "private_bytes",
            "cached_bytes",
        ), "size|null"),
    },
    "watched": {
        "estimate": "#estimate",
        "phases": [{
            "iteration": "whole", "name": "text", "allocated_bytes": "size", "reserved_bytes": "size",
            "predicted_allocated_bytes": "size", "predicted_reserved_bytes": "size", "change_bytes": "whole",
        }],
    },
    "measured": {"records": ["#record"]},
    "verification": {
        "case": "#case", "gpu": "text", "status": "text",
        "levels": {name: {"predicted_bytes": "size|null", "measured_bytes": "size|null"} for name in _NAMES},
    },
    "calibration": {
        "name": "text", "aliases": ["text"], "vendor": "text", "capacity_bytes": "size", "capacity_source": "text",
        "compute_capability": ["whole"], "sm_count": "size", "max_threads_per_sm": "size", "context_bytes": "size",
        "context_source": "text", "context_measured": "flag", "cublas_workspace_bytes": "size",
    },
    "accuracy": {
        "about": "text", "verdicts": [{"*": "any"}],
        "cases": [{"record": "#record", "predicted": ({**_LEVELS}, "null"), "error": "text|null"}],
        "published": [{
            "source": "text", "case": "text", "level": "text", "measured_bytes": "size", "predicted_bytes": "size|null",
            "estimates_bytes": {"*": "size"},
        }],
    },
}  # fmt: skip

#: Documents that have had several versions, each of which adds to the one before: the newest.
VERSIONS: Mapping[str, int] = {"trace": 5}


def names() -> list[str]:
    """The documents with their newest versions, ``graphmem.estimate/1``."""
    return [f"graphmem.{name}/{VERSIONS.get(name, 1)}" for name in DOCUMENTS]


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a document by its name, ``estimate`` or ``graphmem.estimate/1``. Raises
    :class:`UsageError`."""
    short = name.removeprefix("graphmem.").partition("/")[0]
    if short not in DOCUMENTS:
        raise UsageError(f"no document {name!r}; accepted: {', '.join(DOCUMENTS)}")
    needed: dict[str, Any] = {}
    title = f"graphmem.{short}/{VERSIONS.get(short, 1)}"
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**whole, **_of_document(short, needed), "$defs": needed}


def _of_document(name: str, needed: dict[str, Any]) -> dict[str, Any]:
    found = _of({"schema": "text", **DOCUMENTS[name]}, needed)
    last = VERSIONS.get(name, 1)
    versions = [f"graphmem.{name}/{version}" for version in range(1, last + 1)]
    found["properties"]["schema"] = {"const": versions[0]} if last == 1 else {"enum": versions}
    return found


def _of(shape: Shape, needed: dict[str, Any]) -> dict[str, Any]:
    """The schema of a shape; ``needed`` gets those that it refers to."""
    if isinstance(shape, list) and len(shape) > 1:
        places = [_of(one.removesuffix("?") if isinstance(one, str) else one, needed) for one in shape]
        return {"type": "array", "prefixItems": places, "items": False, "minItems": least_of(shape)}
    if isinstance(shape, list):
        return {"type": "array", "items": _of(shape[0], needed)}
    if isinstance(shape, dict):
        keys = {key.removesuffix("?"): _of(value, needed) for key, value in shape.items() if key != "*"}
        required = [key for key in shape if key != "*" and not key.endswith("?")]
        found = {"type": "object", "properties": keys, "required": required}
        return {**found, "additionalProperties": _of(shape["*"], needed)} if shape.get("*", "any") != "any" else found
    choices = [_of(one, needed) for one in shape] if isinstance(shape, tuple) else list(_choices(shape, needed))
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def least_of(row: Sequence[Shape]) -> int:
    """The places that a row has at least."""
    return len(row) - (isinstance(row[-1], str) and row[-1].endswith("?"))


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
