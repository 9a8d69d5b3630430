"""Follows ``nn.Module`` calls and optimizers during a capture: module paths, stages, and the purposes of tensors."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as torch_optimizer

from graphmem.capture.patches import Patches
from graphmem.capture.record.key_value_caches import KeyValueCaches
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import FakeTensor, current_graph_task_id
from graphmem.capture.values.callers import called_to_generate, named_arguments
from graphmem.diagnostics import Code, Diagnostic
from graphmem.trace import Category


class ModuleWatch:
    """Names modules and parameters, and keeps the recorder's place in the step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: dict[int, str] = {}  # by id; an entry goes with its module
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self._adopted: list[weakref.ref[nn.Module]] = []
        self._stack: list[str] = []
        self._has_lazy = False
        self._caches: KeyValueCaches | None = None  # made when transformers' caches are there

    def adopt(self, model: nn.Module) -> None:
        """Learn the names of a model's modules, once, and label the storages of its parameters, their gradients and its
        buffers by name; again after a lazy model's first forward pass."""
        if not any(known() is model for known in self._adopted):
            self._adopted.append(weakref.ref(model))
            for full_name, module in model.named_modules():
                name = _as_written(full_name)
                if id(module) not in self._names:
                    self._remember(module, name or type(model).__name__)
        self._has_lazy = any(is_lazy(tensor) for tensor in (*model.parameters(), *nn.Module.buffers(model)))
        for name, parameter in model.named_parameters():
            shard = getattr(parameter, "ds_tensor", parameter)  # of ZeRO-3, which leaves the parameter itself empty
            self._recorder.storages.label(shard, Category.PARAMETER, _as_written(name))
            if parameter.grad is not None:
                self._recorder.storages.label(parameter.grad, Category.GRADIENT, f"{_as_written(name)}.grad")
        for name, buffer in model.named_buffers():
            self._recorder.storages.label(buffer, Category.BUFFER, _as_written(name))

    def _remember(self, module: nn.Module, name: str) -> None:
        """Name a module for as long as it lives: the step decides when a model dies."""
        key = id(module)

        def forget(_: object) -> None:
            self._names.pop(key, None)
            self._alive.pop(key, None)

        self._names[key] = name
        self._alive[key] = weakref.ref(module, forget)

    def enter(self, module: nn.Module, inputs: Sequence[object]) -> None:
        """A module is called: the recorder gets its name, made up where it has none. An outermost one is adopted and
        may begin a forward pass."""
        recorder = self._recorder
        if not self._stack:
            if id(module) not in self._names:
                self.adopt(module)
            self._begin_forward(module, inputs)
        name = self._names.get(id(module))
        if name is None:
            name = f"{self._stack[-1] if self._stack else ''}.{type(module).__name__}"
            self._remember(module, name)
        self._stack.append(name)
        recorder.enter_module(name)

    @property
    def is_inside(self) -> bool:
        """True if a module is running now."""
        return bool(self._stack)

    def leave(self) -> None:
        """A module has returned: the recorder goes back to the one around it. When the outermost returns, caches of
        keys and values are labelled, and lazy parameters, which have shapes by then."""
        was_entered = bool(self._stack)
        if was_entered:
            self._stack.pop()
            if not self._stack and self._caches is not None:
                self._caches.label()
            if self._has_lazy and not self._stack:  # its first forward gave them their shapes
                for model in filter(None, [known() for known in self._adopted]):
                    self.adopt(model)
        self._recorder.leave_module(self._stack[-1] if self._stack else "", was_entered=was_entered)

    def _begin_forward(self, module: nn.Module, inputs: Sequence[object]) -> None:
        """An outermost module call starts a forward pass; after an optimizer step, a new iteration."""
        recorder = self._recorder
        if current_graph_task_id() != -1:
            return  # recomputation of a checkpointed part
        given = (*inputs, *named_arguments().values())
        if "transformers.cache_utils" in sys.modules:
            self._caches = self._caches or KeyValueCaches(recorder.storages)
            self._caches.note_call(given)
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        on_device = any(isinstance(tensor, FakeTensor) and tensor.is_cuda for tensor in tensors)
        if recorder.phases.names_stages and _is_evaluated(module):
            recorder.phases.step_aside("generate" if called_to_generate() else "evaluate")
        elif recorder.phases.stage == "optimizer" or (recorder.phases.stage == "build" and on_device):
            recorder.phases.begin_iteration()
        elif recorder.phases.stage == "backward" or recorder.phases.is_aside:
            recorder.phases.enter("forward")
        recorder.phases.note_pass()
        if torch.is_grad_enabled():
            if recorder.on_forward is not None:
                recorder.on_forward(module, given)
            if _checkpoints_nothing(module):
                recorder.assumed[_EVALUATED] = 1
        for tensor in tensors:
            if tensor.is_leaf:
                recorder.storages.label_input(tensor)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step begins: note the optimizer, label the gradients of all models, and enter the stage ``optimizer``,
        unless a backward pass is running, which steps by hooks."""
        recorder = self._recorder
        recorder.phases.in_optimizer_step = True
        recorder.note_optimizer(type(optimizer).__name__)
        if recorder.phases.stage == "build":
            recorder.phases.begin_iteration()
        for model in [model for known in self._adopted if (model := known()) is not None]:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    recorder.storages.label(parameter.grad, Category.GRADIENT, f"{_as_written(name)}.grad")
        if current_graph_task_id() == -1:
            recorder.phases.enter("optimizer")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step is over: label the tensors of the optimizer's state by their keys, as ``exp_avg``."""
        self._recorder.phases.in_optimizer_step = False
        for state in optimizer.state.values():
            if isinstance(state, dict):
                for key, value in state.items():
                    for tensor in value if isinstance(value, list) else [value]:  # L-BFGS keeps lists
                        self._recorder.storages.label(tensor, Category.OPTIMIZER_STATE, str(key))


def _is_evaluated(module: nn.Module) -> bool:
    """True if a model that is trained runs without gradients. Frozen ones do so within a training step too."""
    if torch.is_grad_enabled() or getattr(module, "training", False):  # a frozen ScriptModule has none
        return False
    return any(parameter.requires_grad for parameter in module.parameters())


#: ``GradientCheckpointingLayer`` of transformers (``modeling_layers.py``) asks whether it is in training.
_EVALUATED = Diagnostic(
    Code.NOTE,
    "gradient checkpointing is enabled and the model is in eval mode, in which transformers recomputes nothing: call "
    "model.train()",
)


def _checkpoints_nothing(module: nn.Module) -> bool:
    """True if a model in eval mode has transformers' gradient checkpointing enabled."""
    if getattr(module, "training", True):
        return False
    return any(getattr(part, "gradient_checkpointing", False) is True for part in module.modules())


def _as_written(name: str) -> str:
    """The user's name for a module that ``torch.compile`` has wrapped."""
    return name.replace("_orig_mod.", "")


@contextlib.contextmanager
def watch_modules(recorder: Recorder) -> Iterator[ModuleWatch]:
    """Install the hooks for the duration."""
    watch = ModuleWatch(recorder)
    patches = Patches()

    def from_roots(make_grads: Callable[..., object]) -> object:
        def root_gradients(*args: object, **kwargs: object) -> object:
            """The gradients that a backward pass starts from are its first tensors."""
            recorder.begin_backward()
            return make_grads(*args, **kwargs)

        return root_gradients

    lost = "where a backward pass begins is not seen: its peak is told with the forward pass"
    patches.wrap("torch.autograd._make_grads", lost, from_roots)
    only = patches.threads.only  # PyTorch calls these hooks for every thread
    handles: list[Any] = []
    hold_weight = recorder.values.hold_weight
    try:
        for register, hook in (
            (nn_module.register_module_parameter_registration_hook, lambda _, __, parameter: hold_weight(parameter)),
            (nn_module.register_module_forward_pre_hook, lambda module, inputs: watch.enter(module, inputs)),
            (_always_called, lambda *_: watch.leave()),
            (torch_optimizer.register_optimizer_step_pre_hook, lambda optimizer, *_: watch.before_step(optimizer)),
            (torch_optimizer.register_optimizer_step_post_hook, lambda optimizer, *_: watch.after_step(optimizer)),
        ):
            handles.append(register(only(hook)))
        yield watch
    finally:
        for handle in handles:
            handle.remove()
        patches.undo()


def _always_called(hook: Callable[..., object]) -> object:
    return nn_module.register_module_forward_hook(hook, always_call=True)
