"""Private names of PyTorch that several rooms use, each declared once (:mod:`graphmem.torch_names`)."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch

from graphmem.torch_names import private


class Never(Exception):
    """Stands for an exception that this PyTorch does not have, and so never raises."""


if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    #: One overload of an operator, such as ``torch.ops.aten.add.Tensor``.
    OpOverload = type(torch.ops.aten.add.Tensor)
    FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor", "there are no tensors without data")
    FakeTensorMode = private("torch._subclasses.fake_tensor.FakeTensorMode", "operators cannot run on shapes alone")
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode", "operators cannot be recorded")

# --- modes ---

in_kernel_invocation_manager: Any = private(
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager", "compressed sparse tensors cannot be made"
)
unset_fake_temporarily: Any = private(
    "torch._subclasses.fake_tensor.unset_fake_temporarily", "host tensors cannot be computed while shapes are"
)
disable_current_modes: Any = private(
    "torch.utils._python_dispatch._disable_current_modes",
    "host tensors cannot be computed while operators are recorded",
)
dispatch_modes: Any = private(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "threads that the step starts, and passes that make a graph, are not recorded",
    list,
)
push_dispatch_mode: Any = private(
    "torch.utils._python_dispatch._push_mode", "threads that the step starts, and passes that make a graph, fail"
)
pop_dispatch_mode: Any = private(
    "torch.utils._python_dispatch._pop_mode", "threads that the step starts, and passes that make a graph, fail"
)
function_modes: Any = private(
    "torch.overrides._get_current_function_mode_stack",
    "torch.set_default_device and `with torch.device(...)` are not followed where tensors are made of data",
    list,
)
# --- transforms of torch.func ---

_LOST_INSIDE = "tensors inside torch.func show no device, and gradients of gradients there may come in another order"
is_transformed_tensor: Any = private("torch._C._functorch.is_functorch_wrapped_tensor", _LOST_INSIDE, lambda _: False)
inside_transform: Any = private("torch._C._functorch.get_unwrapped", _LOST_INSIDE, None)

# --- modes of functions ---

push_function_mode: Any = private(
    "torch.overrides._push_mode", "modes of functions that the caller has on are not set aside", lambda _: None
)
pop_function_mode: Any = private(
    "torch.overrides._pop_mode", "modes of functions that the caller has on are not set aside", lambda: None
)
DeviceContext: Any = private(
    "torch.utils._device.DeviceContext",
    "torch.set_default_device and `with torch.device(...)` are not followed",
    type("DeviceContext", (), {}),
)
#: What holds the default device of ``torch.set_default_device``.
default_context: Any = private(
    "torch._GLOBAL_DEVICE_CONTEXT", "torch.set_default_device is not put back", types.SimpleNamespace()
)
without_torch_function: Any = private(
    "torch._C.DisableTorchFunctionSubclass",
    "operators of classes of tensors of their own may call those classes",
    contextlib.nullcontext,
)
is_traceable_wrapper_subclass: Any = private(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "tensors around others, as of torchao, are taken for plain ones",
    lambda _: False,
)

# --- tensors ---

#: Bound before it is replaced.
make_subclass: Any = private("torch.Tensor._make_subclass", "no tensor can show that it is on a card")
swap_tensor_impl: Any = private(
    "torch._C._swap_tensor_impl", "tensors cannot move to another device and stay the objects that they are"
)
storage_use_count: Any = private(
    "torch._C._storage_Use_Count",
    "gradients that the engine adds up in place are told by fewer counts, and may be counted as additions",
    lambda _: 0,
)
disabled_torch_function: Any = private(
    "torch._C._disabled_torch_function_impl",
    "classes of tensors of their own are slower",
    torch.Tensor.__torch_function__,
)
suggest_memory_format: Any = private(
    "torch._prims_common.suggest_memory_format",
    "tensors that are channels_last are told by their strides alone",
    lambda tensor: (
        torch.channels_last
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        else torch.contiguous_format
    ),
)
compute_elementwise_output_strides: Any = private(
    "torch._prims_common.compute_elementwise_output_strides", "the order in memory of what elementwise operators give"
)

# --- the backward pass ---

#: The number of the backward pass that runs in this thread, -1 outside one.
current_graph_task_id: Any = private(
    "torch._C._current_graph_task_id", "what runs in a backward pass is taken to run in the forward pass", lambda: -1
)
_multithreaded: Any = private(
    "torch._C._is_multithreading_enabled", "torch.autograd.set_multithreading_enabled is not heard", lambda: True
)


def on_engine_thread() -> bool:
    """True if the autograd engine's device thread would run this: a backward pass, unless it has no threads."""
    return current_graph_task_id() != -1 and bool(_multithreaded())


current_autograd_node: Any = private(
    "torch._C._current_autograd_node",
    "operators of a backward pass are not given to the modules of their forward operators, and gradients that their "
    "own formulas add up may be counted twice",
    lambda: None,
)
next_sequence_number: Any = private(
    "torch.autograd._get_sequence_nr",
    "operators of a backward pass are not given to the modules of their forward operators",
    lambda: 0,
)

# --- the dispatcher ---

has_kernel: Any = private(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "composite operators in inference mode cannot be told from others",
    lambda *_: False,
)
