"""Expert parallelism written by hand: tokens are sorted by expert and sent to the process that has it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.recorded.cases.sharded.models import BF16, ITERATIONS, SEQUENCE, VOCABULARY, loss_of, start, tokens
from tests.recorded.cases.sharded.registry import add

_WIDTH, _EXPERTS, _TOP = 1024, 16, 2


class _Exchanged(torch.autograd.Function):
    """``all_to_all_single`` of equal parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(gradient)
        dist.all_to_all_single(received, gradient.contiguous())
        return received


class Experts(nn.Module):
    """Those of this process, each as many tokens from each process as its capacity allows (GShard)."""

    def __init__(self, processes: int, capacity: float = 1.25) -> None:
        super().__init__()
        self.processes, self.capacity = processes, capacity
        self.here = _EXPERTS // processes
        self.router = nn.Linear(_WIDTH, _EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(self.here, _WIDTH, 2 * _WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(self.here, 2 * _WIDTH, _WIDTH) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, _WIDTH)
        count = flat.shape[0]
        room = int(self.capacity * _TOP * count / _EXPERTS)
        scores = functional.softmax(self.router(flat).float(), dim=-1)
        weights, chosen = scores.topk(_TOP, dim=-1)
        onehot = functional.one_hot(chosen.reshape(-1), _EXPERTS)
        place = (onehot.cumsum(0) - 1).gather(1, chosen.reshape(-1, 1)).squeeze(1)
        kept = place < room
        slot = chosen.reshape(-1) * room + place.clamp(max=room - 1)
        sent = flat.new_zeros(_EXPERTS * room, _WIDTH)
        sent = sent.index_add(0, slot, flat.repeat_interleave(_TOP, 0) * kept.unsqueeze(1))
        received = _Exchanged.apply(sent).view(self.processes, self.here, room, _WIDTH)
        work = received.transpose(0, 1).reshape(self.here, self.processes * room, _WIDTH)
        done = functional.gelu(work @ self.up) @ self.down
        back = done.view(self.here, self.processes, room, _WIDTH).transpose(0, 1).reshape(-1, _WIDTH)
        returned = _Exchanged.apply(back)[slot] * (kept * weights.reshape(-1)).unsqueeze(1).to(x.dtype)
        return returned.view(count, _TOP, _WIDTH).sum(1).view_as(x)


class Mixture(nn.Module):
    def __init__(self, processes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, _WIDTH)
        self.attention = nn.ModuleList(nn.MultiheadAttention(_WIDTH, 16, batch_first=True) for _ in range(2))
        self.experts = nn.ModuleList(Experts(processes) for _ in range(2))
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = x + attention(x, x, x, need_weights=False)[0]
            x = x + experts(x)
        return self.head(x)  # type: ignore[no-any-return]


def experts_by_hand() -> None:
    start()
    model = Mixture(dist.get_world_size()).to("cuda", BF16)
    shared = [parameter for name, parameter in model.named_parameters() if not name.endswith(("up", "down"))]
    for parameter in shared:
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(ITERATIONS):
        ids = tokens(4, SEQUENCE)
        loss_of(model(ids), ids).backward()
        for parameter in shared:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()


add("ep_capacity", experts_by_hand)
