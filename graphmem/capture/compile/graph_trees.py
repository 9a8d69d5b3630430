"""CUDA graphs that Inductor captures itself (mode ``reduce-overhead``), for code that runs without gradients.

``manager`` (``torch/_inductor/cudagraph_trees.py`` of PyTorch 2.13), whose work on addresses and weak references needs
a card, is followed as far as memory sees it: a compiled function runs in the graphs' own pool the first time it is
called, on a stream of theirs (the warm-up); it is captured in the next invocation of compiled code (a generation), its
inputs copied into the pool first, unless they are parameters or were marked to stay where they are (transformers'
static caches are); then it is replayed, which takes nothing. Results of a generation are given back when the next one
begins. cuBLAS's workspaces of the stream live in the pool, and are given back after each run.
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


@dataclass
class _Replay:
    """A captured graph: the places of its static inputs, and the results of every replay."""

    graph: Any
    addresses: tuple[int, ...]
    outputs: list[Any]


@dataclass
class _Function:
    """A compiled function of inputs of one size."""

    model: Callable[[list[Any]], Any]
    static: frozenset[int]
    mutated: tuple[int, ...]
    is_warm: bool = False
    replays: list[_Replay] = field(default_factory=list)


class GraphTrees:
    """The graphs of one capture. All of them share a pool and a stream, and an empty graph holds the pool."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._graphs: list[Any] = []
        self._stream: Any = None
        self._pool: Any = None
        self._generation = -1
        self._is_warming_up = False  # in this generation something ran for the first time: nothing is captured in it
        self._returned: list[Any] = []  # weak references to the storages that this generation has returned

    def patch(self, patches: Patches) -> None:
        patches.replace("torch._inductor.cudagraph_trees.cudagraphify_impl", _LOST, self._with_graphs)

    def forget(self) -> None:
        """The capture is over: graphs that end from here on give nothing back."""
        for graph in self._graphs:
            graph._has_graph = False
        self._graphs.clear()

    # --- what Inductor calls ------------------------------------------------------------------------------------------

    def _with_graphs(
        self,
        model: Callable[[list[object]], object],
        _: list[object],
        static: Sequence[int],
        *,
        is_inference: bool,
        mutated_input_idxs: Sequence[int] = (),
        **__: object,
    ) -> Callable[[list[Any]], Any]:
        """``cudagraphify_impl``: a function for every combination of the inputs that are numbers."""
        if not is_inference:
            return model
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
            return self._run(function, inputs)

        return run

    def _run(self, function: _Function, inputs: list[object]) -> object:
        """``manager._run``."""
        if self._pool is None:
            self._begin()
        self._begin_generation()
        if any(index not in function.static and not self._is_own(inputs[index]) for index in function.mutated):
            return function.model(inputs)  # what is written into lies elsewhere each time
        if not function.is_warm or self._is_warming_up:
            function.is_warm = self._is_warming_up = True
            return self._warm_up(function, inputs)
        addresses = tuple(_address(inputs[index]) for index in sorted(function.static))
        for replay in function.replays:
            if replay.addresses == addresses:
                inputs.clear()
                return list(replay.outputs)
        return self._capture(function, inputs, addresses)

    # --- generations --------------------------------------------------------------------------------------------------

    def _begin_generation(self) -> None:
        manager = private("torch._inductor.cudagraph_trees.CUDAGraphTreeManager", _LOST)

        generation = manager.get_curr_generation()
        if generation == self._generation:
            return
        self._generation, self._is_warming_up = generation, False
        for reference in self._returned:
            storage = reference()
            if storage is not None:
                storage.resize_(0)
        self._returned = []

    def _is_own(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return any(reference() is storage for reference in self._returned)

    def _note_returned(self, outputs: Sequence[object], input_storages: set[int]) -> list[bool]:
        """Note the storages of outputs that lie in the pool, which the next generation frees; for each output, whether
        it does: its storage is none of ``input_storages``."""
        storages = [one.untyped_storage() if isinstance(one, torch.Tensor) else None for one in outputs]
        is_new = [storage is not None and storage._cdata not in input_storages for storage in storages]
        self._returned += [weakref.ref(storage) for storage, new in zip(storages, is_new, strict=True) if new]
        return is_new

    # --- running ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """``manager.__init__``: the graph that holds the pool captures nothing."""
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
        given = {_address(value) for value in inputs if isinstance(value, torch.Tensor)}
        with _without_workspaces(), self._in_pool():
            outputs = function.model(inputs)
        self._note_returned(outputs, given)
        return outputs

    def _capture(self, function: _Function, inputs: list[object], addresses: tuple[int, ...]) -> Any:
        """``CUDAGraphNode``: inputs that may lie elsewhere next time are copied, the originals dropped."""
        static_input = private("torch._inductor.compile_fx.static_input", _LOST)

        with self._in_pool():
            copies = [
                static_input(value) if isinstance(value, torch.Tensor) and index not in function.static else value
                for index, value in enumerate(inputs)
            ]
        inputs.clear()
        graph = self._graph()
        with _without_workspaces(), self._capturing(graph):
            outputs = function.model(copies)
        is_new = self._note_returned(outputs, set(addresses))
        again = [self._over_the_same(one) if new else one for one, new in zip(outputs, is_new, strict=True)]
        function.replays.append(_Replay(graph, addresses, again))
        return outputs

    def _over_the_same(self, output: torch.Tensor) -> torch.Tensor:
        """The output of a replay: a tensor over memory of the pool that the allocator counts as free by then."""
        with self._recorder.paused():
            return torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def _without_workspaces() -> Iterator[None]:
    """``clear_cublas_manager``."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
