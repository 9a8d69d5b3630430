"""The answer of the installed engine itself: its own code starts on the pretended card, and its figures are read.

Whatever models and options that version knows are followed, and it resolves its settings itself; only the arithmetic of
requests of other lengths is ours. The start is in a process of its own (:mod:`graphmem.serving.vllm.starting`), takes
no network and no card, and weights have no values. Of several processes that share every layer the first is followed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from graphmem.answering import capture_cache
from graphmem.base.versions import Version
from graphmem.devices import Loads
from graphmem.errors import UsageError
from graphmem.serving.base import KVCache, Part, Question, Served, ServedModel
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.serving.vllm.scheduler import Scheduler
from graphmem.serving.vllm.starting import Asked

#: Options in ``arguments`` that are not handed on: ours, which the engine lacks, and those that a start sets itself.
_NOT_HANDED_ON = frozenset((
    "basis", "model_runner", "outside",
    "load_format", "skip_tokenizer_init", "distributed_executor_backend", "disable_custom_all_reduce",
))  # fmt: skip
#: Files beside a configuration by which an engine reads text; without one it starts with none.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")
#: Seconds that a start may take.
_MOST_SECONDS = 900
#: The variable that chooses one of its two runners.
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
#: Starts that are remembered.
_REMEMBERED = 64
_FIELDS = (
    "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization",
    "kv_cache_dtype", "quantization", "dtype", "block_size",
)  # fmt: skip
#: Kinds of groups of the cache -> words for people.
_KINDS = {"FullAttentionSpec": "full attention", "MLAAttentionSpec": "latent attention", "MambaSpec": "states"}


class NotFollowed(UsageError):
    """The installed engine did not come to an end of its start, for a reason that is perhaps not its own."""


def version() -> str | None:
    """The installed engine's version; None where there is none, or it was built for no card of NVIDIA's."""
    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    return found if find_spec("vllm") is not None and find_spec("torch") is not None else None


def why_not(question: Question) -> str | None:
    """Why the installed engine is not asked; None where it can be."""
    found = version()
    if found is None:
        return "vLLM is not installed in this environment"
    if question.version is not None and question.version != _short(found):
        return f"vLLM {found} is installed, and {'.'.join(map(str, question.version))} is asked for"
    options = dict(question.arguments)
    ranks = (options.get(name) for name in ("pipeline_parallel_size", "data_parallel_size"))
    if any(size not in (None, "1") for size in ranks):
        return "the installed engine is followed neither in a pipeline nor in replicas"
    if question.cold or question.non_torch_bytes or "outside" in options:
        return "the installed engine is followed where nothing is to be compiled, on a card that is its own"
    return None


def serve(question: Question) -> Served:
    """The engine's own answer. Raises :class:`UsageError` with its reason where it does not start for another one than
    memory, :class:`NotFollowed` among them."""
    reason = why_not(question)
    if reason is not None:
        raise UsageError(f"--basis engine: {reason}")
    folder = _folder(question.model)
    asked = Asked(
        options=tuple(_options(question, folder)),
        is_server=question.entry == "server",
        device=question.device,
        alloc_conf=question.alloc_conf,
        processes=question.tensor_parallel_size,
    )
    runner = dict(question.arguments).get("model_runner", "")
    configuration = json.dumps(dict(question.model.config), default=str)
    return _answer(question, _started(asked, runner.lower(), configuration))


def _short(text: str) -> Version:
    major, minor = (int(part) for part in text.split(".")[:2])
    return major, minor


def _folder(model: ServedModel) -> Path | None:
    """The model's own folder; None where its configuration is one of the table."""
    path = model.path
    return path.parent.resolve() if path is not None and path.name == "config.json" else None


def _options(question: Question, folder: Path | None) -> Iterator[str]:
    """The engine's command line, but for a model without a folder of its own."""
    if folder is not None:
        yield from ("--model", str(folder))
    yield from ("--load-format", "dummy")
    if folder is None or not any((folder / name).is_file() for name in _TOKENIZERS):
        yield "--skip-tokenizer-init"
    for name in _FIELDS:
        value = getattr(question, name)
        if value not in (None, "auto"):
            yield from (_spelled(name), str(value))
    if question.enforce_eager:
        yield "--enforce-eager"
    if question.tensor_parallel_size > 1:  # each process begins as torchrun begins it, and starts no others
        yield from ("--distributed-executor-backend", "external_launcher", "--disable-custom-all-reduce")
    for name, text in question.arguments:
        if name.replace("-", "_") not in _NOT_HANDED_ON:
            yield from _option(name, text)


def _option(name: str, text: str) -> Iterator[str]:
    word = text.strip().lower()
    if word in ("true", ""):
        yield _spelled(name)
    elif word == "false":
        yield f"--no-{name.replace('_', '-')}"
    elif word.startswith("["):
        yield from (_spelled(name), *map(str, json.loads(text)))
    else:
        yield from (_spelled(name), text)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@lru_cache(maxsize=_REMEMBERED)
def _started(asked: Asked, runner: str, configuration: str) -> Mapping[str, Any]:
    """The figures of a start, kept on the disk where captures are. Raises :class:`NotFollowed` for one that ends in
    another way."""
    disk = capture_cache.in_use
    place = None if disk is None else disk.place_of("vLLM", asked, runner, configuration)
    known = None if disk is None or place is None else disk.recalled_values(place)
    if known is not None:
        return known
    found = _start(asked, runner, configuration)
    dependencies = found.pop("dependencies", None)
    if disk is not None and place is not None and dependencies is not None:
        ours = set(_environment("")) | {_RUNNER}
        variables = {name: value for name, value in dependencies["variables"].items() if name not in ours}
        disk.keep_values(place, "vLLM", found, {**dependencies, "variables": variables})
    return found


def _start(asked: Asked, runner: str, configuration: str) -> dict[str, Any]:
    """The figures of a start in a process of its own, and what they depend on. Where the model has no folder one is
    made of its ``configuration`` for as long. Raises :class:`NotFollowed`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "answer.json")
        if asked.options[:1] != ("--model",):
            folder = Path(scratch, "model")
            folder.mkdir()
            (folder / "config.json").write_text(configuration, encoding="utf-8")
            asked = replace(asked, options=("--model", str(folder), *asked.options))
        environment = {**os.environ, **_environment(scratch)}
        if runner:
            environment[_RUNNER] = str(int(runner == "v2"))
        command = [sys.executable, "-m", "graphmem.serving.vllm.starting", str(out)]
        try:
            ended = subprocess.run(
                command, input=pickle.dumps(asked), env=environment, capture_output=True, timeout=_MOST_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise NotFollowed(f"vLLM {version()} had not started after {_MOST_SECONDS} seconds") from None
        if out.is_file():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
    said = ended.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {ended.returncode}"]
    raise NotFollowed(f"vLLM {version()} did not start: {said[-1]}")


def _environment(scratch: str) -> dict[str, str]:
    """No network, nothing told to its makers, nothing kept, temporary files of its libraries among it; and graphmem is
    found where it was. Sums of several cards are NCCL's: the other ways have buffers that cards map into each other."""
    return {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_CACHE_ROOT": scratch, "TMPDIR": scratch,
        "TRITON_CACHE_DIR": scratch, "TORCHINDUCTOR_CACHE_DIR": scratch, "XDG_CACHE_HOME": scratch,
        "FLASHINFER_WORKSPACE_BASE": scratch, "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip


# --- the answer -------------------------------------------------------------------------------------------------------

#: What the engine says where memory alone keeps it from starting.
_FOR_MEMORY = ("OutOfMemoryError", "No available memory for the cache", "KV cache is needed", "is less than desired")

#: How errors begin with which it refuses options and models before it looks at a card.
_REFUSALS = ("ValidationError:", "ValueError:", "NotImplementedError:")


def _answer(question: Question, found: Mapping[str, Any]) -> Served:
    error = found.get("error")
    known = found.get("settings")
    if error is not None and (known is None or not any(text in error for text in _FOR_MEMORY)):
        refuses = known is None and error.startswith(_REFUSALS)
        raise (UsageError if refuses else NotFollowed)(f"vLLM {version()} does not start: {_first(error)}")
    assert known is not None
    settings = {name: value for name, value in known.items() if name not in ("architecture", "batches_in_flight")}
    total = found["total"] or question.device.capacity_bytes
    requested = found["requested"] or ceil(total * settings["gpu_memory_utilization"])
    parts = _parts(found, total - requested, settings)
    available = total - sum(part.bytes for part in parts)
    layout = _layout(found, known)
    blocks = int(found.get("blocks", 0))
    return Served(
        engine="vLLM",
        version=str(version()),
        model=question.model.name,
        gpu=question.device.name,
        cards=question.tensor_parallel_size,
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
        scheduler=None if layout is None else lambda: Scheduler(
            layout,
            blocks,
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=settings["max_model_len"],
            batches_in_flight=known["batches_in_flight"] or 1,
        ),
        refusal=None if error is None else _first(error),
        notes=(f"the class {known['architecture']} of vLLM {version()} was started, its weights without values",),
        basis="engine",
    )  # fmt: skip


def _first(error: str) -> str:
    """What it says first: of options that pydantic refuses, the line behind their number."""
    lines = [line.strip() for line in error.partition(": ")[2].splitlines() if line.strip()]
    return next((line for line in lines if not re.match(r"\d+ validation errors? for", line)), error)


def _parts(found: Mapping[str, Any], unrequested: int, settings: Mapping[str, Any]) -> tuple[Part, ...]:
    """From the card to the cache. What the engine charges beyond what the allocator shows is a part of its own."""
    stages = found["stages"]
    loading, loaded, profiled = (
        stages.get(name, {}) for name in ("before load_model", "after load_model", "after determine_available_memory")
    )
    buffers, after = loading.get("allocated", 0), loaded.get("allocated", 0)
    stays = profiled.get("allocated", after)
    parts = [
        Part("not asked for", unrequested, f"gpu_memory_utilization {settings['gpu_memory_utilization']:g}"),
        Part("weights", found["weights"], "as loaded, in blocks of the allocator"),
        Part("buffers", buffers + max(0, after - buffers - found["weights"]), "the model runner's and the sampler's"),
        Part("workspaces", max(0, stays - after), "what the profile run leaves"),
        Part("segment slack", _slack(stages), "reserved and not allocated: what fragmentation costs"),
        Part("activation peak", max(0, profiled.get("peak", stays) - stays), "of the profile run"),
    ]
    if found["graphs_estimate"]:
        parts.append(Part("CUDA graphs, estimated", found["graphs_estimate"], "the engine's own estimate"))
    if "after determine_available_memory" in stages:
        charged = unrequested + found["requested"] - found["available"]
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
    concurrency = found["concurrency"]
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
