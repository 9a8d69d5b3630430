"""The layers of a capture: what lies over PyTorch while a step runs, from the first that is put on to the last.

Each is a context that undoes itself, whatever happens inside. The order is one that works: a later layer finds what
the earlier ones have replaced. A name that two layers replace is said in the later one's ``again``. The table in
docs/ARCHITECTURE.md is made from :data:`LAYERS`:

    python -m graphmem.capture.session.layers docs/ARCHITECTURE.md
"""

from __future__ import annotations

import contextlib
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphmem.capture.compile import CompiledCode, follow_compiled_code
from graphmem.capture.device.backward_thread import Numbers, numbered_as_on_a_card
from graphmem.capture.device.cuda_graphs import patch_cuda_graphs
from graphmem.capture.device.cuda_namespace import patch_cuda_namespace
from graphmem.capture.device.data_loaders import patch_data_loaders
from graphmem.capture.device.factories import patch_factories
from graphmem.capture.device.fake_tensors import patch_fake_tensors
from graphmem.capture.device.initializers import patch_initializers
from graphmem.capture.device.moved_modules import moved_modules
from graphmem.capture.device.numbered_devices import numbered_devices
from graphmem.capture.device.pretend_device import Teller
from graphmem.capture.device.reading_values import patch_reading
from graphmem.capture.device.streams_api import patch_streams
from graphmem.capture.device.training_tools import patch_training_tools
from graphmem.capture.device.triton_kernels import triton_kernels
from graphmem.capture.device.unnoticed import unnoticed
from graphmem.capture.device.wrapper_tensors import patch_wrapper_tensors
from graphmem.capture.distributed.process_groups import one_rank
from graphmem.capture.loop.optimizers.bitsandbytes_module import bitsandbytes_in_captures
from graphmem.capture.loop.optimizers.lbfgs import patch_lbfgs
from graphmem.capture.operators.autocast import cuda_autocast
from graphmem.capture.operators.composites import cuda_composites
from graphmem.capture.operators.convolution_layout import patch_convolution_layout
from graphmem.capture.operators.recurrent.cudnn import patch_rnn_modules
from graphmem.capture.patches import Patches
from graphmem.capture.program.decoding import patch_decoding
from graphmem.capture.program.leaving import Leaving, patch_leaving
from graphmem.capture.program.saved_files import files_of_tensors
from graphmem.capture.record.dispatch import RecordingMode
from graphmem.capture.record.modules import ModuleWatch, watch_modules
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.record.started_threads import modes_of_starter
from graphmem.capture.session.settings import same_settings
from graphmem.capture.threads import joining
from graphmem.training.processes import Processes


@dataclass
class Context:
    """What layers are given, and what they make for those after them and for the session."""

    teller: Teller
    recorder: Recorder
    processes: Processes | None
    leave_after: int | None = None
    shortens: bool = False
    leaves_alike: bool = True
    numbers: Numbers = field(init=False)
    watch: ModuleWatch = field(init=False)
    leaving: Leaving | None = field(init=False, default=None)
    compiled: CompiledCode = field(init=False)


_Install = Callable[[Context], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Layer:
    """One layer. ``where``: its file below ``capture/``. ``replaces``: patterns (``*``) of the names that it replaces,
    operators of a dispatch key as ``aten::linear @ AutogradCUDA``. ``again``: those among them that an earlier layer
    has replaced already, on purpose."""

    name: str
    where: str
    why: str
    replaces: tuple[str, ...]
    install: _Install
    again: tuple[str, ...] = ()


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


@contextlib.contextmanager
def _factories(context: Context) -> Iterator[None]:
    with _patching(lambda patches, _: patch_factories(patches))(context), numbered_devices():
        yield


@contextlib.contextmanager
def _composites(context: Context) -> Iterator[None]:
    with cuda_composites(context.recorder.card) as composites:
        context.recorder.composites = composites
        yield


def _patch_tensors(patches: Patches, context: Context) -> None:
    patch_fake_tensors(patches, context.recorder.values)
    patch_wrapper_tensors(patches, context.recorder.wrappers)


def _patch_threads(patches: Patches) -> None:
    patches.set(threading.Thread, "start", joining(threading.Thread.start, patches.threads, modes_of_starter))


@contextlib.contextmanager
def _backward_thread(context: Context) -> Iterator[None]:
    with numbered_as_on_a_card() as context.numbers:
        yield


@contextlib.contextmanager
def _fake_mode(_: Context) -> Iterator[None]:
    threads = Patches().threads

    def is_heard(_: object) -> bool:
        return get_ident() not in threads

    fake_tensor.log.addFilter(is_heard)  # it tells of shapes that do not fit; the error says it
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        fake_tensor.log.removeFilter(is_heard)


@contextlib.contextmanager
def _recorder(context: Context) -> Iterator[None]:
    with RecordingMode(context.recorder) as mode:
        Patches().threads.mode = mode
        context.recorder.calibrate()
        context.numbers.begin()
        yield


@contextlib.contextmanager
def _modules(context: Context) -> Iterator[None]:
    with watch_modules(context.recorder) as context.watch:
        yield


@contextlib.contextmanager
def _saved_files(context: Context) -> Iterator[None]:
    recorder, whole = context.recorder, context.leave_after is not None
    remark = lambda found: recorder.assumed.update([found])  # noqa: E731
    with files_of_tensors(recorder.phases.stage_of, recorder.values, remark, whole_program=whole):
        yield


@contextlib.contextmanager
def _leaving(context: Context) -> Iterator[None]:
    if context.leave_after is None:
        yield
        return
    context.leaving = Leaving(context.leave_after, context.recorder, context.leaves_alike, context.shortens)
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
    patches, recorder = Patches(), context.recorder
    if context.shortens:
        recorder.phases.on_generation = lambda: patch_decoding(patches, recorder)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _compiled_code(context: Context) -> Iterator[None]:
    with follow_compiled_code(context.recorder, context.watch, context.teller.card) as context.compiled:
        yield


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
        _patching(lambda patches, _: _patch_threads(patches)),
    ),
    Layer(
        "fake tensors",
        "device/fake_tensors",
        "a device tensor is on `cuda:0` to Python and on `meta` to C++, with CUDA's dispatch keys",
        (
            "torch.Tensor.*",
            "torch.nn.parameter.Parameter.__deepcopy__",
            "torch.storage.UntypedStorage.data_ptr",
            "torch._subclasses.fake_tensor.*",
            "torch.utils.swap_tensors",
        ),
        _patching(_patch_tensors),
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
            "torch.jit._builtins._find_builtin",
            "torch.nn.parameter.Uninitialized*.__new__",
        ),
        _factories,
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
        _patching(
            lambda patches, context: patch_reading(patches, context.recorder.values, context.recorder.assumed_values)
        ),
    ),
    Layer(
        "data loaders",
        "device/data_loaders",
        "a worker process would have no capture: the batches that it sends are fetched here",
        ("torch.utils.data.dataloader.*", "torch.utils.data._utils.signal_handling.*"),
        _patching(lambda patches, _: patch_data_loaders(patches)),
    ),
    Layer(
        "unnoticed",
        "device/unnoticed",
        "a library that recognises fake tensors takes the path it keeps for exporters, which no card sees",
        (),
        lambda _: unnoticed(),
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
        _patching(
            lambda patches, context: patch_cuda_namespace(
                patches, context.teller, context.recorder, context.recorder.values
            )
        ),
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
        _patching(lambda patches, _: patch_training_tools(patches)),
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
        lambda context: cuda_autocast(context.recorder.card.torch_version),
    ),
    Layer(
        "backward thread",
        "device/backward_thread",
        "nodes made in a backward pass are numbered as on the engine's device thread, which decides their order",
        ("torch.autograd.*_engine_run_backward", "torch._subclasses.meta_utils.MetaConverter._backward_error"),
        _backward_thread,
    ),
    Layer(
        "bitsandbytes",
        "loop/optimizers/bitsandbytes_module",
        "importing it asks for a driver, and its paged states come from its own C library",
        ("bitsandbytes.functional.*",),
        lambda _: bitsandbytes_in_captures(),
    ),
    Layer(
        "Triton kernels",
        "device/triton_kernels",
        "kernels are launched without effect, and a library that finds no Triton would go another way than on a card",
        ("trl.kernels.*", "triton.runtime.jit.*", "builtins.__import__"),
        lambda context: triton_kernels(
            context.recorder.values.forget, lambda found: context.recorder.unmodelled.update([found])
        ),
    ),
    Layer(
        "initializers",
        "device/initializers",
        "nobody reads the values of parameters, and a truncated normal asks them whether it is done",
        ("torch.nn.init.*",),
        _patching(lambda patches, context: patch_initializers(patches, context.recorder.values)),
    ),
    Layer(
        "recurrent modules",
        "operators/recurrent/cudnn",
        "on a card with cuDNN their weights move into one flat buffer",
        ("torch.nn.modules.rnn.RNNBase.flatten_parameters",),
        _patching(lambda patches, _: patch_rnn_modules(patches)),
    ),
    Layer(
        "convolution layout",
        "operators/convolution_layout",
        "C++ chooses the memory format for the device `meta`, which has no cuDNN",
        ("torch._C._select_conv_backend", "torch._C._conv_determine_backend_memory_format"),
        _patching(lambda patches, _: patch_convolution_layout(patches)),
    ),
    Layer(
        "L-BFGS",
        "loop/optimizers/lbfgs",
        "it decides by values how it goes on; they are those of a descent that goes on",
        ("torch.optim.lbfgs.LBFGS.step",),
        _patching(lambda patches, context: patch_lbfgs(patches, context.recorder)),
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
        _patching(
            lambda patches, context: patch_streams(
                patches, context.recorder.streams, context.recorder.storages.pools, context.recorder.storages
            )
        ),
    ),
    Layer(
        "CUDA graphs",
        "device/cuda_graphs",
        "a capture's memory stays in a pool of its own; what was captured cannot be seen",
        ("torch.cuda.*", "torch._C._cuda_*", "torch._C._host_emptyCache"),
        _patching(
            lambda patches, context: patch_cuda_graphs(
                patches, context.recorder.streams, context.recorder.storages.pools, context.recorder
            )
        ),
        # `torch.cuda` alone, as a file sees it while it is imported, says that nothing is captured.
        again=("torch.cuda.is_current_stream_capturing", "torch.cuda.graphs.is_current_stream_capturing"),
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
        lambda context: one_rank(context.recorder, context.processes),
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
        "moved modules",
        "device/moved_modules",
        "parameters stay the objects that they are when they are moved, with their hooks; those that were made before "
        "the capture are fake meanwhile, and given back",
        ("torch.nn.modules.module.Module._apply", "torch.Tensor.data"),
        lambda _: moved_modules(),
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
            "shutil._fastcopy_sendfile",
        ),
        _saved_files,
    ),
    Layer(
        "leaving",
        "program/leaving",
        "a whole program trains for days; its loops are told after some optimizer steps that they are over",
        ("torch.utils.data.dataloader._BaseDataLoaderIter.__next__", "torch.utils.data.dataloader.DataLoader.__iter__"),
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
        rows.append(f"| {number} {layer.name} | `{layer.where}` | {names} | {layer.why} |")
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
