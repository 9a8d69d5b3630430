"""``torch.cuda`` and ``torch.accelerator`` as a script finds them on a machine with one card.

Most of ``torch.cuda`` is Python over a few C functions. Those are replaced, so that PyTorch's own Python runs above
them; questions about memory go to :mod:`graphmem.capture.device.memory_answers`. Names of features that are not
modelled (allocators of one's own) raise :class:`CaptureError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from graphmem.base import deferred
from graphmem.base.imports import watched_imports
from graphmem.capture.device.memory_answers import Answers, patch_memory
from graphmem.capture.device.pretend_device import CUDA_MODULES, ShownCard, cards
from graphmem.capture.device.watched_imports import bitsandbytes_without_card
from graphmem.capture.patches import Patches, constant
from graphmem.capture.torch_internals import FakeTensor, compute_elementwise_output_strides
from graphmem.capture.values import generators
from graphmem.capture.values.callers import user_line
from graphmem.capture.values.known_values import KnownValues
from graphmem.devices import Device
from graphmem.errors import CaptureError
from graphmem.torch_names import private

if TYPE_CHECKING:
    from graphmem.capture.record.recorder import Recorder

#: Bound before it is replaced.
_GENERATOR: Any = torch.Generator
#: A card's generator's state: seed and offset, eight bytes each (ATen/cuda/CUDAGeneratorImpl.cpp).
_STATE_BYTES = 16


def patch_cuda_namespace(patches: Patches, shown_card: ShownCard, book: Recorder, values: KnownValues) -> None:
    """Make ``torch.cuda`` answer for a card, whose memory ``book`` knows, and generators take states that ``values``
    knows."""
    patches.table(torch._C, {f"_cuda_{name}": function for name, function in _C_FUNCTIONS.items()})
    patches.set(torch._C, "_cuda_getCurrentRawStream", lambda *_: book.streams.current)
    patches.set(torch._C, "_CudaDeviceProperties", _Properties)
    _patch_functions(patches, shown_card)
    _patch_generators(patches, values)
    patches.table(
        torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), constant(0))
    )
    patches.table(torch.cuda.profiler, dict.fromkeys(("start", "stop"), constant(None)))
    _patch_backends(patches)
    for names, reason in _REFUSED.items():
        patches.where_found(CUDA_MODULES, {name: _refusal(f"torch.cuda.{name}", reason) for name in names})
    _patch_accelerator(patches)
    patch_memory(patches, shown_card, book)


@contextlib.contextmanager
def card_at_import(device: Device) -> Iterator[None]:
    """Let a user's file that chooses its device while it is imported choose the card, as it would beside one.

    The compiler, which remembers the functions of ``torch.cuda`` that it finds when it is imported, or is first asked
    for one (``get_torch_obj_rule_map``, torch/_dynamo/trace_rules.py), finds PyTorch's own, where it waited too.
    """
    with Patches() as patches:
        _patch_functions(patches, ShownCard(device))
        patches.around(torch, {"compile": _compile})
        importing = watched_imports({"torch._dynamo": _import_compiler}, patches.threads.only(lambda: True))
        with importing, deferred.running(Patches.lifted), bitsandbytes_without_card(patches.threads):
            yield


def _compile(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    with Patches.lifted():
        return original(*args, **kwargs)


def _import_compiler(_: ModuleType, import_it: Callable[[], None]) -> None:
    with Patches.lifted():
        import_it()


# --- C functions under torch.cuda -------------------------------------------------------------------------------------

_HOST_STATISTICS = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
_HOST_TIMES = ("host_alloc_time", "host_free_time")


def _host_memory_stats(*_: object) -> dict[str, object]:
    counted = {kind: {"current": 0, "peak": 0, "allocated": 0, "freed": 0} for kind in _HOST_STATISTICS}
    timed = {kind: {"total": 0, "max": 0, "min": 0, "count": 0, "avg": 0} for kind in _HOST_TIMES}
    return {**counted, **timed, "num_host_alloc": 0, "num_host_free": 0}


def _jiterator(
    code: str, name: str, return_by_ref: bool, outputs: int, tensors: Sequence[torch.Tensor], extra: dict[str, object]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Outputs of a kernel written as text (``torch.cuda.jiterator``): those of an elementwise operator with type
    promotion (``CompileAndLaunchKernel``, ATen/cuda/jiterator.cu, 2.13)."""
    del code, name, return_by_ref, extra
    lost = "kernels of torch.cuda.jiterator cannot be followed"
    kinds = private("torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND", lost)
    _, dtype = private("torch._prims_common.elementwise_dtypes", lost)(*tensors, type_promotion_kind=kinds.DEFAULT)
    expanded = torch.broadcast_tensors(*tensors)
    strides = compute_elementwise_output_strides(*expanded)
    made = [torch.empty_strided(expanded[0].shape, strides, dtype=dtype, device=cards().own) for _ in range(outputs)]
    return made[0] if outputs == 1 else tuple(made)


#: By their names without ``_cuda_``.
_C_FUNCTIONS: dict[str, Callable[..., object]] = {
    **dict.fromkeys(("getDevice", "exchangeDevice", "maybeExchangeDevice", "get_sync_debug_mode"), constant(0)),
    **dict.fromkeys(
        (
            "init", "setDevice", "set_sync_debug_mode", "ipc_collect", "sleep", "resetPeakHostMemoryStats",
            "resetAccumulatedHostMemoryStats",
        ),
        constant(None),
    ),
    "getAllocatorBackend": constant("native"),
    "canDeviceAccessPeer": constant(False),
    "cudaCachingAllocator_is_enabled": constant(True),
    "jiterator_compile_and_launch_kernel": _jiterator,
    "hostMemoryStats": _host_memory_stats,
}  # fmt: skip


# --- torch.cuda -------------------------------------------------------------------------------------------------------


class _Properties(SimpleNamespace):
    """``torch.cuda.get_device_properties``; that its name and its memory were asked for is noted."""

    _noted: ClassVar[dict[str, str]] = {"name": "name", "total_memory": "total_bytes"}

    def __init__(self, shown_card: ShownCard, **known: object) -> None:
        super().__init__(**known)
        super().__setattr__("_shown_card", shown_card)

    def __getattr__(self, name: str) -> object:
        if name in self._noted:
            return getattr(vars(self)["_shown_card"], self._noted[name])()
        raise AttributeError(f"the property {name} of this card is not known to graphmem")

    @property
    def L2_cache_size(self) -> int:  # noqa: N802 - PyTorch's name; libraries ask the class whether it has it
        shown_card: ShownCard = vars(self)["_shown_card"]
        return shown_card.l2_cache_bytes()

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self._noted} | vars(self)
        del shown["_shown_card"]
        return f"_CudaDeviceProperties({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _properties(shown_card: ShownCard) -> _Properties:
    device, limits = shown_card.card, shown_card.card.limits
    major, minor = device.capability
    return _Properties(
        shown_card,
        major=major,
        minor=minor,
        multi_processor_count=device.sm_count,
        max_threads_per_multi_processor=device.max_threads_per_sm,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=limits.block_shared_bytes,
        shared_memory_per_multiprocessor=limits.shared_bytes,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=1,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _patch_functions(patches: Patches, shown_card: ShownCard) -> None:
    answers = {
        "is_available": True,
        "is_initialized": True,
        "_lazy_init": None,
        "init": None,
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device", "current_device"), cards().own.index),
        **dict.fromkeys(("get_device_properties", "_get_device_properties"), _properties(shown_card)),
        "device_count": cards().count,
        "get_arch_list": ["sm_{}{}".format(*shown_card.card.capability)],
        "get_gencode_flags": "",
        "is_tf32_supported": shown_card.card.limits.bfloat16,
        "list_gpu_processes": "GPU:0\nno processes are running",
        "initial_seed": 0,
        "cudart": _Runtime(),
        "check_error": None,
        "is_current_stream_capturing": False,
        **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate", "memory_usage"), 0),
    }
    seeding = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")
    functions: dict[str, Callable[..., object]] = {
        **{name: constant(answer) for name, answer in answers.items()},
        **dict.fromkeys(seeding, lambda *_, **__: generators.seed_device()),
        "mem_get_info": Answers(shown_card, None).free_and_total,
        "set_device": check_device,
        "get_rng_state": lambda *_, **__: torch.empty(_STATE_BYTES, dtype=torch.uint8),
        "get_rng_state_all": lambda *_, **__: [torch.empty(_STATE_BYTES, dtype=torch.uint8)],
    }
    patches.where_found(CUDA_MODULES, functions)


class _Runtime:
    """``torch.cuda.cudart()``: calls succeed (0), as those that start and stop a profiler."""

    def cudaMemGetInfo(self, *_: object) -> tuple[int, ...]:  # noqa: N802
        free_and_total: tuple[int, ...] = torch.cuda.mem_get_info()
        return free_and_total

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *_: 0


def check_device(device: object) -> None:
    """Raise :class:`CaptureError` for a device that an analysis does not follow: another kind, or a second card."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type not in ("cuda", "cpu", "meta"):
        raise CaptureError(f"an analysis follows a CUDA card, and the step asks for the device {device.type!r}")
    index = device.index if isinstance(device, torch.device) else device
    if isinstance(index, int) and index >= 0 and index != (own := cards().own.index):
        raise CaptureError(
            f"{user_line() or 'the step'}: cuda:{index} is asked for, and an analysis follows one card, cuda:{own}, "
            "however many a program sees (--cards); analyse each card's part on its own"
        )


# --- generators, backends --------------------------------------------------------------------------------------------


def _patch_generators(patches: Patches, values: KnownValues) -> None:
    """A device generator is one on the host that shows the card: no random number is drawn during an analysis.

    A state that came by way of the card, as accelerate's that it broadcasts, is a fake tensor; one that nobody knows
    leaves the generator where it is, as does a card's, which libraries read for their kernels and set to go on."""

    class GeneratorType(type(_GENERATOR)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, _GENERATOR)

    class Generator(_GENERATOR, metaclass=GeneratorType):  # type: ignore[misc]
        def __new__(cls, device: int | str | torch.device = "cpu") -> torch.Generator:
            self = super().__new__(cls, "cpu")
            on_host = not isinstance(device, int) and torch.device(device).type == "cpu"
            self.device_shown = torch.device("cpu") if on_host else cards().own
            return self

        @property
        def device(self) -> torch.device:
            return self.device_shown

        def get_state(self) -> torch.Tensor:
            on_card = self.device_shown.type != "cpu"
            return torch.zeros(_STATE_BYTES, dtype=torch.uint8, device="cpu") if on_card else super().get_state()

        def set_state(self, new_state: torch.Tensor) -> torch.Generator:
            if new_state.numel() == _STATE_BYTES:
                return self
            known = values.of(new_state) if isinstance(new_state, FakeTensor) else new_state
            return self if known is None else super().set_state(known)

    patches.set(torch, "Generator", Generator)
    patches.set(torch.cuda, "default_generators", (Generator(cards().own),) * cards().count)


#: Of PyTorch 2.13's wheels: their CUDA, and the cuDNN of the recordings that the rules were checked against.
_CUDA_VERSION, _CUDNN_VERSION = "13.0", 92000
#: ``CUFFT_DEFAULT_CACHE_SIZE``, ATen/native/cuda/CuFFTPlanCache.h.
_FFT_PLANS = 4096


def _patch_backends(patches: Patches) -> None:
    patches.set(torch.backends.cuda, "is_built", constant(True))
    patches.table(torch.backends.cudnn, {"is_available": constant(True), "version": constant(_CUDNN_VERSION)})
    if torch.version.cuda is None:
        patches.set(torch.version, "cuda", _CUDA_VERSION)
    plans = SimpleNamespace(max_size=_FFT_PLANS, size=0, clear=lambda: None)
    patches.set(torch.backends.cuda.cuFFTPlanCacheManager, "__getitem__", constant(plans))


# --- what is not modelled ---------------------------------------------------------------------------------------------

_REFUSED = {
    ("CUDAPluggableAllocator", "change_current_allocator", "caching_allocator_alloc", "caching_allocator_delete",
     "caching_allocator_enable", "caching_allocator_disabled"): (
        "memory outside PyTorch's own allocator is not modelled; analyse the step without it"
    ),
    ("current_blas_handle", "current_solver_handle", "GreenContext"): "an analysis has no driver behind it",
}  # fmt: skip


def _refusal(name: str, reason: str) -> type:
    """Something that can be called, entered or tested against, and raises when it is used."""

    class Refused:
        def __init__(self, *_: object, **__: object) -> None:
            raise CaptureError(f"{name} cannot be analysed: {reason}")

    Refused.__name__ = Refused.__qualname__ = name.rpartition(".")[2]
    return Refused


# --- torch.accelerator ------------------------------------------------------------------------------------------------


_LOST_INDEX = "torch.accelerator.device_index asks for a driver"


def _patch_accelerator(patches: Patches) -> None:
    answers = {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "device_count": cards().count,
        **dict.fromkeys(("current_device_index", "current_device_idx"), cards().own.index),
        "empty_host_cache": None,
    }
    patches.table(torch.accelerator, {name: constant(answer) for name, answer in answers.items()})
    patches.table(torch.accelerator, dict.fromkeys(("set_device_index", "set_device_idx"), check_device))

    def exchanged(device: int) -> int:
        check_device(device)
        return int(cards().own.index)

    for name in ("exchangeDevice", "maybeExchangeDevice"):  # ``torch.accelerator.device_index``
        patches.replace(f"torch._C._accelerator_{name}", _LOST_INDEX, exchanged)
