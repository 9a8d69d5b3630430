"""Finds the layers of a model that vLLM would fuse into one, by running the model once on fake tensors.

The engine reads the model's code for it; here it is run: which projections read one input, what the activation between
them is, which modules are root-mean-square norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

#: Activations that have a kernel which also multiplies (``_ACTIVATION_AND_MUL_REGISTRY``, layers/activation.py), by
#: the names of transformers' and torch's classes.
_MULTIPLYING = ("SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh")

#: Projections by the names that the module around them has for them.
Linears: TypeAlias = Mapping[str, nn.Linear]


@dataclass(frozen=True)
class Gate:
    """Two projections of one input, of which the activated first one multiplies the other, by the names of modules;
    ``down`` reads the product."""

    gate: str
    up: str
    act: str
    down: str | None


@dataclass(frozen=True)
class Together:
    """Projections that become one; ``head_dim``: of queries, keys and values, 0 for others."""

    names: tuple[str, ...]
    head_dim: int
    out: str | None


@dataclass
class Fusable:
    """The modules that can be fused, by the names of the modules around it. ``packed``: the projection that a gate and
    what it multiplies share, and the one that reads their product."""

    gates: dict[str, Gate] = field(default_factory=dict)
    together: dict[str, Together] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    packed: dict[str, tuple[str, str]] = field(default_factory=dict)
    activations: set[str] = field(default_factory=set)


def fusable(model: nn.Module, run: Callable[[], object], *, own_code: bool) -> Fusable:
    """The modules that can be fused in the model, which ``run`` runs once.

    The engine's ``own_code`` also has one kernel for the norms and the activations of its models, whatever they are,
    and for gates that are packed with what they are multiplied by.
    """
    calls = _watched(model, run)
    found = Fusable()
    for name, module in model.named_modules():
        path = f"model.{name}"
        linears = {
            one: child
            for one, child in module.named_children()
            if isinstance(child, torch.nn.Linear) and id(child) in calls.given
        }
        if len(linears) >= 2:
            _add_projections(found, path, module, linears, calls)
            if own_code and (packed := _packed(module, linears)):
                found.packed[path] = packed
        elif next(module.children(), None) is None and (kind := _norm_kind(module, any_norm=own_code)):
            found.norms[path] = kind
        elif own_code and type(module) in _activations():
            found.activations.add(path)
    return found


@dataclass(frozen=True)
class _Calls:
    """Arguments and output of every module that was called, by its identity."""

    given: dict[int, tuple[object, ...]] = field(default_factory=dict)
    returned: dict[int, object] = field(default_factory=dict)


def _watched(model: nn.Module, run: Callable[[], object]) -> _Calls:
    calls = _Calls()

    def look(module: nn.Module, arguments: tuple[object, ...], keywords: dict[str, object], output: object) -> None:
        calls.given[id(module)] = (*arguments, *keywords.values())
        calls.returned[id(module)] = output[0] if isinstance(output, tuple) and output else output

    hooks = [one.register_forward_hook(look, with_kwargs=True) for one in model.modules()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _activations() -> set[type]:
    """Activations of transformers' own, which are one kernel each in the engine."""
    from transformers.activations import ACT2CLS

    return {one[0] if isinstance(one, tuple) else one for one in ACT2CLS.values()}


def _add_projections(found: Fusable, path: str, module: nn.Module, linears: Linears, calls: _Calls) -> None:
    by_input: dict[int, list[str]] = {}
    for name, linear in linears.items():
        by_input.setdefault(id(calls.given[id(linear)][0]), []).append(name)
    for names in by_input.values():
        gate = _gate_of(module, names, linears, calls)
        if gate is not None:
            found.gates[path] = gate
            return
    entered = {id(one) for one in calls.given.get(id(module), ())}
    groups = [names for source, names in by_input.items() if len(names) >= 2 and source in entered]
    together = _together(module, groups[0], linears, calls) if len(groups) == 1 else None
    if together is not None:
        found.together[path] = together


def _together(module: nn.Module, names: list[str], linears: Linears, calls: _Calls) -> Together | None:
    """Queries, keys and values, with the projection that the module ends with; else any, all with a bias or without."""
    head_dim = getattr(module, "head_dim", 0) or 0
    order = _queries_first(names, linears)
    if head_dim and order is not None and all(linears[one].out_features % head_dim == 0 for one in order):
        last = calls.returned.get(id(module))
        out = next((one for one, linear in linears.items() if calls.returned[id(linear)] is last), None)
        if out is not None and (out in names or linears[out].in_features != linears[order[0]].out_features):
            out = None
        return Together(order, head_dim, out)
    return Together(tuple(names), 0, None) if len({linears[one].bias is None for one in names}) == 1 else None


def _gate_of(module: nn.Module, names: list[str], linears: Linears, calls: _Calls) -> Gate | None:
    """Two projections of one width, an activation of the first's output, and the one that reads their product."""
    if len(names) != 2 or len({linears[one].out_features for one in names}) != 1:
        return None
    for act, child in module.named_children():
        if type(child).__name__ not in _MULTIPLYING or len(calls.given.get(id(child), ())) != 1:
            continue
        gate = next((one for one in names if calls.returned[id(linears[one])] is calls.given[id(child)][0]), None)
        if gate is not None:
            up = next(one for one in names if one != gate)
            width = linears[gate].out_features
            down = next((one for one, at in linears.items() if one not in names and at.in_features == width), None)
            return Gate(gate, up, act, down)
    return None


def _queries_first(names: list[str], linears: Linears) -> tuple[str, ...] | None:
    """Three projections as queries, keys and values: the wider is of queries; None for others."""
    widths = [linears[one].out_features for one in names]
    if len(names) != 3 or len({linears[one].bias is None for one in names}) != 1:
        return None
    if len(set(widths)) == 1:
        return tuple(names)
    wide = [one for one, width in zip(names, widths, strict=True) if width == max(widths)]
    rest = [one for one in names if one not in wide]
    if len(wide) != 1 or linears[rest[0]].out_features != linears[rest[1]].out_features:
        return None
    return (wide[0], *rest)


def _packed(module: nn.Module, linears: Linears) -> tuple[str, str] | None:
    """(the projection that gate and what it multiplies share, the one that reads their product)."""
    if len(linears) != 2 or not any(type(child).__name__ in _MULTIPLYING for child in module.children()):
        return None
    (first, wide), (last, narrow) = sorted(linears.items(), key=lambda item: -item[1].out_features)
    return (first, last) if wide.out_features == 2 * narrow.in_features else None


def _norm_kind(module: nn.Module, *, any_norm: bool) -> str | None:
    """``rms`` for a root-mean-square norm of one weight (or ``any_norm`` of a class of the model's own), and
    ``zero-centered`` where that is of one more than it."""
    if len(list(module.parameters())) != 1 or getattr(module, "weight", None) is None or module.weight.ndim != 1:
        return None
    try:
        graph = torch.fx.symbolic_trace(module).graph
    except Exception:  # what cannot be traced is not fused by the engine either
        return None
    names = {node: str(getattr(node.target, "__name__", node.target)) for node in graph.nodes}
    called = set(names.values())
    if "rms_norm" in called:
        return "rms"
    if any_norm and type(module).__name__.endswith("Norm") and "mean" in called and called & {"sub", "var"}:
        return "rms"
    if "mean" not in called or not called & {"rsqrt", "pow"} or called & {"sub", "var", "std"}:
        return None
    centered = any(name == "add" and 1 in node.args[:2] for node, name in names.items())
    return "zero-centered" if centered else "rms"
