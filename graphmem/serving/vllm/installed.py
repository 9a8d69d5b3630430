"""vLLM's answer by its own installed code (:mod:`graphmem.serving.installed`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from graphmem.devices import Loads
from graphmem.errors import UsageError
from graphmem.serving.base import KVCache, Part, Question, Served, spelled
from graphmem.serving.installed import SCRATCH, Program, checked, folder_of, handed_on, options_of, processes, started
from graphmem.serving.installed import why_not as why_none
from graphmem.serving.starting import Asked
from graphmem.serving.vllm.arguments import read
from graphmem.serving.vllm.connectors import connector_for
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.serving.vllm.scheduler import Scheduler

#: Nothing is told to its makers, and sums of several cards are NCCL's: the other ways have buffers that cards map into
#: each other.
PROGRAM = Program(
    "vllm", "vLLM", "graphmem.serving.vllm.starting", "--model",
    (
        ("VLLM_NO_USAGE_STATS", "1"), ("VLLM_DO_NOT_TRACK", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_PLUGINS", ""), ("VLLM_CACHE_ROOT", SCRATCH), ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_ALLREDUCE_USE_SYMM_MEM", "0"), ("VLLM_ALLREDUCE_USE_FLASHINFER", "0"),
    ),
)  # fmt: skip
#: Ways beside tensor parallelism in which processes share a model, stages of a pipeline and replicas: the option, and
#: its short name.
_SHARED = (("pipeline_parallel_size", "pp"), ("data_parallel_size", "dp"))
#: Options in ``arguments`` that are not handed on: ours, which the engine lacks, and those that a start sets itself.
_NOT_HANDED_ON = frozenset((
    "basis", "model_runner", "outside", "load_format", "skip_tokenizer_init", "distributed_executor_backend",
    "disable_custom_all_reduce", *(name for names in _SHARED for name in names),
))  # fmt: skip
#: The variable that chooses one of its two runners.
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_FIELDS = (
    "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "kv_cache_dtype", "quantization", "dtype", "block_size",
)  # fmt: skip
#: Kinds of groups of the cache -> words for people.
_KINDS = {"FullAttentionSpec": "full attention", "MLAAttentionSpec": "latent attention", "MambaSpec": "states"}


def version() -> str | None:
    """The installed engine's version; None where there is none."""
    return PROGRAM.version()


def why_not(question: Question) -> str | None:
    """Why the installed engine is not asked; None where it can be."""
    none = why_none(question, PROGRAM.title, version())
    if none is not None:
        return none
    if question.cold or question.non_torch_bytes or "outside" in dict(question.arguments):
        return "the installed engine is followed where nothing is to be compiled, on a card that is its own"
    return None


def stages_of(question: Question) -> list[Served]:
    """The engine's own answer for every stage of the pipeline, as if the others had as many blocks. Raises
    :class:`UsageError` with its reason where it does not start for another one than memory,
    :class:`graphmem.serving.installed.NotFollowed` among them."""
    reason = why_not(question)
    if reason is not None:
        raise UsageError(f"--basis engine: {reason}")
    stages, replicas = (processes(question, names) for names in _SHARED)
    asked = Asked(
        options=tuple(_options(question, folder_of(question.model))),
        is_server=question.entry == "server",
        device=question.device,
        alloc_conf=question.alloc_conf,
        processes=question.tensor_parallel_size * stages * replicas,
    )
    return [_stage(question, replace(asked, rank=stage * question.tensor_parallel_size)) for stage in range(stages)]


def _stage(question: Question, asked: Asked) -> Served:
    runner = dict(question.arguments).get("model_runner", "").lower()
    variables = ((_RUNNER, str(int(runner == "v2"))),) if runner else ()
    configuration = json.dumps(dict(question.model.config), default=str)
    return _answer(question, asked.processes, started(PROGRAM, str(version()), asked, variables, configuration))


def _options(question: Question, folder: Path | None) -> Iterator[str]:
    """The engine's command line, but for a model without a folder of its own."""
    yield from options_of(PROGRAM, question, folder, {name: name for name in _FIELDS})
    if question.enforce_eager:
        yield "--enforce-eager"
    groups = {names[0]: count for names in _SHARED if (count := processes(question, names)) > 1}
    for name, count in groups.items():
        yield from (spelled(name), str(count))
    if question.tensor_parallel_size > 1 or groups:  # each process begins as torchrun begins it, and starts no others
        yield from ("--distributed-executor-backend", "external_launcher", "--disable-custom-all-reduce")
    yield from handed_on(question, _NOT_HANDED_ON)


# --- the answer -------------------------------------------------------------------------------------------------------

#: The options that are read here too, for the scheduler.
_SCHEDULING = ("kv_offloading_size", "enable_prefix_caching", "no_enable_prefix_caching")
#: What the engine says where memory alone keeps it from starting.
_FOR_MEMORY = ("OutOfMemoryError", "No available memory for the cache", "KV cache is needed", "is less than desired")


def _answer(question: Question, cards: int, found: Mapping[str, Any]) -> Served:
    refusal = checked(found, f"vLLM {version()}", _FOR_MEMORY)
    known = found["settings"]
    settings = {name: value for name, value in known.items() if name not in ("architecture", "batches_in_flight")}
    total = found["total"] or question.device.capacity_bytes
    requested = found["requested"] or ceil(total * settings["gpu_memory_utilization"])
    parts = _parts(found, total, requested, settings)
    available = total - sum(part.bytes for part in parts)
    layout = _layout(found, known)
    blocks = int(found.get("blocks", 0))
    more = read(tuple(one for one in question.arguments if one[0].replace("-", "_") in _SCHEDULING))
    return Served(
        engine="vLLM",
        version=str(version()),
        model=question.model.name,
        gpu=question.device.name,
        cards=cards,
        settings=settings,
        total_bytes=total,
        requested_bytes=requested,
        weights_bytes=found["weights"],
        parts=parts,
        kv_cache=_cache(found, layout, available, settings["max_model_len"]),
        graphs_bytes=0,
        fragmentation_bytes=_slack(found["stages"]),
        outside=question.device.outside(Loads()),
        request_blocks=(lambda _: 1) if layout is None else layout.request_blocks,
        scheduler=None if layout is None else lambda role="": Scheduler(
            layout,
            blocks,
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=settings["max_model_len"],
            batches_in_flight=known["batches_in_flight"] or 1,
            prefix_caching=more.prefix_caching,
            connector=connector_for(role, layout, more.host_cache_bytes, question.tensor_parallel_size),
        ),
        refusal=refusal,
        notes=tuple(_notes(found, known["architecture"])),
        basis="engine",
    )  # fmt: skip


def _notes(found: Mapping[str, Any], architecture: str) -> Iterator[str]:
    yield f"the class {architecture} of vLLM {version()} was started, its weights without values"
    if found.get("flashinfer") is not None:
        yield (
            "FlashInfer's kernels are among its choices, as nvcc and ninja, or they, are found here"
            if found["flashinfer"]
            else "without FlashInfer's kernels, as nvcc or ninja is not found here (CUDA_HOME, PATH); a server's "
            "machine that has both uses them"
        )


def _parts(found: Mapping[str, Any], total: int, requested: int, settings: Mapping[str, Any]) -> tuple[Part, ...]:
    """From the card to the cache. What the engine charges beyond what the allocator shows is a part of its own."""
    stages = found["stages"]
    loading, loaded, profiled = (
        stages.get(name, {}) for name in ("before load_model", "after load_model", "after determine_available_memory")
    )
    buffers, after = loading.get("allocated", 0), loaded.get("allocated", 0)
    stays = profiled.get("allocated", after)
    parts = [
        Part("not asked for", total - requested, f"gpu_memory_utilization {settings['gpu_memory_utilization']:g}"),
        Part("weights", found["weights"], "as loaded, in blocks of the allocator"),
        Part("buffers", buffers + max(0, after - buffers - found["weights"]), "the model runner's and the sampler's"),
        Part("workspaces", max(0, stays - after), "what the profile run leaves"),
        Part("segment slack", _slack(stages), "reserved and not allocated: what fragmentation costs"),
        Part("activation peak", max(0, profiled.get("peak", stays) - stays), "of the profile run"),
    ]
    if found["graphs_estimate"]:
        parts.append(Part("CUDA graphs, estimated", found["graphs_estimate"], "the engine's own estimate"))
    if "after determine_available_memory" in stages:
        charged = total - found["available"]
        other = charged - sum(part.bytes for part in parts)
        if other:
            parts.append(Part("other", other, "charged by the engine beyond these"))
    return tuple(parts)


def _slack(stages: Mapping[str, Mapping[str, int]]) -> int:
    profiled = stages.get("after determine_available_memory", {})
    return profiled.get("reserved", 0) - profiled.get("allocated", 0)


def _layout(found: Mapping[str, Any], settings: Mapping[str, Any]) -> Layout | None:
    """The cache's groups; None where the model has none, or the engine did not come so far."""
    if not found.get("groups"):
        return None
    return Layout(tuple(map(_group, found["groups"])), settings["block_size"], _in_flight(settings))


def _in_flight(settings: Mapping[str, Any]) -> int:
    return int(settings["batches_in_flight"] or 1) * int(settings["max_num_batched_tokens"])


def _group(group: Mapping[str, Any]) -> Group:
    spec = Spec(
        group["page_bytes"], group["window"], states=1 if group["is_state"] else 0, in_chunks=group["in_chunks"]
    )  # fmt: skip
    return Group(spec, group["layers"], mixed_bytes=group["page_bytes"] if group["is_whole"] else None)


def _cache(found: Mapping[str, Any], layout: Layout | None, available: int, length: int) -> KVCache:
    if layout is None:
        return KVCache(available, 0, 0, 0, 0, 0.0, 0)
    concurrency = found["concurrency"] or layout.concurrency(found["blocks"], length)
    return KVCache(
        available_bytes=available,
        block_bytes=layout.block_bytes,
        block_size=layout.block_size,
        blocks=found["blocks"],
        tokens=int(concurrency * length),
        concurrency=concurrency,
        longest=layout.longest(available, length),
        groups=tuple((_words(group), group["layers"]) for group in found["groups"]),
    )


def _words(group: Mapping[str, Any]) -> str:
    if group["window"] is not None:
        return f"{'chunks' if group['in_chunks'] else 'sliding window'} of {group['window']}"
    return _KINDS.get(group["kind"], str(group["kind"]).removesuffix("Spec"))
