"""A backward pass that makes a graph of its own (``create_graph=True``) numbers its nodes as on a card.

The engine runs the ready node with the highest sequence number first, and every thread counts for itself
(``at::sequence_number``, a thread-local; torch/csrc/autograd/engine.cpp). On a card the nodes of a backward pass run,
and make new nodes, on the device's thread: those have low numbers, whatever the forward pass has counted. Here all runs
on the caller's thread, so such a pass is given to a thread of its own, which lives as long as the capture. A program
begins to count at nothing in both; the caller's thread may have counted before, and the other one is made to catch up.
Passes inside ``torch.func`` transforms stay, as the stack of transforms is the thread's and Python cannot give it to
another: the nodes that they made are given the numbers of the device's thread when they end.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphmem.capture.patches import Patches, around
from graphmem.capture.threads import OwnThread
from graphmem.capture.torch_internals import (
    dispatch_modes,
    function_modes,
    inside_transform,
    is_transformed_tensor,
    next_sequence_number,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
)
from graphmem.capture.values.callers import is_transformed
from graphmem.capture.values.tensors import tensors_in

_KINDS = ("cuda", "cpu")
_LOST = "the order in which gradients of gradients are computed may be another one"

#: So many nodes are made at once, at most, for nothing but to count them (1.5 microseconds each). In a process that has
#: made more before the capture, the nodes of backward passes have lower numbers than on a card.
_COUNTED_AT_MOST = 3_000_000


class Numbers:
    """How far the device's thread is behind the caller's, by nodes that the program would not have made on the latter
    on a card."""

    def __init__(self) -> None:
        self.ahead = 0
        self._is_in_pass = False

    def begin(self) -> None:
        """The program's next node is its first."""
        self.ahead = next_sequence_number()

    @contextlib.contextmanager
    def of_a_pass(self) -> Iterator[None]:
        """Inside, a backward pass runs on the caller's thread: the nodes that it makes (checkpoints compute their part
        of the forward pass anew) would be the device's, which has counted them then, and the caller's thread not."""
        if self._is_in_pass:
            yield
            return
        self._is_in_pass, begin = True, next_sequence_number()
        try:
            yield
        finally:
            self._is_in_pass = False
            self.ahead += 2 * (next_sequence_number() - begin)

    def count(self, original: Callable[[object], object], _: object, tensor: torch.Tensor) -> object:
        """``MetaConverter._backward_error``, a node around a host tensor of the program that becomes fake."""
        self.ahead += 1
        return original(tensor)


class _DeviceThread:
    """Runs functions one after another, each under the modes and settings of its caller. Its nodes are numbered from as
    far ahead as those of the caller."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self._ahead = numbers, 0
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = OwnThread(target=self._serve, name="backward", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            _count(self._numbers.ahead - self._ahead)
            self._ahead = self._numbers.ahead
            work()
            del work

    def run(self, function: Callable[[], object]) -> object:
        """The function's result, or its error raised again."""
        state = _state()
        done = threading.Event()
        outcome: list[Any] = []

        def work() -> None:
            try:
                with _under(state):
                    outcome.append((function(), None))
            except BaseException as error:
                outcome.append((None, error))
            done.set()

        self._work.put(work)
        done.wait()
        result, error = outcome.pop()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self._work.put(None)
        self.thread.join()

    def take(self, count: int) -> int:
        """The first of ``count`` numbers of the thread that no other node has."""

        first: queue.SimpleQueue[int] = queue.SimpleQueue()

        def work() -> None:
            first.put(next_sequence_number())
            _count(count)

        self._work.put(work)
        return first.get()


def _renumbered(results: object, begin: int, end: int, first: int) -> None:
    """Nodes that ``results`` lead to and that have the numbers from ``begin`` to ``end`` count from ``first`` on."""
    waiting = [node for tensor in tensors_in(results) for node in _nodes(tensor)]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node in seen or not begin <= node._sequence_nr() < end:
            continue
        seen.add(node)
        waiting += [one for one, _ in node.next_functions if one is not None]
    for node in filter(_can_be_numbered, seen):
        node._set_sequence_nr(node._sequence_nr() - begin + first)


def _can_be_numbered(node: object) -> bool:
    return hasattr(node, "_set_sequence_nr")  # not in older versions


def _nodes(tensor: torch.Tensor) -> Iterator[Any]:
    """The nodes that made a tensor, of every level of ``torch.func`` that it is wrapped in; not of its derivative in
    forward mode, which C++ alone can ask for here."""
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
    if is_transformed_tensor(tensor):
        yield from _nodes(inside_transform(tensor))


def _count(missing: int) -> None:
    """Make ``missing`` nodes, or none if they are too many."""
    leaf = torch.zeros((), requires_grad=True)
    for _ in range(missing if missing <= _COUNTED_AT_MOST else 0):
        leaf.neg()


def _state() -> tuple[list[Any], list[Any], list[tuple[str, bool, torch.dtype]]]:
    """The modes and autocast settings of this thread, which a backward pass sees."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    return dispatch_modes(), function_modes(), autocast


@contextlib.contextmanager
def _under(state: tuple[list[object], list[object], list[tuple[str, bool, torch.dtype]]]) -> Iterator[None]:
    """Set the modes and autocast of another thread on this one. The modes are taken off at the end; autocast stays."""
    modes, function_modes, autocast = state
    for kind, enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    for mode in modes:
        push_dispatch_mode(mode)
    for mode in function_modes:
        push_function_mode(mode)
    try:
        yield
    finally:
        for _ in function_modes:
            pop_function_mode()
        for mode in reversed(modes):
            pop_dispatch_mode(getattr(mode, "_mode_key", None))


@contextlib.contextmanager
def numbered_as_on_a_card() -> Iterator[Numbers]:
    """Give backward passes that make a graph to a thread of their own, for the duration."""
    threads: list[_DeviceThread] = []
    numbers = Numbers()

    def run_backward(
        original: Callable[..., object], tensors: object, gradients: object, retain: object, create_graph: object,
        *args: object, **kwargs: object,
    ) -> object:  # fmt: skip
        def run() -> object:
            return original(tensors, gradients, retain, create_graph, *args, **kwargs)

        if threads and threading.current_thread() is threads[0].thread:
            return run()
        if not create_graph:
            with numbers.of_a_pass():
                return run()
        if not threads:
            threads.append(_DeviceThread(numbers))
        return transformed(run) if is_transformed() else threads[0].run(run)

    def transformed(run: Callable[[], object]) -> object:
        begin = next_sequence_number()
        results = run()
        end = next_sequence_number()
        first = threads[0].take(end - begin)
        numbers.ahead += end - begin
        _renumbered(results, begin, end, first)
        return results

    try:
        with Patches() as patches:
            patches.wrap("torch.autograd.graph._engine_run_backward", _LOST, around(run_backward))
            patches.wrap("torch.autograd._engine_run_backward", _LOST, around(run_backward))
            patches.wrap("torch._subclasses.meta_utils.MetaConverter._backward_error", _LOST, around(numbers.count))
            yield numbers
    finally:
        for thread in threads:
            thread.close()
