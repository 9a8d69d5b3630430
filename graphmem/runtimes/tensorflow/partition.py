"""Prepares a graph for the card's executor: adds nodes for arguments, and for tensors received from the host.

A tensor on the host that a kernel reads on the card is sent, and received once for all its readers in a buffer of its
own (``Partition``, graph_partition.cc; ``EnsureMemoryTypes``, memory_types.cc). Integers of 32 bits that Python gives
stay on the host until then (pywrap_tensor.cc). Whoever reads what another device sent is begun by a thread
of its own (``IntraProcessRecvAsync``, rendezvous_mgr.cc; ``ScheduleReady``, executor.cc).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from graphmem.runtimes.tensorflow.step import Node, Step, Tensor

ARGUMENT, RECEIVED = "_Arg", "_Recv"
_RESOURCE = Tensor("resource", ())


def partitioned(step: Step) -> Step:
    """The step with nodes for its arguments, in TensorFlow's order, and for what is received, each before its first
    reader."""
    arguments = {**step.data, **dict.fromkeys(step.resources, _RESOURCE)}
    nodes = {node.name: node for node in (*(_argument(*one) for one in arguments.items()), *step.nodes)}
    return replace(step, nodes=(*nodes.values(),)) if step.eager else replace(step, nodes=tuple(_with_received(nodes)))


def begins_thread(node: Node, nodes: Mapping[str, Node]) -> bool:
    """Whether a node waits for another device: it receives, or reads on the host what the card computes."""
    return node.op == RECEIVED or any(
        _is_sent(node, position, nodes[name], output, to_card=False)
        for position, (name, output) in enumerate(node.inputs)
    )


def _argument(name: str, tensor: Tensor) -> Node:
    on_host = frozenset({0} if tensor.dtype == "int32" else ())
    return Node(ARGUMENT, name, not on_host, (), (), (tensor,), {}, host_outputs=on_host)


def _with_received(nodes: Mapping[str, Node]) -> Iterator[Node]:
    received: set[tuple[str, int]] = set()
    for node in nodes.values():
        inputs = list(node.inputs)
        for position, (name, output) in enumerate(node.inputs):
            if not _is_sent(node, position, nodes[name], output, to_card=True):
                continue
            inputs[position] = f"{name}/{RECEIVED}{output}", 0
            if (name, output) not in received:
                received.add((name, output))
                yield Node(
                    RECEIVED, inputs[position][0], True, ((name, output),), (), (nodes[name].outputs[output],), {}
                )
        yield node if tuple(inputs) == node.inputs else replace(node, inputs=tuple(inputs))


def _is_sent(node: Node, position: int, source: Node, output: int, *, to_card: bool) -> bool:
    """Whether an input lies on the other side: on the host, and is read on the card, or the other way round."""
    read_on_card = node.on_card and position not in node.host_inputs
    made_on_card = source.on_card and output not in source.host_outputs
    return source.outputs[output].bytes > 0 and read_on_card is to_card and made_on_card is not to_card
