"""vLLM's answer: the start of one rank on our allocator, then the engine's own arithmetic.

Followed from vllm 0.32.0, ``v1/worker/gpu_worker.py`` and ``utils/mem_utils.py``: ``available = ceil(total *
utilization) - consumed - headroom - graphs``, where consumed is the loss of free memory from the start until after the
profile run, and headroom the run's peak above the bytes that stay.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

from graphmem.allocators.alloc_conf import parse_alloc_conf
from graphmem.allocators.pytorch_caching import PyTorchCachingAllocator
from graphmem.base.figures import Communicator, Figure
from graphmem.devices import Device, Loads
from graphmem.devices.nccl import nccl_of
from graphmem.errors import UsageError
from graphmem.replay import Player, events_on_device
from graphmem.serving.base import KVCache, Part, Question, Served
from graphmem.serving.configurations import model_named
from graphmem.serving.installed import AskedFirst
from graphmem.serving.values import count
from graphmem.serving.vllm import (
    arguments,
    backend,
    collectives,
    encoders,
    families,
    graphs,
    installed,
    order,
    versions,
)
from graphmem.serving.vllm.attention import FlashAttention2, FlashAttention3
from graphmem.serving.vllm.connectors import connector_for
from graphmem.serving.vllm.kv_cache import CACHE_DTYPES, Layout, Spec, layout_of
from graphmem.serving.vllm.layers import Unquantized
from graphmem.serving.vllm.log import READER
from graphmem.serving.vllm.models import deltanet
from graphmem.serving.vllm.models.base import Shape, stages
from graphmem.serving.vllm.quantization import method_for
from graphmem.serving.vllm.scheduler import Scheduler
from graphmem.serving.vllm.settings import Settings, resolve
from graphmem.serving.vllm.speculation import Draft, medusa_shape
from graphmem.sources.checkpoints import Checkpoint
from graphmem.trace import Trace, TraceBuilder
from graphmem.units import GIB, MIB, format_bytes

#: ``parseChosenWorkspaceSize`` (ATen/cuda/CublasHandlePool.cpp): 4096 KiB twice and 16 KiB eight times, or 32 MiB.
_CUBLAS_BYTES, _CUBLAS_LARGE_BYTES = 8_519_680, 32 * MIB
#: Kernels of attention and quantisations that recorded starts have.
_RECORDED_ATTENTION = (FlashAttention2.name, FlashAttention3.name)
_RECORDED_METHODS = (None, "awq", "fp8", "compressed-tensors")
#: Starts that are remembered: sweeps ask for many that differ in what only the arithmetic reads.
_REMEMBERED = 128


@dataclass(frozen=True)
class Start:
    """The memory of one rank at its start. Sizes are bytes."""

    weights: int
    adapters: int
    draft: int
    runner_buffers: int
    sampling_buffers: int
    workspaces: int
    slack: int
    consumed: int
    headroom: int
    loading: int
    graphs_estimate: int
    graphs_taken: int


class VLLM(AskedFirst):
    """The engine."""

    name = "vllm"
    title = "vLLM"
    has_benchmarks = True
    newest = ".".join(map(str, versions.NEWEST))
    log = READER

    def check_arguments(self, question: Question) -> None:
        """Raises :class:`UsageError` for a further option that is not followed."""
        arguments.read(question.arguments)

    def why_not(self, question: Question) -> str | None:
        """See :class:`graphmem.serving.installed.AskedFirst`."""
        return installed.why_not(question)

    def by_itself(self, question: Question) -> Served:
        """See :class:`graphmem.serving.installed.AskedFirst`."""
        return _of_stages(installed.stages_of(question))

    def serve(self, question: Question) -> Served:
        """See :class:`graphmem.serving.base.Engine`."""
        if question.device.vendor != "NVIDIA":
            raise UsageError(f"{question.device.name}: vLLM is followed on NVIDIA's cards only")
        return super().serve(question)

    def retold(self, question: Question) -> Served:
        """The answer by our own account of the engine's code."""
        question = _overridden(question)
        if question.max_model_len == -1:  # ``_auto_fit_max_model_len``: the longest that fits
            whole = self._worst(question.with_(max_model_len=None))
            fits = whole.kv_cache.longest
            question = question.with_(max_model_len=None if whole.refusal is None or not fits else fits)
        found = self._worst(question)
        if question.version is None or question.version <= versions.LAST:
            return found
        before = [self._worst(question.with_(version=version)) for version in versions.before_newest()]
        return replace(found, basis="logs", notes=(_newer_in_words(question.version, found, before), *found.notes))

    def loaded_while_profiling(self, question: Question) -> int:
        """See :func:`_connected_bytes`; answers to users name it, those to logs take it away."""
        return _connected_bytes(question)

    def _worst(self, question: Question) -> Served:
        return _of_stages(self.stages_of(question))

    def stages_of(self, question: Question) -> list[Served]:
        """The answer of every stage of the pipeline, as if the others had as many blocks."""
        question = backend.prepared(encoders.language_model(question, families.MODEL_TYPES))
        if not backend.is_captured(question):
            families.checked_kind(question.model)
        settings = resolve(question)
        shape, method, assumed = self.shape(question, settings)
        answers = []
        for one in self.stages(settings, shape):
            start = self._started(question, settings, one)
            answer = _answer(question, settings, one, self.layout(settings, one), start, method)
            answers.append(replace(answer, notes=(*assumed, *answer.notes)))
        return answers

    def stages(self, settings: Settings, shape: Shape) -> list[Shape]:
        """The shape of every stage of the pipeline; the one alone where there is none. Raises :class:`UsageError`."""
        _check_experts(settings, shape)
        count = settings.more.pipeline
        if count == 1:
            return [shape]
        if count > shape.layers:
            raise UsageError(
                f"pipeline_parallel_size ({count}) is more than the model's {shape.layers} layers; accepted: 1 to "
                f"{shape.layers}"
            )
        return [replace(shape, stage=stage) for stage in stages(shape.layers, count)]

    def draft(self, settings: Settings, target: Shape) -> Draft | None:
        """The source of draft tokens, None without one. Raises :class:`graphmem.errors.GraphmemError`."""
        asked = settings.more.speculation
        if asked is None:
            return None
        if asked.method == "mtp":
            return Draft(asked.method, asked.tokens, families.prediction(target, asked.tokens))
        if asked.model is None:
            return Draft(asked.method, asked.tokens)
        model = model_named(asked.model)
        if asked.method == "medusa":
            return Draft(asked.method, asked.tokens, heads=medusa_shape(model), itemsize=settings.itemsize)
        if asked.method != "draft_model" and versions.DRAFTS_AS_LONG.holds(settings.version):
            positions = max(count(model, "max_position_embeddings"), settings.batch.length)
            model = replace(model, config={**model.config, "max_position_embeddings": positions})
        shape = families.shape_of(model, settings.itemsize, Unquantized(settings.itemsize))
        if asked.method == "draft_model" and shape.vocab != target.vocab:
            raise UsageError(
                "Target and draft model should have the same vocabulary size. Target model vocab_size="
                f"{target.vocab}. Draft model vocab_size={shape.vocab}"
            )
        vocab = count(model, "draft_vocab_size", 0, least=0)
        checkpoint = model.checkpoint
        own = vocab > 0 if checkpoint is None else checkpoint.has_head
        return Draft(
            asked.method, asked.tokens, shape, families.style_of(model, shape), vocab,
            own_head=own and asked.method == "eagle3" and not settings.more.dummy_weights,
        )  # fmt: skip

    def _started(self, question: Question, settings: Settings, shape: Shape) -> Start:
        layout, draft = self.layout(settings, shape), self.draft(settings, shape)
        return _start(settings_key(settings), shape, layout, question.device, question.alloc_conf, draft)

    def shape(self, question: Question, settings: Settings) -> tuple[Shape, str | None, tuple[str, ...]]:
        """The model's sizes, the method of its quantisation, and its assumptions."""
        method, name, assumed = method_for(question, settings.itemsize)
        if backend.is_captured(question):
            return backend.shape(question, settings, method), name, assumed
        model, more = question.model, settings.more
        shape = families.with_mrope(families.shape_of(model, settings.itemsize, method), model, settings.version)
        if shape.state is not None:
            state = replace(
                shape.state,
                conv_bytes=more.conv_state_bytes or shape.state.conv_bytes,
                state_bytes=more.scan_state_bytes or shape.state.state_bytes,
                drafted=more.speculation.tokens if more.speculation else 0,
            )
            shape = replace(shape, state=state)
        if more.pools:
            shape = replace(shape, pooled=families.pooled_head(model))
        return encoders.with_encoder(shape, question, settings), name, assumed

    def layout(self, settings: Settings, shape: Shape) -> Layout:
        """The KV cache's groups; none of a model that reads in both directions."""
        if settings.more.encodes:
            return Layout((), settings.batch.block_size, settings.batches_in_flight * settings.batch.tokens)
        element = CACHE_DTYPES[settings.cache_dtype] or settings.itemsize
        in_flight = settings.batches_in_flight * settings.batch.tokens
        draft = self.draft(settings, shape)
        drafting = draft.shape if draft is not None else None
        only_states = shape.state is not None and not shape.attends
        size = settings.batch.length if only_states else settings.batch.block_size
        found = layout_of(
            shape,
            settings.tensor_parallel,
            size,
            element,
            in_flight,
            drafting,
            prefixes=settings.more.prefix_caching,
            encoded=settings.batch.tokens,
        )
        # Ranks that share out the context keep each their tokens of a block (``dcp_world_size``, kv_cache_utils.py).
        return replace(found, block_size=found.block_size * settings.more.context_parallel)

    def trace(self, question: Question) -> Trace:
        """The start of one rank, as a Trace."""
        question = backend.prepared(encoders.language_model(question, families.MODEL_TYPES))
        settings = resolve(question)
        shape, _, _ = self.shape(question, settings)
        cublas = _cublas_bytes(question.device, settings)
        layout = self.layout(settings, shape)
        draft = self.draft(settings, shape)
        return order.start(settings, shape, layout, question.device, question.alloc_conf, cublas, draft)[0].build()


def _check_experts(settings: Settings, shape: Shape) -> None:
    """Raises :class:`UsageError` for uses of experts that are not followed."""
    more = settings.more
    if more.speculation and shape.state is not None and shape.kind not in deltanet.KINDS:
        raise UsageError(
            f"{shape.kind} with speculative_config: what its states remember of drafted tokens is not followed; leave "
            f"it out, or take one of {', '.join(deltanet.KINDS)}, or a model of attention"
        )
    if shape.experts is None:
        if more.expert_parallel:
            raise UsageError(f"enable_expert_parallel: {shape.kind} has no experts; leave it out")
        return
    ranks, copies = settings.tensor_parallel * more.data, shape.experts.count + more.redundant_experts
    _check_replicas(settings, shape, ranks, copies)
    if more.balanced and (not more.expert_parallel or copies % ranks):
        raise UsageError(
            f"enable_eplb needs --enable-expert-parallel and ranks ({ranks}) that divide the experts and their copies "
            f"({copies}); give num_redundant_experts {-shape.experts.count % ranks} or that and a multiple of {ranks}"
        )


def _check_replicas(settings: Settings, shape: Shape, ranks: int, copies: int) -> None:
    """Raises :class:`UsageError` for experts that cannot be shared out over so many ranks of all replicas, or whose
    exchange is not followed."""
    more = settings.more
    if more.data > 1 and more.exchange not in arguments.GATHERED:
        raise UsageError(
            f"--all2all-backend {more.exchange} is a library of its own that vLLM does not install, and its buffers "
            f"are not followed; accepted: {', '.join(arguments.GATHERED)}"
        )
    if more.expert_parallel and ranks > copies:
        raise UsageError(f"{copies} experts cannot be shared out over {ranks} ranks; give {copies} cards or fewer")
    assert shape.experts is not None
    if not more.expert_parallel and shape.experts.width % ranks:
        raise UsageError(
            f"experts of width {shape.experts.width} cannot be cut over {ranks} ranks of all replicas; give "
            "--enable-expert-parallel, or ranks that divide it"
        )
    sliced = more.expert_parallel and more.data > 1 and settings.tensor_parallel > 1
    if sliced and (
        shape.kind in families.SLICED_BETWEEN_LAYERS
        or (shape.backend is not None and (not shape.backend.own_code or shape.kind in backend.SLICED))
        or (shape.latent and (more.pipeline > 1 or more.speculation))
    ):
        raise UsageError(
            f"{shape.kind} with tensor, data and expert parallelism keeps tokens in slices, "
            "which is not followed for it, nor with a pipeline or drafts; give --tensor-parallel-size 1, or "
            "--data-parallel-size 1"
        )


def _of_stages(answers: list[Served]) -> Served:
    """The answer of the stage of the pipeline that has the fewest blocks."""
    if len(answers) == 1:
        return answers[0]
    worst = min(answers, key=lambda answer: (answer.refusal is None, answer.kv_cache.blocks))
    return replace(worst, notes=(_stages_in_words(answers, worst), *worst.notes))


def _stages_in_words(answers: list[Served], worst: Served) -> str:
    each = ", ".join(
        f"{format_bytes(answer.weights_bytes)} of weights and {answer.kv_cache.blocks:,} blocks" for answer in answers
    )
    return (
        f"the pipeline's stages, first to last: {each}; the figures are those of stage {answers.index(worst) + 1}, "
        "whose blocks all have"
    )


def _overridden(question: Question) -> Question:
    """The question about the configuration with ``--hf-overrides``, which reach into objects."""
    values = json.loads(arguments.read(question.arguments).overrides)
    if not values:
        return question
    model = question.model
    return question.with_(model=replace(model, config=_merged(model.config, values)))


def _merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, other in others.items():
        own = merged.get(name)
        merged[name] = _merged(own, other) if isinstance(own, Mapping) and isinstance(other, Mapping) else other
    return merged


def _newer_in_words(version: tuple[int, int], found: Served, before: list[Served]) -> str:
    """How far a version that nobody read may be from the newest that is followed."""
    tokens = [one.kv_cache.tokens for one in (found, *before)]
    return (
        f"vLLM {'.'.join(map(str, version))} is newer than what is followed, and taken as {found.version}; as a "
        f"measure of what releases change, {before[0].version} to {found.version} give {min(tokens):,} to "
        f"{max(tokens):,} tokens for the same question"
    )


def settings_key(settings: Settings) -> Settings:
    """The settings that a start depends on: utilization is the arithmetic's."""
    return replace(settings, utilization=0.0)


def _cublas_bytes(device: Device, settings: Settings) -> int:
    if device.cublas_workspace_bytes is not None:
        return device.cublas_workspace_bytes
    since = device.limits.large_workspace_since
    return _CUBLAS_LARGE_BYTES if since is not None and versions.torch_of(settings.version) >= since else _CUBLAS_BYTES


@lru_cache(maxsize=_REMEMBERED)
def _start(
    settings: Settings, shape: Shape, layout: Layout, device: Device, alloc_conf: str, draft: Draft | None
) -> Start:
    """The start on the allocator of a card with so much free: blocks that are not split make it run into the limit and
    give its cache back. A start that does not fit is played without a limit, and the arithmetic decides."""
    torch = versions.torch_of(settings.version)
    conf = parse_alloc_conf(alloc_conf, torch)
    cublas = _cublas_bytes(device, settings)
    builder, marks = order.start(settings, shape, layout, device, alloc_conf, cublas, draft)
    free = _free_bytes(device, settings, shape)
    played = _played(builder, PyTorchCachingAllocator(free, conf, torch))
    if played is None:
        played = _played(builder, PyTorchCachingAllocator(None, conf, torch))
    if played is None:
        raise UsageError("the model is too large for any card")
    allocated, reserved = played
    stays, peak = allocated[marks.after], max(allocated[marks.before : marks.after + 1])
    base = marks.base
    consumed = reserved[marks.after] - (reserved[base] if base is not None else 0)
    before = allocated[base] if base is not None else 0
    weights = allocated[marks.weights] - allocated[marks.buffers]
    sampling = allocated[marks.loaded] - allocated[marks.drafting]
    workspaces = stays - allocated[marks.before]
    captured = marks.graphs
    away = min(settings.more.offloaded_bytes, weights)
    weights, consumed = weights - away, consumed - away
    return Start(
        weights=weights,
        adapters=allocated[marks.adapted] - allocated[marks.weights],
        draft=allocated[marks.drafting] - allocated[marks.adapted],
        runner_buffers=allocated[marks.buffers] - before,
        sampling_buffers=sampling,
        workspaces=workspaces,
        slack=consumed + away - (stays - before),
        consumed=consumed,
        headroom=peak - stays,
        loading=max(allocated[: marks.before]) - away,
        graphs_estimate=graphs.estimate(captured, reserved) if captured and layout.groups else 0,
        graphs_taken=reserved[captured.end] - reserved[captured.start] if captured else 0,
    )


def _played(builder: TraceBuilder, allocator: PyTorchCachingAllocator) -> tuple[list[int], list[int]] | None:
    """Bytes (allocated, reserved) after every event; None where they do not fit."""
    allocated: list[int] = []
    reserved: list[int] = []
    for number in range(1, len(builder.pools) + 1):
        allocator.declare_pool(number)
    player = Player(allocator, builder.storage_bytes, builder.streams, builder.storage_pools, {})
    events = events_on_device(builder.rows, builder.places, builder.storage_pools)
    if player.play(events, allocated.append, reserved.append, settings=builder.settings) >= 0:
        return None
    return allocated, reserved


def _tokens(settings: Settings, layout: Layout, blocks: int) -> int:
    """The tokens in so many blocks, as the version prints them."""
    if versions.TOKENS_OF_REQUESTS.holds(settings.version):
        return int(layout.concurrency(blocks, settings.batch.length) * settings.batch.length)
    return blocks // len(layout.groups) * layout.block_size if layout.groups else 0


def _answer(
    question: Question, settings: Settings, shape: Shape, layout: Layout, start: Start, method: str | None
) -> Served:
    total = question.device.capacity_bytes
    requested = ceil(total * settings.utilization)
    parts = _parts(question, settings, shape, start, total - requested)
    available = total - sum(part.bytes for part in parts)
    length = settings.batch.length
    blocks = settings.more.blocks or layout.blocks(available)
    cache = KVCache(
        available_bytes=available, block_bytes=layout.block_bytes, block_size=layout.block_size, blocks=blocks,
        tokens=_tokens(settings, layout, blocks),
        concurrency=layout.concurrency(blocks, length) or settings.batch.tokens / length,
        longest=layout.longest(available, settings.longest),
        groups=tuple((_words(shape, group.spec), group.layers) for group in layout.groups),
    )  # fmt: skip
    return Served(
        engine="vLLM", version=".".join(map(str, settings.version)), model=question.model.name,
        gpu=question.device.name, cards=settings.cards,
        settings=settings.shown(method) | encoders.shown(shape, settings),
        total_bytes=total, requested_bytes=requested, weights_bytes=start.weights, parts=parts, kv_cache=cache,
        graphs_bytes=start.graphs_taken, fragmentation_bytes=start.slack,
        outside=_outside(question.device, settings, shape),
        request_blocks=layout.request_blocks if layout.groups else lambda _: 1,
        scheduler=(lambda role="": _scheduler(settings, shape, layout, blocks, role)) if layout.groups else None,
        refusal=_refusal(question, settings, shape, layout, start, cache),
        notes=tuple(_notes(question, settings, shape)), basis=_basis(question, settings, shape, method),
    )  # fmt: skip


def _scheduler(settings: Settings, shape: Shape, layout: Layout, blocks: int, role: str) -> Scheduler:
    """The engine's scheduler over so many blocks, of an engine that does both or has one role."""
    ranks = 1 if shape.latent is not None else settings.cards  # all ranks have the same latent keys
    return Scheduler(
        layout, blocks, max_num_seqs=settings.batch.requests, max_num_batched_tokens=settings.batch.tokens,
        max_model_len=settings.batch.length, batches_in_flight=settings.batches_in_flight,
        prefix_caching=settings.more.prefix_caching,
        connector=connector_for(role, layout, settings.more.host_cache_bytes, ranks),
    )  # fmt: skip


def _basis(question: Question, settings: Settings, shape: Shape, method: str | None) -> str:
    """What the answer stands on: recordings where one holds this version, the card's attention and the quantisation."""
    if shape.backend is not None:
        return "captures"
    recorded = question.device.limits.vllm_attention in _RECORDED_ATTENTION and method in _RECORDED_METHODS
    if settings.version < versions.NEWEST:
        return "logs"
    more = settings.more
    others = more.offloaded_bytes or more.context_parallel > 1 or more.not_counted
    return "recordings" if recorded and not others else "formula"


def _words(shape: Shape, spec: Spec) -> str:
    window = spec.window
    if spec.states:
        return "states of requests"
    if shape.latent is not None:
        return "latent attention"
    return "full attention" if window is None else f"{'chunks' if spec.in_chunks else 'sliding window'} of {window}"


def _parts(question: Question, settings: Settings, shape: Shape, start: Start, unrequested: int) -> tuple[Part, ...]:
    utilization = settings.utilization
    parts = [
        Part("not asked for", unrequested, f"gpu_memory_utilization {utilization:g}"),
        Part("weights", start.weights, "as loaded, in blocks of the allocator"),
    ]
    if settings.more.adapters:
        slots, rank = settings.more.adapters.slots, settings.more.adapters.rank
        parts.append(Part("adapters", start.adapters, f"{slots} slots of rank {rank}, whether used or not"))
    if start.draft:
        parts.append(Part("draft model", start.draft, "what it does not share with the target"))
    requests = settings.batch.requests
    if versions.DEVICE_LEVEL.holds(settings.version):
        parts += [
            Part("buffers for batches", start.runner_buffers, "the model runner's"),
            Part("buffers per sequence", start.sampling_buffers, f"sampling state of {requests} sequences"),
            Part("workspaces", start.workspaces, "cuBLAS and kernels"),
            Part("segment slack", start.slack, "reserved and not allocated: what fragmentation costs"),
        ]
        headroom = start.headroom
    else:  # weights, the peak above what was there before, and growth outside torch: buffers are not charged
        headroom = start.headroom + start.workspaces
    parts.append(
        Part("activation peak", headroom, encoders.peak_of(shape, settings))
    )  # fmt: skip
    if question.non_torch_bytes:
        parts.append(Part("outside torch", question.non_torch_bytes, "loaded while the engine profiles, as given"))
    elif charged := _charged_outside(question.device, settings, shape):
        parts.append(Part("outside torch", charged, "this version charges what is there before it profiles"))
    if start.graphs_estimate:
        parts.append(Part("CUDA graphs, estimated", start.graphs_estimate, "the engine's own estimate"))
    if settings.more.cache_bytes is not None:
        left = question.device.capacity_bytes - sum(part.bytes for part in parts) - settings.more.cache_bytes
        parts.append(Part("not given to the cache", left, "kv_cache_memory_bytes decides, whatever is left"))
    return tuple(parts)


def _charged_outside(device: Device, settings: Settings, shape: Shape) -> int:
    """Bytes outside PyTorch that are charged though they come before the profile run: NCCL's communicators, and in 0.8
    all that is in use."""
    if versions.GROUPS_BEFORE.holds(settings.version):
        return 0
    every = sum(figure.bytes for figure in _outside(device, settings, shape))
    alone = sum(figure.bytes for figure in device.outside(Loads()))
    second = settings.more.second_engine and versions.has_second_engine(settings.version, device.capability)
    is_all = second and not versions.GROWTH_ALONE.holds(settings.version)
    return every if is_all else every - alone


def _outside(device: Device, settings: Settings, shape: Shape) -> tuple[Figure, ...]:
    """The memory in use on the card before the engine looks, so it is checked and not charged. Replicas that exchange
    tokens have a group of their own, and one with all ranks that share experts (distributed/parallel_state.py,
    ``initialize_model_parallel``). Until :data:`versions.GROUPS_BEFORE` NCCL is kept from the driver's virtual memory
    (vllm/env_override.py; removed by vllm#24141) and connects at once; of more than two ranks those amid a chain have
    most."""
    replicas = settings.more.data if shape.experts is not None else 1
    ranks = settings.tensor_parallel * settings.more.pipeline
    groups = [ranks, *([replicas, replicas * settings.tensor_parallel] if replicas > 1 else [])]
    if versions.GROUPS_BEFORE.holds(settings.version):
        return device.outside(Loads(communicators=tuple(Communicator(ranks) for ranks in groups if ranks > 1)))
    groups += [ranks] if versions.GROUP_OF_EXPERTS.holds(settings.version) else []
    return device.outside(
        Loads(
            communicators=tuple(Communicator(ranks, place=int(ranks > 2)) for ranks in groups if ranks > 1),
            nccl_version=nccl_of(versions.torch_of(settings.version)), nccl_variables=(("NCCL_CUMEM_ENABLE", "0"),),
        )
    )  # fmt: skip


def _free_bytes(device: Device, settings: Settings, shape: Shape) -> int:
    """The free bytes of the card before the engine starts."""
    if settings.more.outside is not None:
        return max(0, device.capacity_bytes - settings.more.outside)
    return max(0, device.capacity_bytes - sum(figure.bytes for figure in _outside(device, settings, shape)))


def _refusal(
    question: Question, settings: Settings, shape: Shape, layout: Layout, start: Start, cache: KVCache
) -> str | None:
    """The error of an engine that does not start, and the settings that would start it."""
    device = question.device
    free = _free_bytes(device, settings, shape)
    requested = ceil(device.capacity_bytes * settings.utilization)
    if max(start.consumed, start.loading) > free:
        loading = _gib(max(start.consumed, start.loading))
        return (
            f"CUDA out of memory while loading: weights and buffers take {loading} of {_gib(free)} GiB free on "
            f"{device.name}{_would_fit(start, free, settings.tensor_parallel)}"
        )
    given = settings.more.cache_bytes
    if given is not None and given + start.consumed > free:
        return (
            f"CUDA out of memory: a KV cache of {_gib(given)} GiB beside {_gib(start.consumed)} GiB of weights and "
            f"buffers is more than the {_gib(free)} GiB free on {device.name}; give --kv-cache-memory-bytes "
            f"{max(0, free - start.consumed - start.headroom)} or less"
        )
    if start.consumed + start.headroom > free:
        return (
            f"CUDA out of memory in the profile run: {_gib(start.consumed + start.headroom)} of {_gib(free)} GiB free "
            f"on {device.name}; give a smaller --max-num-batched-tokens or --max-num-seqs"
        )
    if requested > free:
        return (
            f"Free memory on device ({_gib(free)}/{_gib(device.capacity_bytes)} GiB) on startup is less than desired "
            f"GPU memory utilization ({settings.utilization:g}, {_gib(requested)} GiB)"
        )
    if not layout.groups:
        return None
    if cache.available_bytes <= 0:
        return "No available memory for the cache blocks. Try increasing gpu_memory_utilization"
    needed = layout.needed(settings.batch.length)
    if needed > cache.available_bytes:
        return (
            f"To serve at least one request with the model's max seq len ({settings.batch.length}), {_gib(needed)} GiB "
            f"KV cache is needed, which is larger than the available KV cache memory "
            f"({_gib(cache.available_bytes)} GiB); the estimated maximum model length is {cache.longest}"
        )
    return None


def _would_fit(start: Start, free: int, tp: int) -> str:
    """The number of cards that would do, by the weights, which are shared out."""
    more = next((count for count in (2, 4, 8) if start.loading / count < free), None)
    return f"; --tp {more * tp} would do" if more else "; no eight times as many cards would do"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _connected_bytes(question: Question) -> int:
    """Bytes of what NCCL connects when the profile run first sums over cards, in the groups of
    :data:`versions.GROUP_OF_EXPERTS`; 0 for one card, and where they come before it."""
    version, ranks = versions.checked(question.version), question.tensor_parallel_size
    if ranks < 2 or not versions.GROUPS_BEFORE.holds(version):
        return 0
    two = Loads(communicators=(Communicator(ranks), Communicator(ranks)))
    return sum(figure.bytes for figure in question.device.outside(two) if figure.name == "NCCL's buffers")


def _notes(question: Question, settings: Settings, shape: Shape) -> Iterator[str]:
    """The assumptions of an answer that a reader has to know, as sentences."""
    more, device = settings.more, question.device
    compiled, attention = not settings.eager, device.limits.vllm_attention
    yield from more.not_counted
    if more.offloaded_bytes:
        yield "weights are moved to the host by whole parameters, so up to one more than --cpu-offload-gb says"
    if more.pools:
        yield "a model that pools: no sampler and no head; what its pooler takes is not followed"
    if compiled and not settings.cold:
        yield "a warm start; the first one on a machine compiles, and charges that as activations: see --cold"
        if attention not in _RECORDED_ATTENTION:
            yield "CUDA graphs with kernels other than FlashAttention's are followed by their source only"
    if compiled and more.speculation:
        yield "activations are taken as in eager mode where tokens are drafted, and graphs of the draft as none"
    if compiled and more.pipeline > 1:
        yield "compiled stages of a pipeline, and their graphs, are followed by the engine's source only"
    if shape.kind in deltanet.KINDS and attention != FlashAttention3.name:
        yield "what gated delta nets warm up is followed with FlashInfer's kernels of compute capability 9.0 only"
    sums = collectives.in_words(device, settings.tensor_parallel)
    if sums is not None and settings.version >= versions.NEWEST:
        yield sums
    if more.host_cache_bytes:
        host = format_bytes(more.host_cache_bytes)
        yield f"KV offloading: {host} of pinned memory on the host of all cards together; the cards hold the same"
    if settings.version < versions.NEWEST:
        yield f"version {'.'.join(map(str, settings.version))} is followed by its source; 0.32 by recordings too"
    if not question.non_torch_bytes:
        yield from _notes_of_profiling(question)
    if question.model.checkpoint is not None:
        yield _note_of_checkpoint(question.model.checkpoint, shape)
    yield from encoders.notes(shape, question.model, settings)
    yield from backend.notes(shape, settings.eager)
    yield from families.notes(shape, settings.eager)


def _notes_of_profiling(question: Question) -> Iterator[str]:
    """What takes memory while the engine profiles, and is taken as 0."""
    if connected := _connected_bytes(question):
        yield (
            f"NCCL connects {question.tensor_parallel_size} cards while the engine profiles, which takes about "
            f"{format_bytes(connected)} of the KV cache on each: --non-torch {round(connected / MIB)}MiB takes it away"
        )
    shared = "; here the host's processes, which share this memory, count too: 0.5 to 1.4 GiB in three logs"
    yield (
        "what CUDA loads while the engine profiles is taken as 0 (--non-torch): public logs of one card have 30 to 400 "
        f"MiB, which the KV cache has less{shared * question.device.unified_memory}"
    )


def _note_of_checkpoint(checkpoint: Checkpoint, shape: Shape) -> str:
    headless = "; it has no head of its own, as tied embeddings have none"
    return (
        f"the checkpoint's headers: {len(checkpoint.tensors):,} tensors, {format_bytes(checkpoint.bytes)}"
        f"{headless * (not checkpoint.has_head and not shape.tied)}"
    )


ENGINE: Any = VLLM()
