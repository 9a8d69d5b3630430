"""Runs of subgraphs: what the kernels of ``If``, ``Loop`` and ``Scan`` allocate around them.

A subgraph runs in a frame of its own in the arena of the session (``utils::ExecuteSubgraph``). Where its outputs live
is the kernel's business: ``core/providers/cpu/controlflow/{if,loop,scan_9,scan_utils}.cc``, which the CUDA provider's
kernels call too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from graphmem.graph.model import Body, Graph, Node

if TYPE_CHECKING:
    from graphmem.runtimes.onnxruntime.plan.runs import Frame, Held

#: Bytes of the number of a loop's run, and of its condition.
_NUMBER_BYTES, _CONDITION_BYTES = 8, 1
#: Runs of the nodes of one loop that are written one by one; of what repeats after them only the outputs are.
MOST_WRITTEN = 20_000
#: Equal runs after which the arena is in the state that every further one leaves it in.
_SETTLED = 4


def run_bodies(frame: Frame, node: Node) -> None:
    """Outputs and subgraphs of a node."""
    {"If": _run_if, "Loop": _run_loop, "Scan": _run_scan}[node.op_type](frame, node)


def _run_body(
    frame: Frame,
    node: Node,
    body: Body,
    graph: Graph,
    elsewhere: Mapping[str, Callable[[], None]],
    given: Mapping[str, Held] | None = None,
) -> dict[str, Held]:
    """One run of a subgraph, and the storages of the outputs that are not made elsewhere, which are held."""
    session = frame.session.bodies[node.key, body.attribute]
    inside = type(frame)(session, graph, frame.phase, given or {}, elsewhere, frame)
    inside.operator = frame.operator
    inside.execute_all()
    return inside.results()


def _nothing() -> None:
    """The output is there already."""


def _is_fixed(graph: Graph, name: str) -> bool:
    shape = graph.symbolic_shape(name)
    return shape is not None and all(isinstance(dimension, int) for dimension in shape)


# --- If ---------------------------------------------------------------------------------------------------------------


def _run_if(frame: Frame, node: Node) -> None:
    """Outputs whose shape the file fixes are allocated first, the others when the branch makes them; either way in the
    buffers of the node (``IfImpl::AllocateOutputTensors``)."""
    body = next(body for body in frame.graph.bodies[node.key] if body.runs)
    graph = body.graphs[0]
    elsewhere: dict[str, Callable[[], None]] = {}
    for name, inner in zip(node.outputs, graph.outputs, strict=True):
        if not name or graph.tensors[inner].items is not None:
            continue
        if _is_fixed(graph, inner):
            frame.output(name)
            elsewhere[inner] = _nothing
        else:
            elsewhere[inner] = lambda name=name: frame.output(name)  # type: ignore[misc]
    results = _run_body(frame, node, body, graph, elsewhere)
    for name, inner in zip(node.outputs, graph.outputs, strict=True):
        held = results[inner]
        if isinstance(held, tuple) and name:
            frame.sequences[name] = held
        else:
            frame.drop(held)


# --- Loop -------------------------------------------------------------------------------------------------------------


def _run_loop(frame: Frame, node: Node) -> None:
    """Every run makes its outputs anew; what it was given goes when the next run begins. At the end what is carried is
    copied, and what was collected put together, into the outputs of the node (``LoopImpl::Execute``)."""
    (body,) = frame.graph.bodies[node.key]
    number = frame.take(_NUMBER_BYTES, f"{node.name} iteration", of_cpu=True)
    condition = frame.take(_CONDITION_BYTES, f"{node.name} condition", of_cpu=True)
    feeds: list[Held] = [condition, *(frame.sequence(name) or None for name in node.inputs[2:])]
    for held in (number, *feeds):
        frame.hold(held)
    fetches: list[Held] = []
    collected: list[Held] = []
    for graph, is_written in _runs(body, collects=len(body.graphs[0].outputs) > len(feeds)):
        if fetches:
            for position, held in enumerate(fetches[: len(feeds)]):
                frame.drop(feeds[position])
                feeds[position] = held
            collected += fetches[len(feeds) :]
        fetches = _run_of_loop(frame, node, body, graph, (number, *feeds), is_written)
    carried = fetches[1:] or feeds[1:]
    for name, held in zip(node.outputs, carried, strict=False):
        if name and frame.graph.tensors[name].items is not None:
            frame.sequences[name] = held if isinstance(held, tuple) else ()
            frame.hold(frame.sequences[name])
        elif name:
            frame.output(name)
    for held in (number, *collected, *feeds, *fetches):
        frame.drop(held)


def _run_of_loop(
    frame: Frame, node: Node, body: Body, graph: Graph, feeds: Sequence[Held], is_written: bool
) -> list[Held]:
    """One run; its outputs are held."""
    given = {name: held for name, held in zip(graph.inputs, feeds, strict=True) if held is not None}
    if is_written:
        outputs = _run_body(frame, node, body, graph, {}, given)
        return [outputs[name] for name in graph.outputs]
    taken: list[Held] = [
        given[name] if name in given else frame.take(graph.tensors[name].nbytes, name) for name in graph.outputs
    ]
    for held in taken:
        frame.hold(held)
    return taken


def _runs(body: Body, *, collects: bool = False) -> Iterator[tuple[Graph, bool]]:
    """The shapes of each run, and whether it is written whole: where there are too many, a run that is like several
    before it is not; it is left out where nothing of it stays."""
    count = sum(times for _, times in body.runs) * max(1, len(body.graphs[0].nodes))
    for index, times in body.runs:
        whole = times if count <= MOST_WRITTEN else min(times, _SETTLED)
        for run in range(times if collects else whole):
            yield body.graphs[index], run < whole


# --- Scan -------------------------------------------------------------------------------------------------------------


def _run_scan(frame: Frame, node: Node) -> None:
    """States go back and forth between two buffers, the last one is the node's output; slices of outputs are written
    where they belong, in a buffer of its own where the axis is another than the first (``ScanImpl``)."""
    (body,) = frame.graph.bodies[node.key]
    length = sum(times for _, times in body.runs)
    states = len(node.inputs) - int(node.attributes["num_scan_inputs"])
    taken = [frame.take(size, f"{node.name} transposed") for size in _transposed_inputs(frame, node, states)]
    later, moved = _scan_outputs(frame, node, states, taken, is_empty=not length)
    buffers = min(2, max(0, length - 1))
    for name in node.inputs[:states]:
        taken += [frame.take(frame.graph.tensors[name].nbytes, f"{node.name} state") for _ in range(buffers)]
    for run, (shapes, is_written) in enumerate(_runs(body)):
        if is_written:
            results = _run_body(frame, node, body, shapes, later if not run else dict.fromkeys(later, _nothing))
            for held in results.values():
                frame.drop(held)
    for name in moved:
        frame.output(name)
    for storage in taken:
        frame.free(storage)


def _scan_outputs(
    frame: Frame, node: Node, states: int, taken: list[int], *, is_empty: bool
) -> tuple[dict[str, Callable[[], None]], list[str]]:
    """Allocate the outputs whose shapes are known; how the first run makes the others, by the name that they have in
    the subgraph, and the outputs that are written to a buffer in ``taken`` first."""
    graph = frame.graph.bodies[node.key][0].graphs[0]
    axes = tuple(node.attributes.get("scan_output_axes", ()))
    later: dict[str, Callable[[], None]] = {}
    moved: list[str] = []

    def untransposed(name: str) -> int:
        """The buffer of an output whose slices do not lie along the first axis."""
        return frame.take(frame.graph.tensors[name].nbytes, f"{node.name} before transposing")

    for position, (name, inner) in enumerate(zip(node.outputs, graph.outputs, strict=True)):
        is_state = position < states
        is_moved = bool(not is_state and axes and axes[position - states])
        if is_moved:
            moved.append(name)
            later[inner] = lambda name=name: taken.append(untransposed(name))  # type: ignore[misc]
        else:
            later[inner] = lambda name=name: frame.output(name)  # type: ignore[misc]
        if is_empty or _is_fixed(graph, inner) or (is_state and not is_moved):
            later[inner]()
            later[inner] = _nothing
    return later, moved


def _transposed_inputs(frame: Frame, node: Node, states: int) -> Iterator[int]:
    """Bytes of the inputs whose slices do not lie along the first axis."""
    axes = tuple(node.attributes.get("scan_input_axes", ()))
    for name, axis in zip(node.inputs[states:], axes, strict=False):
        spec = frame.graph.tensors[name]
        if axis % len(spec.shape):
            yield spec.nbytes
