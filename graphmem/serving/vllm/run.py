"""The allocations of a rank of the engine, recorded as a Trace while its code is followed.

The modules of this package are the engine's own, in its order: making one asks for its weights, calling one for its
output. A tensor lives until it is freed here, where the engine's Python lets go of it: a frame that still holds a name
holds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphmem.devices import Device
from graphmem.trace import Category, EventKind, TraceBuilder

if TYPE_CHECKING:
    from graphmem.serving.vllm.layers import Linear, LinearMethod

#: ``_scoped_allocator_max_split`` (v1/worker/gpu_worker.py): the least that PyTorch allows.
MAX_SPLIT = "max_split_size_mb:20"
#: Indices of streams beside the default one: where graphs are captured, the engine's own, and the one beside it.
CAPTURE_STREAM, OWN_STREAM, AUXILIARY_STREAM = 1, 2, 3


@dataclass(frozen=True)
class Batch:
    """The limits of a batch: tokens, requests, and the length of one; and the tokens of a block of the KV cache."""

    tokens: int
    requests: int
    length: int
    block_size: int

    @property
    def profiled_requests(self) -> int:
        """Requests of the profile run: one token each at least."""
        return min(self.tokens, self.requests)


@dataclass(frozen=True)
class ExpertRanks:
    """The distribution of experts: whole ones over ``ranks`` (``--enable-expert-parallel``), or slices of each over
    ``slices``. ``redundant``: copies of busy ones among all; ``balanced``: their load is watched. ``data``: replicas
    whose batches are gathered before the experts; ``sliced``: each tensor parallel rank takes its slice of the tokens
    there (``use_sequence_parallel_moe``, config/parallel.py)."""

    ranks: int = 1
    slices: int = 1
    redundant: int = 0
    balanced: bool = False
    data: int = 1
    sliced: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor on the device: the index of its storage, and its bytes."""

    storage: int
    bytes: int


class Run:
    """One rank while it loads a model and runs it. ``tp`` ranks share it, ``alloc_conf`` is the text of
    ``PYTORCH_CUDA_ALLOC_CONF``."""

    def __init__(self, source: str, device: Device, cublas_bytes: int, batch: Batch, tp: int, alloc_conf: str) -> None:
        self.builder = TraceBuilder(source)
        self.batch_limits = batch
        self.device = device
        self.tp = tp
        self._alloc_conf = alloc_conf.strip().rstrip(",")
        self._cublas_bytes = cublas_bytes
        self._cublas_streams: set[int] = set()
        self._phase = self.builder.phase(0, "start")
        self._operator = self.builder.operator("init", "", self._phase)
        self.category = Category.UNKNOWN
        self._scratch: Tensor | None = None
        self._kept: dict[tuple[str, int], Tensor] = {}
        #: Parameters that are replaced when loading is done, by name.
        self.named: dict[str, Tensor] = {}
        #: The module whose code runs.
        self.module = ""
        #: Whether the profile run runs, in which no attention does.
        self.profiling = False
        #: Whether what runs is a model as torch.compile made it.
        self.compiled = False
        #: Whether the machine has not met the model before.
        self.cold = False
        #: Whether the engine's own operators outside of compiled code run as torch operators, as they do where the
        #: model is compiled (``CustomOp.dispatch_forward``, model_executor/custom_op.py).
        self.native = False
        #: Whether attention takes queries in eight bits, which are made of those that were turned.
        self.narrow_queries = False
        #: Whether the scratch of experts stays once it is there.
        self.keeps_scratch = True
        #: Rotary tables that were made, by what tells them apart: the engine keeps one for equal arguments.
        self.ropes: set[object] = set()
        #: How layers of experts are shared out.
        self.experts = ExpertRanks(slices=tp)
        #: How an encoder keeps its weights, None where they stay as they are, and its linear layers.
        self.encoder_linear: LinearMethod | None = None
        self.encoder_layers: list[Linear] = []
        self._stream = 0
        self._pool = 0

    @contextmanager
    def phase(self, name: str, category: Category) -> Iterator[None]:
        """A stage of the engine's start, and the purpose of its allocations."""
        before = self._phase, self._operator, self.category
        self._phase = self.builder.phase(0, name)
        self._operator = self.builder.operator(name, "", self._phase)
        self.category = category
        yield
        self._phase, self._operator, self.category = before

    @contextmanager
    def limited_split(self, applies: bool) -> Iterator[None]:
        """The allocator does not split blocks from 20 MiB on, where that ``applies``."""
        if not applies:
            yield
            return
        text = f"{self._alloc_conf},{MAX_SPLIT}" if self._alloc_conf else MAX_SPLIT
        self.builder.allocator_settings(text, self._operator)
        yield
        self.builder.allocator_settings(self._alloc_conf, self._operator)

    def enter(self, module: str) -> None:
        """The module whose code runs from now on."""
        self.module = module
        self._operator = self.builder.operator(module, module, self._phase)

    @contextmanager
    def placed(self, stream: int, pool: int = 0) -> Iterator[None]:
        """A context whose allocations are on this stream, and in this private pool."""
        before = self._stream, self._pool
        self._stream, self._pool = stream, pool
        yield
        self._stream, self._pool = before

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A context whose allocations are on the auxiliary stream (``aux_stream``, utils/torch_utils.py)."""
        with self.placed(AUXILIARY_STREAM, self._pool):
            yield

    def new(self, size: int, label: str = "", category: Category | None = None) -> Tensor:
        """A tensor of ``size`` bytes."""
        kind = self.category if category is None else category
        index = self.builder.alloc(size, self._operator, kind, label=label, stream=self._stream, pool=self._pool)
        return Tensor(index, size)

    def free(self, *tensors: Tensor) -> None:
        """Nothing refers to them any more."""
        for tensor in tensors:
            self.builder.free(tensor.storage, self._operator)

    def replacing(self, *tensors: Tensor) -> Tensor:
        """The last of these, which was made of the others or while somebody held them; they are let go now."""
        *held, made = tensors
        self.free(*held)
        return made

    @contextmanager
    def as_compiled(self) -> Iterator[None]:
        """What runs is a model as torch.compile made it."""
        self.compiled = True
        yield
        self.compiled = False

    def narrowed(self, values: int) -> list[Tensor]:
        """Queries of so many values in eight bits, where attention takes them so."""
        return [self.new(values, "queries in eight bits")] if self.narrow_queries else []

    def temporary(self, *sizes: int) -> None:
        """Tensors that live together for one call."""
        self.free(*[self.new(size) for size in sizes])

    def matmul(self, size: int, label: str = "") -> Tensor:
        """A product by cuBLAS, whose workspace comes with the first on a stream and stays (CublasHandlePool.cpp)."""
        result = self.new(size, label)
        self.cublas_workspace()
        return result

    def cublas_workspace(self) -> None:
        """Take the workspace of cuBLAS on this stream."""
        if self._stream not in self._cublas_streams:
            self._cublas_streams.add(self._stream)
            self.new(self._cublas_bytes, "cuBLAS workspace", Category.WORKSPACE)

    def scratch(self, size: int) -> None:
        """``WorkspaceManager.get_simultaneous``: the engine's own scratch grows to this size, and stays. The former one
        is let go first, and the allocator's cache emptied."""
        if self._scratch is not None and self._scratch.bytes >= size:
            return
        if self._scratch is not None:
            self.free(self._scratch)
        self.empty_cache()
        self._scratch = self.new(size, "scratch of experts", Category.WORKSPACE)

    def once(self, name: str, size: int) -> None:
        """A buffer of a kernel that is asked for once on a stream, and stays."""
        key = (name, self._stream)
        if key not in self._kept:
            self._kept[key] = self.new(size, name, Category.WORKSPACE)

    def leave_default_stream(self) -> None:
        """From now on everything runs on a stream of the engine's own."""
        if self._stream == 0:
            self._stream = OWN_STREAM

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context for the layers that this rank has and does whole, as if there were no others."""
        ranks, self.tp = self.tp, 1
        yield
        self.tp = ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, out of place: the operand's frame still holds it (device_communicators)."""
        if self.tp == 1:
            return tensor
        return self.replacing(tensor, self.new(tensor.bytes, "all-reduced"))

    def all_gather(self, part: Tensor, label: str) -> Tensor:
        """The parts of all ranks: gathered, then put side by side; the operand's frame holds it until then."""
        if self.tp == 1:
            return part
        gathered = self.new(part.bytes * self.tp, "gathered")
        return self.replacing(gathered, part, self.new(gathered.bytes, label))

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache``."""
        self.builder.event(EventKind.EMPTY_CACHE, self._operator)

    @property
    def last(self) -> int:
        """The index of the last event so far."""
        return len(self.builder.rows) - 1
