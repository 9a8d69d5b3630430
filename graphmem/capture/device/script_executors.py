"""TorchScript's profiling executor on the pretended card, with its fuser (NNC).

C++ runs a graph operator by operator the first time, and notes the types of its values. From then on a group of
element-wise operators is one kernel, which takes its results and nothing else. What needs a gradient is taken out first
and becomes two graphs with executors of their own, each with a first run of its own, one call later. Sources, in
torch/csrc/jit: ``ProfilingGraphExecutorImpl`` (runtime/profiling_graph_executor_impl.cpp), ``DifferentiableGraphOp``
(runtime/graph_executor.cpp), ``TensorExprFuser`` (passes/tensorexpr_fuser.cpp), ``TensorExprKernel::run``
(tensorexpr/kernel.cpp).

A build without CUDA has no kernels for a card. So PyTorch's own passes say what a card would fuse, and a Python
function that makes the results stands in place of each group; the rest is C++ as it is. Graphs are copies: what ran in
one capture is new to the next.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch

from graphmem.base.environment import changed
from graphmem.capture.values.tensors import tensors_in
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import CaptureError
from graphmem.torch_names import private

_LOST = "TorchScript's fuser is left out"
_Graph: Any = private("torch._C.Graph", _LOST)
_Module: Any = private("torch._C.ScriptModule", _LOST, type(None))
_last_graph: Any = private("torch._C._last_executed_optimized_graph", _LOST, lambda: None)
_create_function: Any = private("torch._C._create_function_from_graph", _LOST)
_is_optimized: Any = private("torch._C._get_graph_executor_optimize", _LOST)
_set_optimized: Any = private("torch._C._set_graph_executor_optimize", _LOST)
_fuser_is_on: Any = private("torch._C._jit_texpr_fuser_enabled", _LOST, lambda: False)
_profiled_runs: Any = private("torch._C._jit_get_num_profiled_runs", _LOST, lambda: 0)
_can_fuse_on_cpu: Any = private("torch._C._jit_can_fuse_on_cpu", _LOST)
_fuse_on_cpu: Any = private("torch._C._jit_override_can_fuse_on_cpu", _LOST)
_eliminate_dead_code: Any = private("torch._C._jit_pass_dce", _LOST)
_common_subexpressions: Any = private("torch._C._jit_pass_cse", _LOST)
_peephole: Any = private("torch._C._jit_pass_peephole", _LOST)
_propagate_constants: Any = private("torch._C._jit_pass_constant_propagation", _LOST)
_erase_types: Any = private("torch._C._jit_pass_erase_shape_information", _LOST)
_fuse: Any = private("torch._C._jit_pass_fuse_tensorexprs", _LOST)
#: ``runPreAutodiffPassPipeline``, then ``runNoGradOptimizations`` up to where types are needed.
_PASSES: tuple[Any, ...] = (
    private("torch._C._jit_pass_specialize_autogradzero", _LOST),
    private("torch._C._jit_pass_remove_expands", _LOST),
    private("torch._C._jit_pass_canonicalize_graph_fuser_ops", _LOST),
    _eliminate_dead_code,
    _peephole,
    _propagate_constants,
    _eliminate_dead_code,
    _common_subexpressions,
    _peephole,
    _propagate_constants,
    private("torch._C._jit_pass_constant_pooling", _LOST),
    private("torch._C._jit_pass_loop_unrolling", _LOST),
    _peephole,
    _propagate_constants,
    _common_subexpressions,
)

_number = itertools.count()
_HALF = {torch.float16, torch.bfloat16}
_CHECKS = ("prim::TypeCheck", "prim::RequiresGradCheck")
_FLOAT = 6  # ``c10::ScalarType::Float``
_DONT_FUSE = "PYTORCH_TENSOREXPR_DONT_FUSE"
#: Specializations of one shape, after which a group is fused for all shapes (``fusion_strategy``).
_STATIC = 2


class Book(NamedTuple):
    """What the executors ask of a recorder: a place for remarks, a context whose operators are no part of the step, and
    to call something before every operator of a backward pass."""

    remark: Callable[[Diagnostic], None]
    paused: Callable[[], AbstractContextManager[None]]
    before_each_in_backward: Callable[[Callable[[], None]], None]


class Executors:
    """The executors of one capture. ``call`` runs a scripted function."""

    def __init__(self, call: Callable[..., Any], book: Book) -> None:
        self.call, self._book = call, book
        self._kept: dict[tuple[Any, ...], _Executor] = {}
        self._seen: Any = _last_graph()

    def run(self, graph: Any, args: Sequence[Any], depth: int = 0) -> Any:
        """The result of ``graph``."""
        return self._executor(graph, args, depth).run(args)

    def _executor(self, graph: Any, args: Sequence[Any], depth: int) -> _Executor:
        """Each pattern of gradients has one, as PyTorch checks it at each part. ``RequiresGradCheck`` does not ask
        whether gradients are on, where what was noted first needs them; ``TypeCheck`` does."""
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        needing = (bool(args) and _is_module(args[0]), *(tensor.requires_grad for tensor in tensors_in(args)))
        keys = [(graph, depth, cast, needing)]
        if any(needing) and not torch.is_grad_enabled():
            keys.append((graph, depth, cast, (False,) * len(needing)))
        kept = [self._kept[key] for key in keys if key in self._kept]
        if not kept:
            self._kept[keys[-1]] = _Executor(self, graph, depth)
            kept = [self._kept[keys[-1]]]
        return min(kept, key=lambda executor: executor.number)

    def fused(self, depth: int = 0) -> bool:
        """Fuse the graph that had its first run last, for its next; False: it needs gradients."""
        graph = self._seen = _last_graph()
        if _needs_gradient(graph.nodes()):
            return False
        with self._attempt():
            self._fuse(graph.copy(), depth)  # it is C++'s own, and cannot be left half done
            self._fuse(graph, depth)
        return True

    def note_finished(self) -> None:
        """Fuse the graph that ended last, if that was its first run: C++ itself calls those of backward passes. A pass
        that is differentiated once more is not followed."""
        graph = _last_graph()
        if graph is None or graph is self._seen or graph.findNode("prim::profile") is None:
            return
        if not self.fused():
            self._book.remark(Code.SCRIPT_UNFUSED.about())

    def _note_begun(self, began: str) -> None:
        """A part of a backward pass begins. That its own first run is found only now is too late to fuse it."""
        graph = _last_graph()
        is_new = graph is not None and graph is not self._seen and graph.findNode("prim::profile")
        if is_new and began in (node.pyname() for node in graph.findAllNodes("prim::PythonOp")):
            self._seen = graph
            self._book.remark(Code.SCRIPT_UNFUSED.about())
        self.note_finished()

    def differentiated(self, function: Any, args: Sequence[Any]) -> Any:
        """``function`` as it is from its second run on, with the parts that need gradients; None: not known."""
        with self._attempt():
            with contextlib.suppress(RuntimeError), self._book.paused():  # it may read values that nobody knows
                self.call(function, *args)
            graph = _plan_of(function).copy()
            for node in graph.findAllNodes("prim::DifferentiableGraph"):
                self._show(graph, node)
            self._book.before_each_in_backward(self.note_finished)
            return _function(graph)
        return None

    def results(self, graph: Any, args: Sequence[Any]) -> list[tuple[Any, Any, torch.dtype]]:
        """Shapes, strides and types of what ``graph`` returns."""
        with self._book.paused(), optimized(False):
            out = self.call(_function(graph.copy()), *args)
        return [(one.shape, one.stride(), one.dtype) for one in (out if isinstance(out, tuple) else (out,))]

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """What fails in here leaves the graph to C++, which fuses nothing."""
        try:
            yield
        except (RuntimeError, CaptureError):
            self._book.remark(Code.SCRIPT_UNFUSED.about())

    def _show(self, graph: Any, node: Any) -> None:
        """Let the executors of a part that needs gradients be seen: forward, backward, and of what runs instead where
        other tensors need them than were noted (``guardDifferentiableGraph``)."""
        forward, backward = node.g("Subgraph"), node.g("ReverseSubgraph").copy()
        instead = forward.copy()
        for index in reversed(range(node.i("f_real_outputs"), sum(1 for _ in forward.outputs()))):
            instead.eraseOutput(index)
        _eliminate_dead_code(instead)
        began = f"began_{next(_number)}"
        _put(backward, next(backward.nodes()), _Graph(), partial(self._note_begun, began), began)
        node.g_("Subgraph", self._calling(forward)).g_("ReverseSubgraph", backward)
        choice = _choice(node)
        for called in list(choice.blocks())[1].findAllNodes("prim::CallFunction") if choice else ():
            unpacked = called.output().uses()[0].user
            inputs = list(called.inputs())[1:]
            _stand_for(unpacked, _put(graph, called, instead, self._running(instead), "run", inputs))
            called.destroy()

    def _calling(self, graph: Any) -> Any:
        """A graph that does nothing but to run ``graph``, so that its executor is seen."""
        outer = _Graph()
        for value in graph.inputs():
            outer.addInput().setType(value.type())
        for value in _put(outer, outer.return_node(), graph, self._running(graph), "run", outer.inputs()):
            outer.registerOutput(value)
        return outer

    def _running(self, graph: Any, depth: int = 0) -> Callable[..., Any]:
        """A function that runs a copy of ``graph``."""
        graph = graph.copy()

        def run(*args: Any) -> Any:
            with optimized(True):
                return self.run(graph, args, depth)

        return run

    def _fuse(self, graph: Any, depth: int) -> None:
        """Let the next run of a profiled graph be that of a card."""
        for node in graph.findAllNodes("prim::profile"):
            if not node.outputsSize():  # ``removeProfileCounter``
                node.destroy()
        for apply in _PASSES:
            apply(graph)
        _take_types(graph.nodes())
        _spell_casts(graph)
        _name_types(graph.inputs(), graph.nodes())
        with _fusing():
            _fuse(graph)
        for group in graph.findAllNodes("prim::TensorExprGroup"):
            choice, fused = _choice(group), group.g("Subgraph")
            given = _unchecked(group.inputs(), choice.input().node()) if choice else group.inputs()
            whole = choice or group
            _stand_for(whole, _put(graph, whole, fused, _Group(self, fused, depth), "fused", given))
        for node in graph.findAllNodes("prim::FallbackGraph"):  # where other gradients are zero than were noted
            inner = node.g("Subgraph")
            _stand_for(node, _put(graph, node, inner, self._running(inner, depth + 1), "run", node.inputs()))
        _eliminate_dead_code(graph)
        _erase_types(graph)


class _Executor:
    """A graph under one pattern of gradients."""

    def __init__(self, executors: Executors, graph: Any, depth: int) -> None:
        self._executors, self._depth = executors, depth
        self.number = next(_number)
        self._function = _function(graph.copy())
        self._runs = 0
        self._needs_gradient = self._is_differentiated = False

    def run(self, args: Sequence[Any]) -> Any:
        self._runs += 1
        if self._runs == 2 and self._needs_gradient:
            function = self._executors.differentiated(self._function, args)
            self._is_differentiated = function is not None
            self._function = function or self._function
        with optimized(False) if self._is_differentiated else contextlib.nullcontext():
            out = self._executors.call(self._function, *args)
        if self._runs == 1:
            self._needs_gradient = not self._executors.fused(self._depth)
        return out


class _Group:
    """A fused group: its results where its inputs are of the types that were noted, else one by one (``TypeCheck``)."""

    def __init__(self, executors: Executors, graph: Any, depth: int) -> None:
        self._executors, self._depth = executors, depth
        self._types = [value.type() for value in graph.inputs()]
        self._made: dict[object, list[Any]] = {}
        self._graph = graph.copy()
        _erase_types(self._graph)

    def __call__(self, *args: Any) -> Any:
        known = [(kind, arg) for kind, arg in zip(self._types, args, strict=True) if kind.kind() == "TensorType"]
        matches = _matches_dynamically if self._depth >= _STATIC else _matches
        if not matches(known):
            return self._executors.run(self._graph, args, self._depth + 1)
        shapes = tuple((arg.shape, arg.stride(), arg.dtype) for _, arg in known)
        if shapes not in self._made:
            self._made[shapes] = self._executors.results(self._graph, args)
        made = tuple(torch.empty_strided(*like, dtype=dtype, device="cuda") for *like, dtype in self._made[shapes])
        return made[0] if len(made) == 1 else made


def _matches(known: Sequence[tuple[Any, torch.Tensor]]) -> bool:
    """``TensorType::matchTensor``."""
    return all(
        _is_like(kind, arg) and list(arg.shape) == kind.sizes() and list(arg.stride()) == kind.strides()
        for kind, arg in known
    )


def _matches_dynamically(known: Sequence[tuple[Any, torch.Tensor]]) -> bool:
    """``TensorExprDynamicGuard`` (passes/symbolic_shape_runtime_fusion.cpp): dimensions that were equal still are, and
    those of 1 are 1."""
    now: dict[int, int] = {1: 1}
    for kind, arg in known:
        before = kind.sizes()
        if not _is_like(kind, arg) or arg.dim() != len(before):
            return False
        if any(now.setdefault(old, new) != new for old, new in zip(before, arg.shape, strict=True)):
            return False
    return True


def _is_like(kind: Any, arg: torch.Tensor | None) -> bool:
    if arg is None or not arg.is_cuda or (torch.is_grad_enabled() and arg.requires_grad):
        return False
    return bool((torch.float64 if arg.dtype in _HALF else arg.dtype) == kind.dtype())


def _needs_gradient(nodes: Any) -> bool:
    """``needsGradientInProfilingMode``. A type that was never seen says that it does."""
    for node in nodes:
        if node.kind() == "prim::profile" and node.outputsSize():
            seen = node.ty("profiled_type")
            if seen.scalarType() is not None and seen.requires_grad():
                return True
        if any(_needs_gradient(block.nodes()) for block in node.blocks()):
            return True
    return False


def _take_types(nodes: Any) -> None:
    """``RemoveProfileNodesAndSpecializeTypes``."""
    for node in list(nodes):
        for block in node.blocks():
            _take_types(block.nodes())
        if node.kind() == "prim::profile":
            seen = node.ty("profiled_type")
            node.output().replaceAllUsesWith(node.input())
            if seen.scalarType() is not None:
                node.input().setType(seen)
            node.destroy()


def _spell_casts(graph: Any) -> None:
    """Autocast's casts as plain ones: the pass has the same rules for both, but for the host, where it leaves out more
    of autocast's."""
    for kind in ("aten::_autocast_to_reduced_precision", "aten::_autocast_to_full_precision"):
        for node in graph.findAllNodes(kind):
            tensor, *flags = node.inputs()
            dtype = node.output().type().dtype()
            if dtype is not torch.float32 and not (dtype in _HALF and len(flags) > 2):
                continue  # nothing is cast
            with graph.insert_point_guard(node):
                given = [graph.insertConstant(value) for value in (_FLOAT, False, False, None)]
                if dtype in _HALF:
                    given[0] = flags[2]
                cast = graph.insert("aten::to", [tensor, *given])
            cast.setType(node.output().type())
            node.output().replaceAllUsesWith(cast)
            node.destroy()


def _name_types(inputs: Any, nodes: Any) -> None:
    """Give every value its type as the pass takes it (:func:`_named`)."""
    nodes = list(nodes)
    for value in (*inputs, *(value for node in nodes for value in node.outputs())):
        if value.type().kind() == "TensorType" and value.type().scalarType() is not None:
            value.setType(_named(value.type()))
    for node in nodes:
        for block in node.blocks():
            _name_types(block.inputs(), block.nodes())


def _named(kind: Any) -> Any:
    """The type under which the pass takes a tensor of a card for one that it fuses: a build without CUDA does so for
    the host alone, and for no type of 16 bits. For the device that the host's tensors are given nothing is fused, as
    for the host where PyTorch has CUDA."""
    if kind.dtype() in _HALF:
        kind = kind.with_dtype(torch.float64)
    return kind.with_device(torch.device("cpu" if kind.device() == torch.device("meta") else "xpu"))


@contextlib.contextmanager
def _fusing() -> Iterator[None]:
    """Let the pass fuse for the host what it fuses for a card: neither convolutions nor products."""
    can = _can_fuse_on_cpu()
    _fuse_on_cpu(True)
    try:
        with changed({_DONT_FUSE: ":".join(filter(None, (os.environ.get(_DONT_FUSE), "conv2d:matmul")))}):
            yield
    finally:
        _fuse_on_cpu(can)


def _is_module(arg: object) -> bool:
    """Whether it has parameters, which need gradients."""
    return isinstance(arg, _Module)


def _put(
    owner: Any, before: Any, like: Any, kernel: Callable[..., Any], name: str, inputs: Iterable[Any] = ()
) -> list[Any]:
    """Call ``kernel`` before a node of ``owner``; its inputs and results are of the types of the graph ``like``."""
    call = _calling(like, kernel, name)
    kinds = [value.type() for value in like.outputs()]
    with owner.insert_point_guard(before):
        (made,) = owner.insertGraph(call, list(inputs))
    if len(kinds) < 2:
        return [made][: len(kinds)]
    unpacked = owner.create("prim::TupleUnpack", [made], len(kinds))
    unpacked.insertBefore(before)
    for value, kind in zip(unpacked.outputs(), kinds, strict=True):
        value.setType(kind)
    return list(unpacked.outputs())


def _calling(like: Any, kernel: Callable[..., Any], name: str) -> Any:
    """A graph with one node, that calls a Python function. An operator could not have more than 64 arguments."""
    kinds = [value.type().annotation_str for value in like.inputs()]
    results = [value.type().annotation_str for value in like.outputs()]
    result = results[0] if len(results) == 1 else f"Tuple[{', '.join(results)}]" if results else "None"
    known = {**vars(typing), "Tensor": torch.Tensor}
    names = [f"x{number}" for number in range(len(kinds))]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    of = [inspect.Parameter(one, kind, annotation=eval(text, known)) for one, text in zip(names, kinds, strict=True)]

    def ignored(*args: Any) -> Any:
        return kernel(*args)

    ignored.__signature__ = inspect.Signature(of, return_annotation=eval(result, known))  # type: ignore[attr-defined]
    ignored.__name__ = name
    header = ", ".join(f"{one}: {text}" for one, text in zip(names, kinds, strict=True))
    does = f"{'return ' if results else ''}ignored({', '.join(names)})"
    unit = torch.jit.CompilationUnit()
    unit.define(f"def call({header}) -> {result}:\n    {does}\n", {"ignored": torch.jit.ignore(ignored)}.get)
    return unit.call.graph


def _choice(node: Any) -> Any:
    """The ``If`` between a part and what runs instead; None where no tensor was checked (``insertTypeGuard``)."""
    around = node.owningBlock().owningNode()
    is_choice = around is not None and around.kind() == "prim::If"
    return around if is_choice and around.input().node().kind() in _CHECKS else None


def _unchecked(values: Iterable[Any], check: Any) -> list[Any]:
    """These values as they were before the check of types that stands before a group."""
    before = {after.debugName(): value for after, value in zip(check.outputs(), check.inputs(), strict=False)}
    return [before.get(value.debugName(), value) for value in values]


def _stand_for(node: Any, values: Sequence[Any]) -> None:
    """Let ``values`` stand for what ``node`` gives, which goes."""
    for old, new in zip(node.outputs(), values, strict=True):
        old.replaceAllUsesWith(new)
    node.destroy()


def _plan_of(function: Any) -> Any:
    """The graph that a scripted function runs from its second run on, which is made at the beginning of that."""
    (plan,) = function.get_debug_state().execution_plans.values()
    return plan.graph


def _function(graph: Any) -> Any:
    """A scripted function of its own for ``graph``, which becomes its."""
    if sum(1 for _ in graph.outputs()) != 1:
        graph.makeMultiOutputIntoTuple()
    return _create_function("scripted", graph)


@contextlib.contextmanager
def optimized(value: bool) -> Iterator[None]:
    """Whether executors profile and optimize what they run in here."""
    before = _is_optimized()
    _set_optimized(value)
    try:
        yield
    finally:
        _set_optimized(before)


def is_followed() -> bool:
    """Whether PyTorch is set to fuse what it profiles in one run."""
    return bool(_fuser_is_on() and _is_optimized() and _profiled_runs() == 1)
