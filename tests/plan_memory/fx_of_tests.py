"""Graphs of torch.fx that several tests read, and how much memory one really holds."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Block(nn.Module):
    """Norm, two products, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks and a loss."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * x).mean()


def partitioned(model: nn.Module, *inputs: torch.Tensor, partition: Any = default_partition) -> Any:
    """The joint graph that AOTAutograd makes of a model, and the two that ``partition`` makes of that."""
    found: list[fx.GraphModule] = []

    def keep(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        found.append(copy.deepcopy(joint))
        parts = partition(joint, joint_inputs, **options)
        found.extend(map(copy.deepcopy, parts))
        return parts

    def compiled(module: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(module)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiled, bw_compiler=compiled, partition_fn=keep)
    torch.compile(model, backend=backend)(*inputs).backward()
    return found


def inputs_of(module: fx.GraphModule) -> list[torch.Tensor]:
    """Random inputs of the sizes that the graph was traced with."""
    torch.manual_seed(1)
    values = (node.meta["val"] for node in module.graph.nodes if node.op == "placeholder")
    return [torch.randn(value.shape) if value.is_floating_point() else torch.ones_like(value) for value in values]


class Meter(TorchDispatchMode):
    """The most bytes of storages alive after any operator, by weak references."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._note(inputs)

    def _note(self, value: Any) -> None:
        for tensor in torch.utils._pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(result)
        return result


def real_peak(module: fx.GraphModule, inputs: list[torch.Tensor]) -> int:
    """The most bytes that the module's own code holds while it runs; its caller holds the inputs."""
    with Meter(inputs) as meter, torch.no_grad():
        module(*inputs)
    return meter.peak
