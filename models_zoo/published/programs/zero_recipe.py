"""The recipe of pytorch/tutorials on ``ZeroRedundancyOptimizer``: twenty linear layers in DDP over gloo, Adam, one
step.

Arguments: ``zero`` or ``adam``, and how far it goes: ``model``, ``ddp``, ``backward`` or ``step``; the recipe prints
the peak after each. Its output is of PyTorch 1.8, whose Adam updates one parameter after the other.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

KIND, END = sys.argv[1:]
WIDTH, LAYERS, BATCH = 2000, 20, 20


def main():
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo")
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).to(rank) for _ in range(LAYERS)])
    if END == "model":
        return
    wrapped = DistributedDataParallel(model, device_ids=[rank])
    if END == "ddp":
        return
    measure = nn.MSELoss()
    if KIND == "zero":
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, foreach=False
        )
    else:
        optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.01, foreach=False)
    found = wrapped(torch.randn(BATCH, WIDTH).to(rank))
    wanted = torch.randn(BATCH, WIDTH).to(rank)
    measure(found, wanted).backward()
    if END == "step":
        optimizer.step()


main()
