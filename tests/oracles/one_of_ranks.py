"""Imported before an engine: this process is rank OWN_RANK of a group of RANKS that has nobody else in it. Collectives
of PyTorch's groups move nothing."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, OWN = int(os.environ["RANKS"]), int(os.environ.get("OWN_RANK", "0"))
os.environ |= {
    "RANK": str(OWN), "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555",
}  # fmt: skip
_init, _new_group = dist.init_process_group, dist.new_group


def _init_process_group(backend=None, *arguments, **options):
    return _init(backend="fake", rank=OWN, world_size=RANKS, store=FakeStore())


def _fake_group(ranks=None, *arguments, **options):
    kept = {name: options[name] for name in ("timeout", "use_local_synchronization", "group_desc") if name in options}
    return _new_group(ranks, backend="fake", **kept)


def _own_object(out, value, *arguments, **options):
    out[:] = [value] * len(out)


def _all_gather(tensors, tensor, *arguments, **options):
    """Into a flat copy first, as ``ProcessGroupNCCL`` does (``newLikeFlat``)."""
    torch.empty((len(tensors), *tensor.shape), dtype=tensor.dtype, device=tensor.device)


dist.init_process_group = torch.distributed.distributed_c10d.init_process_group = _init_process_group
dist.new_group = torch.distributed.distributed_c10d.new_group = _fake_group
dist.broadcast_object_list = lambda values, *arguments, **options: None
dist.all_gather = torch.distributed.distributed_c10d.all_gather = _all_gather
dist.monitored_barrier = lambda *arguments, **options: None
dist.all_gather_object = _own_object
