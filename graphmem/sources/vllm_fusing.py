"""Finds the layers of a model that vLLM would fuse into one, by running the model once on fake tensors.

The engine reads the model's code for it; here it is run: which projections read one input, what the activation between
them is, which modules are root-mean-square norms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphmem.sources.vllm_modules import ADDING

#: Activations that have a kernel which also multiplies (``_ACTIVATION_AND_MUL_REGISTRY``, layers/activation.py), by
#: the names of transformers' and torch's classes.
_MULTIPLYING = ("SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh")

#: Names of the projections that the engine's own code always makes one.
_QKV = ("q_proj", "k_proj", "v_proj")
#: ``model_type`` whose own code has the gate of attention in their product (models/hrm_text.py); of others it is apart.
_GATED_TOGETHER = ("hrm_text",)
#: ``model_type`` whose activation and product are two operators there (models/modernbert.py).
_MULTIPLIED_APART = ("modernbert",)

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


@dataclass(frozen=True)
class Inline:
    """Attention of a module that does not go through an interface: the projections that read its input, by the names
    of modules, the one that reads its result, heads, those of keys, and whether more is done to its output."""

    projections: tuple[str, ...]
    out: str
    heads: int
    kv_heads: int
    head_dim: int
    is_added: bool


@dataclass
class Fusable:
    """The modules that can be fused, by the names of the modules around it. ``weightless``: norms without a weight, and
    the width of what they norm; ``packed``: the projection that a gate and what it multiplies share, and the one that
    reads their product; ``several``: how many things a module returns that returns some; ``wide``: shapes of weights in
    fp32 that inputs are multiplied with; ``sums_in_place``: residuals are summed by the kernel of the norm behind them.
    """

    gates: dict[str, Gate] = field(default_factory=dict)
    together: dict[str, Together] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    weightless: dict[str, int] = field(default_factory=dict)
    packed: dict[str, tuple[str, str]] = field(default_factory=dict)
    activations: set[str] = field(default_factory=set)
    several: dict[str, int] = field(default_factory=dict)
    inline: dict[str, Inline] = field(default_factory=dict)
    wide: set[tuple[int, ...]] = field(default_factory=set)
    sums_in_place: bool = False


def fusable(
    model: nn.Module, run: Callable[[], object], *, own_code: bool, attended: Collection[int], heads: int
) -> Fusable:
    """The modules that can be fused in the model, which ``run`` runs once.

    The engine's ``own_code`` also has one kernel for the norms and the activations of its models, whatever they are,
    for gates that are packed with what they are multiplied by, and for attention: with so many ``heads`` where a model
    has it inline, so that the run ``attended`` in no layer.
    """
    calls = _watched(model, run)
    found = Fusable(wide=calls.wide)
    for name, module in model.named_modules():
        path = f"model.{name}"
        if id(module) in calls.several:
            found.several[path] = calls.several[id(module)]
        linears = {
            one: child
            for one, child in module.named_children()
            if isinstance(child, torch.nn.Linear) and id(child) in calls.given
        }
        inline = _inline(module, linears, calls, heads) if own_code and not attended else None
        if inline is not None:
            found.inline[path] = inline
        elif len(linears) >= 2:
            alone = own_code and model.config.model_type not in _GATED_TOGETHER
            _add_projections(found, path, module, linears, calls, own_code=own_code, alone=alone)
            multiplies = own_code and model.config.model_type not in _MULTIPLIED_APART
            if multiplies and (packed := _packed(module, linears)):
                found.packed[path] = packed
        elif next(module.children(), None) is None and (kind := _norm_kind(module, any_norm=own_code)):
            found.norms[path] = kind
            if getattr(module, "weight", None) is None and isinstance(given := calls.given[id(module)][0], Tensor):
                found.weightless[path] = given.shape[-1]
        elif own_code and _activates(module, calls):
            found.activations.add(path)
    found.sums_in_place = own_code and _sums_are_normed(model, found, calls)
    return found


@dataclass(frozen=True)
class _Calls:
    """Arguments and output of every module that was called, by its identity, and how many outputs where it has some."""

    given: dict[int, tuple[object, ...]] = field(default_factory=dict)
    returned: dict[int, object] = field(default_factory=dict)
    several: dict[int, int] = field(default_factory=dict)
    wide: set[tuple[int, ...]] = field(default_factory=set)
    sums: list[tuple[object, object, object]] = field(default_factory=list)
    products: set[int] = field(default_factory=set)


class _Watching(TorchFunctionMode):  # type: ignore[misc]
    """Notes products with weights in fp32, and sums."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self, function: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        assert callable(function)
        result = function(*args, **(kwargs or {}))
        if function is nn.functional.linear and isinstance(weight := args[1], Tensor) and weight.dtype is torch.float32:
            self.calls.wide.add(tuple(weight.shape))
        elif function in ADDING and len(args) == 2:
            self.calls.sums.append((*args, result))
        return result


def _watched(model: nn.Module, run: Callable[[], object]) -> _Calls:
    calls = _Calls()

    def look(module: nn.Module, arguments: tuple[object, ...], keywords: dict[str, object], output: object) -> None:
        calls.given[id(module)] = (*arguments, *keywords.values())
        calls.returned[id(module)] = output[0] if isinstance(output, tuple) and output else output
        if isinstance(module, nn.Linear):
            calls.products.add(id(output))
        if isinstance(output, tuple):
            calls.several[id(module)] = len(output)

    hooks = [one.register_forward_hook(look, with_kwargs=True) for one in model.modules()]
    try:
        with _Watching(calls):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _sums_are_normed(model: nn.Module, found: Fusable, calls: _Calls) -> bool:
    """True if every sum of what a layer returned, and so one in each layer at least, goes into a norm that is one
    kernel (``RMSNorm.forward`` with a residual, layers/layernorm.py). Not counted are sums within a module, of experts
    say, which returns them to be added in turn."""
    normed = {
        id(calls.given[id(module)][0])
        for name, module in model.named_modules()
        if found.norms.get(f"model.{name}") == "rms" and id(module) in calls.given
    }
    returned, sums = {id(one) for one in calls.returned.values()}, {id(result) for _, _, result in calls.sums}
    of_layers = [
        result for *added, result in calls.sums if any(id(one) in returned and id(one) not in sums for one in added)
    ]
    roots = {id(_root(one)) for one in calls.returned.values()}
    within = roots & {id(_root(one)) for *added, _ in calls.sums for one in added} - normed
    of_layers = [result for result in of_layers if id(result) not in within]
    layers = getattr(model.config, "num_hidden_layers", 1)
    return len(of_layers) >= layers and all(id(result) in normed for result in of_layers)


def _root(one: object) -> object:
    """The tensor that this one is a view of; itself for all else."""
    return one if not isinstance(one, Tensor) or one._base is None else one._base


def _activations() -> set[type]:
    """Activations of transformers' own, which are one kernel each in the engine."""
    from transformers.activations import ACT2CLS

    return {one[0] if isinstance(one, tuple) else one for one in ACT2CLS.values()}


def _activates(module: nn.Module, calls: _Calls) -> bool:
    """True if it makes what a projection returned something of the same shape, without weights: one with weights runs
    as torch operators (``XIELU``, layers/activation.py)."""
    given, result = calls.given.get(id(module), ()), calls.returned.get(id(module))
    if len(given) != 1 or not isinstance(given[0], Tensor) or not isinstance(result, Tensor):
        return False
    if next(module.parameters(), None) is not None or result is given[0] or result.shape != given[0].shape:
        return False
    return type(module) in _activations() or id(given[0]) in calls.products


def _add_projections(
    found: Fusable, path: str, module: nn.Module, linears: Linears, calls: _Calls, *, own_code: bool, alone: bool
) -> None:
    """``alone``: queries, keys and values become one without what else reads their input."""
    by_input: dict[int, list[str]] = {}
    for name, linear in linears.items():
        by_input.setdefault(id(calls.given[id(linear)][0]), []).append(name)
    for names in by_input.values():
        gate = _gate_of(module, names, linears, calls)
        if gate is not None:
            found.gates[path] = gate
            return
    if own_code and (gate := _gated_otherwise(linears, calls)) is not None:
        found.gates[path] = gate
        return
    entered = {id(one) for one in calls.given.get(id(module), ())}
    groups = [names for source, names in by_input.items() if len(names) >= 2 and source in entered]
    if alone:
        groups = [[one for one in names if one in _QKV] if set(names) > set(_QKV) else names for names in groups]
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


def _inline(module: nn.Module, linears: Linears, calls: _Calls, heads: int) -> Inline | None:
    """Attention of the module's own, where its projections are queries, keys and values of so many heads: one that
    reads its input or three, and one that reads something else."""
    entered = {id(one) for one in calls.given.get(id(module), ())}
    reading = tuple(name for name, one in linears.items() if id(calls.given[id(one)][0]) in entered)
    rest = [name for name in linears if name not in reading]
    if not reading or len(rest) != 1 or "attention" not in type(module).__name__.lower():
        return None
    out = linears[rest[0]]
    head_dim = out.in_features // heads
    width = sum(linears[name].out_features for name in reading) - out.in_features
    is_added = calls.returned.get(id(module)) is not calls.returned[id(out)]
    return Inline(reading, rest[0], heads, width // 2 // head_dim, head_dim, is_added)


def _gate_of(module: nn.Module, names: list[str], linears: Linears, calls: _Calls) -> Gate | None:
    """Two projections of one width, an activation of the first's output, and the one that reads their product."""
    if not _is_pair(names, linears):
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


def _is_pair(names: list[str], linears: Linears) -> bool:
    """True for two projections of one width."""
    return len(names) == 2 and len({linears[one].out_features for one in names}) == 1


def _gated_otherwise(linears: Linears, calls: _Calls) -> Gate | None:
    """Two projections of the input and one that reads what is made of both, whatever that is: the engine's own code
    has a kernel for it (``GeluAndMulSparse``, layers/activation.py)."""
    if len(linears) != 3:
        return None
    names = [one for one in linears if linears[one].in_features == linears[next(iter(linears))].in_features]
    down = next((one for one in linears if one not in names), None)
    same = len({id(calls.given[id(linears[one])][0]) for one in names}) == 1
    if down is None or not same or not _is_pair(names, linears):
        return None
    gate, up = names
    return Gate(gate, up, "", down) if linears[gate].out_features == linears[down].in_features else None


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
    more = sum(isinstance(one, nn.Linear) for one in module.modules()) > len(linears)  # something is added between
    if len(linears) != 2 or more or not any(type(child).__name__ in _MULTIPLYING for child in module.children()):
        return None
    (first, wide), (last, narrow) = sorted(linears.items(), key=lambda item: -item[1].out_features)
    return (first, last) if wide.out_features == 2 * narrow.in_features else None


def _norm_kind(module: nn.Module, *, any_norm: bool) -> str | None:
    """``rms`` for a root-mean-square norm of one weight (or ``any_norm`` of a class of the model's own, or without
    one), and ``zero-centered`` where that is of one more than it."""
    weights = list(module.parameters())
    if not weights and not (any_norm and type(module).__name__.endswith(("RMSNorm", "L2Norm"))):
        return None
    if weights and (len(weights) != 1 or getattr(module, "weight", None) is None or module.weight.ndim != 1):
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
