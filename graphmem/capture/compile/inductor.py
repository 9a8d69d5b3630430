"""Inductor without a card: its questions about the device are answered, its kernels are never built.

Written against ``torch/_inductor`` and ``torch/_dynamo/device_interface.py`` of PyTorch 2.13. What is replaced: the
device interface, the compilation of Triton and C++ kernels, the C functions with which generated code allocates and
views buffers (``torch/csrc/dynamo/guards.cpp``), the check of pointer alignment, and the timing of padded matrix
products. Everything else, from fusion to the reuse of buffers, is Inductor's.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphmem.base import versions
from graphmem.base.files import own_compiler_folder
from graphmem.capture.compile.functional import patch_functional_tensors
from graphmem.capture.compile.graph_trees import GraphTrees
from graphmem.capture.compile.padding import follow_padding
from graphmem.capture.patches import Patches
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import FakeTensor, FakeTensorMode, TorchDispatchMode, disable_current_modes
from graphmem.devices import Device
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"

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
    """Let Inductor compile for the pretended ``device``; ``assumed`` counts what would be decided by timing."""
    import_compiler()
    patches = Patches()
    forget = _device_caches()
    trees = GraphTrees(recorder)
    settings = {"force_disable_caches": True, "compile_threads": 1}
    try:
        forget()
        with private("torch._inductor.config.patch", _LOST)(settings), own_compiler_folder():
            _patch_device(patches, device)
            _patch_mode(patches)
            patch_functional_tensors(patches)
            _allow_factories()
            _patch_triton(patches)
            _patch_kernels(patches, recorder)
            _patch_buffers(patches)
            _patch_constants(patches)
            _patch_timing(patches, assumed)
            trees.patch(patches)
            follow_padding(patches, device, recorder, assumed)
            yield
    finally:
        trees.forget()
        patches.undo()
        forget()


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


def _device_caches() -> Callable[[], None]:
    """Forgets what Inductor remembers of the device."""
    utils = private("torch._inductor.utils", _LOST)
    properties = private("torch._inductor.runtime.hints.DeviceProperties", _LOST)

    def forget() -> None:
        properties.create.cache_clear()
        for function in vars(utils).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    return forget


# --- the device -------------------------------------------------------------------------------------------------------


def _patch_device(patches: Patches, device: Device) -> None:
    device_interface = private("torch._dynamo.device_interface", _LOST)

    device_interface.get_interface_for_device("cpu")  # fills the table
    properties = torch.cuda.get_device_properties(0)
    answers: dict[str, Any] = {
        "get_device_properties": properties,
        "current_device": 0,
        "set_device": None,
        "device_count": 1,
        "synchronize": None,
        "get_raw_stream": 0,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "memory_allocated": 0,
        "is_bf16_supported": True,
        "is_available": True,
        "get_compute_capability": device.capability[0] * 10 + device.capability[1],
        "is_triton_capable": device.limits.triton,
        "raise_if_triton_unavailable": None,
    }
    interface = device_interface.CudaInterface
    for name, answer in answers.items():
        patches.set(interface, name, staticmethod(lambda *_, _answer=answer, **__: _answer))
    patches.set(interface.Worker, "get_device_properties", staticmethod(lambda *_, **__: properties))
    patches.set(torch.cuda, "_DeviceGuard", lambda _: contextlib.nullcontext())


def _patch_mode(patches: Patches) -> None:
    """The fake mode of the graph that is compiled is that of its context, whatever its inputs are: they are fake
    tensors of the capture. Since 2.11 ``detect_fake_mode`` (``torch/_guards.py``) says so itself."""
    if versions.version_of(torch.__version__) >= _CLONES_INPUTS_SINCE:
        return
    detect = private("torch._guards.detect_fake_mode", _LOST)

    def of_context(inputs: object = None) -> object:
        context = private("torch._guards.TracingContext.try_get", _LOST)()
        mode = None if context is None else context.fake_mode
        return detect(inputs) if mode is None else mode

    _patch_wherever(patches, "detect_fake_mode", detect, of_context)
    aot_autograd = private("torch._functorch.aot_autograd", _LOST)

    process = aot_autograd.process_inputs

    def in_mode(inputs: list[Any], settings: object, mode: FakeTensorMode, *args: object, **kwargs: object) -> object:
        """The same of inputs, which 2.11 clones into the graph's mode (``frontend_utils.py``)."""
        others = (isinstance(one, FakeTensor) and one.fake_mode is not mode for one in inputs)
        inputs = [mode.from_tensor(one) if other else one for one, other in zip(inputs, others, strict=True)]
        return process(inputs, settings, mode, *args, **kwargs)

    _patch_wherever(patches, "process_inputs", process, in_mode)


def _patch_wherever(patches: Patches, name: str, found: object, value: object) -> None:
    """In every module of torch that has it by this name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and vars(module).get(name) is found:
            patches.set(module, name, value)


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
            patches.set(module, "has_triton", lambda *_, **__: True)
    patches.replace("torch.utils._triton.triton_hash_with_backend", _LOST, lambda: "")
    codegen = private("torch._inductor.codegen.wrapper.PythonWrapperCodegen", _LOST)

    def header(self: Any) -> None:
        self.imports.splice(
            "from torch._inductor.runtime.triton_heuristics import start_graph, end_graph\n"
            "get_raw_stream = lambda _: 0\n"
            "grid = split_scan_grid = grid_combo_kernels = cooperative_reduction_grid = lambda *_, **__: None\n"
        )

    # The second one since 2.8, which the third calls; before 2.8 generated code computes each kernel's grid itself.
    for name in ("write_triton_header_once", "write_get_raw_stream_header", "write_get_raw_stream_header_once"):
        if hasattr(codegen, name):
            patches.set(codegen, name, header)


def _patch_kernels(patches: Patches, recorder: Recorder) -> None:
    async_compile = private("torch._inductor.async_compile.AsyncCompile", _LOST)

    def named(_: object, name: str, *args: object, **kwargs: object) -> _Kernel:
        return _Kernel(name, recorder)

    def unnamed(*_: object, **__: object) -> _Kernel:
        return _Kernel("compiled kernel", recorder)

    patches.set(async_compile, "triton", named)
    for name in ("multi_kernel", "size_hint_multi_kernel"):  # the second one since 2.11
        if hasattr(async_compile, name):
            patches.set(async_compile, name, named)
    for name in ("cpp", "cpp_pybinding"):
        patches.set(async_compile, name, unnamed)


# --- buffers ----------------------------------------------------------------------------------------------------------


def _patch_buffers(patches: Patches) -> None:
    utils = private("torch._inductor.utils", _LOST)

    guards = private("torch._C._dynamo.guards", _LOST)
    patches.set(guards, "_empty_strided_cuda", _empty_on("cuda"))
    patches.set(guards, "_empty_strided_cpu", _empty_on("cpu"))
    patches.set(guards, "_reinterpret_tensor", _reinterpret)
    answers: dict[str, Callable[..., Any]] = {
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "copy_if_misaligned": _aligned,
    }
    for name, answer in answers.items():
        if hasattr(guards, name):  # the younger ones are not there before 2.11
            patches.set(guards, name, answer)
    patches.set(utils, "copy_misaligned_inputs", _align_inputs)


def _empty_on(device: str) -> Callable[..., torch.Tensor]:
    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its first element is not aligned. Addresses of storages always are."""
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


class _OnHost(TorchDispatchMode):  # type: ignore[misc]
    """Computes on the host what the compiler would compute on the card to know its value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prims.device_put.default:
            return args[0]
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _patch_constants(patches: Patches) -> None:
    """Constant folding works on tensors of one element (``joint_graph.py``), which are freed when it is done; tracing
    follows the values of small tensors that are made of numbers, which a card would hold as long."""
    from torch.fx.experimental import proxy_tensor

    without_fakes = proxy_tensor.unset_fake_temporarily

    @contextlib.contextmanager
    def on_host() -> Iterator[Any]:
        with without_fakes() as mode, _OnHost():
            yield mode

    patches.set(proxy_tensor, "unset_fake_temporarily", on_host)
    patches.set(FakeTensorMode, "avoid_device_init", property(lambda _: True))
    folder = private("torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder", _LOST)

    for name in ("_deduce_value", "create_unknown_value_placeholder"):
        if name in vars(folder):
            patches.set(folder, name, _on_host(vars(folder)[name]))


def _on_host(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: object, **kwargs: object) -> object:
        with _OnHost():
            return method(*args, **kwargs)

    return run


# --- what timing decides, and CUDA graphs -----------------------------------------------------------------------------

#: Settings of Inductor that are left out, with what the reader is told.
_LEFT_OUT = {
    "triton.cudagraphs": Code.CUDA_GRAPHS_LEFT_OUT,
    "max_autotune": Code.AUTOTUNING_LEFT_OUT,
}
_AUTOTUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


def _without(settings: Any, assumed: Counter[Diagnostic]) -> Any:
    """Inductor's settings without those that only a card can follow."""
    if not settings:
        return settings
    left_out = dict(_LEFT_OUT)
    if not torch.is_grad_enabled():  # :mod:`graphmem.capture.compile.graph_trees`
        del left_out["triton.cudagraphs"]
    for name, code in left_out.items():
        if settings.get(name):
            assumed[code.about()] += 1
    return {name: value for name, value in settings.items() if name not in (*left_out, *_AUTOTUNING)}


def _patch_timing(patches: Patches, assumed: Counter[Diagnostic]) -> None:
    compile_fx = private("torch._inductor.compile_fx", _LOST)

    compile_graph = compile_fx.compile_fx

    def with_settings(*args: object, config_patches: object = None, **kwargs: object) -> object:
        return compile_graph(*args, config_patches=_without(config_patches, assumed), **kwargs)

    patches.set(compile_fx, "compile_fx", with_settings)
