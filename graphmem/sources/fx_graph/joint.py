"""The joint graph of a training step: forward and backward in one, as AOTAutograd hands it to a partitioner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphmem.errors import GraphError, first_line
from graphmem.torch_names import private

_aot_autograd: Any = private("torch._dynamo.backends.common.aot_autograd", "there are no joint graphs of steps")


def joint_graph(step: Callable[..., Any], *inputs: Any, **named: Any) -> fx.GraphModule:
    """The joint graph of ``step(*inputs, **named)``, which returns the loss.

    Nothing is compiled and no kernel runs. ``meta["partition"]`` of the graph are the arguments that a partitioner
    gets besides it. Raises :class:`graphmem.errors.GraphError` where ``torch.compile`` would break the graph, with its
    reason, and for a step without anything to differentiate.
    """
    found: list[fx.GraphModule] = []

    def keep(joint: fx.GraphModule, _: Any, **options: Any) -> Any:
        joint.meta["partition"] = options
        found.append(joint)
        raise _Found

    backend = _aot_autograd(fw_compiler=lambda module, _: module, partition_fn=keep)
    try:
        torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(*inputs, **named)
    except Exception as error:
        if not found:
            raise GraphError(f"there is no joint graph of this step: {first_line(error)}") from error
    if not found:
        raise GraphError("there is no joint graph of this step: nothing in it requires gradients")
    found[0].graph.eliminate_dead_code()
    return found[0]


class _Found(Exception):
    """Ends the compilation."""
