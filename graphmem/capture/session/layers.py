"""The layers of a capture: replacements over PyTorch while a step runs, in the order of their installation.

Each is a context that undoes itself, whatever happens inside. The order is one that works: a later layer finds the
replacements of earlier ones. A name that two layers replace is in the later one's ``again``. The table in
docs/ARCHITECTURE.md is made from :data:`LAYERS`:

    python -m graphmem.capture.session.layers docs/ARCHITECTURE.md
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphmem.capture.patches import Patches
from graphmem.capture.session.doors import Asks, doors
from graphmem.capture.session.settings import same_settings
from graphmem.capture.threads import joining
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


@dataclass
class Context:
    """The input of layers, and the objects they make for those after them and for the session."""

    shown_card: ShownCard
    recorder: Recorder
    processes: Processes | None
    leave_after: int | None = None
    shortens: bool = False
    ends_alike_loops: bool = True
    numbers: Numbers | None = field(init=False, default=None)
    watch: ModuleWatch = field(init=False)
    leaving: Leaving | None = field(init=False, default=None)
    compiled: CompiledCode | None = field(init=False, default=None)


_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_Install = Callable[[Context], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Layer:
    """One layer. ``where``: its file below ``capture/``. ``replaces``: patterns (``*``) of the names that it replaces,
    operators of a dispatch key as ``aten::linear @ AutogradCUDA``. ``again``: those among them that an earlier layer
    has replaced already, on purpose. ``lost``: the loss where PyTorch lacks a name that the layer needs; empty where
    nothing can be answered then.

    A layer with ``doors`` (paths of functions of torch) or ``libraries`` (modules) is installed when one of those is
    called or imported first (:mod:`graphmem.capture.session.doors`), or at once where it ``is_due``; ``asks``: does a
    call need the layer.
    """

    name: str
    where: str
    why: str
    replaces: tuple[str, ...]
    install: _Install
    again: tuple[str, ...] = ()
    lost: str = ""
    doors: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    is_due: Callable[[Context], bool] = lambda _: False
    asks: Asks = lambda *_, **__: True

    def enter(self, context: Context, stack: contextlib.ExitStack) -> None:
        """Install it until ``stack`` is left, or put up its doors. Raises :class:`MissingName`."""
        waits = self.doors or self.libraries
        if not waits or self.is_due(context) or _is_loaded(self.libraries):
            self._install(context, stack)
        else:
            stack.enter_context(doors(lambda: self._open(context, stack), self.doors, self.libraries, self.asks))

    def _open(self, context: Context, stack: contextlib.ExitStack) -> None:
        """Install it in the middle of the step, which sees nothing of it."""
        with context.recorder.paused(), disable_current_modes():
            with Patches.lifted():
                import_module(f"graphmem.capture.{self.where.replace('/', '.')}")
            self._install(context, stack)

    def _install(self, context: Context, stack: contextlib.ExitStack) -> None:
        try:
            stack.enter_context(self.install(context))
        except MissingName as error:
            if not self.lost:
                raise
            context.recorder.unmodelled.update([Code.NAME_GONE.about(path=error.path, lost=self.lost)])


def _is_loaded(libraries: Sequence[str]) -> bool:
    """True if one of the libraries, or a part of one, was imported before."""
    if any(library in sys.modules for library in libraries):
        return True
    is_part = methodcaller("startswith", tuple(f"{library}." for library in libraries))
    return bool(libraries) and any(map(is_part, list(sys.modules)))


def _patching(patch: Callable[[Patches, Context], None]) -> _Install:
    """A layer that is nothing but replaced names."""

    @contextlib.contextmanager
    def install(context: Context) -> Iterator[None]:
        patches = Patches()
        try:
            patch(patches, context)
            yield
        finally:
            patches.undo()

    return install


# --- how each is installed: its file is imported then, and not before -------------------------------------------------


@_patching
def _threads(patches: Patches, _: Context) -> None:
    from graphmem.capture.record.started_threads import modes_of_starter

    patches.set(threading.Thread, "start", joining(threading.Thread.start, patches.threads, modes_of_starter))


@_patching
def _tensors(patches: Patches, context: Context) -> None:
    from graphmem.capture.device.fake_tensors import patch_fake_tensors
    from graphmem.capture.device.wrapper_tensors import patch_wrapper_tensors

    patch_fake_tensors(patches, context.recorder.values)
    patch_wrapper_tensors(patches, context.recorder.wrappers)


@contextlib.contextmanager
def _factories(_: Context) -> Iterator[None]:
    from graphmem.capture.device.factories import patch_factories
    from graphmem.capture.device.numbered_devices import numbered_devices

    patches = Patches()
    try:
        patch_factories(patches)
        with numbered_devices():
            yield
    finally:
        patches.undo()


@_patching
def _torch_script(patches: Patches, context: Context) -> None:
    from graphmem.capture.device.torch_script import patch_torch_script

    patch_torch_script(patches, _remark_of(context))


@_patching
def _reading(patches: Patches, context: Context) -> None:
    from graphmem.capture.device.reading_values import patch_reading

    patch_reading(patches, context.recorder.values, context.recorder.assumed_values)


@_patching
def _data_loaders(patches: Patches, _: Context) -> None:
    from graphmem.capture.device.data_loaders import patch_data_loaders

    patch_data_loaders(patches)


@contextlib.contextmanager
def _unnoticed(_: Context) -> Iterator[None]:
    from graphmem.capture.device.shown_types import shown_types
    from graphmem.capture.device.unnoticed import unnoticed

    with unnoticed(), shown_types():
        yield


@_patching
def _torch_cuda(patches: Patches, context: Context) -> None:
    from graphmem.capture.device.cuda_namespace import patch_cuda_namespace

    patch_cuda_namespace(patches, context.shown_card, context.recorder, context.recorder.values)


@_patching
def _training_tools(patches: Patches, _: Context) -> None:
    from graphmem.capture.device.training_tools import patch_training_tools

    patch_training_tools(patches)


@contextlib.contextmanager
def _composites(context: Context) -> Iterator[None]:
    from graphmem.capture.operators.composites import cuda_composites

    with cuda_composites(context.recorder.card, context.recorder.values) as composites:
        context.recorder.composites = composites
        yield


def _autocast(context: Context) -> AbstractContextManager[None]:
    from graphmem.capture.operators.autocast import cuda_autocast

    return cuda_autocast(context.recorder.card.torch_version)


@contextlib.contextmanager
def _backward_thread(context: Context) -> Iterator[None]:
    from graphmem.capture.device.backward_thread import numbered_as_on_a_card

    with numbered_as_on_a_card() as context.numbers:
        yield


def _bitsandbytes(_: Context) -> AbstractContextManager[None]:
    from graphmem.capture.loop.optimizers.bitsandbytes_module import bitsandbytes_in_captures

    return bitsandbytes_in_captures()


def _triton(context: Context) -> AbstractContextManager[None]:
    from graphmem.capture.device.triton_kernels import triton_kernels

    recorder = context.recorder
    return triton_kernels(recorder.values.forget, lambda found: recorder.unmodelled.update([found]))


@_patching
def _initializers(patches: Patches, context: Context) -> None:
    from graphmem.capture.device.initializers import patch_initializers

    patch_initializers(patches, context.recorder.values)


@_patching
def _recurrent_modules(patches: Patches, _: Context) -> None:
    from graphmem.capture.operators.recurrent.cudnn import patch_rnn_modules

    patch_rnn_modules(patches)


@_patching
def _convolution_layout(patches: Patches, _: Context) -> None:
    from graphmem.capture.operators.convolution_layout import patch_convolution_layout

    patch_convolution_layout(patches)


@_patching
def _lbfgs(patches: Patches, context: Context) -> None:
    from graphmem.capture.loop.optimizers.lbfgs import patch_lbfgs

    patch_lbfgs(patches, context.recorder)


@_patching
def _streams(patches: Patches, context: Context) -> None:
    from graphmem.capture.device.streams_api import patch_streams

    storages = context.recorder.storages
    patch_streams(patches, context.recorder.streams, storages.pools, storages)


@_patching
def _cuda_graphs(patches: Patches, context: Context) -> None:
    from graphmem.capture.device.cuda_graphs import patch_cuda_graphs

    recorder = context.recorder
    patch_cuda_graphs(patches, recorder.streams, recorder.storages.pools, recorder)


def _one_rank(context: Context) -> AbstractContextManager[None]:
    from graphmem.capture.distributed.process_groups import one_rank

    return one_rank(context.recorder, context.processes)


@contextlib.contextmanager
def _fake_mode(_: Context) -> Iterator[None]:
    threads = Patches().threads

    def is_heard(_: object) -> bool:
        return get_ident() not in threads

    _LOG.addFilter(is_heard)  # it tells of shapes that do not fit; the error says it
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        _LOG.removeFilter(is_heard)


@contextlib.contextmanager
def _recorder(context: Context) -> Iterator[None]:
    from graphmem.capture.record.dispatch import RecordingMode

    with RecordingMode(context.recorder) as mode:
        Patches().threads.mode = mode
        context.recorder.calibrate()
        if context.numbers is not None:
            context.numbers.begin()
        yield


@contextlib.contextmanager
def _flex_attention(_: Context) -> Iterator[None]:
    from graphmem.capture.record.flex_attention import follow_flex_attention

    follow_flex_attention()
    yield


def _moved_modules(_: Context) -> AbstractContextManager[None]:
    from graphmem.capture.device.moved_modules import moved_modules

    return moved_modules()


@contextlib.contextmanager
def _modules(context: Context) -> Iterator[None]:
    from graphmem.capture.record.modules import watch_modules

    with watch_modules(context.recorder) as context.watch:
        yield


def _remark_of(context: Context) -> Callable[[Diagnostic], None]:
    """A function that shows the reader an assumption."""
    return lambda found: context.recorder.assumed.update([found])


@contextlib.contextmanager
def _saved_files(context: Context) -> Iterator[None]:
    from graphmem.capture.program.saved_files import files_of_tensors

    recorder, whole = context.recorder, context.leave_after is not None
    with files_of_tensors(recorder.phases.stage_of, recorder.values, _remark_of(context), whole_program=whole):
        yield


@contextlib.contextmanager
def _leaving(context: Context) -> Iterator[None]:
    if context.leave_after is None:
        yield
        return
    from graphmem.capture.program.asking import patch_leaving
    from graphmem.capture.program.leaving import Leaving

    context.leaving = Leaving(context.leave_after, context.recorder, context.ends_alike_loops, context.shortens)
    context.recorder.phases.names_stages = True
    patches, handles = Patches(), []
    try:
        handles = patch_leaving(patches, context.leaving)
        yield
    finally:
        for handle in handles:
            handle.remove()
        patches.undo()


@contextlib.contextmanager
def _generation(context: Context) -> Iterator[None]:
    """Shorten long generations: once one begins, its loop is patched, until the capture ends."""
    patches, recorder = Patches(), context.recorder

    def follow() -> None:
        from graphmem.capture.program.decoding import patch_decoding

        patch_decoding(patches, recorder)

    if context.shortens:
        recorder.phases.on_generation = follow
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _compiled_code(context: Context) -> Iterator[None]:
    from graphmem.capture.compile.regions import follow_compiled_code

    with follow_compiled_code(context.recorder, context.watch, context.shown_card.card) as context.compiled:
        yield


def _has_compiled(_: Context) -> bool:
    """True if something was compiled in this process before: then Dynamo may stand in the interpreter's place."""
    seen: Any = private("torch._dynamo.convert_frame.input_codes", "the compiler is followed from the beginning", None)
    return seen is None or bool(seen.seen) or "graphmem.capture.compile.regions" in sys.modules


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
        lambda _: same_settings(),
    ),
    Layer(
        "threads",
        "threads",
        "a thread that the step starts belongs to the capture; every other one finds what was there before",
        ("threading.Thread.start",),
        _threads,
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
            "torch.storage.UntypedStorage.data_ptr",
            "torch._subclasses.fake_tensor.*",
            "torch.utils.swap_tensors",
        ),
        _tensors,
    ),
    Layer(
        "factories",
        "device/factories",
        "C++ would ask a driver for the device that a new tensor is made on",
        (
            "torch.[a-z]*",
            "torch.cuda.*Tensor",
            "torch.Tensor.new_tensor",
            "torch.Tensor.type",
            "torch._C._nn._parse_to",
            "torch.nn.parameter.Uninitialized*.__new__",
        ),
        _factories,
    ),
    Layer(
        "TorchScript",
        "device/torch_script",
        "scripted code runs below Python, where no mode is heard: it runs as the Python that it is made of",
        (
            "torch.jit.script",
            "torch.jit.freeze",
            "torch.jit.optimize_for_inference",
            "torch.jit._builtins._find_builtin",
        ),
        _torch_script,
        lost="scripted functions and modules are refused",
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
        _reading,
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
        _data_loaders,
        lost="data loaders with workers cannot be followed",
        doors=("torch.utils.data.dataloader.DataLoader._get_iterator",),
        asks=lambda loader: loader.num_workers > 0,
    ),
    Layer(
        "unnoticed",
        "device/unnoticed",
        "a library that recognises fake tensors takes the path it keeps for exporters, which no card sees",
        (),
        _unnoticed,
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
            "torch._C._accelerator_setAllocatorSettings",
            "torch.accelerator.*",
            "torch.backends.cuda.*",
            "torch.backends.cudnn.*",
            "torch.version.cuda",
            "torch.Generator",
        ),
        _torch_cuda,
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
        ),
        _training_tools,
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
        ),
        _composites,
    ),
    Layer(
        "autocast",
        "operators/autocast",
        "C++ asks the C++ device whether a tensor may be cast",
        ("aten::* @ AutocastCUDA", "torch.clear_autocast_cache"),
        _autocast,
        lost="autocast cannot be followed",
    ),
    Layer(
        "backward thread",
        "device/backward_thread",
        "nodes made in a backward pass are numbered as on the engine's device thread, which decides their order",
        ("torch.autograd.*_engine_run_backward", "torch._subclasses.meta_utils.MetaConverter._backward_error"),
        _backward_thread,
        lost="the order in which gradients of gradients are computed may be another one",
    ),
    Layer(
        "bitsandbytes",
        "loop/optimizers/bitsandbytes_module",
        "importing it asks for a driver, and its paged states come from its own C library",
        ("bitsandbytes.functional.*",),
        _bitsandbytes,
        lost="bitsandbytes cannot be followed",
        libraries=("bitsandbytes",),
    ),
    Layer(
        "Triton kernels",
        "device/triton_kernels",
        "kernels are launched without effect, and a library that finds no Triton would go another way than on a card",
        ("trl.kernels.*", "triton.runtime.jit.*", "builtins.__import__"),
        _triton,
        lost="Triton kernels cannot be followed",
    ),
    Layer(
        "initializers",
        "device/initializers",
        "nobody reads the values of parameters, and a truncated normal asks them whether it is done",
        ("torch.nn.init.*",),
        _initializers,
        lost="initial values of parameters are asked for",
    ),
    Layer(
        "recurrent modules",
        "operators/recurrent/cudnn",
        "on a card with cuDNN their weights move into one flat buffer",
        ("torch.nn.modules.rnn.RNNBase.flatten_parameters",),
        _recurrent_modules,
        lost="recurrent layers keep their weights apart",
        doors=("torch.nn.modules.rnn.RNNBase.flatten_parameters",),
    ),
    Layer(
        "convolution layout",
        "operators/convolution_layout",
        "C++ chooses the memory format for the device `meta`, which has no cuDNN",
        ("torch._C._select_conv_backend", "torch._C._conv_determine_backend_memory_format"),
        _convolution_layout,
        lost="what convolutions give is not channels_last where cuDNN would make it so",
    ),
    Layer(
        "L-BFGS",
        "loop/optimizers/lbfgs",
        "it decides by values how it goes on; they are those of a descent that goes on",
        ("torch.optim.lbfgs.LBFGS.step",),
        _lbfgs,
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
        _streams,
        lost="streams are not followed",
    ),
    Layer(
        "CUDA graphs",
        "device/cuda_graphs",
        "a capture's memory stays in a pool of its own; what was captured cannot be seen",
        ("torch.cuda.*", "torch._C._cuda_*", "torch._C._host_emptyCache"),
        _cuda_graphs,
        # `torch.cuda` alone, as a file sees it while it is imported, says that nothing is captured.
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
        _one_rank,
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
        _fake_mode,
    ),
    Layer(
        "recorder",
        "record/dispatch",
        "sees every operator before the fake mode does, and writes the trace",
        (),
        _recorder,
    ),
    Layer(
        "flex attention",
        "record/flex_attention",
        "outside of compiled code it is plain attention, which an operator of higher order hides",
        (),
        _flex_attention,
        lost="flex_attention is followed in compiled code alone",
        libraries=("torch.nn.attention.flex_attention",),
    ),
    Layer(
        "moved modules",
        "device/moved_modules",
        "parameters stay the objects that they are when they are moved, with their hooks; those that were made before "
        "the capture are fake meanwhile, and given back",
        ("torch.nn.modules.module.Module._apply", "torch.Tensor.data"),
        _moved_modules,
    ),
    Layer(
        "modules",
        "record/modules",
        "hooks say which module runs, when a backward pass begins and when an optimizer steps",
        ("torch.autograd._make_grads",),
        _modules,
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
        _saved_files,
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
        "leaving",
        "program/leaving",
        "a whole program trains for days; its loops are told after some optimizer steps that they are over",
        (
            "torch.utils.data.dataloader._BaseDataLoaderIter.__next__",
            "torch.utils.data.dataloader.DataLoader.__iter__",
            "torch.optim.optimizer.Optimizer.__init__",
        ),
        _leaving,
    ),
    Layer(
        "generation",
        "program/decoding",
        "a token is much like the one before: long generations are probed at some lengths, and written from those",
        ("transformers.generation.stopping_criteria.MaxLengthCriteria.__call__",),
        _generation,
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
        _compiled_code,
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
