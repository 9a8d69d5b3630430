"""Modules in place of a serving engine's layers, which only return tensors of the shapes that those return.

Each call that makes a tensor appends to ``calls`` the name of the layer that returns it, "" for one without a name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from graphmem.errors import UsageError


def _made(calls: list[str], name: str, given: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    calls.append(name)
    return torch.empty(shape, dtype=dtype or given.dtype, device=given.device)


class Product(nn.Module):  # type: ignore[misc]
    """A product of ``width`` columns."""

    def __init__(self, calls: list[str], name: str, width: int) -> None:
        super().__init__()
        self.calls, self.name, self.width = calls, name, width

    def forward(self, given: Tensor) -> Tensor:
        """The product."""
        return _made(self.calls, self.name, given, *given.shape[:-1], self.width)


class Shared:
    """A product that several modules have parts of. It is alive until the module around them returns."""

    def __init__(self, calls: list[str], name: str, sizes: tuple[int, ...]) -> None:
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
    """A norm, or an activation, with an output like its input."""

    def __init__(self, calls: list[str], name: str) -> None:
        super().__init__()
        self.calls, self.name = calls, name

    def forward(self, given: Tensor) -> Tensor:
        """The output."""
        return _made(self.calls, self.name, given, *given.shape)


class Gated(nn.Module):  # type: ignore[misc]
    """The activation of the first half, times the second."""

    def __init__(self, calls: list[str]) -> None:
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


def look_up(table: nn.Embedding, calls: list[str]) -> None:
    """Have the table look up as :class:`LookedUp`; a class that inherits from the plain one keeps what else it does."""
    kind = type(table)
    table._graphmem_calls = calls
    table.__class__ = LookedUp if kind is nn.Embedding else type(kind.__name__, (kind, LookedUp), {})
