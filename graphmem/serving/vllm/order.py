"""The engine's start from first to last: the allocations of one rank, as a Trace, and where the engine looks at it.

Followed from vllm 0.32.0, ``v1/worker/gpu_worker.py``: ``init_device``, ``load_model``, ``determine_available_memory``,
``initialize_from_config``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphmem.devices import Device
from graphmem.serving.vllm import families, graphs, versions
from graphmem.serving.vllm.attention import backend_for, quantises_queries
from graphmem.serving.vllm.compiling import compile_cold
from graphmem.serving.vllm.encoders.budget import Items
from graphmem.serving.vllm.kv_cache import Layout
from graphmem.serving.vllm.layers import COMPRESSED_TENSORS_TABLE, Unquantized
from graphmem.serving.vllm.lora import Slots
from graphmem.serving.vllm.models.base import Family, Shape, Tower
from graphmem.serving.vllm.run import ExpertRanks, Run, Tensor
from graphmem.serving.vllm.runner import RUNNERS
from graphmem.serving.vllm.settings import Settings
from graphmem.serving.vllm.speculation import Draft, speculator_for
from graphmem.trace import Category, TraceBuilder


@dataclass(frozen=True)
class Marks:
    """Events: the last before the engine looks first, where it has any, and before the weights; with them, with room
    for adapters, with a draft model, after loading; before and after the profile run."""

    base: int | None
    buffers: int
    weights: int
    adapted: int
    drafting: int
    loaded: int
    before: int
    after: int
    graphs: graphs.Marks | None


def start(
    settings: Settings,
    shape: Shape,
    layout: Layout,
    device: Device,
    alloc_conf: str,
    cublas_bytes: int,
    draft: Draft | None = None,
) -> tuple[TraceBuilder, Marks]:
    """The start of one rank up to where the engine knows the memory left, as a trace that is not built yet."""
    source = f"vLLM {'.'.join(map(str, settings.version))}"
    run = Run(source, device, cublas_bytes, settings.batch, settings.tensor_parallel, alloc_conf)
    run.experts, run.cold = _expert_ranks(settings, shape), settings.cold
    if settings.cards > 1:  # NCCL's communicators ask for the engine's own stream (``_init_comm``, pynccl.py)
        run.leave_default_stream()
    second = settings.more.second_engine and versions.has_second_engine(settings.version, device.capability)
    compiles = second and not settings.eager and settings.more.compiled
    run.native = compiles
    run.narrow_queries = quantises_queries(run.device, settings.cache_dtype)
    run.keeps_scratch = versions.SCRATCH_KEPT.holds(settings.version)
    speculator = speculator_for(run, settings.batch, draft) if draft is not None else None
    runner = RUNNERS[settings.runner](run, settings.batch, shape, speculator)
    version = settings.version
    runner.unsorted = versions.SAMPLES_UNSORTED.holds(version) or settings.more.flashinfer_samples
    runner.buffered = versions.SAMPLES_UNSORTED.holds(version) and not settings.more.flashinfer_samples
    runner.pools, runner.encodes = settings.more.pools, settings.more.encodes
    runner.samples_twice = versions.SAMPLES_TWICE.holds(version)
    base = _warm_cublas(run, shape.itemsize) if versions.CUBLAS_BEFORE.holds(version) else None
    with run.phase("buffers of the model runner", Category.BUFFER):
        runner.make()
    buffers = run.last
    with (
        run.limited_split(versions.SPLIT_WHILE_LOADING.holds(version)),
        run.phase("weights", Category.PARAMETER),
    ):
        run.encoder_linear = shape.encoder_linear
        tower = shape.encoder.tower(run, settings.batch) if shape.encoder is not None else None
        model = families.family(run, shape)
        if settings.more.pools and not shape.tied:  # ``as_embedding_model`` lets go of the head (models/adapters.py)
            run.free(model.head.weight)
        for size in shape.pooled:
            run.new(size, "score")
        if not shape.linear.online:  # else each layer is quantised as soon as it is loaded (reload/layerwise.py)
            run.empty_cache()
        if isinstance(shape.linear, Unquantized) and not shape.imports_compressed:
            run.once("table of compressed-tensors", COMPRESSED_TENSORS_TABLE)
        for layer in run.encoder_layers:
            layer.finish()
        model.finish()
        run.empty_cache()
        weights = run.last
        slots = model.adapt(settings.more.adapters) if settings.more.adapters else []
        adapted = run.last
        if speculator is not None:
            model.tap(speculator.taps(shape.layers))
            speculator.load(model)
        drafting = run.last
        with run.phase("buffers of sampling", Category.BUFFER):
            runner.after_loading(model)
    loaded = run.last
    run.empty_cache()
    before = run.last
    plain = not compiles or (draft is not None and draft.method != "ngram")
    forward = model.forward if plain else _compiled(model, run, shape, settings)
    with (
        run.limited_split(versions.SPLIT_WHILE_PROFILING.holds(version)),
        run.phase("profile run", Category.ACTIVATION),
    ):
        encoded = (
            _encoded(run, tower, settings, shape.encoder.items)
            if tower is not None and shape.encoder is not None and not settings.more.skip_mm_profiling
            else []
        )
        _fill(slots, settings)
        run.profiling = True
        runner.profile(model, forward)
        run.profiling = False
        run.free(*encoded)
    run.empty_cache()
    after = run.last
    captured = None
    if settings.capture_sizes and versions.GRAPHS_CHARGED.holds(version):
        kinds = graphs.Kinds(
            settings.more.graph_mode,
            draft.tokens if draft is not None else 0,
            2 if settings.more.adapters else 1,
            lambda: _fill(slots, settings),
        )
        captured = _captured(run, model, settings, shape, layout, kinds)
    return run.builder, Marks(base, buffers, weights, adapted, drafting, loaded, before, after, captured)


def _warm_cublas(run: Run, itemsize: int) -> int:
    """Two products of 16 by 16, one with a bias; the allocator's cache is emptied behind them."""
    with run.phase("cuBLAS", Category.WORKSPACE):
        operand = run.new(16 * 16 * itemsize)
        run.free(run.matmul(operand.bytes))
        run.free(run.matmul(operand.bytes), operand)
        run.empty_cache()
    return run.last


def _captured(
    run: Run, model: Family, settings: Settings, shape: Shape, layout: Layout, kinds: graphs.Kinds
) -> graphs.Marks:
    """The capture of graphs before there is a KV cache."""
    whole = settings.more.graph_mode != "PIECEWISE"
    backend = backend_for(run.device, shape, settings.tensor_parallel, whole=whole)
    tables = [graphs.block_table_bytes(settings.batch, layout.block_size) for _ in layout.groups]
    profile = graphs.GraphProfile(run, model, settings.batch, backend, len(shape.own.layers), kinds)
    with run.phase("CUDA graphs", Category.WORKSPACE):
        sizes, first = list(settings.capture_sizes), settings.runner == "V1"
        return profile.record(sizes, layout.block_bytes, tables, first_runner=first)


def _expert_ranks(settings: Settings, shape: Shape) -> ExpertRanks:
    """``FusedMoEParallelConfig.make``: experts are shared out over tensor and data parallel ranks together."""
    more, ranks = settings.more, settings.tensor_parallel * settings.more.data
    if not more.expert_parallel:
        return ExpertRanks(1, ranks, data=more.data)
    sliced = shape.kind in families.SLICED and settings.tensor_parallel > 1 and more.data > 1
    return ExpertRanks(ranks, 1, more.redundant_experts, more.balanced, more.data, sliced)


def _encoded(run: Run, tower: Tower, settings: Settings, items: Items) -> list[Tensor]:
    """The tensors of the encoder's profile run that stay until the language model's is done: the embeddings, and with
    the first runner their inputs (``batched_dummy_mm_inputs``, v1/worker/gpu_model_runner.py)."""
    inputs = tower.inputs()
    embeddings = tower.encode()
    if items.spread > items.embedded:  # the last of them stays besides, by its name in the loop
        size = sum(one.bytes for one in embeddings) // items.count * items.spread // items.embedded
        embeddings += [run.new(size, "embeddings among other tokens") for _ in range(items.count)]
    if settings.runner == "V1":
        return [*embeddings, inputs]
    run.free(inputs)
    return embeddings


def _fill(slots: list[Slots], settings: Settings) -> None:
    """Dummy adapters are put into all slots."""
    for _ in range(settings.more.adapters.slots if settings.more.adapters else 0):
        for one in slots:
            one.fill()


def _compiled(model: Family, run: Run, shape: Shape, settings: Settings) -> Callable[[int], Tensor]:
    """The forward pass as torch.compile makes it, which a machine that has not met the model before compiles first."""

    def forward(tokens: int) -> Tensor:
        if settings.cold:
            compile_cold(run, model, shape)
        return model.compiled(tokens, lambda tokens: None, graphs.plainly)

    return forward
