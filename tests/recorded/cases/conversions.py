"""Methods that convert parameters and buffers, over PyTorch's own module database, and everything that a program can
see of the two before and after: identity, attributes, hooks, gradients, graph nodes, versions, views, references."""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, prune, weight_norm

Seen = dict[str, Any]


def _with_future(flag: str, convert: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def converted(module: nn.Module) -> Any:
        set_, get = (getattr(torch.__future__, f"{verb}_{flag}_module_params_on_conversion") for verb in ("set", "get"))
        before = get()
        set_(True)
        try:
            return convert(module)
        finally:
            set_(before)

    return converted


def _assign_data(convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], Any]:
    def converted(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data = convert(parameter.data)

    return converted


def _load(assign: bool) -> Callable[[nn.Module], Any]:
    def converted(module: nn.Module) -> None:
        state = {name: value.detach().clone().cuda() for name, value in module.state_dict().items()}
        module.load_state_dict(state, assign=assign)

    return converted


def _state_of_card(module: nn.Module) -> None:
    module.cuda()
    module.load_state_dict({name: value.cpu() for name, value in module.state_dict().items()})


#: By name: what is done to a module.
METHODS: dict[str, Callable[[nn.Module], Any]] = {
    "cuda": lambda m: m.cuda(),
    "to_device": lambda m: m.to("cuda"),
    "to_dtype": lambda m: m.to(torch.bfloat16),
    "to_device_dtype": lambda m: m.to("cuda", torch.float16),
    "to_tensor": lambda m: m.to(torch.empty(0, device="cuda", dtype=torch.float64)),
    "to_memory_format": lambda m: m.to(memory_format=torch.channels_last),
    "to_device_memory_format": lambda m: m.to("cuda", memory_format=torch.channels_last),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "type": lambda m: m.type(torch.float16),
    "cuda_twice": lambda m: m.cuda().cuda(),
    "cuda_bfloat16": lambda m: m.cuda().bfloat16(),
    "bfloat16_cuda": lambda m: m.bfloat16().cuda(),
    "cuda_float": lambda m: m.cuda().float(),
    "cuda_memory_format": lambda m: m.cuda().to(memory_format=torch.channels_last),
    "cuda_cpu": lambda m: m.cuda().cpu(),
    "cpu": lambda m: m.cpu(),
    "meta": lambda m: m.to("meta"),
    "meta_to_empty": lambda m: m.to("meta").to_empty(device="cuda"),
    "to_empty": lambda m: m.to_empty(device="cuda"),
    "requires_grad_false": lambda m: m.requires_grad_(False),
    "cuda_frozen": lambda m: m.cuda().requires_grad_(False),
    "frozen_cuda": lambda m: m.requires_grad_(False).cuda(),
    "share_memory": lambda m: m.share_memory(),
    "zero_grad_cuda": lambda m: (m.zero_grad(), m.cuda()),
    "deepcopy": copy.deepcopy,
    "cuda_deepcopy": lambda m: copy.deepcopy(m.cuda()),
    "overwrite_cuda": _with_future("overwrite", lambda m: m.cuda()),
    "overwrite_bfloat16": _with_future("overwrite", lambda m: m.bfloat16()),
    "swap_cuda": _with_future("swap", lambda m: m.cuda()),
    "data_cuda": _assign_data(lambda data: data.cuda()),
    "data_bfloat16": _assign_data(lambda data: data.bfloat16()),
    "data_clone": _assign_data(torch.clone),
    "data_cuda_cpu": lambda m: (_assign_data(lambda data: data.cuda())(m), _assign_data(lambda data: data.cpu())(m)),
    "load": _load(assign=False),
    "load_assign": _load(assign=True),
    "cuda_load": _state_of_card,
}
#: Methods of which every reference that the test holds would be refused: they are seen without.
_UNHELD = frozenset(("swap_cuda",))


def modules() -> dict[str, Callable[[], nn.Module]]:
    """What makes each module of PyTorch's database that has parameters or buffers, on the host, by its name."""
    from torch.testing._internal.common_modules import module_db

    # Importing it forbids PyTorch's switches to be set, in the whole process.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return {info.name: lambda info=info: _made(info) for info in module_db} | _COMPOSED


def _materialized() -> nn.Module:
    made = nn.LazyLinear(3)
    made(torch.zeros(2, 4))
    return made


#: Modules that keep their parameters in other ways than a layer does.
_COMPOSED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: weight_norm(nn.Linear(4, 4)),
    "parametrized_weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "parametrized_spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "parameter_list": lambda: nn.ParameterList([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(()))]),
    "parameter_dict": lambda: nn.ParameterDict({"a": nn.Parameter(torch.zeros(4, 4).t())}),
    "nested": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Sequential(nn.Linear(4, 4))),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
    "materialized_lazy": _materialized,
}


def _made(info: Any) -> nn.Module:
    given = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    arguments = given[0].constructor_input
    made: nn.Module = info.module_cls(*arguments.args, **arguments.kwargs)
    return made


def observed(make: Callable[[], nn.Module], method: str) -> Seen | None:
    """What is seen of a module's tensors after the method; None of one that has none yet."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = make()
        tensors = list(_tensors(module).values())
        if not tensors or any(is_lazy(tensor) for tensor in tensors):
            return None
        first = next(module.parameters(), None)
        if first is not None:
            module.register_parameter("tied", first)
        return _observed(module, method)


def _observed(module: nn.Module, method: str) -> Seen:
    calls: list[str] = []
    for number, (name, parameter) in enumerate(module.named_parameters()):
        parameter.tag = number  # type: ignore[attr-defined]
        if number % 2 == 0 and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.requires_grad and method not in _UNHELD:
            parameter.register_hook(lambda grad, name=name: calls.append(f"hook {name} {_kind(grad)}"))
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: calls.append(f"after {name} {_kind(p)} {_kind(p.grad)} {getattr(p, 'tag', None)}")
            )
    for name, buffer in module.named_buffers():
        buffer.tag = name  # type: ignore[attr-defined]
    held = [] if method in _UNHELD else [_Held(tensor) for tensor in _tensors(module).values()]
    before = {name: (id(tensor), tensor._version) for name, tensor in _tensors(module).items()}
    references = {name: sys.getrefcount(tensor) for name, tensor in _tensors(module).items()}
    try:
        result = METHODS[method](module)
    except Exception as error:
        return {"raised": _error(error)}
    after = result if isinstance(result, nn.Module) else module
    seen: Seen = {"held": [one.facts() for one in held]}
    held.clear()  # a graph's node refers to its parameter from C++
    gc.collect(0)
    more = {name: sys.getrefcount(tensor) - references[name] for name, tensor in _tensors(after).items()}
    for name, tensor in _tensors(after).items():
        identity, version = before[name]
        same = id(tensor) == identity
        written = tensor._version - version if same and method not in _UNHELD else None
        seen[name] = {"same": same, "references": more[name], "written": written, **_facts(tensor)}
    seen["calls"] = _backward(after, calls)
    return seen


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


class _Held:
    """What a program holds of a tensor while its module is converted: weak references to it and its gradient, its data,
    its graph node."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self.grad = None if tensor.grad is None else weakref.ref(tensor.grad)
        self.data = tensor.detach()
        self.node = _node(tensor)

    def facts(self) -> list[Any]:
        tensor = self.tensor()
        if tensor is None:
            return ["gone"]
        shares = tensor.untyped_storage()._cdata == self.data.untyped_storage()._cdata
        grad = None if self.grad is None else self.grad() is tensor.grad
        return [shares, _kind(self.data), self.node is not None and _node(tensor) is self.node, grad]


def _node(tensor: torch.Tensor) -> Any:
    return get_gradient_edge(tensor).node if tensor.requires_grad else None


def _facts(tensor: torch.Tensor) -> Seen:
    """A tensor as a program sees it."""
    grad = tensor.grad
    return {
        "is": [isinstance(tensor, nn.Parameter), tensor.requires_grad, tensor.is_leaf, tensor._is_view()],
        "kind": _kind(tensor),
        "layout": [list(tensor.shape), list(tensor.stride())],
        "tag": getattr(tensor, "tag", None),
        "hooks": [_count(tensor._backward_hooks), _count(tensor._post_accumulate_grad_hooks)],
        "grad": None if grad is None else [_kind(grad), list(grad.stride()), grad.requires_grad],
    }


def _count(hooks: Any) -> int:
    return -1 if hooks is None else len(hooks)


def _kind(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{tensor.device.type} {str(tensor.dtype).removeprefix('torch.')}"


def _backward(module: nn.Module, calls: list[str]) -> list[str]:
    """The hooks that a backward pass over every parameter calls."""
    for parameter in module.parameters():
        try:
            if parameter.requires_grad:
                (parameter * 2).sum().backward()
        except Exception as error:
            calls.append(_error(error))
    return calls


def _error(error: Exception) -> str:
    """Fake tensors have errors of their own kinds, which are runtime errors."""
    plain = isinstance(error, RuntimeError) and not isinstance(error, RecursionError)
    return "RuntimeError" if plain else type(error).__name__


def everything(parts: list[str]) -> dict[str, Seen]:
    """What is seen by ``module.method``, of those whose names contain one of the parts."""
    found: dict[str, Seen] = {}
    for module, make in modules().items():
        for method in METHODS:
            name = f"{module}.{method}"
            seen = observed(make, method) if not parts or any(part in name for part in parts) else None
            if seen is not None:
                found[name] = seen
    return found
