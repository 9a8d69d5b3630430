"""The layers of a capture: replacements over PyTorch while a step runs, in the order of their installation.

Each is a context that undoes itself, whatever happens inside. The order is one that works: a later layer finds the
replacements of earlier ones. A name that two layers replace is in the later one's ``again``. The table in
docs/ARCHITECTURE.md is made from :data:`LAYERS`:

    python -m graphmem.capture.session.layers docs/ARCHITECTURE.md
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graphmem.base import deferred
from graphmem.capture.patches import Patches
from graphmem.capture.session.doors import Asks, doors
from graphmem.capture.torch_internals import FakeTensorMode, disable_current_modes
from graphmem.diagnostics import Code, Diagnostic
from graphmem.torch_names import MissingName, private
from graphmem.training.processes import Processes

if TYPE_CHECKING:
    from graphmem.capture.compile import CompiledCode
    from graphmem.capture.device.backward_thread import Numbers
    from graphmem.capture.device.pretend_device import ShownCard
    from graphmem.capture.program.leaving import Leaving
    from graphmem.capture.record.modules import ModuleWatch
    from graphmem.capture.record.recorder import Recorder
    from graphmem.training.program import LibraryFunction, Steps


@dataclass
class Context:
    """The input of layers, and the objects they make for those after them and for the session."""

    shown_card: ShownCard
    recorder: Recorder
    processes: Processes | None
    leave_after: Steps | None = None
    shortens: bool = False
    ends_alike_loops: bool = True
    opens: Sequence[LibraryFunction] = ()
    numbers: Numbers | None = field(init=False, default=None)
    watch: ModuleWatch = field(init=False)
    leaving: Leaving | None = field(init=False, default=None)
    compiled: CompiledCode | None = field(init=False, default=None)

    def remark(self, found: Diagnostic) -> None:
        """Show the reader an assumption."""
        self.recorder.assumed.update([found])

    def lack(self, found: Diagnostic) -> None:
        """Show the reader what is not modelled."""
        self.recorder.unmodelled.update([found])


#: The doors of a layer that is installed when one of the functions that it replaces is called.
THERE: Final = ("the names that it replaces",)


@dataclass(frozen=True)
class Layer:
    """One layer. ``where``: its file below ``capture/``, which is imported when the layer is installed. ``entry``: the
    function of that file that installs it, given the arguments that ``given`` takes from the context, a ``patch_...``
    behind the :class:`Patches` to replace names with, any other to return a context; ``keeps`` stores the value of that
    one. ``replaces``: patterns (``*``) of the names that it replaces, operators of a dispatch key as
    ``aten::linear @ AutogradCUDA``. ``again``: those among them that an earlier layer has replaced already, on purpose.
    ``lost``: the loss where PyTorch lacks a name that the layer needs; empty where nothing can be answered then.

    A layer is for captures that it ``serves``. One with ``doors`` (paths of functions, :data:`THERE` for those that it
    replaces) or ``libraries`` (modules) is installed when one of those is called or imported first
    (:mod:`graphmem.capture.session.doors`), or at once where it ``is_due``; ``asks``: does a call need the layer.
    """

    name: str
    where: str
    why: str
    replaces: tuple[str, ...]
    entry: str
    given: Callable[[Context], tuple[object, ...]] = lambda _: ()
    keeps: Callable[[Context, Any], None] = lambda *_: None
    again: tuple[str, ...] = ()
    lost: str = ""
    doors: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    serves: Callable[[Context], bool] = lambda _: True
    is_due: Callable[[Context], bool] = lambda _: False
    asks: Asks = lambda *_, **__: True

    def waits(self, context: Context) -> bool:
        """True if it is installed when it is first needed."""
        return bool(self.doors or self.libraries) and not (self.is_due(context) or _is_loaded(self.libraries))

    def enter(self, context: Context, stack: contextlib.ExitStack) -> None:
        """Install it until ``stack`` is left, or put up its doors. Raises :class:`MissingName`."""
        if not self.waits(context):
            self._install(context, stack)
            return
        lost = self.lost or "what goes through it is followed from elsewhere, or not at all"
        functions = self.replaces if self.doors is THERE else self.doors
        stack.enter_context(doors(lambda: self._open(context, stack), functions, self.libraries, self.asks, lost))

    def _open(self, context: Context, stack: contextlib.ExitStack) -> None:
        """Install it in the middle of the step, which sees nothing of it."""
        with context.recorder.paused(), disable_current_modes():
            with Patches.lifted():
                self.function()
            self._install(context, stack)

    def _install(self, context: Context, stack: contextlib.ExitStack) -> None:
        try:
            stack.enter_context(self.installed(context))
        except MissingName as error:
            if not self.lost:
                raise
            context.lack(Code.NAME_GONE.about(path=error.path, lost=self.lost))

    @contextlib.contextmanager
    def installed(self, context: Context) -> Iterator[None]:
        """The layer as a context."""
        install, given = self.function(), self.given(context)
        if self.entry.startswith("patch_"):
            with Patches() as patches:
                install(patches, *given)
                yield
        else:
            with install(*given) as made:
                self.keeps(context, made)
                yield

    def function(self) -> Callable[..., Any]:
        """Its entry, of its file."""
        found: Callable[..., Any] = getattr(
            import_module(f"graphmem.capture.{self.where.replace('/', '.')}"), self.entry
        )
        return found


def _is_loaded(libraries: Sequence[str]) -> bool:
    """True if one of the libraries, or a part of one, was imported before."""
    if any(library in sys.modules for library in libraries):
        return True
    is_part = methodcaller("startswith", tuple(f"{library}." for library in libraries))
    return bool(libraries) and any(map(is_part, list(sys.modules)))


@contextlib.contextmanager
def fake_mode() -> Iterator[None]:
    """PyTorch's own mode, without its messages about shapes that do not fit: the error has them."""
    from graphmem.capture.device.fake_tensors import shapes_unheard

    with shapes_unheard(Patches().threads), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def _has_compiled(_: Context) -> bool:
    """True if something was compiled in this process before: then Dynamo may stand in the interpreter's place."""
    if deferred.is_waiting("torch._dynamo"):
        return False
    seen: Any = private("torch._dynamo.convert_frame.input_codes", "the compiler is followed from the beginning", None)
    return seen is None or bool(seen.seen) or "graphmem.capture.compile.regions" in sys.modules


#: Functions of ``torch.nn.init`` that every other one calls, or that call none.
_INITIALIZERS = (
    "_no_grad_uniform_", "_no_grad_normal_", "_no_grad_trunc_normal_", "_no_grad_fill_", "_no_grad_zero_", "eye_",
    "dirac_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_",
)  # fmt: skip

#: Packages with kernels of a card, and modules whose kernels are launched.
_WITH_KERNELS = (
    "triton", "triton.runtime.jit", "flash_attn", "xformers", "causal_conv1d", "mamba_ssm", "liger_kernel", "apex",
    "trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence",
)  # fmt: skip


LAYERS: tuple[Layer, ...] = (
    Layer(
        "settings",
        "session/settings",
        "scripts leave PyTorch's global switches as they set them, and a capture runs in its caller's process",
        (
            "torch._C._[gs]et_cudnn_*",
            "torch._C._[gs]et_cublas_allow_tf32",
            "torch._C._[gs]et_float32_matmul_precision",
            "torch._C._get_*_sdp_enabled",
            "torch._C._set_sdp_use_*",
            "torch._C._[gs]et_*_preferred_backend",
            "sys.setrecursionlimit",
            "torch._C._set_default_dtype",
            "torch._C._set_deterministic_algorithms",
            "torch.backends.ContextProp.*",
            "torch.*seed",
            "torch.*_rng_state",
        ),
        "same_settings",
    ),
    Layer(
        "threads",
        "record/started_threads",
        "a thread that the step starts belongs to the capture; every other one finds what was there before",
        ("threading.Thread.start",),
        "patch_threads",
        doors=THERE,
        lost="threads that the step starts are not followed",
    ),
    Layer(
        "fake tensors",
        "device/fake_tensors",
        "a device tensor is on `cuda:0` to Python and on `meta` to C++, with CUDA's dispatch keys",
        (
            "torch.Tensor.*",
            "torch.nn.parameter.Parameter.__deepcopy__",
            "torch.nn.parameter.Parameter.__new__",
            "torch._subclasses.fake_tensor.*",
            "torch.utils.swap_tensors",
        ),
        "patch_fake_tensors",
        lambda context: (context.recorder.values,),
    ),
    Layer(
        "tensors around others",
        "device/wrapper_tensors",
        "C++ would make them on the device that they name, which a build without CUDA ends the process over",
        (
            "torch.Tensor._make_wrapper_subclass",
            "torch._subclasses.fake_tensor.FakeTensor.get_nested_int",
        ),
        "patch_wrapper_tensors",
        lambda context: (context.recorder.wrappers,),
        lost="tensors around others, as of torchao, cannot be on the card",
        doors=THERE,
    ),
    Layer(
        "addresses",
        "device/addresses",
        "every storage that holds bytes has an address of its own, as on a card",
        ("torch.storage.UntypedStorage.data_ptr", "torch.Tensor.data_ptr"),
        "patch_addresses",
        doors=THERE,
    ),
    Layer(
        "factories",
        "device/factories",
        "C++ would ask a driver for the device that a new tensor is made on",
        (
            "torch.[a-z]*",
            "torch._shape_as_tensor",
            "torch.cuda.*Tensor",
            "torch.Tensor.new_tensor",
            "torch.Tensor.type",
            "torch._C._nn._parse_to",
            "torch.nn.parameter.Uninitialized*.__new__",
        ),
        "patch_factories",
    ),
    Layer(
        "numbered devices",
        "device/numbered_devices",
        "C++ would ask which accelerator this build has for `torch.device(0)`, and there may be none",
        (),
        "numbered_devices",
    ),
    Layer(
        "TorchScript",
        "device/torch_script",
        "its derivatives and its fuser begin in later runs; functions that ask for a device, `meta` in C++, are told "
        "the card, and modules that ask run as the Python that they are made of",
        (
            "torch.jit.script",
            "torch.jit.*ScriptFunction.__call__",
            "torch.ScriptMethod.__call__",
            "torch.autograd.*_engine_run_backward",
            "torch.jit.freeze",
            "torch.jit.optimize_for_inference",
            "torch.jit._builtins._find_builtin",
        ),
        "patch_torch_script",
        lambda context: (context.remark, context.recorder),
        lost="scripted functions and modules are refused",
        doors=(
            "torch.jit.script",
            "torch.jit.freeze",
            "torch.jit.optimize_for_inference",
            "torch.jit.ScriptFunction.__call__",
            "torch.ScriptMethod.__call__",
        ),
    ),
    Layer(
        "read-back",
        "device/reading_values",
        "numpy, lists and logs read values outside the dispatcher: those that are known, else what is assumed",
        (
            "torch.Tensor.numpy",
            "torch.Tensor.tolist",
            "torch.Tensor.item",
            "torch.Tensor.__[bifr]*__",
        ),
        "patch_reading",
        lambda context: (context.recorder.values, context.recorder.assumed_values),
    ),
    Layer(
        "data loaders",
        "device/data_loaders",
        "a worker process would have no capture: the batches that it sends are fetched here",
        (
            "torch.utils.data.dataloader.*",
            "torch.utils.data._utils.signal_handling.*",
            "torch.utils.data._utils.collate.default_collate_fn_map",
        ),
        "patch_data_loaders",
        lost="data loaders with workers cannot be followed",
        doors=("torch.utils.data.dataloader.DataLoader._get_iterator",),
        asks=lambda loader: loader.num_workers > 0,
    ),
    Layer(
        "unnoticed",
        "device/unnoticed",
        "a library that recognises fake tensors takes the path it keeps for exporters, which no card sees",
        (),
        "unnoticed",
        lost="a library that recognises fake tensors takes the path it keeps for exporters",
    ),
    Layer(
        "torch.cuda",
        "device/cuda_namespace",
        "scripts ask what card there is, and a machine without one must answer for the pretended card",
        (
            "torch.cuda.*",
            "torch._C._cuda_*",
            "torch._C._CudaDeviceProperties",
            "torch._C._accelerator_*",
            "torch.accelerator.*",
            "torch.backends.cuda.*",
            "torch.backends.cudnn.*",
            "torch.version.cuda",
            "torch.Generator",
        ),
        "patch_cuda_namespace",
        lambda context: (context.shown_card, context.recorder, context.recorder.values),
    ),
    Layer(
        "NVML",
        "device/nvml",
        "its Python bindings ask the driver's library which cards there are",
        ("*pynvml._LoadNvmlLibrary", "*pynvml._nvmlGetFunctionPointer"),
        "nvml_of_card",
        lambda context: (context.shown_card,),
        lost="NVML finds no card",
        libraries=("pynvml", "vllm.third_party.pynvml"),
    ),
    Layer(
        "driver's library",
        "device/driver_library",
        "extensions that are linked against the driver are not loaded without it, and their operators are missing",
        ("_imp.create_dynamic", "ctypes._dlopen"),
        "patch_driver_library",
        lost="extensions that need the driver's library are not loaded",
        doors=THERE,
    ),
    Layer(
        "training tools",
        "device/training_tools",
        "optimizers group tensors by C++'s device, a gradient scaler decides on data, checkpointing on a device in use",
        (
            "torch._C._group_tensors_by_device_and_dtype",
            "torch.optim.optimizer._foreach_supported_types",
            "torch.*._has_foreach_support",
            "torch.amp.grad_scaler.GradScaler.*",
            "torch.utils.checkpoint._get_device_module",
            "torch.nn.parallel.data_parallel.DataParallel.*",
            "torch.optim.optimizer.Optimizer.zero_grad",
            "torch.nn.modules.module.Module.zero_grad",
        ),
        "patch_training_tools",
        lambda context: (context.recorder.card.torch_version,),
        lost="optimizers may update parameters one by one, and a gradient scaler asks values",
    ),
    Layer(
        "composites",
        "operators/composites",
        "composite operators (attention, dropout, batch norm, linear, …) would ask `is_cuda()` in C++; they call what "
        "CUDA's version calls",
        (
            "aten::* @ AutogradCUDA",
            "aten::* @ CUDA",
            "torch._subclasses.fake_impls.op_implementations_dict",
            "torch.Tensor.__getitem__",
            "torch._C._can_use_*_attention",
        ),
        "cuda_composites",
        lambda context: (context.recorder.card, context.recorder.values),
        lambda context, made: setattr(context.recorder, "composites", made),
    ),
    Layer(
        "autocast",
        "operators/autocast",
        "C++ asks the C++ device whether a tensor may be cast",
        ("aten::* @ AutocastCUDA", "torch.clear_autocast_cache"),
        "cuda_autocast",
        lambda context: (context.recorder.card.torch_version,),
        lost="autocast cannot be followed",
    ),
    Layer(
        "backward thread",
        "device/backward_thread",
        "nodes made in a backward pass are numbered as on the engine's device thread, which decides their order",
        ("torch.autograd.*_engine_run_backward", "torch._subclasses.meta_utils.MetaConverter._backward_error"),
        "numbered_as_on_a_card",
        keeps=lambda context, made: setattr(context, "numbers", made),
        lost="the order in which gradients of gradients are computed may be another one",
        again=("torch.autograd._engine_run_backward", "torch.autograd.graph._engine_run_backward"),
    ),
    Layer(
        "bitsandbytes",
        "loop/optimizers/bitsandbytes_module",
        "importing it asks for a driver, and its paged states come from its own C library",
        ("bitsandbytes.functional.*",),
        "bitsandbytes_in_captures",
        lost="bitsandbytes cannot be followed",
        libraries=("bitsandbytes",),
    ),
    Layer(
        "Triton kernels",
        "device/triton_kernels",
        "kernels are launched without effect, and a library that finds no Triton would go another way than on a card",
        ("trl.kernels.*", "triton.runtime.jit.*", "triton.runtime.driver.*", "builtins.__import__"),
        "triton_kernels",
        lambda context: (context.recorder.values.forget, context.lack),
        lost="Triton kernels cannot be followed",
        libraries=_WITH_KERNELS,
    ),
    Layer(
        "built kernels",
        "device/built_kernels",
        "libraries would compile kernels for the card where they are first used",
        ("cutlass.base_dsl.compiler.*", "cutlass.cute.runtime.*", "flashinfer.jit.core.*", "sglang.kernels.jit.*"),
        "built_kernels",
        lambda context: (context.recorder.values.forget,),
        lost="kernels that a library builds cannot be followed",
        libraries=("cutlass", "flashinfer", "sglang"),
    ),
    Layer(
        "initializers",
        "device/initializers",
        "nobody reads the values of parameters, and a truncated normal asks them whether it is done",
        ("torch.nn.init.*",),
        "patch_initializers",
        lambda context: (context.recorder.values,),
        lost="initial values of parameters are asked for",
        doors=tuple(f"torch.nn.init.{name}" for name in _INITIALIZERS),
    ),
    Layer(
        "recurrent modules",
        "operators/recurrent/cudnn",
        "on a card with cuDNN their weights move into one flat buffer",
        ("torch.nn.modules.rnn.RNNBase.flatten_parameters",),
        "patch_rnn_modules",
        lost="recurrent layers keep their weights apart",
        doors=THERE,
    ),
    Layer(
        "convolution layout",
        "operators/convolution_layout",
        "C++ chooses the memory format for the device `meta`, which has no cuDNN",
        ("torch._C._select_conv_backend", "torch._C._conv_determine_backend_memory_format"),
        "patch_convolution_layout",
        lost="what convolutions give is not channels_last where cuDNN would make it so",
        doors=THERE,
    ),
    Layer(
        "L-BFGS",
        "loop/optimizers/lbfgs",
        "it decides by values how it goes on; they are those of a descent that goes on",
        ("torch.optim.lbfgs.LBFGS.step",),
        "patch_lbfgs",
        lambda context: (context.recorder,),
        lost="L-BFGS stops at once, as it decides by values",
        doors=("torch.optim.lbfgs.LBFGS.__init__",),
    ),
    Layer(
        "streams",
        "device/streams_api",
        "the caching allocator keeps blocks by stream, and the current one is noted without a driver",
        (
            "torch.cuda.*[sS]tream*",
            "torch.cuda.*Event",
            "torch.Stream",
            "torch.Event",
            "torch.Tensor.record_stream",
            "torch.accelerator.*_stream",
            "torch.nn.parallel._functions._get_stream",
        ),
        "patch_streams",
        lambda context: (context.recorder.streams, context.recorder.storages.pools, context.recorder.storages),
        lost="streams are not followed",
    ),
    Layer(
        "CUDA graphs",
        "device/cuda_graphs",
        "a capture's memory stays in a pool of its own; what was captured cannot be seen",
        ("torch.cuda.*", "torch._C._cuda_*", "torch._C._host_emptyCache"),
        "patch_cuda_graphs",
        lambda context: (context.recorder.streams, context.recorder.storages.pools, context.recorder),
        # `torch.cuda` alone, as a file sees it while it is imported, answers that nothing is captured.
        again=("torch.cuda.is_current_stream_capturing", "torch.cuda.graphs.is_current_stream_capturing"),
        lost="CUDA graphs are not followed",
    ),
    Layer(
        "one rank",
        "distributed/process_groups",
        "of several processes one is analysed: its process groups have nobody else in them",
        (
            "torch.distributed.*",
            "torch.nn.parallel.distributed.*",
            "transformers.distributed.expert_parallel.*",
            "torch._C._distributed_c10d.*",
            "torch._C._get_accelerator",
            "torch.cuda.nccl.version",
            "torch.storage.UntypedStorage.resize_",
            "os.environ",
        ),
        "one_rank",
        lambda context: (context.recorder, context.processes),
        lost="process groups cannot be followed",
        doors=(
            "torch.distributed.is_nccl_available",
            "torch.distributed.distributed_c10d.is_nccl_available",
            "torch.distributed.distributed_c10d.rendezvous",
            "torch.distributed.distributed_c10d._new_process_group_helper",
            "torch.distributed.distributed_c10d._get_object_coll_device",
            "torch.distributed.distributed_c10d._get_default_timeout",
            "torch.cuda.nccl.version",
            "torch._C._get_accelerator",
            "torch.storage.UntypedStorage.resize_",
        ),
        libraries=("deepspeed", "accelerate"),
        is_due=lambda context: context.processes is not None,
    ),
    Layer(
        "fake mode",
        "session/layers",
        "PyTorch's own: operators compute shapes and nothing else",
        (),
        "fake_mode",
    ),
    Layer(
        "recorder",
        "record/dispatch",
        "sees every operator before the fake mode does, and writes the trace",
        (),
        "recording",
        lambda context: (context.recorder, context.numbers),
    ),
    Layer(
        "flex attention",
        "record/flex_attention",
        "outside of compiled code it is plain attention, which an operator of higher order hides",
        (),
        "flex_attention_followed",
        lost="flex_attention is followed in compiled code alone",
        libraries=("torch.nn.attention.flex_attention",),
    ),
    Layer(
        "moved modules",
        "device/moved_modules",
        "parameters stay the objects that they are when they are moved, with their hooks; those that were made before "
        "the capture are fake meanwhile, and given back",
        ("torch.nn.modules.module.Module._apply", "torch.Tensor.data"),
        "moved_modules",
    ),
    Layer(
        "modules",
        "record/modules",
        "hooks show which module runs, when a backward pass begins and when an optimizer steps",
        ("torch.autograd._make_grads",),
        "watch_modules",
        lambda context: (context.recorder,),
        lambda context, made: setattr(context, "watch", made),
    ),
    Layer(
        "saved files",
        "program/saved_files",
        "weights have no values: checkpoints are written with holes in their place, and read without them",
        (
            "torch.serialization.*",
            "torch._C.PyTorchFileWriter",
            "torch._guards.*_fake_mode",
            "torch._utils._rebuild_*",
            "torch._tensor._rebuild_from_type_v2",
            "torch._weights_only_unpickler._get_allowed_globals",
            "torch._subclasses.fake_tensor.FakeTensor.__reduce_ex__",
            "torch.nn.parameter.Parameter.__reduce_ex__",
            "*.safe_open",
            "safetensors.torch.*",
            "transformers.modeling_utils.*",
            "transformers.utils.hub.cached_files",
            "transformers.models.auto.tokenization_auto.AutoTokenizer.from_pretrained",
            "shutil._fastcopy_sendfile",
        ),
        "files_of_tensors",
        lambda context: (context.recorder, context.remark, context.leave_after is not None),
        lost="files of tensors cannot be followed",
        doors=(
            "torch.serialization._open_file_like",
            "torch.serialization._open_zipfile_writer",
            "torch._subclasses.fake_tensor.FakeTensor.__reduce_ex__",
            "torch.nn.parameter.Parameter.__reduce_ex__",
            "torch._utils._rebuild_tensor_v2",
            "torch._utils._rebuild_tensor_v3",
            "torch._utils._rebuild_parameter",
            "torch._utils._rebuild_parameter_with_state",
            "torch._tensor._rebuild_from_type_v2",
            "torch._C.PyTorchFileWriter",
        ),
        libraries=("safetensors", "transformers.utils.hub", "transformers.modeling_utils"),
    ),
    Layer(
        "serving engine",
        "program/serving_engine",
        "vLLM starts its core in a process of its own, which would have no capture; SGLang asks the driver",
        ("vllm.*", "sglang.*"),
        "engine_in_process",
        lost="serving engines start processes that are not followed",
        libraries=("vllm", "sglang"),
    ),
    Layer(
        "leaving",
        "program/asking",
        "a whole program trains for days; its loops are ended after some optimizer steps",
        (
            "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
            "torch.utils.data.dataloader.DataLoader.__iter__",
            "torch.optim.optimizer.Optimizer.__init__",
        ),
        "loops_left",
        lambda context: (
            context.leave_after,
            context.recorder,
            context.ends_alike_loops,
            context.shortens,
            context.opens,
        ),
        lambda context, made: setattr(context, "leaving", made),
        serves=lambda context: context.leave_after is not None,
    ),
    Layer(
        "generation",
        "program/decoding",
        "a token is much like the one before: long generations are probed at some lengths, and written from those",
        ("transformers.generation.stopping_criteria.MaxLengthCriteria.__call__",),
        "generations_shortened",
        lambda context: (context.recorder,),
        serves=lambda context: context.shortens,
    ),
    Layer(
        "compiled code",
        "compile/regions",
        "`torch.compile` is PyTorch's own, without the kernels that it writes; opened when it is first used",
        (
            "torch.compile",
            "torch._dynamo.*",
            "torch._inductor.*",
            "torch._C._dynamo.guards.*",
            "torch.distributions.distribution.Distribution.*",
            "torch._subclasses.*",
            "torch.fx.experimental.*",
            "torch.utils._triton.*",
            "torch.cuda._DeviceGuard",
            "torch.cuda.is_available",
        ),
        "follow_compiled_code",
        lambda context: (context.recorder, context.watch, context.shown_card.card),
        lambda context, made: setattr(context, "compiled", made),
        again=("torch.cuda.is_available",),  # while Dynamo forgets what it compiled, it must not look for CUDA graphs
        lost="torch.compile cannot be followed",
        doors=(
            "torch.compile",
            "torch._dynamo.eval_frame.set_eval_frame",
            "torch._dynamo.eval_frame._maybe_set_eval_frame",
        ),
        is_due=_has_compiled,
        asks=lambda *args, **_: not args or args[0] is not None,  # Dynamo is let in, or something is to be compiled
    ),
)


# --- the table in docs/ARCHITECTURE.md --------------------------------------------------------------------------------

BEGIN, END = "<!-- layers: begin -->", "<!-- layers: end -->"


def table() -> str:
    """The layers as a table in Markdown."""
    rows = ["| layer | file | replaces | why |", "|---|---|---|---|"]
    for number, layer in enumerate(LAYERS, start=1):
        names = ", ".join(f"`{name}`" for name in layer.replaces) or "nothing"
        if layer.again:
            names += f"; once more {', '.join(f'`{name}`' for name in layer.again)}"
        when = ", when needed" if layer.doors or layer.libraries else ""
        rows.append(f"| {number} {layer.name}{when} | `{layer.where}` | {names} | {layer.why} |")
    return "\n".join(rows)


def with_table(page: str) -> str:
    """The text of a page, with today's table between the two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Write the table into the page that is named, or print it."""
    for name in sys.argv[1:]:
        page = Path(name)
        text = page.read_text(encoding="utf-8")
        if BEGIN not in text or END not in text:
            sys.exit(f"{name}: the table has no place here; write {BEGIN} and {END} where it goes")
        page.write_text(with_table(text), encoding="utf-8")
    if len(sys.argv) == 1:
        print(table())


if __name__ == "__main__":
    main()
