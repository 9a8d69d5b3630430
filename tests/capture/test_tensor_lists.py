"""Lists of sharded tensors: what is answered once an operator is what PyTorch answers for each of its tensors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard

from graphmem.capture.distributed import tensor_lists
from graphmem.capture.patches import Patches
from tests.support.examples import examples

_PROPAGATION = importlib.import_module("torch.distributed.tensor._sharding_prop")
_PLACEMENTS: list[Placement] = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]
_OPERATORS = {
    torch.ops.aten._foreach_mul_.Scalar: ("lists", "one"),
    torch.ops.aten._foreach_addcdiv_.ScalarList: ("lists", "lists", "lists", "each"),
    torch.ops.aten._foreach_div.ScalarList: ("lists", "each"),
    torch.ops.aten._foreach_lerp_.Scalar: ("lists", "lists", "one"),
    torch.ops.aten._foreach_sqrt.default: ("lists",),
}


@pytest.fixture(scope="module")
def four_processes() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def _tensor(rows: int, placements: list[Placement]) -> DTensor:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.zeros(rows, 4, device="meta")
    return DTensor.from_local(torch.zeros(rows, 4), mesh, placements, run_check=False, shape=whole.shape, stride=(4, 1))


_LAYOUTS = st.tuples(st.sampled_from([4, 8]), st.lists(st.sampled_from(_PLACEMENTS), min_size=2, max_size=2))


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(list(_OPERATORS)), st.lists(_LAYOUTS, min_size=1, max_size=5), st.booleans())
@pytest.mark.usefixtures("four_processes")
def test_an_operator_on_lists_is_sharded_as_by_pytorch(op: Any, layouts: list[Any], mixed: bool) -> None:
    def lists(turned: bool) -> tuple[Any, ...]:
        return tuple(_tensor(rows, places[::-1] if turned else places)._spec for rows, places in layouts)

    kinds = {
        "one": lambda _: 0.5,
        "each": lambda _: [0.5 + 0.25 * (n % 2) for n in range(len(layouts))],
        "lists": lists,
    }
    arguments = tuple(kinds[kind](mixed and n > 0) for n, kind in enumerate(_OPERATORS[op]))

    def answered() -> tuple[str, ...]:
        schema = OpSchema(op, arguments, {}, _info(op))
        try:
            sharding = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
        except Exception as error:  # what PyTorch refuses is refused alike
            event("refused")
            return (type(error).__name__,)
        return str(sharding.output_spec), str(sharding.redistribute_schema), str(sharding.needs_redistribute)

    theirs = answered()
    patches = Patches()
    tensor_lists.patch_tensor_lists(patches)
    try:
        assert answered() == theirs
    finally:
        patches.undo()


def _info(op: Any) -> Any:
    propagator = DTensor._op_dispatcher.sharding_propagator
    return propagator.op_to_schema_info_for_single_dim_strategy.get(op) or propagator.op_to_schema_info.get(op)


@given(st.integers(0, 9), st.integers(1, 6), st.integers(0, 1))
def test_chunks_are_those_of_pytorch(rows: int, count: int, dim: int) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    original = _fsdp_param._chunk_with_empty
    tensor = torch.arange(rows * 9).view(rows, 9)
    theirs = original(tensor, count, dim)
    ours = tensor_lists._Chunks.of(original)(tensor, count, dim)
    assert len(ours) == len(theirs)
    for index, chunk in enumerate(theirs):
        assert torch.equal(ours[index], chunk)
        assert ours[index].stride() == chunk.stride()
