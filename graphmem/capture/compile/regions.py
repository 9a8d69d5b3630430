"""Where compiled code begins and ends, and the parts of a capture that the compiler must not see.

Dynamo calls back whenever a frame of a compiled region is entered for the first time. While it listens, the capture's
module hooks are lifted: Dynamo would trace them into the user's code and break the graph there.
"""

from __future__ import annotations

import contextlib
import logging
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphmem.base import versions
from graphmem.capture.compile.frame_evaluation import (
    FrameEvaluation,
    frame_evaluation,
    patched_by_dynamo,
    without_validation,
)
from graphmem.capture.compile.inductor import import_compiler, keep_tables, pretend_inductor
from graphmem.capture.device.fake_tensors import is_of_own_class, library_class
from graphmem.capture.device.unnoticed import Hiding, NoTensor
from graphmem.capture.patches import Patches, constant, ignored_warnings
from graphmem.capture.record.dispatch import RecordingMode
from graphmem.capture.record.modules import ModuleWatch
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.record.started_threads import let_recorder_run
from graphmem.capture.threads import Threads
from graphmem.capture.torch_internals import FakeTensorMode, current_graph_task_id, dispatch_modes
from graphmem.capture.values.callers import place_of
from graphmem.devices import Device
from graphmem.diagnostics import Diagnostic
from graphmem.errors import CaptureError, GraphmemError
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"

_HOOKS = "hooks of the analysis are compiled into the step"
_HOOK_TABLES: Any = (
    private("torch.nn.modules.module._global_forward_pre_hooks", _HOOKS, {}),
    private("torch.nn.modules.module._global_forward_hooks", _HOOKS, {}),
    private("torch.nn.modules.module._global_forward_hooks_always_called", _HOOKS, {}),
)

_WRAPPED: Any = private("torch._higher_order_ops.inductor_compiled_code", _LOST, None)
_WITHOUT_MODE: Any = private("torch._C.DispatchKey.CompositeExplicitAutograd", _LOST)

#: By which Dynamo asks whether there is a dispatch mode: of 2.6, and since 2.9.
_ASKING_FOR_MODES = (
    "is_in_torch_dispatch_mode",
    "is_in_any_mode_without_ignore_compile_internals",
    "any_torch_dispatch_mode_on_stack",
)


class CompiledCode:
    """The code that was compiled in a capture, and the compiler while it runs.

    ``regions`` counts the calls of compiled code, ``assumed`` decisions by timing on a card (diagnostic -> count).
    """

    def __init__(
        self, recorder: Recorder, watch: ModuleWatch, device: Device, evaluation: FrameEvaluation | None
    ) -> None:
        self.regions = 0
        self.assumed: Counter[Diagnostic] = Counter()
        self._recorder = recorder
        self._watch = watch
        self._device = device
        self._evaluation = evaluation
        self._stack = contextlib.ExitStack()
        self._open = False
        self._ready = False
        self.is_listening = False
        self._converting = False
        self._lifted: list[tuple[Any, Any, Any]] = []

    def notes(self) -> tuple[str, ...]:
        """Remarks for the reader of an estimate on its compiled part; empty when nothing was compiled."""
        if not self.regions:
            return ()
        return (
            f"torch.compile: compiled by PyTorch {torch.__version__.split('+')[0]} itself (Inductor, kernels not run); "
            "buffers are allocated and freed as the generated code does",
            "torch.compile: confidence: equal to recordings of the CUDA build without its kernels (MLP, BERT, GPT-2, "
            "Llama, T5, vision transformer; ResNet-50 and U-Net but for cuDNN's workspaces); not compared with a real "
            "card",
            "torch.compile: what compiling takes on the card (autotuning kernels, trying padded products in the first "
            "iteration, Triton's modules in the context) is not counted",
        )

    # --- regions ------------------------------------------------------------------------------------------------------

    def set_listening(self, listening: bool) -> None:
        """Dynamo starts or stops looking at the frames that run.

        While it converts a frame it does not look at others, which its own functions confirm in passing; the hooks stay
        away until it is done, or it would see a module with them where it saw one without.
        """
        if listening == self.is_listening or self._converting:
            return
        self.is_listening = listening
        if listening:
            self.regions += 1
            self._prepare()
            self._begin_forward()
            self._lift_hooks()
        else:
            self._restore_hooks()

    def stopped_listening(self) -> None:
        """Dynamo's function is out of the interpreter's way again, unless something failed to compile.

        Not while a frame is converted: Dynamo goes on with its result and expects to see the frames that it calls.
        """
        if self._evaluation is not None and not self._converting:
            self._evaluation.idle()

    def _begin_forward(self) -> None:
        """A compiled function called from outside any module is a forward pass, as an outermost module call is."""
        recorder = self._recorder
        if self._watch.is_inside or current_graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        if recorder.phases.stage in ("build", "optimizer"):
            recorder.phases.begin_iteration()
        elif recorder.phases.stage == "backward":
            recorder.phases.enter("forward")

    def _lift_hooks(self) -> None:
        ours = {key for table in _HOOK_TABLES for key, hook in table.items() if _is_ours(hook)}
        self._lifted = [(table, key, table[key]) for table in _HOOK_TABLES for key in table if key in ours]
        for table, key, _ in self._lifted:
            del table[key]

    def _restore_hooks(self) -> None:
        for table, key, hook in self._lifted:
            table[key] = hook
        self._lifted = []

    # --- the compiler -------------------------------------------------------------------------------------------------

    def followed(self, patches: Patches) -> None:
        """Something is to be compiled, or was before the capture: let Dynamo in, the first time."""
        if self._open:
            return
        _check_version()
        self._open = True
        import_compiler()
        keep_tables(patches)
        patched_by_dynamo()
        without_validation(patches)
        _open_dynamo(patches, self)

    def _prepare(self) -> None:
        if self._ready:
            return
        self._ready = True
        _forget_compiled()
        _follow_wrapped_regions(self._stack.enter_context(Patches()))
        self._stack.enter_context(_quiet())
        self._stack.enter_context(pretend_inductor(self._device, self._recorder, self.assumed))

    def convert(self, original: Callable[..., object]) -> Callable[..., Any]:
        """Dynamo's callback for a new frame, kept away from the capture's own frames."""
        # Dynamo listens again after a frame that is skipped with its callees; this module's frames tell it when to.
        code, evaluation = self, self._evaluation
        skip, skip_with_callees = _skipping()

        def call(self: object, frame: Any, *args: object) -> Any:
            name = frame.f_globals.get("__name__", "")
            if name.startswith("graphmem."):
                return skip if name == __name__ else skip_with_callees
            outermost, code._converting = not code._converting, True
            try:
                return original(self, frame, *args)
            except Exception as error:
                if evaluation is not None:
                    evaluation.failed = True
                if isinstance(error, GraphmemError):
                    raise
                raise CaptureError(_failure(frame, error)) from error
            finally:
                code._converting = not outermost

        return call

    def close(self) -> None:
        self._restore_hooks()
        self._stack.close()
        if self._ready:
            _forget_compiled()


def _follow_wrapped_regions(patches: Patches) -> None:
    """Code that is compiled with ``wrap_inductor_compiled_regions`` is an operator of higher order wherever a mode is
    active (``CompiledFxGraph.post_compile``, torch/_inductor/output_code.py of 2.13): where the program has one, the
    recorder runs it as without the option; elsewhere it is none, and gives its arguments back one by one."""
    if _WRAPPED is None:
        return
    output_code = private("torch._inductor.output_code", _LOST)
    patches.where_found([output_code], {"is_in_torch_dispatch_mode": _program_has_mode})
    compiled = _WRAPPED.py_kernels[_WITHOUT_MODE]

    def run(mode: RecordingMode, *args: object, **kwargs: object) -> object:
        with mode:
            return compiled(*args, **kwargs)

    let_recorder_run(_WRAPPED, run)


def _program_has_mode(include_infra_modes: bool = True) -> bool:
    """Whether there is a dispatch mode beside those of the capture."""
    return any(not isinstance(mode, (RecordingMode, FakeTensorMode)) for mode in dispatch_modes())


@contextlib.contextmanager
def follow_compiled_code(recorder: Recorder, watch: ModuleWatch, device: Device) -> Iterator[CompiledCode]:
    """Let ``torch.compile`` work inside a capture, whenever and however the step uses it."""
    evaluation = frame_evaluation()
    code = CompiledCode(recorder, watch, device, evaluation)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ignored_warnings("Using `torch.compile"))  # with the capture's hooks
        if evaluation is not None:
            stack.enter_context(evaluation.restored())
        with Patches() as patches, contextlib.closing(code):

            def compile_(*args: object, **kwargs: object) -> object:
                code.followed(patches)
                return _REAL_COMPILE(*args, **kwargs)

            patches.set(torch, "compile", compile_)
            _watch_dynamo(patches, code)
            yield code


_REAL_COMPILE = torch.compile


def _watch_dynamo(patches: Patches, code: CompiledCode) -> None:
    """Notice when Dynamo begins to look at frames: functions may have been decorated before the capture."""
    eval_frame = private("torch._dynamo.eval_frame", _LOST)

    set_eval_frame, threads = private("torch._C._dynamo.eval_frame.set_eval_frame", _LOST), patches.threads

    def watched(callback: object) -> object:
        prior = set_eval_frame(None)  # nothing of ours runs while Dynamo listens
        if get_ident() not in threads and not threads.adopts():
            set_eval_frame(callback)
            return prior
        if callback is None and prior is None and not code.is_listening:  # every operator asks so, twice
            return prior
        if callback is not None:
            code.followed(patches)
        code.set_listening(callback is not None)
        set_eval_frame(callback)
        if callback is None:
            code.stopped_listening()
        return prior

    for name in ("set_eval_frame", "_maybe_set_eval_frame"):
        if hasattr(eval_frame, name):
            patches.share(eval_frame, name, watched)


def _skipping() -> tuple[Any, Any]:
    """The results of Dynamo's callback for a frame that is to run as it is, and for one whose callees are, too."""
    convert_frame = private("torch._dynamo.convert_frame", _LOST)
    types = private("torch._dynamo.types", _LOST)

    if hasattr(types, "FrameAction"):
        action, strategy = types.FrameAction, types.FrameExecStrategy
        with_callees = convert_frame.ConvertFrameReturn(frame_exec_strategy=strategy(action.SKIP, action.SKIP))
        return convert_frame.ConvertFrameReturn(), with_callees
    return None, private("torch._C._dynamo.eval_frame.skip_code_recursive_flag", _LOST, until=(2, 7))  # 2.6


def _open_dynamo(patches: Patches, code: CompiledCode) -> None:
    convert_frame = private("torch._dynamo.convert_frame", _LOST)

    patches.set(convert_frame.CatchErrorsWrapper, "__call__", code.convert(convert_frame.CatchErrorsWrapper.__call__))
    # Dynamo refuses to work below a dispatch mode; the recorder's own calls of it happen outside compiled graphs.
    patches.where_found([convert_frame], dict.fromkeys(_ASKING_FOR_MODES, constant(False)))
    patches.share(torch.compiler, "is_compiling", _compiling_here(torch.compiler.is_compiling, patches.threads))
    module_variable = private("torch._dynamo.variables.misc.PythonModuleVariable", _LOST)
    patches.around(module_variable, {"var_getattr": _name_in_module})
    builder = private("torch._dynamo.variables.builder", _LOST)
    patches.around(builder.VariableBuilder, {"_wrap": _tensor_of_library})
    patches.around(builder, {"infer_subclass_type": _class_of_library})


def _name_in_module(original: Callable[..., Any], variable: Any, transaction: Any, name: str) -> Any:
    """A name in a module, in traced code. What ``torch._subclasses.FakeTensor`` is depends on who asks, and compiled
    code is valid while it is what it was: the class that libraries find is traced as a constant."""
    if name == "FakeTensor" and isinstance(variable.value, Hiding):
        return variable.build(transaction, NoTensor)
    return original(variable, transaction, name)


def _tensor_of_library(original: Callable[..., Any], builder: Any, value: object) -> Any:
    """A tensor of a library's class has its own ``__torch_function__`` and no ``__torch_dispatch__``, which its fake
    one has: that is traced as a tensor too."""
    return builder.wrap_tensor(value) if is_of_own_class(value) else original(builder, value)


def _class_of_library(original: Callable[[object], type | None], value: object) -> type | None:
    return library_class(type(value)) if is_of_own_class(value) else original(value)


def _compiling_here(original: Callable[[], bool], threads: Threads) -> Callable[[], bool]:
    """``torch.compiler.is_compiling``, whose answer is one flag for all threads since 2.13: optimizers that ask it
    compute a little otherwise."""
    before = original()

    def is_compiling() -> bool:
        return original() if get_ident() in threads else before

    is_compiling._torchdynamo_inline = lambda: True  # type: ignore[attr-defined]  # what is traced is being compiled
    is_compiling.__original_fn = original  # type: ignore[attr-defined]  # TorchScript compiles it
    return is_compiling


def _forget_compiled() -> None:
    """Code compiled for real tensors and code compiled for the pretended device must not meet."""
    with Patches() as patches:
        patches.set(torch.cuda, "is_available", constant(False))  # else CUDA graphs are reset, which needs a CUDA build
        private("torch._dynamo.reset", _LOST)()


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("graphmem.")


def _followed() -> bool:
    return versions.version_of(torch.__version__) >= versions.COMPILER_FOLLOWED_SINCE


def _check_version() -> None:
    if not _followed():
        wanted = versions.words(versions.COMPILER_FOLLOWED_SINCE)
        raise CaptureError(
            f"torch.compile is followed with PyTorch {wanted} or later, and {torch.__version__} is installed; leave it "
            "out for the step as it runs without it"
        )


def _failure(frame: Any, error: Exception) -> str:
    """The message for a frame that ``torch.compile`` could not compile: its place and the first cause."""
    cause = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or ["no message"]
    if lines[0].endswith("raised:") and len(lines) > 1:  # BackendCompilerFailed
        lines = lines[1:]
    where = place_of(frame)
    return (
        f"{where}: torch.compile failed: {type(cause).__name__}: {lines[0].rstrip('.')}. Leave torch.compile out for "
        "the step as it runs without it"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The compiler's advice on speed is not about memory."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor", "torch._functorch")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with ignored_warnings():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
