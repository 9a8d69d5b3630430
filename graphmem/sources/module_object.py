"""Live Python objects given to the library: an ``nn.Module`` with example inputs, a factory, or a step function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from graphmem.errors import SourceError
from graphmem.sources.base import Built, Sizes, TorchModel, call_factory, refuse_seq_len, require_torch

if TYPE_CHECKING:
    from torch import Tensor, nn


def from_object(model: object, example_inputs: object) -> TorchModel:
    """A source for ``model``. The user's module is as it was afterwards: it is copied, with new, empty parameters, or
    with its own ones, empty meanwhile, where hooks know them.

    Raises :class:`SourceError` for anything that is neither a module nor callable, or a module without inputs.
    """
    require_torch("a Python object")
    import torch
    from torch import nn

    if isinstance(model, torch.jit.ScriptModule):
        raise SourceError(
            f"a {type(model).__name__} of torch.jit runs outside Python, where an analysis cannot follow it; give the "
            "module that it was made from"
        )
    if isinstance(model, torch.export.ExportedProgram) and example_inputs is None:
        from graphmem.sources.exported_program import build_program

        return TorchModel("ExportedProgram", lambda sizes: build_program(model, "the program", sizes))
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    if isinstance(model, nn.Module):
        if example_inputs is None:
            raise SourceError("a module needs example_inputs: a tensor, a tuple, or a dict of keyword arguments")
        if not isinstance(example_inputs, (torch.Tensor, list, tuple, Mapping)):
            raise SourceError(
                f"example_inputs is a {type(example_inputs).__name__}; "
                "give a tensor, a tuple, or a dict of keyword arguments"
            )
        if isinstance(example_inputs, Mapping):  # also those of tokenizers, which are no dict
            example_inputs = dict(example_inputs)
        name = type(model).__name__

        def build(sizes: Sizes) -> Built:
            refuse_seq_len(sizes, name)
            return fake_copy(model, example_inputs, sizes)

        return TorchModel(name, build)
    if callable(model):
        name = getattr(model, "__name__", type(model).__name__)
        return TorchModel(name, lambda sizes: call_factory(model, name, sizes))
    raise SourceError(f"cannot analyse a {type(model).__name__}; give a path, a torch.nn.Module, or a function")


def fake_copy(model: nn.Module, example_inputs: object, sizes: Sizes) -> Built:
    """Copy the module's structure with fake host parameters in place of the real ones; runs inside a capture.

    Hooks know their parameters by identity, also those of an optimizer that they step: where there are any, the
    parameters are borrowed and not copied."""
    import torch
    from torch.nn.parameter import is_lazy

    from graphmem.capture.device.borrowed import Borrowed, fake_like
    from graphmem.capture.device.factories import lazy_like

    place = Borrowed.of_capture().fake if _has_hooks(model) else fake_like
    memo: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_lazy(tensor):
            memo[id(tensor)] = lazy_like(tensor)
            continue
        memo[id(tensor)] = (place if isinstance(tensor, torch.nn.Parameter) else fake_like)(tensor)
    for module in model.modules():
        for tensor in _tensors(vars(module)):
            kept = not tensor.is_leaf  # from an earlier call; deepcopy refuses it
            unread = tensor.is_meta and id(tensor) not in memo  # a constant of an exported program
            if kept or unread:
                memo[id(tensor)] = fake_like(tensor)
    copied = copy.deepcopy(model, memo)
    inputs = _map_tensors(example_inputs, lambda t: _resized(_plain(t), sizes.batch))
    return Built(copied, tuple(inputs) if isinstance(inputs, list) else inputs)


def _has_hooks(model: nn.Module) -> bool:
    """Whether anything of the user's is called with parameters or gradients of the model."""
    of_tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
    of_modules = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(tensor, hooks) for tensor in model.parameters() for hooks in of_tensors) or any(
        getattr(module, hooks) for module in model.modules() for hooks in of_modules
    )


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _plain(tensor: Tensor) -> Tensor:
    import torch

    empty = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty


def _resized(tensor: Tensor, batch: int | None) -> Tensor:
    if batch is None or tensor.dim() == 0 or tensor.shape[0] == batch:
        return tensor
    return tensor.new_empty((batch, *tensor.shape[1:]))


def _map_tensors(value: object, function: Callable[[Tensor], Tensor]) -> object:
    import torch

    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, function) for item in value)
    return value
