"""Which tensors live on the host when the rest runs on a GPU: shapes, axes, indices, and what computes them.

The rules are those of ONNX Runtime's CUDA execution provider: a kernel may want an input in CPU memory
(``InputMemoryType(OrtMemTypeCPUInput, i)``) or give its output there, and nodes that only see such tensors run on the
CPU (``GetCpuPreferredNodes``, ``core/framework/fallback_cpu_capability.cc``). A tensor needed on both sides exists
twice (``MemcpyFromHost`` / ``MemcpyToHost`` nodes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from graphmem.base.records import dataclass
from graphmem.graph.model import Graph, Node
from graphmem.trace import Place

#: Inputs that CUDA kernels read in CPU memory: the ``InputMemoryType`` lines of ``core/providers/cuda/**``, ~1.20.
HOST_INPUTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Slice": (1, 2, 3, 4), "Squeeze": (1,), "Unsqueeze": (1,), "Tile": (1,),
    "ConstantOfShape": (0,), "Range": (0, 1, 2), "Pad": (1, 2, 3), "Split": (1,), "TopK": (1,), "OneHot": (1, 2),
    "Resize": (1, 2, 3), "Upsample": (1,), "CumSum": (1,), "Trilu": (1,), "Dropout": (1, 2),
    "ReduceSum": (1,), "ReduceMean": (1,), "ReduceMax": (1,), "ReduceMin": (1,), "ReduceProd": (1,), "ReduceL1": (1,),
    "ReduceL2": (1,), "ReduceLogSum": (1,), "ReduceLogSumExp": (1,), "ReduceSumSquare": (1,),
    "NonMaxSuppression": (2, 3, 4), "If": (0,), "Loop": (0, 1),
}  # fmt: skip
#: The same of operators of com.microsoft (``bert/group_query_attention.cc``).
_MICROSOFT_HOST_INPUTS: dict[str, tuple[int, ...]] = {"GroupQueryAttention": (6,)}


def host_inputs(node: Node) -> tuple[int, ...]:
    """Positions of the inputs that a card's kernel of ``node`` reads in host memory."""
    if node.domain == "com.microsoft":
        return _MICROSOFT_HOST_INPUTS.get(node.op_type, ())
    return HOST_INPUTS.get(node.op_type, ()) if not node.domain else ()


#: CUDA kernels whose output is in CPU memory: ``core/providers/cuda/tensor/shape_op.cc``, ``size.cc``.
HOST_OUTPUTS = frozenset(("Shape", "Size"))
SMALL_INITIALIZER_ELEMENTS = 100  # kSmallInitializerThreshold, fallback_cpu_capability.cc
#: GetCpuPreferredNodes leaves nodes with such an input on the GPU.
_GPU_ONLY_TYPES = frozenset(("float16", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"))


@dataclass(frozen=True)
class Placement:
    """``home`` is where a tensor is made (for inputs and initializers, where it is wanted); ``copies`` are the tensors
    that also exist on the other side; ``host_nodes`` are indices of nodes that run on the CPU."""

    home: dict[str, Place]
    copies: frozenset[str]
    host_nodes: frozenset[int]

    def read_at(self, index: int, node: Node, position: int) -> Place:
        """Where the node reads its input ``position``."""
        if index in self.host_nodes or position in host_inputs(node):
            return Place.HOST
        return Place.DEVICE


def place(
    graph: Graph, order: Sequence[int], takes: Callable[[Node, Graph], bool] = lambda node, graph: True
) -> Placement:
    """Place every tensor of ``graph``, whose nodes run in ``order``; those that ``takes`` refuses run on the CPU."""
    host_nodes = _host_nodes(graph, order, takes)
    draft = Placement({}, frozenset(), host_nodes)
    readers: dict[str, set[Place]] = {}
    for index, node in enumerate(graph.nodes):
        for position, name in enumerate(node.inputs):
            if name:
                readers.setdefault(name, set()).add(draft.read_at(index, node, position))
    inside = {name for node in graph.nodes for name in node.implicit_inputs}  # copied by each run of a subgraph
    home: dict[str, Place] = {}
    for name in (*graph.inputs, *graph.initializers, *graph.captured):
        is_wanted = name in inside or Place.DEVICE in readers.get(name, ())
        home[name] = Place.DEVICE if is_wanted else Place.HOST
    for index, node in enumerate(graph.nodes):
        on_host = index in host_nodes or (not node.domain and node.op_type in HOST_OUTPUTS)
        home.update((name, Place.HOST if on_host else Place.DEVICE) for name in node.outputs if name)
    copies = frozenset(name for name, places in readers.items() if places - {home[name]})
    return Placement(home, copies, host_nodes)


@dataclass(frozen=True)
class CopiedGraph:
    """A graph with the copies between host and device as nodes, as ``transformer_memcpy.cc`` inserts them.

    ``original`` maps each copy to what it copies; an initializer needed on both sides exists twice
    (``initializers`` lists the second ones). ``host_nodes`` are indices into ``nodes``.
    """

    nodes: tuple[Node, ...]
    places: Mapping[str, Place]
    original: Mapping[str, str]
    initializers: tuple[str, ...]
    host_nodes: frozenset[int]


def insert_copies(graph: Graph, placement: Placement) -> CopiedGraph:
    """Give every tensor that is needed on both sides a second one, and a node that fills it."""
    places = dict(placement.home)
    constants = frozenset(graph.initializers)
    names = {name: f"{name} (copy)" for name in graph.tensors if name in placement.copies}
    original = {copy: name for name, copy in names.items()}
    for name, copy in names.items():
        places[copy] = Place.HOST if places[name] == Place.DEVICE else Place.DEVICE
    nodes = []
    for index, node in enumerate(graph.nodes):
        inputs = tuple(
            names[name] if name and placement.read_at(index, node, position) != placement.home[name] else name
            for position, name in enumerate(node.inputs)
        )
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    fed = frozenset(graph.inputs)
    for kind, where in (("MemcpyFromHost", Place.DEVICE), ("MemcpyToHost", Place.HOST)):
        wanted = [name for name, copy in names.items() if name not in constants and places[copy] == where]
        for name in sorted(wanted, key=lambda name: (name not in fed, name)):  # as a set of names goes
            nodes.append(Node(f"{kind} {name}", kind, "", (name,), (names[name],)))
    doubled = tuple(names[name] for name in graph.initializers if name in names)
    return CopiedGraph(tuple(nodes), places, original, doubled, placement.host_nodes)


def _host_nodes(graph: Graph, order: Sequence[int], takes: Callable[[Node, Graph], bool]) -> frozenset[int]:
    """``GetCpuPreferredNodes``: nodes fed by CPU tensors, small initializers and graph inputs only, in data-flow order.

    Nodes without a GPU kernel join them, as those that touch strings, but what they make draws nobody there.
    """
    on_cpu: set[str] = set()  # tensors made in CPU memory
    anywhere = set(graph.inputs)
    anywhere.update(n for n in graph.initializers if graph.tensors[n].elements <= SMALL_INITIALIZER_ELEMENTS)
    host: set[int] = set()
    for index in order:
        node = graph.nodes[index]
        has_string = any(graph.tensors[name].dtype == "string" for name in (*node.inputs, *node.outputs) if name)
        if has_string or not takes(node, graph):
            host.add(index)
        elif _prefers_cpu(graph, node, on_cpu, anywhere):
            host.add(index)
            on_cpu.update(filter(None, node.outputs))
        elif not node.domain and node.op_type in HOST_OUTPUTS:
            on_cpu.update(filter(None, node.outputs))
    return frozenset(host)


def _prefers_cpu(graph: Graph, node: Node, on_cpu: set[str], anywhere: set[str]) -> bool:
    if not any(name in on_cpu for name in node.inputs):  # only consumers of CPU tensors are candidates
        return False
    wanted_on_cpu = host_inputs(node)
    for position, name in enumerate(node.inputs):
        if not name:
            continue
        if graph.tensors[name].dtype in _GPU_ONLY_TYPES:
            return False
        if name in anywhere:
            continue
        if name not in on_cpu or position in wanted_on_cpu:
            return False
    return True
