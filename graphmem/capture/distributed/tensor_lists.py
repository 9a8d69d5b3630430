"""Lists of sharded tensors: a result that PyTorch derives for each of n by looking at all n is derived once.

An optimizer of a large model hands DTensor lists of hundreds of parameters. For each of them DTensor (2.11 to 2.15,
torch/distributed/tensor/_sharding_prop.py and _ops/single_dim_strategy.py) goes through the whole list again, and FSDP2
(_fsdp_common.py) makes a view for each of its processes to take one. On a card the answers are kept from step to step;
a capture runs two or three steps. All answers are the same as PyTorch's.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.torch_names import private

_LOST = "sharded models and process groups cannot be followed"


def patch_tensor_lists(patches: Patches) -> None:
    """Replace those of these functions that this version of PyTorch has by equal ones that take less time."""
    propagation = importlib.import_module("torch.distributed.tensor._sharding_prop")
    replaced = {
        "_propagate_use_strided_shard_flag": _flag_propagated_once,
        "_expand_single_dim_strategy_to_mesh": _expanded_once,
    }
    for name, make in replaced.items():
        if hasattr(propagation, name):
            patches.set(propagation, name, make(getattr(propagation, name)))
    with contextlib.suppress(ImportError):  # before 2.6 it was elsewhere
        parameters = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
        patches.set(parameters, "_chunk_with_empty", _Chunks.of(parameters._chunk_with_empty))


def _flag_propagated_once(original: Callable[[object, object], None]) -> Callable[[Any, Any], None]:
    """The flag of strided shards in a strategy of one tensor. Where no input of the operator has such a shard, which is
    asked once an operator, there is nothing to do."""
    strided = private("torch.distributed.tensor.placement_types._StridedShard", _LOST)

    asked: list[Any] = [None, False]  # the schema of the last operator, which stays alive; whether it has such a shard

    def propagate(op_strategy: object, op_schema: Any) -> None:
        if asked[0] is not op_schema:
            placements = {place for spec in op_schema.args_spec for place in spec.placements}
            asked[:] = op_schema, any(isinstance(place, strided) for place in placements)
        if asked[1]:
            original(op_strategy, op_schema)

    return propagate


def _expanded_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """The strategies of an operator on lists: those of the first of all elements that are alike."""
    schema_kind = private("torch.distributed.tensor._op_schema.OpSchema", _LOST)
    tuple_kind = private("torch.distributed.tensor._op_schema.TupleStrategy", _LOST)

    def expand(mesh: Any, op_schema: Any, strategy_info: Any, output_tensor_meta: Any) -> Callable[..., Any]:
        count = _length_of_lists(op_schema, output_tensor_meta, tuple_kind)
        if count is None:
            return original(mesh, op_schema, strategy_info, output_tensor_meta)  # type: ignore[no-any-return]

        def strategy_of(index: int) -> Any:
            arguments = tuple(_element(argument, index, count, tuple_kind) for argument in op_schema.args_schema)
            one = schema_kind(op_schema.op, arguments, op_schema.kwargs_schema, op_schema.schema_info)
            meta = None if output_tensor_meta is None else [output_tensor_meta[index]]
            return original(mesh, one, strategy_info, meta)(one.op, one.args_meta, one.kwargs_meta).children[0]

        def expanded(*_: object) -> object:
            known: dict[Any, Any] = {}
            children = []
            for index, key in enumerate(_keys(op_schema, output_tensor_meta, count, tuple_kind)):
                if key not in known:
                    known[key] = strategy_of(index)
                children.append(known[key])
            return tuple_kind(children)

        return expanded

    return expand


def _length_of_lists(op_schema: Any, output_tensor_meta: Any, strategies: type) -> int | None:
    """The length of an operator's lists of tensors; None: it has none, or they are not element by element."""
    name = op_schema.op.name()
    lists = [argument for argument in op_schema.args_schema if isinstance(argument, strategies)]
    lengths = {len(of.children) for of in lists}  # type: ignore[attr-defined]
    if not name.startswith(("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")) or len(lengths) != 1:
        return None
    if any(len(child.strategies) != 1 for of in lists for child in of.children):  # type: ignore[attr-defined]
        return None
    (length,) = lengths
    is_list = isinstance(output_tensor_meta, list) or type(output_tensor_meta) is tuple  # TensorMeta is a tuple, too
    if output_tensor_meta is not None and not (is_list and len(output_tensor_meta) == length):
        return None
    return length


def _element(argument: Any, index: int, count: int, strategies: type) -> Any:
    """The argument for one element of the lists: of a list of as many its own, of all else the same."""
    if isinstance(argument, strategies):
        return strategies([argument.children[index]])  # type: ignore[attr-defined]
    return [argument[index]] if _is_list(argument, count) else argument


def _is_list(argument: object, count: int) -> bool:
    return isinstance(argument, (list, tuple)) and len(argument) == count


def _keys(op_schema: Any, output_tensor_meta: Any, count: int, strategies: type) -> Iterator[Any]:
    """The facts of each element on which its strategy depends."""
    columns: list[Sequence[Any]] = [output_tensor_meta or [None] * count]
    for argument in op_schema.args_schema:
        if isinstance(argument, strategies):
            columns.append([child.strategies[0].output_spec for child in argument.children])  # type: ignore[attr-defined]
        elif _is_list(argument, count):
            columns.append(argument)
    return zip(*columns, strict=True)


class _Chunks:
    """``torch.chunk`` filled up with empty tensors, of which only those are made that somebody asks for."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._size = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self._tensor.size(self._dim)
        begin = index * self._size
        if begin >= size:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._size, size - begin))

    @classmethod
    def of(cls, original: Callable[..., object]) -> Callable[..., Any]:
        def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> object:
            if tensor.size(dim) == 0:
                return original(tensor, num_chunks, dim)
            return cls(tensor, num_chunks, dim)

        return chunk_with_empty
