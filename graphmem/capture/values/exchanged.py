"""What is known of a tensor's values after a collective (all-reduce, all-gather), though only one process is analysed.

The others are taken to hold what this one holds: they run the same program. So a flag that is 0 here is 0 everywhere,
its sum over eight processes is eight times this one's, and what is gathered is this one's part so many times. What
another process sends (a broadcast that this one is not the source of, a message) is not known, whatever the tensor
that receives it held before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from graphmem.capture.torch_internals import FakeTensor, unset_fake_temporarily
from graphmem.capture.values.known_values import INTEGER_LIMIT, KnownValues
from graphmem.capture.values.messages import Post
from graphmem.capture.values.tensors import tensors_in

#: The remark where known values came out of a collective.
OTHERS_HOLD_THE_SAME = "values that processes exchange: the others were taken to hold what this one does"
#: What a reduction over ``ranks`` processes that hold the same makes of a number or a tensor. Of the others (exclusive
#: or, sums of scaled values, any whose name PyTorch does not give) it is known that zeros stay zeros.
_REDUCTIONS: dict[str, Callable[[Any, int], Any]] = {
    "SUM": lambda value, ranks: value * ranks,
    "PRODUCT": lambda value, ranks: value**ranks,
    **dict.fromkeys(("AVG", "MIN", "MAX", "BAND", "BOR"), lambda value, ranks: value),
}


class Group(NamedTuple):
    """Where this process stands in the group of a collective, counted within it; ``reduction`` names how values are
    combined: "" where they are not, "?" where it is unknown. ``name`` is PyTorch's of the group,
    ``members`` its ranks in the job (none: unknown)."""

    rank: int
    ranks: int
    reduction: str = ""
    name: str = ""
    members: tuple[int, ...] = ()


class _Written(NamedTuple):
    """A tensor that a collective writes, and the one that it gets its values of: None where that is nobody's here.
    ``part``: which of as many equal parts, flat; ``times``: how often it is repeated."""

    target: Any
    source: Any
    part: int | None = None
    times: int = 1


def follow(values: KnownValues, func: Any, args: Sequence[object], group: Group, post: Post | None = None) -> bool:
    """Note what is known after ``func``, an operator of ``c10d``; whether it came of others that were taken to hold
    what this process does. What one process sends another goes through the ``post``, where there is one."""
    name = func.__name__.partition(".")[0].strip("_")
    written = list(_written(name, args, group))
    read = [_incoming(values, one, group) for one in written]
    if post is not None and name in _SENT and len(group.members) == group.ranks:
        heard = _exchange(values, name, args, group, post)
        read = [(value, None) for value in heard] if written else read
    for one in written:
        values.forget(one.target)
    for one, (value, number) in zip(written, read, strict=True):
        if value is not None:
            values.overwrite(one.target, value)
        elif number is not None:
            values.numbers.learn(one.target, number)
    is_known = any(value is not None or number is not None for value, number in read)
    return is_known and group.ranks > 1 and name not in _SENT


#: Operators by which one process sends to another, or to all.
_SENT = ("broadcast", "send", "recv")


def _exchange(
    values: KnownValues, name: str, args: Sequence[object], group: Group, post: Post
) -> list[torch.Tensor | None]:
    """The tensors that this process receives in the tensors of an operator of :data:`_SENT`."""
    peer = group.members[_root(args)]
    source, target = (peer, -1) if name == "broadcast" else (post.rank, peer) if name == "send" else (peer, post.rank)
    heard: list[torch.Tensor | None] = []
    for tensor in tensors_in(args[0]):
        message = post.next(source, target, group.members)
        if source != post.rank:
            known = post.hear(message, tensor) if tensor.numel() <= INTEGER_LIMIT else None
            heard.append(_shaped(known, tensor))
            continue
        value = values.of(tensor) if tensor.numel() <= INTEGER_LIMIT else None
        if value is not None:
            with unset_fake_temporarily():
                post.say(message, value.detach().clone())
    return heard


def _shaped(known: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor | None:
    """A host tensor in the shape of the one that receives it; None where it does not fit."""
    if known is None or known.numel() != tensor.numel() or known.dtype is not tensor.dtype:
        return None
    with unset_fake_temporarily():
        return known.reshape(tuple(tensor.shape))


def _incoming(values: KnownValues, one: _Written, group: Group) -> tuple[torch.Tensor | None, Any]:
    """Values that a collective will write into ``one.target``, or the number that each element is; None for those that
    are not known. Nothing is written yet."""
    if one.source is None or max(one.target.numel(), one.source.numel()) > INTEGER_LIMIT:
        return None, None
    combine = _REDUCTIONS.get(group.reduction)
    needs_zeros = combine is None and bool(group.reduction)
    value = values.of(one.source)
    if value is None:
        number = values.number(one.source) if isinstance(one.source, FakeTensor) else None
        if number is None or (needs_zeros and number):
            return None, None
        return None, number if combine is None else combine(number, group.ranks)
    with unset_fake_temporarily(), torch.no_grad():
        if needs_zeros and value.any():
            return None, None
        flat = value.detach().clone().reshape(-1)
        if one.part is not None:
            flat = flat.chunk(group.ranks)[one.part] if flat.numel() % group.ranks == 0 else flat[:0]
        if one.times > 1:
            flat = flat.repeat(one.times)
        if combine is not None:
            flat = combine(flat, group.ranks).to(value.dtype)
        fits = flat.numel() == one.target.numel() and flat.dtype is one.target.dtype
        return (flat.reshape(tuple(one.target.shape)), None) if fits else (None, None)


def _written(name: str, args: Sequence[Any], group: Group) -> Iterator[_Written]:
    """The tensors that a collective writes. Lists have one entry a device of this process, which has one."""
    outputs, inputs = list(tensors_in(args[0])), list(tensors_in(args[1])) if len(args) > 1 else []
    if name in ("allreduce", "allreduce_coalesced", "reduce"):
        yield from (_Written(tensor, tensor) for tensor in outputs)
    elif name == "broadcast":
        is_mine = _root(args) == group.rank
        yield from (_Written(tensor, None) for tensor in outputs if not is_mine)
    elif name in ("allgather", "gather", "allgather_coalesced"):
        each = max(1, len(outputs) // max(1, len(inputs)))
        yield from (_Written(tensor, inputs[index // each]) for index, tensor in enumerate(outputs))
    elif name in ("allgather_base", "allgather_into_tensor_coalesced"):
        yield from (_Written(*pair, times=group.ranks) for pair in zip(outputs, inputs, strict=True))
    elif name in ("reduce_scatter_base", "reduce_scatter_tensor_coalesced"):
        yield from (_Written(*pair, part=group.rank) for pair in zip(outputs, inputs, strict=True))
    elif name == "alltoall_base":
        is_even = not any(args[3]) and not any(args[4])
        yield _Written(outputs[0], inputs[0] if is_even else None, part=group.rank, times=group.ranks)
    elif name in ("reduce_scatter", "scatter", "alltoall"):
        is_here = len(inputs) == group.ranks and (name != "scatter" or _root(args) == group.rank)
        yield from (_Written(tensor, inputs[group.rank] if is_here else None) for tensor in outputs)
    elif name in ("recv", "recv_any_source"):
        yield from (_Written(tensor, None) for tensor in outputs)


def _root(args: Sequence[object]) -> int:
    return next(value for value in args if type(value) is int)
