"""CUDA graphs that Inductor captures itself (mode ``reduce-overhead``).

``manager`` (``torch/_inductor/cudagraph_trees.py`` of PyTorch 2.13), whose work on addresses and weak references needs
a card, is followed as far as memory sees it. All graphs share a pool and a stream. A compiled function runs in the
pool the first time (its warm-up); it is captured when it is called once more, its inputs copied into the pool first,
unless they are parameters, were marked to stay where they are (transformers' static caches are), or are results of the
graphs before it; then it is replayed, which takes nothing. A run is a path: what is called while results of an earlier
function live comes after that one, and is captured anew after another. A path ends when all of its results are dead,
or with the next call of compiled code (a generation) after a backward pass: then they are given back. Between replays
the pool holds nothing; what is warmed up or captured after one finds again what was in it. cuBLAS's workspaces of the
stream live in the pool, and are given back after each run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphmem.capture.patches import Patches
from graphmem.capture.record.recorder import Recorder
from graphmem.torch_names import private

_LOST = "torch.compile cannot be followed"

_Storage = Any
#: Of an output: its place on the path (the number of graphs before its own), and among the outputs.
_Place = tuple[int, int]


@dataclass(eq=False)
class _Function:
    """A compiled function of inputs of one size."""

    model: Callable[[list[Any]], Any]
    static: frozenset[int]
    mutated: tuple[int, ...]
    is_warm: bool = False


@dataclass(frozen=True)
class _Rebuilt:
    """A result of a replay: memory of the pool that the allocator counts as free by then."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(output: torch.Tensor) -> _Rebuilt:
        return _Rebuilt(output.shape, output.stride(), output.dtype, output.device)

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


@dataclass(eq=False)
class _Node:
    """One run of a function, and what was before it on its path; captured, it has the places of its inputs that stay,
    and how its results are made in a replay. ``storages``: of the results of its latest run, those in the pool."""

    function: _Function
    parent: _Node | None
    storages: list[Callable[[], _Storage | None] | None] = field(default_factory=list)
    places: tuple[object, ...] = ()
    dead: tuple[_Place, ...] = ()
    results: list[Any] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)

    def path(self) -> list[_Node]:
        """From the first one to this."""
        return [*(self.parent.path() if self.parent is not None else ()), self]

    def live(self) -> dict[_Place, _Storage]:
        """The results of the path that live."""
        found = {}
        for depth, node in enumerate(self.path()):
            for index, reference in enumerate(node.storages):
                storage = reference() if reference is not None else None
                if storage is not None:
                    found[depth, index] = storage
        return found

    def _is_cuda_graph_recorded_tensor(self, tensor: torch.Tensor) -> bool:
        """Dynamo asks so of an optimizer's gradients."""
        return any(storage is tensor.untyped_storage() for storage in self.live().values())


class GraphTrees:
    """The graphs of one capture; an empty one holds the pool."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graphs: list[Any] = []
        self._stream: Any = None
        self._pool: Any = None
        self._generation = -1
        self._is_pending = False  # a forward pass waits for its backward pass
        self._state = ""  # of the current node: "warm-up", "captured", "replayed"
        self._roots: list[_Node] = []
        self._found_again: dict[int, torch.Tensor] = {}
        self.current_node: _Node | None = None

    def patch(self, patches: Patches) -> None:
        trees = "torch._inductor.cudagraph_trees"
        patches.replace(f"{trees}.cudagraphify_impl", _LOST, self._with_graphs)
        patches.replace(f"{trees}.get_manager", _LOST, lambda *_, **__: self if self._pool is not None else None)

    def forget(self) -> None:
        """The capture is over: graphs that end from here on give nothing back."""
        for graph in self._graphs:
            graph._has_graph = False
        self._graphs.clear()

    # --- what Inductor calls ------------------------------------------------------------------------------------------

    def set_to_running_backward(self) -> None:
        """A backward pass runs that is not captured."""
        self._is_pending = False

    def _with_graphs(
        self,
        model: Callable[[list[object]], object],
        _: list[object],
        static: Sequence[int],
        *,
        is_inference: bool,
        is_backward: bool = False,
        mutated_input_idxs: Sequence[int] = (),
        **__: object,
    ) -> Callable[[list[Any]], Any]:
        """``cudagraphify_impl``: a function for every combination of the inputs that are numbers."""
        functions: dict[tuple[int, ...], tuple[_Function, list[int]]] = {}

        def run(inputs: list[object]) -> object:
            get_input_idxs_to_check = private("torch._inductor.compile_fx.get_input_idxs_to_check", _LOST)
            copy_misaligned_inputs = private("torch._inductor.utils.copy_misaligned_inputs", _LOST)
            remove_unaligned_input_idxs = private("torch._inductor.utils.remove_unaligned_input_idxs", _LOST)

            key = tuple(value for value in inputs if isinstance(value, int))
            if key not in functions:
                checked = list(get_input_idxs_to_check(inputs, static))
                stays = frozenset(remove_unaligned_input_idxs(inputs, static))
                functions[key] = _Function(model, stays, tuple(mutated_input_idxs)), checked
            function, checked = functions[key]
            copy_misaligned_inputs(inputs, checked)
            self._hold_pool()
            outputs = self._run(function, inputs)
            if not is_inference:
                self._is_pending = not is_backward
            return outputs

        return run

    def _run(self, function: _Function, inputs: list[object]) -> object:
        """``manager._run``."""
        if self._state in ("warm-up", "captured"):
            self._try_to_end()
        managed = self._managed(inputs)
        if any(index not in function.static and index not in managed for index in function.mutated):
            return function.model(inputs)  # what is written into lies elsewhere each time
        if not function.is_warm or self._state == "warm-up":
            if self._state == "replayed":
                self._find_again()
            function.is_warm = True
            return self._warm_up(function, inputs)
        if self._state != "captured":
            for node in self.current_node.children if self.current_node is not None else self._roots:
                if node.function is function and self._fits(node, inputs, managed):
                    return self._replay(node, inputs)
            if self.current_node is not None:
                self._try_to_end()
                if self.current_node is None:
                    return self._run(function, inputs)
                self._find_again()
        return self._capture(function, inputs, managed)

    # --- paths --------------------------------------------------------------------------------------------------------

    def _try_to_end(self) -> None:
        """``try_end_curr_warmup``, ``_recording`` and ``_execution``."""
        live = self._live()
        manager = private("torch._inductor.cudagraph_trees.CUDAGraphTreeManager", _LOST)
        is_new = manager.get_curr_generation() != self._generation
        if is_new and (manager.user_invoked_mark_step() or not self._is_pending):
            if self._state != "replayed":
                self._found_again.clear()
                for storage in live.values():
                    storage.resize_(0)
        elif live:
            return
        self.current_node, self._state = None, ""

    def _live(self) -> dict[_Place, _Storage]:
        return {} if self.current_node is None else self.current_node.live()

    def _managed(self, inputs: Sequence[object]) -> dict[int, _Place]:
        """Of inputs that are results of the path, the place on it."""
        places = {id(storage): place for place, storage in self._live().items()}
        return {index: places[id(one)] for index, one in _storages(inputs).items() if id(one) in places}

    def _find_again(self) -> None:
        """``apply_checkpoint_execution_state_in_allocator``: what lives of the replayed path is in the pool again."""
        for storage in self._live().values():
            if id(storage) not in self._found_again:
                with self._in_pool():
                    self._found_again[id(storage)] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
                weakref.finalize(storage, self._found_again.pop, id(storage), None)

    def _enter(self, node: _Node, state: str) -> None:
        manager = private("torch._inductor.cudagraph_trees.CUDAGraphTreeManager", _LOST)
        self.current_node, self._state, self._generation = node, state, manager.get_curr_generation()

    # --- running ------------------------------------------------------------------------------------------------------

    def _hold_pool(self) -> None:
        """``manager.__init__``: the graph that holds the pool captures nothing."""
        if self._pool is not None:
            return
        torch.cuda.synchronize()
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        with self._capturing(self._graph()):
            pass

    def _graph(self) -> Any:
        self._graphs.append(torch.cuda.CUDAGraph())
        return self._graphs[-1]

    def _capturing(self, graph: object) -> Any:
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    @contextlib.contextmanager
    def _in_pool(self) -> Iterator[None]:
        """``_use_cuda_memory_pool_manager``."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            torch._C._cuda_beginAllocateCurrentThreadToPool(0, self._pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(0, self._pool)
                torch._C._cuda_releasePool(0, self._pool)

    def _warm_up(self, function: _Function, inputs: list[object]) -> object:
        """``CUDAWarmupNode.run``."""
        node = _Node(function, self.current_node)
        given = set(map(id, _storages(inputs).values())) - set(map(id, self._live().values()))
        self._enter(node, "warm-up")
        with _without_workspaces(), self._in_pool():
            outputs: Any = function.model(inputs)
        node.storages = _references(outputs, given)
        return outputs

    def _capture(self, function: _Function, inputs: list[object], managed: dict[int, _Place]) -> Any:
        """``CUDAGraphNode``: inputs that may lie elsewhere next time are copied, the originals dropped."""
        static_input = private("torch._inductor.compile_fx.static_input", _LOST)

        parent, before = self.current_node, self._live()
        node = _Node(function, parent, places=_places(function, inputs, managed))
        if parent is not None:
            node.dead = tuple(
                (depth, index)
                for depth, one in enumerate(parent.path())
                for index, reference in enumerate(one.storages)
                if reference is not None and (depth, index) not in before
            )
        stays = {id(storage) for index, storage in _storages(inputs).items() if index in function.static}
        stays -= set(map(id, before.values()))
        with self._in_pool():
            copies = [
                static_input(one)
                if isinstance(one, torch.Tensor) and index not in function.static and index not in managed
                else one
                for index, one in enumerate(inputs)
            ]
        inputs.clear()
        del before
        (self._roots if parent is None else parent.children).append(node)
        graph = self._graph()
        with _without_workspaces(), self._capturing(graph):
            outputs = function.model(copies)
        node.storages = _references(outputs, stays)
        node.results = [
            _Rebuilt.of(one) if new is not None else one for one, new in zip(outputs, node.storages, strict=True)
        ]
        self._enter(node, "captured")
        return outputs

    def _fits(self, node: _Node, inputs: Sequence[object], managed: dict[int, _Place]) -> bool:
        """``check_invariants``."""
        return node.places == _places(node.function, inputs, managed) and not self._live().keys() & set(node.dead)

    def _replay(self, node: _Node, inputs: list[object]) -> list[Any]:
        inputs.clear()
        with self._recorder.paused():
            outputs = [one.made() if isinstance(one, _Rebuilt) else one for one in node.results]
        node.storages = [None] * len(outputs)
        for index, one in enumerate(outputs):
            if isinstance(node.results[index], _Rebuilt):
                self._recorder.storages.see(one, 0)
                node.storages[index] = weakref.ref(one.untyped_storage())
        self._enter(node, "replayed")
        return outputs


def _places(function: _Function, inputs: Sequence[Any], managed: dict[int, _Place]) -> tuple[object, ...]:
    """Where inputs lie that are not copied."""
    stays = function.static | managed.keys()
    return tuple(managed.get(index) or one._cdata for index, one in _storages(inputs).items() if index in stays)


def _storages(inputs: Sequence[object]) -> dict[int, _Storage]:
    return {index: one.untyped_storage() for index, one in enumerate(inputs) if isinstance(one, torch.Tensor)}


def _references(outputs: Sequence[object], given: set[int]) -> list[Callable[[], _Storage | None] | None]:
    """Weak references to the storages of outputs that are not among those ``given``, the identities of inputs'."""
    storages = [one.untyped_storage() if isinstance(one, torch.Tensor) and one.is_cuda else None for one in outputs]
    return [None if one is None or id(one) in given else weakref.ref(one) for one in storages]


@contextlib.contextmanager
def _without_workspaces() -> Iterator[None]:
    """``clear_cublas_manager``."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
