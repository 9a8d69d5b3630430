"""SGLang's answer by its own installed code (:mod:`graphmem.serving.installed`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphmem.devices import Device
from graphmem.errors import UsageError
from graphmem.serving.base import KVCache, Part, Question, Served
from graphmem.serving.installed import Program, checked, folder_of, handed_on, options_of, processes, started
from graphmem.serving.installed import why_not as why_none
from graphmem.serving.sglang.scheduler import following
from graphmem.serving.shapes import outside
from graphmem.serving.starting import Asked
from graphmem.units import format_bytes

PROGRAM = Program("sglang", "SGLang", "graphmem.serving.sglang.starting", "--model-path")
#: Fields of the question -> the engine's names.
_FIELDS = {
    "max_model_len": "context_length", "max_num_seqs": "max_running_requests", "kv_cache_dtype": "kv_cache_dtype",
    "block_size": "page_size", "quantization": "quantization", "dtype": "dtype",
}  # fmt: skip
#: The names of one option, and of those for pipelines and replicas.
_TENSOR_PARALLEL = ("tp_size", "tp", "tensor_parallel_size")
_OTHERWISE_SHARED = (
    ("pp_size", "pp", "pipeline_parallel_size"), ("dp_size", "dp", "data_parallel_size"),
)  # fmt: skip
#: Options in ``arguments`` that are not handed on: ours, and those that a start sets itself.
_NOT_HANDED_ON = frozenset((
    "basis", "load_format", "skip_tokenizer_init", "disable_custom_all_reduce", *_TENSOR_PARALLEL
))  # fmt: skip
#: What the engine says where memory alone keeps it from starting.
_FOR_MEMORY = ("OutOfMemoryError", "out of memory", "Not enough memory")


def why_not(question: Question) -> str | None:
    """Why the installed engine is not asked; None where it can be."""
    if any(processes(question, names) > 1 for names in _OTHERWISE_SHARED):
        return "the installed SGLang is followed neither in a pipeline nor in replicas"
    return why_none(question, PROGRAM.title, PROGRAM.version())


def serve(question: Question) -> Served:
    """The engine's own answer. Raises :class:`UsageError` with its reason where it does not start for another one than
    memory, :class:`graphmem.serving.installed.NotFollowed` among them."""
    reason = why_not(question)
    if reason is not None:
        raise UsageError(f"--basis engine: {reason}")
    cards = _cards(question)
    asked = Asked(
        options=tuple(_options(question, folder_of(question.model))),
        is_server=True,
        device=_among(question.device, cards),
        alloc_conf=question.alloc_conf,
        processes=cards,
    )
    configuration = json.dumps(dict(question.model.config), default=str)
    return _answer(question, cards, started(PROGRAM, str(PROGRAM.version()), asked, (), configuration))


def _cards(question: Question) -> int:
    """The processes that share every layer, one card each."""
    return processes(question, _TENSOR_PARALLEL, question.tensor_parallel_size)


def _among(device: Device, cards: int) -> Device:
    """The card as one of several, on which NCCL connects them before the engine looks at what is free
    (``measure_pre_model_load_memory``, srt/distributed/bootstrap.py)."""
    if cards == 1:
        return device
    held = sum(figure.bytes for figure in outside(device, cards))
    return replace(device, context_bytes=held, context_measured=True)


def _options(question: Question, folder: Path | None) -> Iterator[str]:
    """The engine's command line, but for a model without a folder of its own."""
    yield from options_of(PROGRAM, question, folder, _FIELDS)
    if question.enforce_eager:
        yield "--disable-cuda-graph"
    if (cards := _cards(question)) > 1:
        yield from ("--tp-size", str(cards), "--disable-custom-all-reduce")
    yield from handed_on(question, _NOT_HANDED_ON, off="")


# --- the answer -------------------------------------------------------------------------------------------------------


def _answer(question: Question, cards: int, found: Mapping[str, Any]) -> Served:
    version = PROGRAM.version()
    refusal = checked(found, f"SGLang {version}", _FOR_MEMORY)
    stages, device = found["stages"], question.device
    settings = {name: value for name, value in found["settings"].items() if name != "architecture"}
    length, page = settings["max_model_len"], settings["page_size"]
    parts, graphs = _parts(found, device.capacity_bytes), _taken(stages, "init_cuda_graphs", "reserved")
    tokens, token_bytes = found["tokens"], found["pool"] // max(1, found["slots"])
    blocks = tokens // page
    return Served(
        engine="SGLang",
        version=str(version),
        model=question.model.name,
        gpu=device.name,
        cards=cards,
        settings=settings,
        total_bytes=device.capacity_bytes,
        requested_bytes=device.capacity_bytes,
        weights_bytes=_taken(stages, "load_model", "allocated"),
        parts=parts,
        kv_cache=KVCache(
            available_bytes=device.capacity_bytes - sum(part.bytes for part in parts),
            block_bytes=token_bytes * page,
            block_size=page,
            blocks=blocks,
            tokens=tokens,
            concurrency=tokens / length,
            longest=min(tokens, length),
            groups=(("as the engine cuts it", found["layers"]),),
        ),
        graphs_bytes=graphs,
        fragmentation_bytes=0,
        outside=(),
        request_blocks=lambda asked: max(1, -(-asked // page)),
        refusal=refusal,
        scheduler=following(settings, tokens) if found["scheduled"] else None,
        notes=_notes(found, version, cards, graphs),
        basis="engine",
    )  # fmt: skip


def _notes(found: Mapping[str, Any], version: str | None, cards: int, graphs: int) -> tuple[str, ...]:
    notes = [f"the class {found['settings']['architecture']} of SGLang {version} was started, weights without values"]
    if graphs > 0:
        notes.append(f"of what is kept free CUDA graphs and buffers of steps take {format_bytes(graphs)}")
    if cards > 1:  # most on two Hoppers: four slots and a buffer of 16 MiB (configs/custom_all_reduce_v2.py, 0.5.23)
        notes.append(
            "of several cards the first was started; the engine's own sums over cards that NVLink joins (custom "
            "all-reduce) keep 80 MiB or less on each, which is not counted"
        )
    return tuple(notes)


def _taken(stages: Mapping[str, Mapping[str, int]], method: str, level: str) -> int:
    """Bytes that a method has left; 0 where it was not come to."""
    before, after = (stages.get(f"{when} {method}", {}) for when in ("before", "after"))
    return after.get(level, 0) - before.get(level, 0) if after else 0


def _parts(found: Mapping[str, Any], total: int) -> tuple[Part, ...]:
    """From the card to the pool; what the pool does not take of the rest is kept free."""
    stages = found["stages"]
    weights, segments = (_taken(stages, "load_model", level) for level in ("allocated", "reserved"))
    before = stages.get("before load_model", {})
    parts = [
        Part("outside the engine", total - before.get("free", total), "the CUDA context, and what was there before"),
        Part("weights", weights, "as loaded, rotary tables among them"),
        Part("segment slack", segments - weights, "reserved and not allocated"),
        Part(
            "tables", max(0, _taken(stages, "alloc_memory_pool", "allocated") - found["pool"]),
            "of requests and their tokens",
        ),
    ]  # fmt: skip
    kept = total - sum(part.bytes for part in parts) - found["pool"]
    fraction = found["settings"]["mem_fraction_static"]
    return (*parts, Part("kept free", kept, f"mem_fraction_static {fraction:g}: activations, graphs"))
