"""Modules in place of a serving engine's layers, which only return tensors of the shapes that those return.

Each call that makes a tensor appends to ``calls`` the name of the layer that returns it, "" for one without a name.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from graphmem.errors import UsageError

#: Functions that add two tensors.
ADDING = (torch.Tensor.__add__, torch.Tensor.add, torch.add)


class Calls(list[str]):
    """Names of the layers that made tensors; the ``latest`` tensor, what is ``kept`` until the next one is made, and
    with ``sums`` those of residuals, which norms take over."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: weakref.ref[Tensor] | None = None
        self.kept: list[Tensor] = []
        self.sums: Sums | None = None


class Sums(TorchFunctionMode):  # type: ignore[misc]
    """Sums of a residual and what a layer returned, which the kernel of the norm behind them makes in place
    (``fused_add_rms_norm``, csrc/layernorm_kernels.cu): the sum is the residual's, the normed one the other's."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls
        self._sum: weakref.ref[Tensor] | None = None
        self._added: Tensor | None = None
        self._held: Tensor | None = None
        self._is_new_layer = False

    def __torch_function__(
        self, function: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if function in ADDING and len(args) == 2 and self._is_residual(*args):
            one, other = args
            added, kept = (one, other) if self._is_latest(one) else (other, one)
            assert isinstance(added, Tensor)
            assert isinstance(kept, Tensor)
            self._sum, self._added = weakref.ref(kept), added
            return kept
        assert callable(function)
        return function(*args, **(kwargs or {}))

    def normed(self, given: Tensor) -> Tensor | None:
        """What was added to the sum that is normed; None for another input."""
        added, self._added = self._added, None
        if self._sum is None or self._sum() is not given:
            return None
        if self._is_new_layer:
            self._held, self._is_new_layer = added, False
        return added

    def leave_layer(self, *_: object) -> None:
        """A layer returns. What it was given beside the residual its caller holds until then."""
        self._held, self._is_new_layer = None, True

    def _is_residual(self, one: object, other: object) -> bool:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
            return False
        return self._is_latest(one) != self._is_latest(other)

    def _is_latest(self, one: object) -> bool:
        latest = self.calls.latest() if self.calls.latest is not None else None
        return latest is not None and isinstance(one, Tensor) and (one is latest or one._base is latest)


class Carried(TorchFunctionMode):  # type: ignore[misc]
    """What a layer added up last, which the engine's own code hands on apart, and sums in the next layer's first norm,
    out of place: its caller holds both until that layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self._added: tuple[object, ...] = ()
        self._held: tuple[object, ...] = ()

    def __torch_function__(
        self, function: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if function in ADDING:
            self._added = args
        assert callable(function)
        return function(*args, **(kwargs or {}))

    def leave_layer(self, *_: object) -> None:
        """A layer returns."""
        self._held, self._added = self._added, ()


def _made(calls: Calls, name: str, given: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    calls.append(name)
    calls.kept.clear()
    made = torch.empty(shape, dtype=dtype or given.dtype, device=given.device)
    calls.latest = weakref.ref(made)
    return made


class Product(nn.Module):  # type: ignore[misc]
    """A product of ``width`` columns. ``weight`` is that of the module in whose place it is, for code that looks at
    its type; it is no parameter of this one."""

    def __init__(self, calls: Calls, name: str, width: int, weight: Tensor | None = None) -> None:
        super().__init__()
        self.calls, self.name, self.width = calls, name, width
        self.__dict__["weight"] = weight

    def forward(self, given: Tensor) -> Tensor:
        """The product."""
        return _made(self.calls, self.name, given, *given.shape[:-1], self.width)


class Shared:
    """A product that several modules have parts of. It is alive until the module around them returns."""

    def __init__(self, calls: Calls, name: str, sizes: tuple[int, ...]) -> None:
        self.calls, self.name, self.sizes = calls, name, sizes
        self.parts: Sequence[Tensor] | None = None

    def part(self, at: int, given: Tensor) -> Tensor:
        """The part at this place; the first one that is asked for makes them all."""
        if self.parts is None:
            whole = _made(self.calls, self.name, given, *given.shape[:-1], sum(self.sizes))
            self.parts = whole.split(list(self.sizes), -1)
        return self.parts[at]

    def let_go(self) -> None:
        """Free the product."""
        self.parts = None


class Part(nn.Module):  # type: ignore[misc]
    """One part of a shared product."""

    def __init__(self, shared: Shared, at: int) -> None:
        super().__init__()
        self.shared, self.at = shared, at

    def forward(self, given: Tensor) -> Tensor:
        """The part."""
        return self.shared.part(self.at, given)


class Normed(nn.Module):  # type: ignore[misc]
    """A norm, or an activation, with an output like its input; of the engine's ``own_code`` with its rows where those
    of the input lie, since that norms heads before it turns them around, or not at all."""

    def __init__(
        self, calls: Calls, name: str, weight: Tensor | None = None, *, own_code: bool = False, in_fp32: bool = False
    ) -> None:
        super().__init__()
        self.calls, self.name, self.own_code, self.in_fp32 = calls, name, own_code, in_fp32
        self.__dict__["weight"] = weight  # for code that looks at its type
        self.beside = 0

    def _with_keys(self, given: Tensor) -> Tensor:
        """Queries in fp32 beside the keys, which are ``beside`` wide (``MiniMaxText01RMSNormTP.forward_qk``,
        layers/minimax_rms_norm/rms_norm_tp.py)."""
        kind, rows = torch.float32, given.shape[:-1]
        wide, _keys = (_made(self.calls, "", given, *rows, one, dtype=kind) for one in (given.shape[-1], self.beside))
        _means = [_made(self.calls, "", given, *rows, 1, dtype=kind) for _ in range(2)]
        scaled = _made(self.calls, "", given, *wide.shape, dtype=kind)
        normed = _made(self.calls, "", given, *wide.shape, dtype=kind)
        del scaled, wide
        return normed.to(given.dtype)

    def forward(self, given: Tensor) -> Tensor:
        """The output; that of a residual's sum takes the place of what was added."""
        added = self.calls.sums.normed(given) if self.calls.sums is not None else None
        if added is not None:
            return added
        if self.beside:
            return self._with_keys(given)
        if self.in_fp32:  # heads are copied out of the product, and normed in fp32
            _copied, wide = (_made(self.calls, "", given, *given.shape, dtype=kind) for kind in (None, torch.float32))
            normed = _made(self.calls, "", given, *given.shape, dtype=wide.dtype)
            del wide
            return normed.to(given.dtype)
        order = list(range(given.dim()))
        if self.own_code:
            order.sort(key=given.stride, reverse=True)
        made = _made(self.calls, self.name, given, *(given.shape[at] for at in order))
        return made if order == sorted(order) else made.permute([order.index(at) for at in range(len(order))])


class Block(nn.Module):  # type: ignore[misc]
    """A layer of experts, which returns ``several`` things where that is not 0, of which only the first is read; or one
    of states, whose input the engine's own code keeps (``keeps``) until its output is added to the residual."""

    def __init__(self, calls: Calls, name: str, several: int = 0, *, keeps: bool = False) -> None:
        super().__init__()
        self.calls, self.name, self.several, self.keeps = calls, name, several, keeps

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor | None, ...]:
        """The output."""
        made = _made(self.calls, self.name, hidden_states, *hidden_states.shape)
        if self.keeps:
            self.calls.kept.append(hidden_states)
        return (made, *[None] * (self.several - 1)) if self.several else made


class Sent(nn.Module):  # type: ignore[misc]
    """Experts that the model's own code sends tokens to; ids stay (``TransformersMoERunner``, transformers/moe.py)."""

    def __init__(self, calls: Calls, name: str) -> None:
        super().__init__()
        self.calls, self.name = calls, name
        self.ids: Tensor | None = None

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor, *_: object, **__: object) -> Tensor:
        """The output."""
        ids, weights = ids.to(torch.int32), weights.to(torch.float32)
        self.ids = ids
        return _made(self.calls, self.name, hidden_states, *hidden_states.shape)


class Gated(nn.Module):  # type: ignore[misc]
    """The activation of the first half, times the second."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, given: Tensor) -> Tensor:
        """The product of the halves."""
        return _made(self.calls, "", given, *given.shape[:-1], given.shape[-1] // 2)


class Absent(nn.Module):  # type: ignore[misc]
    """A factor that was multiplied by already."""

    def forward(self, given: Tensor) -> _Multiplied:
        """A stand-in that a product leaves out."""
        return _Multiplied()


class _Multiplied:
    """A factor without effect; anything else that is done with it is an error."""

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if getattr(function, "__name__", "") not in ("mul", "__mul__", "__rmul__"):
            raise UsageError("a gated layer whose gate does more than multiply is not followed")
        return next(one for one in args if not isinstance(one, cls))


class LookedUp(nn.Embedding):  # type: ignore[misc]
    """An embedding whose class was changed to this one, or to one that inherits from it: see :func:`look_up`."""

    def forward(self, given: Tensor) -> Tensor:
        """The rows."""
        shape = (*given.shape, self.embedding_dim)
        return _made(self._graphmem_calls, self._graphmem_name, given, *shape, dtype=self.weight.dtype)


def look_up(table: nn.Embedding, calls: Calls) -> None:
    """Have the table look up as :class:`LookedUp`; a class that inherits from the plain one keeps what else it does."""
    kind = type(table)
    table._graphmem_calls = calls
    table.__class__ = LookedUp if kind is nn.Embedding else type(kind.__name__, (kind, LookedUp), {})
