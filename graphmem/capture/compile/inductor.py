"""Inductor without a card: its questions about the device are answered, its kernels are never built.

Written against ``torch/_inductor`` and ``torch/_dynamo/device_interface.py`` of PyTorch 2.13. These are replaced: the
device interface, the compilation of Triton and C++ kernels, the C functions with which generated code allocates and
views buffers (``torch/csrc/dynamo/guards.cpp``), the check of pointer alignment, and the timing of padded matrix
products. Everything else, from fusion to the reuse of buffers, is Inductor's.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from graphmem.base import versions
from graphmem.base.files import own_compiler_folder
from graphmem.capture.compile.functional import patch_functional_tensors
from graphmem.capture.compile.graph_trees import GraphTrees
from graphmem.capture.device.fake_results import view_of
from graphmem.capture.device.pretend_device import cards
from graphmem.capture.patches import Patches, constant
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode, disable_current_modes
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"
_Function = Callable[..., object]
#: The function itself: ``torch.empty_strided`` is replaced in captures, for devices that programs name.
_EMPTY: Callable[..., torch.Tensor] = torch.empty_strided

#: Before, the compiler refuses inputs that are fake tensors of another mode than its own.
_CLONES_INPUTS_SINCE = (2, 11)
_MODULES = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.triton",
    "torch._inductor.cudagraph_trees",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.graph",
    "torch._inductor.lowering",
    "torch._inductor.scheduler",
)


@contextlib.contextmanager
def pretend_inductor(device: Device, recorder: Recorder, assumed: Counter[Diagnostic]) -> Iterator[None]:
    """Let Inductor compile for the pretended ``device``; ``assumed`` counts decisions that a card makes by timing."""
    import_compiler()
    trees = GraphTrees(recorder)
    settings = {"force_disable_caches": True, "compile_threads": 1}
    _forget_device()
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_device)
        patches = stack.enter_context(Patches())
        stack.callback(trees.forget)
        stack.enter_context(private("torch._inductor.config.patch", _LOST)(settings))
        stack.enter_context(own_compiler_folder())
        _patch_device(patches, device)
        _patch_mode(patches)
        patch_functional_tensors(patches)
        _allow_factories()
        _patch_triton(patches)
        _patch_kernels(patches, recorder)
        _patch_buffers(patches)
        _patch_constants(patches)
        _leave_out_settings(patches, assumed)
        trees.patch(patches)
        _assume_padding(patches, assumed)
        yield


def import_compiler() -> None:
    """Import the compiler as if there were no pretence: its tables hold the functions that it finds."""
    with Patches.lifted(), disable_current_modes():
        for name in _MODULES:
            importlib.import_module(name)
        trace_rules = private("torch._dynamo.trace_rules", _LOST)
        variable = private("torch._dynamo.variables.torch.TorchInGraphFunctionVariable", _LOST)

        variable._get_handlers()
        trace_rules.get_torch_obj_rule_map()
        trace_rules.get_tensor_method()


def keep_tables(patches: Patches) -> None:
    """Fill the tables again where PyTorch empties them: ``init_process_group`` does (distributed_c10d.py)."""

    def emptied(original: Callable[[], None]) -> None:
        original()
        import_compiler()

    patches.around(private("torch._dynamo.trace_rules", _LOST), {"clear_lru_cache": emptied})


def _forget_device() -> None:
    """Forget Inductor's stored facts of the device."""
    private("torch._inductor.runtime.hints.DeviceProperties", _LOST).create.cache_clear()
    for function in vars(private("torch._inductor.utils", _LOST)).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


# --- the device -------------------------------------------------------------------------------------------------------


def _patch_device(patches: Patches, device: Device) -> None:
    device_interface = private("torch._dynamo.device_interface", _LOST)

    device_interface.get_interface_for_device("cpu")  # fills the table
    properties = torch.cuda.get_device_properties(0)
    zero = ("current_device", "get_raw_stream", "exchange_device", "maybe_exchange_device", "memory_allocated")
    answers = {
        "get_device_properties": properties,
        **dict.fromkeys(zero, 0),
        **dict.fromkeys(("set_device", "synchronize", "raise_if_triton_unavailable")),
        "device_count": 1,
        "is_bf16_supported": True,
        "is_available": True,
        "get_compute_capability": device.capability[0] * 10 + device.capability[1],
        "is_triton_capable": device.limits.triton,
    }
    interface = device_interface.CudaInterface
    patches.table(interface, {name: staticmethod(constant(answer)) for name, answer in answers.items()})
    patches.set(interface.Worker, "get_device_properties", staticmethod(constant(properties)))
    patches.set(torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext())


def _patch_mode(patches: Patches) -> None:
    """The fake mode of the graph that is compiled is that of its context, whatever its inputs are: they are fake
    tensors of the capture. Since 2.11 ``detect_fake_mode`` (``torch/_guards.py``) does so itself."""
    if versions.version_of(torch.__version__) >= _CLONES_INPUTS_SINCE:
        return
    detect = private("torch._guards.detect_fake_mode", _LOST)

    def of_context(original: Callable[..., object], inputs: object = None) -> object:
        context = private("torch._guards.TracingContext.try_get", _LOST)()
        mode = None if context is None else context.fake_mode
        return original(inputs) if mode is None else mode

    _patch_wherever(patches, "detect_fake_mode", detect, of_context)

    def in_mode(
        original: Callable[..., object], inputs: list[object], settings: object, mode: FakeTensorMode, *args: object,
        **kwargs: object,
    ) -> object:  # fmt: skip
        """The same of inputs, which 2.11 clones into the graph's mode (``frontend_utils.py``)."""
        others = (isinstance(one, FakeTensor) and one.fake_mode is not mode for one in inputs)
        inputs = [mode.from_tensor(one) if other else one for one, other in zip(inputs, others, strict=True)]
        return original(inputs, settings, mode, *args, **kwargs)

    process = private("torch._functorch.aot_autograd", _LOST).process_inputs
    _patch_wherever(patches, "process_inputs", process, in_mode)


def _patch_wherever(patches: Patches, name: str, found: object, function: Callable[..., object]) -> None:
    """In every module of torch that has it by this name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and vars(module).get(name) is found:
            patches.around(module, {name: function})


def _allow_factories() -> None:
    """Dynamo takes the capture's factories into its graph, as it does PyTorch's."""
    for name in ("tensor", "as_tensor", "asarray"):
        private("torch._dynamo.allow_in_graph", _LOST)(getattr(torch, name))


# --- kernels ----------------------------------------------------------------------------------------------------------


class _Kernel:
    """Stands for a compiled kernel; launching it gives the buffers it writes first a name, and does nothing else."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name = name
        self._recorder = recorder

    def run(self, *args: object, **_: object) -> None:
        for argument in args:
            if isinstance(argument, torch.Tensor):
                self._recorder.storages.name_storage(argument, self._name)

    def __call__(self, *args: object, **kwargs: object) -> None:
        self.run(*args, **kwargs)


def _patch_triton(patches: Patches) -> None:
    """Triton counts as installed; whether it is changes nothing that is allocated."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch._inductor.") and callable(vars(module).get("has_triton")):
            patches.set(module, "has_triton", constant(True))
    patches.replace("torch.utils._triton.triton_hash_with_backend", _LOST, lambda: "")
    # By which compiled code is found again: a digest of all of Triton's files, as on a machine without a card.
    cache = private("torch._inductor.codecache.CacheBase", "compiling takes half a second more", None)
    patches.where_found([cache], {"get_system": staticmethod(constant({"hash": ""}))})
    codegen = private("torch._inductor.codegen.wrapper.PythonWrapperCodegen", _LOST)

    def header(self: Any) -> None:
        self.imports.splice(
            "from torch._inductor.runtime.triton_heuristics import start_graph, end_graph\n"
            "get_raw_stream = lambda _: 0\n"
            "grid = split_scan_grid = grid_combo_kernels = cooperative_reduction_grid = lambda *_, **__: None\n"
        )

    # The second one since 2.8, which the third calls; before 2.8 generated code computes each kernel's grid itself.
    names = ("write_triton_header_once", "write_get_raw_stream_header", "write_get_raw_stream_header_once")
    patches.where_found([codegen], dict.fromkeys(names, header))


def _patch_kernels(patches: Patches, recorder: Recorder) -> None:
    async_compile = private("torch._inductor.async_compile.AsyncCompile", _LOST)

    def named(_: object, name: str, *args: object, **kwargs: object) -> _Kernel:
        return _Kernel(name, recorder)

    def unnamed(*_: object, **__: object) -> _Kernel:
        return _Kernel("compiled kernel", recorder)

    # The last of them since 2.11.
    patches.where_found([async_compile], dict.fromkeys(("triton", "multi_kernel", "size_hint_multi_kernel"), named))
    patches.where_found([async_compile], dict.fromkeys(("cpp", "cpp_pybinding"), unnamed))
    # No compiler is asked which vectors the host has.
    vectors = private("torch._inductor.cpu_vec_isa", _LOST)
    patches.where_found([vectors], {"pick_vec_isa": constant(vectors.invalid_vec_isa)})
    # Not timed are the kernels of code that is to be kept, as it is written (``triton.autotune_at_compile_time``), and
    # whether several are quicker as one (``combo_kernels``), as all are that take less than 0.3 ms.
    codegen = private("torch._inductor.codegen.wrapper.PythonWrapperCodegen", _LOST)
    patches.where_found([codegen], {"generate_and_run_autotune_block": constant(None)})
    # Templates (flex attention) are modules, which import Triton, so that they can be timed.
    unloaded = SimpleNamespace(load=constant(SimpleNamespace(__file__="", key="")))
    patches.where_found([private("torch._inductor.select_algorithm", _LOST)], {"PyCodeCache": unloaded})
    scheduler = private("torch._inductor.scheduler.Scheduler", _LOST)
    patches.where_found([scheduler], {"speedup_by_combo_kernel": constant(True)})


# --- buffers ----------------------------------------------------------------------------------------------------------


def _patch_buffers(patches: Patches) -> None:
    functions: dict[str, Callable[..., object]] = {
        "_empty_strided_cuda": _empty_on(cards().own),
        "_empty_strided_cpu": _empty_on(torch.device("cpu")),
        "_reinterpret_tensor": _reinterpret,
        "assert_size_stride": constant(None),
        "assert_alignment": constant(None),
        "copy_if_misaligned": _aligned,
    }  # the younger ones are not there before 2.11
    guards = private("torch._C._dynamo.guards", _LOST)
    patches.where_found([guards], functions)
    patches.around(getattr(guards, "GuardManager", None), {"add_tensor_match_guard": _under_modes})
    patches.around(private("torch._dynamo.guards.GuardManagerWrapper", _LOST, None), {"check": _under_modes})
    patches.set(private("torch._inductor.utils", _LOST), "copy_misaligned_inputs", _align_inputs)


def _under_modes(original: Callable[..., object], *args: object) -> object:
    """The guard of a tensor compares the keys that it is dispatched by, with those of modes. They are on when it is
    asked, and off while code is compiled: made then, that of a real host tensor would fail at every call."""
    include = private("torch._C._IncludeDispatchKeyGuard", _LOST)
    keys = private("torch._C.DispatchKey", _LOST)
    with include(keys.Python), include(keys.PythonTLSSnapshot):
        return original(*args)


def _empty_on(device: torch.device) -> Callable[..., torch.Tensor]:
    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return _EMPTY(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    """No operator: the function makes a tensor of the storage, without the dispatcher."""
    offset += tensor.storage_offset()
    if type(tensor) is FakeTensor and not torch.is_grad_enabled():
        return view_of(tensor, tuple(size), tuple(stride), offset)
    return torch.as_strided(tensor, size, stride, offset)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its first element is not aligned. Addresses of storages always are."""
    if not tensor.storage_offset():
        return tensor
    alignment = private("torch._inductor.utils.ALIGNMENT", _LOST)
    clone_preserve_strides = private("torch._inductor.utils.clone_preserve_strides", _LOST)
    misaligned = tensor.storage_offset() * tensor.element_size() % alignment
    return clone_preserve_strides(tensor) if misaligned else tensor


def _align_inputs(
    inputs: list[Any], checked: Sequence[int], returned: Any = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """``copy_misaligned_inputs`` (``torch/_inductor/utils.py``)."""
    old, new = [], []
    for index in checked:
        tensor, inputs[index] = inputs[index], _aligned(inputs[index])
        if tensor is not inputs[index] and returned is not None and index in returned:
            old.append(tensor)
            new.append(inputs[index])
    return old, new


# --- constants --------------------------------------------------------------------------------------------------------


class _HostFactories(TorchDispatchMode):  # type: ignore[misc]
    """Makes on the host the tensors that the compiler would make on the card to know a value."""

    def __torch_dispatch__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prims.device_put.default:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _patch_constants(patches: Patches) -> None:
    """Let the compiler compute constants on the host, so that they take nothing on the card.

    Constant folding works on tensors of one element (``joint_graph.py``), which are freed when it is done; tracing
    follows the values of small tensors that are made of numbers, which a card would hold as long.
    """
    from torch.fx.experimental import proxy_tensor

    @contextlib.contextmanager
    def entered_on_host(original: Callable[[], contextlib.AbstractContextManager[object]]) -> Iterator[object]:
        with original() as mode, _HostFactories():
            yield mode

    patches.around(proxy_tensor, {"unset_fake_temporarily": entered_on_host})
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda _: True))
    folder = private("torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder", _LOST)
    names = ("_deduce_value", "create_unknown_value_placeholder")
    patches.around(folder, {name: _call_on_host for name in names if name in vars(folder)})


def _call_on_host(method: Callable[..., object], *args: object, **kwargs: object) -> object:
    with _HostFactories():
        return method(*args, **kwargs)


# --- what timing decides, and CUDA graphs -----------------------------------------------------------------------------

#: Settings of Inductor that are left out, and the remark.
_LEFT_OUT = {
    "max_autotune": Code.AUTOTUNING_LEFT_OUT,
}
_AUTOTUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


def _without(settings: dict[str, object] | None, assumed: Counter[Diagnostic]) -> dict[str, object] | None:
    """Inductor's settings without those that only a card can follow."""
    if not settings:
        return settings
    for name, code in _LEFT_OUT.items():
        if settings.get(name):
            assumed[code.about()] += 1
    return {name: value for name, value in settings.items() if name not in (*_LEFT_OUT, *_AUTOTUNING)}


def _leave_out_settings(patches: Patches, assumed: Counter[Diagnostic]) -> None:
    """Let ``compile_fx`` compile without the settings that only a card can follow; each is noted as ``assumed``."""

    def compile_fx(
        original: _Function, *args: object, config_patches: dict[str, object] | None = None, **others: object
    ) -> object:
        return original(*args, config_patches=_without(config_patches, assumed), **others)

    patches.around(private("torch._inductor.compile_fx", _LOST), {"compile_fx": compile_fx})


def _assume_padding(patches: Patches, assumed: Counter[Diagnostic]) -> None:
    """A product whose sides are not a multiple of 16 bytes may be faster with zeros around it. Inductor tries both and
    keeps on the disk which was the faster (``torch/_inductor/fx_passes/pad_mm.py``): here it finds that none is padded.
    """
    pad_mm = private("torch._inductor.fx_passes.pad_mm", _LOST)

    def found(_: str) -> bool:
        assumed[Code.PADDING_NOT_TIMED.about()] += 1
        return False

    patches.set(pad_mm, "get_cached_should_pad", found)
    for name in ("_should_pad", "_should_pad_bench"):  # the second before 2.11
        if hasattr(pad_mm, name):
            patches.set(pad_mm, name, inspect.unwrap(getattr(pad_mm, name)))  # the wrapper remembers for good
