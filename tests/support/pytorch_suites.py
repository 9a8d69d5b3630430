"""Checks in the manner of PyTorch's own suites, for a device that is named: on the CPU, and on the pretended card.

PyTorch's wheels have the databases of its tests (``torch.testing._internal``) and not the tests. A case is one check
of one entry: of ``test_modules.py``, ``test_optim.py``, ``test_subclass.py``, ``test_overrides.py`` and of functorch's
``test_ops.py``. It says only whether the check raises.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.common_subclass import WrapperTensor, subclass_db
from torch.testing._internal.generated.annotated_fn_args import annotated_args
from torch.utils._pytree import tree_flatten

from tests.support.captures import record

_Check = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """``check`` raises where something is wrong with the device that it is given."""

    suite: str
    name: str
    check: _Check

    @property
    def label(self) -> str:
        return f"{self.suite}/{self.name}"


def failures(cases: Iterable[Case], device: str = "cuda") -> dict[str, str]:
    """The cases that fail, by label, each with its error; ``cuda``: inside a capture."""
    found: dict[str, str] = {}

    def run() -> None:
        for case in cases:
            error = _error_of(case, device)
            if error:
                found[case.label] = error

    if device == "cpu":
        run()
    else:
        record(run)
    return found


def _error_of(case: Case, device: str) -> str:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            case.check(device)
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return ""


# --- modules ----------------------------------------------------------------------------------------------------------


def module_cases() -> Iterator[Case]:
    """Of ``test_modules.py``: every input of every module."""
    checks = (_trains, _is_saved, _is_copied, _moves, _is_made_there, _has_second_gradients)
    for info in module_db:
        for check in checks:
            if check is _has_second_gradients and not info.supports_gradgrad:
                continue
            yield Case("modules", f"{info.name}{check.__name__}", functools.partial(check, info))


def _modules(info: Any, device: str, gradients: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """A module's first two inputs of the database: modules on the device, with what they are called with."""
    dtype = torch.float32 if torch.float32 in info.dtypes else next(iter(info.dtypes))
    inputs = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=gradients, training=True)
    for given in inputs[:2]:
        if given.forward_input is not None:
            made = given.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).to(device).to(dtype)
            yield module.train(), given.forward_input, made


def _first_number(value: Any) -> torch.Tensor:
    tensors = [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor) and one.requires_grad]
    return sum((one.abs().sum() for one in tensors), torch.zeros(()))


def _trains(info: Any, device: str) -> None:
    for module, given, _ in _modules(info, device, gradients=True):
        loss = _first_number(module(*given.args, **given.kwargs))
        if loss.requires_grad:
            loss.backward()
        for parameter in module.parameters():
            assert parameter.device.type == device
            assert parameter.grad is None or parameter.grad.device.type == device


def _is_saved(info: Any, device: str) -> None:
    for module, given, made in _modules(info, device):
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        other = info.module_cls(*made.args, **made.kwargs).to(device)
        if any(isinstance(one, torch.nn.UninitializedParameter) for one in module.parameters()):
            continue
        other.load_state_dict(torch.load(file, weights_only=True))
        other(*given.args, **given.kwargs)


def _is_copied(info: Any, device: str) -> None:
    for module, given, _ in _modules(info, device):
        copied = copy.deepcopy(module)
        copied(*given.args, **given.kwargs)
        assert repr(copied) == repr(module)


def _moves(info: Any, device: str) -> None:
    for module, _, _ in _modules(info, device):
        assert all(one.device.type == "cpu" for one in module.cpu().parameters())
        module.to(device).double().float().to(torch.float32)
        module.zero_grad(set_to_none=False)


def _is_made_there(info: Any, device: str) -> None:
    for _, given, made in _modules(info, device):
        with torch.device(device):
            module = info.module_cls(*made.args, **made.kwargs)
        assert all(one.device.type == device for one in module.parameters())
        with torch.device("meta"):
            empty = info.module_cls(*made.args, **made.kwargs)
        if not info.is_lazy:
            empty.to_empty(device=device)(*given.args, **given.kwargs)


def _has_second_gradients(info: Any, device: str) -> None:
    for module, given, _ in _modules(info, device, gradients=True):
        parameters = [one for one in module.parameters() if one.requires_grad]
        loss = _first_number(module(*given.args, **given.kwargs))
        if not parameters or not loss.requires_grad:
            continue
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        again = sum((one.square().sum() for one in first if one is not None and one.requires_grad), torch.zeros(()))
        if again.requires_grad:
            again.backward()


# --- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_cases() -> Iterator[Case]:
    """Of ``test_optim.py``: every input of every optimizer, in every one of its implementations."""
    for info in optim_db:
        for implementation in ("forloop", "foreach", "fused"):
            if implementation == "forloop" or implementation in info.supported_impls:
                for check in (_optimizes, _is_resumed, _optimizer_is_copied):
                    name = f"{info.optim_cls.__name__}_{implementation}{check.__name__}"
                    yield Case("optimizers", name, functools.partial(check, info, implementation))


def _optimizers(info: Any, implementation: str, device: str) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Optimizers of a small model, each with its closure."""
    for given in info.optim_inputs_func(device=device):
        kwargs = {name: value for name, value in given.kwargs.items() if name not in ("foreach", "fused")}
        if implementation != "forloop":
            kwargs[implementation] = True
            if kwargs.get("differentiable") or (implementation == "fused" and device not in info.supports_fused_on):
                continue
        if device == "cpu" and kwargs.get("capturable"):
            continue
        sides = [(8, 8), (8, 8)] if info.optim_cls.__name__ == "Muon" else [(8, 8), (8,)]
        weights = [torch.nn.Parameter(torch.randn(*side, device=device)) for side in sides]
        if info.only_supports_sparse_grads:
            layer = torch.nn.Embedding(8, 4, sparse=True).to(device)
            weights = list(layer.parameters())
        optimizer = info.optim_cls(weights, **kwargs)

        def closure(
            optimizer: Any = optimizer, weights: Any = weights, sparse: bool = info.only_supports_sparse_grads
        ) -> Any:
            optimizer.zero_grad()
            if sparse:
                rows = torch.arange(4, device=weights[0].device)
                loss = torch.nn.functional.embedding(rows, weights[0], sparse=True).sum()
            else:
                loss = sum(one.square().sum() for one in weights)
            loss.backward()
            return loss

        yield optimizer, closure


def _steps(info: Any, optimizer: Any, closure: Callable[[], Any]) -> None:
    for _ in range(2):
        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _optimizes(info: Any, implementation: str, device: str) -> None:
    for optimizer, closure in _optimizers(info, implementation, device):
        _steps(info, optimizer, closure)


def _is_resumed(info: Any, implementation: str, device: str) -> None:
    for optimizer, closure in _optimizers(info, implementation, device):
        _steps(info, optimizer, closure)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file, weights_only=True))
        _steps(info, optimizer, closure)


def _optimizer_is_copied(info: Any, implementation: str, device: str) -> None:
    for optimizer, closure in _optimizers(info, implementation, device):
        _steps(info, optimizer, closure)
        copied = copy.deepcopy(optimizer)
        assert len(copied.state) == len(optimizer.state)
        repr(copied)


# --- classes of tensors -----------------------------------------------------------------------------------------------


def subclass_cases() -> Iterator[Case]:
    """Of ``test_subclass.py``: every class of its database. That they do not say themselves where they are is not
    asked: in a capture they do."""
    WrapperTensor._validate_methods = lambda _: None
    checks = (_is_of_its_class, _class_is_saved, _class_is_copied, _is_a_parameter, _class_is_trained, _is_shown)
    for kind, info in subclass_db.items():
        for check in checks:
            yield Case("subclasses", f"{info.name}{check.__name__}", functools.partial(check, kind, info))


def _made(info: Any, device: str) -> Any:
    with torch.device(device):
        return info.create_fn((3, 3) if info.name != "diag_tensor_below" else (3,))


def _is_of_its_class(kind: Any, info: Any, device: str) -> None:
    one = _made(info, device)
    assert isinstance(one, kind)
    assert one.device.type == device
    if info.closed_under_ops:
        for result in (one + one, one * 2, one.view(9), one.sum(), one.detach(), one.clone(), torch.relu(one)):
            assert isinstance(result, kind)


def _class_is_saved(kind: Any, info: Any, device: str) -> None:
    one, file = _made(info, device), io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=False), kind)


def _class_is_copied(kind: Any, info: Any, device: str) -> None:
    one = _made(info, device)
    copied = copy.deepcopy(one)
    assert isinstance(copied, kind)
    assert copied.shape == one.shape


def _is_a_parameter(kind: Any, info: Any, device: str) -> None:
    parameter = torch.nn.Parameter(_made(info, device))
    assert isinstance(parameter, kind)
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert isinstance(torch.nn.Parameter(parameter), kind)


def _class_is_trained(kind: Any, info: Any, device: str) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(_made(info, device))

        def forward(self) -> Any:
            return self.weight + self.weight

    module = Module()
    assert isinstance(module.weight, kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    module().sum().backward()
    optimizer.step()
    assert isinstance(module.weight, kind)


def _is_shown(kind: Any, info: Any, device: str) -> None:
    assert repr(_made(info, device))


# --- functions that classes replace -----------------------------------------------------------------------------------


class _Answering:
    """Of ``test_overrides.py``: no tensor, and every function of PyTorch is answered by it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> int:
        return -1


class _AnsweringTensor(torch.Tensor):
    """The same as a class of tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return -1


def override_cases() -> Iterator[Case]:
    """Of ``test_overrides.py``: every function of PyTorch that classes may replace."""
    seen: set[str] = set()
    for function, dummy in torch.overrides.get_testing_overrides().items():
        path = torch.overrides.resolve_name(function)
        if path is None or path in seen or "__get__" in path or "__set__" in path:
            continue
        seen.add(path)
        yield Case("overrides", path, functools.partial(_is_answered, path, _arguments(function, dummy)))


_BY_KIND: dict[str, Callable[[], Any]] = {
    "Tensor": _Answering,
    "TensorList": lambda: [_Answering(), _Answering()],
    "ITensorListRef": lambda: [_Answering(), _Answering()],
    "c10::List<::std::optional<Tensor>>": lambda: [_Answering(), _Answering()],
    "IntArrayRef": lambda: [1, 2, 3],
    "SymIntArrayRef": lambda: [1, 2, 3],
    "ScalarList": lambda: [3.5, 3.5],
    "int64_t": lambda: 1,
    "SymInt": lambda: 1,
    "Scalar": lambda: 3.5,
    "bool": lambda: False,
    "double": lambda: 1.0,
    "ScalarType": lambda: torch.float32,
    "c10::string_view": lambda: "",
    "std::string_view": lambda: "",
}


def _arguments(function: Any, dummy: Callable[..., Any]) -> list[Callable[[], Any]]:
    known = annotated_args.get(function)
    if known is None:
        spec = inspect.getfullargspec(dummy)
        return [_Answering] * (len(spec.args) - len(spec.defaults or ()))
    positional = [one["simple_type"].rstrip("?") for one in known if one.get("is_kwarg_only") != "True"]
    return [_BY_KIND.get(kind, _Answering) for kind in positional]


def _is_answered(path: str, arguments: list[Callable[[], Any]], device: str) -> None:
    found: Any = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    result = found(*(make() for make in arguments))
    assert result == -1, result
    if path.startswith("torch.Tensor."):
        with torch.device(device):
            tensor = torch.ones(1).as_subclass(_AnsweringTensor)
        assert found(tensor, *(make() for make in arguments[1:])) == -1


# --- transforms of torch.func -----------------------------------------------------------------------------------------


def transform_cases() -> Iterator[Case]:
    """Of functorch's ``test_ops.py``: derivatives and batches of every operator of the database."""
    for info in op_db:
        if not info.supports_autograd or torch.float32 not in info.dtypes:
            continue
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        absent = {_jvp: not info.supports_forward_ad, _vjp_of_vjp: not info.supports_gradgrad}
        for check in (_vjp, _jvp, _vmap, _vmap_of_vjp, _vjp_of_vjp):
            if absent.get(check):
                continue
            yield Case("transforms", f"{name}{check.__name__}", functools.partial(check, info))


def _called(info: Any, device: str, batched: bool = False) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The operator at its first two inputs, as a function of those of its arguments that have derivatives."""
    for _, sample in zip(range(2), info.sample_inputs(device, torch.float32, requires_grad=False), strict=False):
        flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, one in enumerate(flat) if isinstance(one, torch.Tensor) and one.is_floating_point()]
        if not places:
            continue

        def function(*values: Any, flat: Any = flat, spec: Any = spec, places: Any = places) -> Any:
            given = list(flat)
            for place, value in zip(places, values, strict=True):
                given[place] = value
            first, args, kwargs = torch.utils._pytree.tree_unflatten(given, spec)
            results = tree_flatten(info.op(first, *args, **kwargs))[0]
            return tuple(one for one in results if isinstance(one, torch.Tensor) and one.is_floating_point())

        values = tuple(flat[place].detach() for place in places)
        yield function, tuple(torch.stack([one, one]) for one in values) if batched else values


def _vjp(info: Any, device: str) -> None:
    for function, values in _called(info, device):
        results, pull = torch.func.vjp(function, *values)
        pull(tuple(torch.ones_like(one) for one in results))


def _jvp(info: Any, device: str) -> None:
    for function, values in _called(info, device):
        torch.func.jvp(function, values, tuple(torch.ones_like(one) for one in values))


def _vmap(info: Any, device: str) -> None:
    for function, values in _called(info, device, batched=True):
        torch.func.vmap(function, randomness="different")(*values)


def _vmap_of_vjp(info: Any, device: str) -> None:
    def derived(function: Any, *values: Any) -> Any:
        results, pull = torch.func.vjp(function, *values)
        return pull(tuple(torch.ones_like(one) for one in results))

    for function, values in _called(info, device, batched=True):
        torch.func.vmap(functools.partial(derived, function), randomness="different")(*values)


def _vjp_of_vjp(info: Any, device: str) -> None:
    def derived(function: Any, *values: Any) -> Any:
        results, pull = torch.func.vjp(function, *values)
        return pull(tuple(torch.ones_like(one) for one in results))

    for function, values in _called(info, device):
        results, pull = torch.func.vjp(functools.partial(derived, function), *values)
        pull(tuple(torch.ones_like(one) for one in results))


SUITES: dict[str, Callable[[], Iterator[Case]]] = {
    "modules": module_cases,
    "optimizers": optimizer_cases,
    "subclasses": subclass_cases,
    "overrides": override_cases,
    "transforms": transform_cases,
}
