"""Results of operators on fake tensors, made anew without the dispatcher and without PyTorch's way to its own cache.

``FakeTensorMode`` remembers an operator's results for arguments of the same metadata, and makes such a tensor again
(``_cached_dispatch_impl``, torch/_subclasses/fake_tensor.py). Most of a call's time is the way there: a pass through
the dispatcher, a description of every argument in twenty fields, two context managers. Here a call that the mode's
cache answered, or took, once is answered by the result of then, for arguments that are the same in all that the cache
compares: shapes, strides, offsets, types, devices, sizes of storages, flags, and the defaults that a factory takes.
Calls that the cache leaves to the operator (``cache_bypasses``: outputs depend on data, or alias in unknown ways) are
run.

Of some kinds of operators more is remembered than there. ``aten._unsafe_view``, a view by another name, is one as the
others are. Of an operator on lists (``aten._foreach_*``), by which optimizers write all parameters at once, each
element's result depends on the elements at its place alone (torch/_meta_registrations.py), and of numbers on the type.
PyTorch's own views, what is written into ``out=``, and operators that return nothing depend on what is described too,
where the arguments are afterwards as they were: that cache has no place for the first in inference mode, whose views of
ordinary tensors are ordinary ones, and none for the others.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any

import torch

from graphmem.capture.device.fake_tensors import device_tensor
from graphmem.capture.device.pretend_device import cards
from graphmem.capture.torch_internals import FakeTensor, FakeTensorMode, has_kernel
from graphmem.torch_names import private

_META = torch.device("meta")
_HOST = torch.device("cpu")
_LOST = "results of operators are not remembered, which takes longer"
_FAKE = private("torch._C._TorchDispatchModeKey", _LOST, types.SimpleNamespace(FAKE=None)).FAKE
_mode_of: Any = private("torch._C._get_dispatch_mode", _LOST, None)
_modes_on: Any = private("torch._C._len_torch_dispatch_stack", _LOST, lambda: 0)
_default_device: Any = private("torch._C._get_default_device", _LOST, torch.get_default_device)
_below_modes: Any = private("torch._C._DisableTorchDispatch", _LOST, None)
_IS_QUICK = None not in (_FAKE, _mode_of, _below_modes)
_keys_of: Any = private("torch._C._dispatch_keys", _LOST, None)
_is_trivial: Any = private("torch._library.utils.can_generate_trivial_fake_impl", _LOST, lambda _: False)
_registered: Any = private("torch._library.simple_registry.singleton", _LOST, None)
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
#: The function itself: ``torch.empty_strided`` is replaced in captures.
_EMPTY: Callable[..., torch.Tensor] = torch.empty_strided

#: Values that equality alone distinguishes; 1, 1.0 and True are equal, and not of one type.
_PLAIN = frozenset((int, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format))
_NUMBERS = frozenset((bool, float, complex))
_SEQUENCES = frozenset((list, tuple, torch.Size))
_LISTS = frozenset((list, tuple))


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that an operator makes; ``viewed`` is the position of the argument whose storage it shows, if any.
    ``is_ordinary``: within inference mode, and no tensor of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_on_card: bool
    viewed: int | None
    offset: int
    is_ordinary: bool


@dataclass(frozen=True, slots=True)
class _Same:
    """The argument at this position, or of this name."""

    position: int | str


_Recipe = _Made | _Same | None
_Known = dict[tuple[Any, ...], tuple[type, tuple[_Recipe, ...]]]  # a sequence of outputs, or what is one; each
#: Results by the card's number: they outlive a capture, as those of ``FakeTensorMode.cache`` do.
_KNOWN: dict[torch.device, _Known] = {}


class FakeResults:
    """Results of operators under one fake mode, by the metadata of their arguments."""

    def __init__(self) -> None:
        self._mode: Any = None
        self._known: _Known = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of ``func``, called below every mode but the fake one."""
        mode = _mode_of(_FAKE) if _IS_QUICK else None
        if mode is None or _modes_on() != 1 or mode.shape_env is not None:
            return func(*args, **kwargs)
        if mode is not self._mode:
            self._mode, self._known = mode, _KNOWN.setdefault(cards().own, {})
        if _is_of_lists(func) and _are_alike(args, kwargs):
            places = zip(*(([x] for x in arg) if type(arg) in _LISTS else repeat(arg) for arg in args), strict=False)
            found = [self._run(func, one, kwargs, mode) for one in places]
            return None if found[0] is None else [out for outs in found for out in outs]
        return self._run(func, args, kwargs, mode)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> Any:
        """The result, by the key of all that it depends on."""
        key = [func, torch.get_default_dtype(), _default_device(), torch.is_inference_mode_enabled()]
        exact = not _is_of_lists(func)
        if not (_describe(key, args, mode, exact) and (not kwargs or _describe_named(key, kwargs, mode, exact))):
            return func(*args, **kwargs)
        if _gives_nothing(func):
            return None
        described = tuple(key)
        known = self._known.get(described)
        if known is None:
            return self._learn(described, func, args, kwargs)
        kind, recipes = known
        if kind in _LISTS:
            return kind([_follow(each, mode, args, kwargs) for each in recipes])
        return _follow(recipes[0], mode, args, kwargs)

    def _learn(self, key: tuple[object, ...], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the operator; where the mode's cache had, or took, its results, or could have, keep them."""
        bypassed = sum(FakeTensorMode.cache_bypasses.values())
        asked = FakeTensorMode.cache_hits + FakeTensorMode.cache_misses
        out = func(*args, **kwargs)
        was_asked = asked != FakeTensorMode.cache_hits + FakeTensorMode.cache_misses
        is_cached = was_asked and bypassed == sum(FakeTensorMode.cache_bypasses.values())
        is_known = is_cached or func is _UNSAFE_VIEW or _is_of_lists(func)
        if is_known or _depends_on_metadata(func):
            kind = type(out)
            outs = out if kind in _LISTS else (out,)
            recipes = _recipes(func, args, kwargs, outs)
            if recipes is not None and (is_known or self._is_repeated(key, func, args, kwargs, outs, recipes)):
                self._known[key] = kind, recipes
        return out

    def _is_repeated(
        self, key: tuple[object, ...], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Any],
        recipes: Sequence[_Recipe],
    ) -> bool:  # fmt: skip
        """Whether the arguments are as the key says still, and recipes make tensors of the same dispatch keys."""
        after = [*key[:4]]
        described = _describe(after, args, self._mode, True)
        if not described or (kwargs and not _describe_named(after, kwargs, self._mode, True)) or tuple(after) != key:
            return False
        if _keys_of is None:
            return False
        again = [_follow(recipe, self._mode, args, kwargs) for recipe in recipes]
        return all(one is out or _keys_of(one) == _keys_of(out) for one, out in zip(again, outs, strict=True))


@cache
def _is_of_lists(func: Any) -> bool:
    return bool(func._schema.name.startswith("aten::_foreach_"))


@cache
def _gives_nothing(func: Any) -> bool:
    """Whether PyTorch itself answers with nothing, whatever it is given: an operator of a library that writes into its
    arguments and has no implementation for shapes (``generate_trivial_fake_impl``, torch/_library/utils.py, 2.13)."""
    if func._schema.returns or not _is_trivial(func) or _registered is None:
        return False
    has_own = _registered.find(func.name()).fake_impl.kernel is not None
    return not has_own and not any(has_kernel(func._name, key) for key in ("Meta", "CompositeImplicitAutograd"))


@cache
def _depends_on_metadata(func: Any) -> bool:
    """Whether an operator is one of PyTorch's views, writes what it returns into ``out=``, or returns nothing."""
    schema = func._schema
    if not schema.returns:
        return True
    return func.namespace == "aten" and (func.is_view or any(one.is_out for one in schema.arguments))


def _are_alike(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments are lists of one length, and what is the same for all their elements."""
    lengths = {len(arg) for arg in args if type(arg) in _LISTS}
    others = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim()]
    others += [arg for arg in kwargs.values() if type(arg) in _LISTS or isinstance(arg, torch.Tensor)]
    return len(lengths) == 1 and 0 not in lengths and not others


def _describe(key: list[Any], values: Iterable[Any], mode: FakeTensorMode, exact: bool) -> bool:
    """Add to the key all that the results can depend on; False where that is more than a key can hold. Unless it is
    ``exact``, of a fraction that is its type."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                return False
            key += (
                kind, value.dtype, value.shape, value.stride(), value.storage_offset(),
                value.untyped_storage().nbytes(), value.requires_grad, value.fake_device, value.is_conj(),
                value.is_neg(), value.is_inference(),
            )  # fmt: skip
        elif kind in _PLAIN:
            key.append(value)
        elif kind in _SEQUENCES:
            key += (kind, len(value))
            if not _describe(key, value, mode, exact):
                return False
        elif kind in _NUMBERS:
            key += (kind, value) if exact else (kind,)
        else:
            return False
    return True


def _describe_named(key: list[object], values: Mapping[str, object], mode: FakeTensorMode, exact: bool) -> bool:
    key.append(dict)
    key.extend(values)
    return _describe(key, values.values(), mode, exact)


def _recipes(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: tuple[Any, ...]
) -> tuple[_Recipe, ...] | None:
    """The recipes that make the outputs again; None where a call of the same key might give others."""
    given = {
        value.untyped_storage()._cdata
        for each in (*args, *kwargs.values())
        for value in (each if isinstance(each, (list, tuple)) else (each,))
        if isinstance(value, torch.Tensor)
    }
    found: list[_Recipe] = []
    for out in outs:
        if out is None:
            found.append(None)
            continue
        if type(out) is not FakeTensor or out.layout is not torch.strided or out.constant is not None:
            return None
        if out.requires_grad or out.is_conj() or out.is_neg() or out.fake_device not in (cards().own, _HOST):
            return None
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        position = next((name for name, arg in named if arg is out), None)
        if position is not None:
            found.append(_Same(position))
            continue
        storage = out.untyped_storage()._cdata
        viewed = None
        if func.is_view or func is _UNSAFE_VIEW:
            tensors = [number for number, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
            if len(tensors) != 1 or args[tensors[0]].untyped_storage()._cdata != storage:
                return None
            viewed = tensors[0]
        elif storage in given or out.storage_offset():
            return None
        else:
            given.add(storage)
        is_on_card = out.fake_device.type == "cuda"
        shape, stride = tuple(out.shape), out.stride()
        is_ordinary = torch.is_inference_mode_enabled() and not out.is_inference()
        found.append(_Made(shape, stride, out.dtype, is_on_card, viewed, out.storage_offset(), is_ordinary))
    return tuple(found)


def _follow(recipe: _Recipe, mode: FakeTensorMode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """The output that a recipe describes."""
    if isinstance(recipe, _Made):
        if recipe.is_ordinary:
            with torch.inference_mode(False):
                return _make(recipe, mode, args)
        return _make(recipe, mode, args)
    if recipe is None:
        return None
    return kwargs[recipe.position] if isinstance(recipe.position, str) else args[recipe.position]


def view_of(tensor: FakeTensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor that shows the storage of another one, of the same dispatch keys, without an operator."""
    is_ordinary = torch.is_inference_mode_enabled() and not tensor.is_inference()
    is_on_card = tensor.fake_device.type == "cuda"
    recipe = _Made(shape, stride, tensor.dtype, is_on_card, 0, offset, is_ordinary)
    view: torch.Tensor = _follow(recipe, tensor.fake_mode, (tensor,), {})
    return view


def _make(recipe: _Made, mode: FakeTensorMode, args: Sequence[Any]) -> torch.Tensor:
    with _below_modes():
        made = _EMPTY(recipe.shape, recipe.stride, dtype=recipe.dtype, device=_META)
        if recipe.viewed is not None:
            storage = args[recipe.viewed].untyped_storage()
            made.set_(storage, recipe.offset, recipe.shape, recipe.stride)
    return device_tensor(FakeTensor, mode, made) if recipe.is_on_card else FakeTensor(mode, made, _HOST)
