"""Pipelines of ``torch.distributed.pipelining``, their stages' shapes given in advance."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.recorded.cases.sharded.models import BF16, ITERATIONS, SEQUENCE, loss_of, start, tokens, written_llama
from tests.recorded.cases.sharded.registry import add

_WIDTH, _VOCABULARY, _LAYERS, _MICRO_BATCHES = 1024, 32000, 8, 8


def pipeline(schedule: str, virtual: int = 1, in_v: bool = False) -> None:
    """``virtual``: stages of a rank; ``in_v``: the second ones are counted backwards."""
    from torch.distributed import pipelining

    start()
    world, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())
    stages, optimizers = [], []
    for turn in range(virtual):
        index = turn * world + (world - 1 - rank if in_v and turn else rank)
        stage, optimizer = _stage(index, world * virtual, device)
        stages.append(stage)
        optimizers.append(optimizer)
    made = getattr(pipelining, schedule)(
        stages if virtual > 1 else stages[0], n_microbatches=_MICRO_BATCHES, loss_fn=loss_of
    )
    for _ in range(ITERATIONS):
        ids = tokens(_MICRO_BATCHES)
        if rank == 0:
            made.step(ids)
        elif rank == world - 1 and not in_v:
            made.step(target=ids, losses=[])
        else:
            made.step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _stage(index: int, count: int, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    from torch.distributed.pipelining import PipelineStage

    model = written_llama(layers=_LAYERS // count)
    if index > 0:
        model.tok_embeddings = None
    if index < count - 1:
        model.norm = model.output = None
    if index == 0:
        given = torch.zeros(1, SEQUENCE, dtype=torch.long, device=device)
    else:
        given = torch.zeros(1, SEQUENCE, _WIDTH, dtype=BF16, device=device, requires_grad=True)
    width = _VOCABULARY if index == count - 1 else _WIDTH
    returned = torch.zeros(1, SEQUENCE, width, dtype=BF16, device=device, requires_grad=True)
    stage = PipelineStage(model, index, count, device, input_args=(given,), output_args=(returned,))
    return stage, torch.optim.AdamW(model.parameters(), lr=1e-4)


add("pp_gpipe_r0", pipeline, world=4, rank=0, schedule="ScheduleGPipe")
add("pp_gpipe_r3", pipeline, world=4, rank=3, schedule="ScheduleGPipe")
add("pp_1f1b_r1", pipeline, world=4, rank=1, schedule="Schedule1F1B")
add("pp_1f1b_r3", pipeline, world=4, rank=3, schedule="Schedule1F1B")
add("pp_inter_r0", pipeline, world=4, rank=0, schedule="ScheduleInterleaved1F1B", virtual=2)
add("pp_inter_r3", pipeline, world=4, rank=3, schedule="ScheduleInterleaved1F1B", virtual=2)
add("pp_zero_bubble_r0", pipeline, world=4, rank=0, schedule="ScheduleInterleavedZeroBubble", virtual=2)
add("pp_zbv_r1", pipeline, world=4, rank=1, schedule="ScheduleZBVZeroBubble", virtual=2, in_v=True)
