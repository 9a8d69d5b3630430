"""CUDA streams of the pretended device: which one is current, and its effect on memory.

The caching allocator keeps a list of free blocks per stream, so a block that a side stream gave back serves that stream
alone, and one that ``record_stream`` named is reusable only when the other stream's work has been seen to be done
(``c10/cuda/CUDACachingAllocator.cpp``). A capture therefore notes the current stream with every storage.

In the backward pass the autograd engine makes the stream of a node's forward operator current while the node runs
(``torch/csrc/autograd/engine.cpp``). It is done here, because for C++ the device is ``meta``, without streams.
"""

from __future__ import annotations

import contextlib
import weakref
from _thread import get_ident
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.autograd.graph import Node

from graphmem.capture.torch_internals import current_autograd_node, current_graph_task_id
from graphmem.capture.values.tensors import tensors_in

#: Sequence number of the nodes that accumulate gradients (torch/csrc/autograd/functions/accumulate_grad.cpp).
_ACCUMULATES = 2**64 - 1
_MADE = "graphmem stream"
#: ``torch.cuda.Stream()`` hands out the streams of a pool in turn, one pool per priority (``kStreamsPerPool``,
#: c10/cuda/CUDAStream.cpp).
STREAMS_PER_POOL = 32
#: CUDA's priorities on cards since Pascal: 0 (lowest) to -5; PyTorch has pools for the first four.
HIGHEST_PRIORITY = -3


class _Made:
    """The stream on which a node was made."""

    __slots__ = ("__weakref__", "stream")

    def __init__(self, stream: int) -> None:
        self.stream = stream


class Streams:
    """The streams of one capture, by index; 0 is the default stream.

    A card's autograd engine works on a thread of its own, so the stream of the step and that of the node that runs
    now are two things.
    """

    def __init__(self) -> None:
        self.used = False  # whether the step has made a stream of its own; until then nothing needs to be followed
        self._of_step = 0
        self._of_thread: dict[int, int] = {}  # identity of a thread that the step started -> its current stream
        self.on_change: Callable[[], None] | None = None  # called when another stream is current
        self.of_sequence: dict[int, int] = {}  # sequence number of a node -> stream of its forward operator
        self._node: tuple[int, int] = (-1, 0)  # the node that runs, the stream that is current in it
        # Nodes that accumulate gradients have no number. They are known by their leaf, and live as long as a graph, or
        # a reducer, holds them: often from one iteration into the next, where the loss is only then replaced.
        self._of_leaf: dict[int, _Made | weakref.ref[_Made]] = {}
        self._made = 0
        self._handed_out: dict[int, int] = {}  # priority -> how many streams were asked for
        self._index: dict[tuple[int, int], int] = {}  # (priority, place in its pool) -> index

    @property
    def of_step(self) -> int:
        """Index of the stream that is current outside nodes of the backward pass. Every thread has its own
        (``thread_local`` in c10/cuda/CUDAStream.cpp): a loader's leaves the training loop's alone."""
        return self._of_thread.get(get_ident(), self._of_step) if self._of_thread else self._of_step

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """A context for a thread that the step has started: it begins on the default stream."""
        self._of_thread[get_ident()] = 0
        try:
            yield
        finally:
            del self._of_thread[get_ident()]

    @property
    def current(self) -> int:
        """Index of the current stream."""
        return self.of_step if not self.used or not self._in_node() else self._node[1]

    def make_current(self, index: int) -> None:
        """Everything from now on runs on stream ``index``; inside a node of the backward pass, until it ends."""
        if self._in_node():
            self._node = (self._node[0], index)
        elif get_ident() in self._of_thread:
            self._of_thread[get_ident()] = index
        else:
            self._of_step = index
        if self.on_change is not None:
            self.on_change()

    def note_forward(self, sequence: int, args: Sequence[object]) -> None:
        """An operator of the forward pass makes node ``sequence``, and those that accumulate its leaves' gradients."""
        if not self.used:
            return
        self.of_sequence.setdefault(sequence, self.current)
        self.note_leaves(tensor for tensor in tensors_in(args) if tensor.requires_grad and tensor.is_leaf)

    def note_leaves(self, leaves: Iterable[torch.Tensor]) -> None:
        """The nodes that accumulate these leaves' gradients are made on the current stream, unless they are there."""
        for leaf in leaves:
            entry = self._of_leaf.get(id(leaf))
            if entry is None or (isinstance(entry, weakref.ref) and entry() is None):
                self._of_leaf[id(leaf)] = _Made(self.current)

    def _in_node(self) -> bool:
        """True if a node of the backward pass runs now. One that begins takes the stream of its forward operator."""
        node = current_autograd_node() if current_graph_task_id() != -1 else None
        if node is None:
            return False
        sequence = node._sequence_nr()
        key = sequence if sequence != _ACCUMULATES else -id(node.variable)
        if key != self._node[0]:
            self._node = (key, self._of(node))
        return True

    def add_gradients(self, gradient: torch.Tensor) -> None:
        """The engine adds up two gradients, on the stream of the node that will use the sum."""
        node = current_autograd_node()
        for consumer, number in node.next_functions if node is not None else ():
            if consumer is not None and tuple(consumer._input_metadata[number].shape) == tuple(gradient.shape):
                self.make_current(self._of(consumer))
                return

    def _of(self, node: Node) -> int:
        """Index of the stream that the node of the backward pass runs on."""
        sequence = node._sequence_nr()
        if sequence != _ACCUMULATES:
            return self.of_sequence.get(sequence, self.of_step)
        made = node.metadata.get(_MADE)
        if made is None:  # its first backward pass: from now on the entry lives as long as the node
            entry = self._of_leaf.get(id(node.variable))
            made = entry if isinstance(entry, _Made) else _Made(self.of_step)
            node.metadata[_MADE] = made
            self._of_leaf[id(node.variable)] = weakref.ref(made)
        return int(made.stream)

    def next_of_pool(self, priority: int) -> int:
        """The index of the stream that ``torch.cuda.Stream(priority=...)`` returns next."""
        self.used = True
        priority = min(0, max(priority, HIGHEST_PRIORITY))
        turn = self._handed_out.get(priority, 0)
        self._handed_out[priority] = turn + 1
        place = (priority, turn % STREAMS_PER_POOL)
        if place not in self._index:
            self._made += 1
            self._index[place] = self._made
        return self._index[place]
