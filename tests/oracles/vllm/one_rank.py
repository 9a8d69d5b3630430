"""Imported before vllm: this process is rank OWN_RANK of a group of RANKS (tensor and data parallel, or stages of a
pipeline), whose collectives only allocate what the real ones do. The group has nobody else in it; replicas are taken to
have batches like this rank's, as they have while the engine profiles."""

from __future__ import annotations

import sys
import types

import torch
import vllm.distributed.device_communicators.all2all as all2all
import vllm.distributed.device_communicators.shm_broadcast as shm_broadcast
import vllm.distributed.parallel_state as parallel_state
import vllm.platforms as platforms
import vllm.v1.worker.gpu.dp_utils as dp_utils
from one_of_ranks import RANKS
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class Silent:
    """NCCL's collectives, which allocate nothing here.

    On a card ``PyNcclCommunicator._init_comm`` also asks for ``current_stream()`` (pynccl.py, utils/torch_utils.py), so
    that everything from the first weight on is on a stream of the engine's own; here that comes with Marlin's locks
    only. Recorded with it, two starts of Qwen3-32B-AWQ on two ranks have 23,068,672 bytes more and 20,971,520 less for
    the KV cache (the latter beside what its cold start takes), as a prediction that leaves the default stream at the
    start says to the byte; by the same prediction the third has 20,971,520 less, experts with graphs over replicas
    2,097,152, and no other recorded start moves.
    """

    disabled, nccl_version = False, 22907

    def __init__(self, world_size):
        self.world_size = world_size
        for name in ("all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "group_start", "group_end"):
            setattr(self, name, lambda *arguments, **options: None)


class Communicator(CudaCommunicator):
    """Without any library of collectives."""

    def __init__(self, *arguments, **options):
        DeviceCommunicatorBase.__init__(self, *arguments, **options)
        for name in ("ca_comm", "qr_comm", "symm_mem_comm", "fi_ar_comm", "fi_pcie_ipc_ar_comm",
                     "all2all_manager", "aiter_ar_comm"):  # fmt: skip
            setattr(self, name, None)
        self.use_aiter_ag_rs = self.use_custom_allreduce = False
        self.pynccl_comm = Silent(self.world_size)
        if self.use_all2all:
            self.all2all_manager = all2all.AgRsAll2AllManager(self.cpu_group)

    def all_reduce(self, tensor):
        return torch.empty_like(tensor)  # the real one is out of place too

    all_gather, gather = DeviceCommunicatorBase.all_gather, DeviceCommunicatorBase.gather
    reduce_scatter = DeviceCommunicatorBase.reduce_scatter

    def destroy(self):
        pass


_module = types.ModuleType("one_rank_communicator")
_module.Communicator = Communicator
sys.modules[_module.__name__] = _module
platforms.current_platform.__class__.get_device_communicator_cls = classmethod(
    lambda cls: f"{_module.__name__}.Communicator"
)
parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * RANKS
shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *arguments, **options: None)
dp_utils.should_skip_dp_coordination = lambda: True
