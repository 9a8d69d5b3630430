"""The dispatch mode that records operators, above ``FakeTensorMode``, and the interceptors it asks.

An interceptor knows calls that a card, or Python, answers otherwise than the fake run. Which of them can apply to an
operator is decided once for each operator, from its :class:`OperatorFacts`; of those that can, every call tries one
after the other, in the order of :data:`INTERCEPTORS`. A call that none of them handles runs on fake tensors.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from graphmem.capture.device.backward_thread import Numbers
from graphmem.capture.device.fake_results import FakeResults
from graphmem.capture.device.fake_tensors import without_classes
from graphmem.capture.device.pretend_device import cards
from graphmem.capture.operators import collectives, compressed, nested, sparse
from graphmem.capture.operators.attention import nested_attention_backend
from graphmem.capture.operators.data_dependent_sizes import VALUES, outputs_of
from graphmem.capture.operators.deterministic import DETERMINISTIC_BEFORE
from graphmem.capture.operators.facts import OperatorFacts, facts_of
from graphmem.capture.operators.gradient_formulas import OUT_OF_PLACE_AFTER
from graphmem.capture.operators.kernel_decompositions import COMPARISONS
from graphmem.capture.patches import Patches
from graphmem.capture.record.attribution import OperatorCall
from graphmem.capture.record.recorder import Recorder
from graphmem.capture.torch_internals import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    current_graph_task_id,
    unset_fake_temporarily,
)
from graphmem.capture.values import device_values, exchanged, host_values
from graphmem.capture.values.callers import called_by_engine, is_forward_derivative, node_name
from graphmem.capture.values.known_values import INTEGERS
from graphmem.capture.values.tensors import has_sparse, on_device, sparse_parts, tensors_in
from graphmem.diagnostics import Code
from graphmem.torch_names import private
from graphmem.trace import Category, Place

_aten = torch.ops.aten
_PRIM_DEVICE = torch.ops.prim.device.default
_COMPOSITE: Any = private(
    "torch._C.DispatchKey.CompositeImplicitAutograd", "composite operators in inference mode cannot be followed", None
)
_KEYS: Any = private("torch._C.DispatchKey", "operators written in Python are not followed inside", None)
_ADD = _aten.add.Tensor
_TO_COPY = _aten._to_copy.default
_PIN_MEMORY = _aten._pin_memory.default
_EMPTY_STRIDED = _aten.empty_strided.default
_ITEM = _aten._local_scalar_dense.default
_NONZERO = _aten.nonzero.default
_IS_SET_TO = _aten.is_set_to.default
_TO = _aten.to.dtype_layout
_META = torch.device("meta")
_COALESCE = _aten._coalesce.default
_SPARSE = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_MAKES_SPARSE = {_SPARSE, _aten._to_sparse.default, _aten._to_sparse.sparse_dim}
#: What selects along a dimension, and which of its arguments names it.
_ALONG = {_aten.unique_dim.default: 1, _aten.unique_dim_consecutive.default: 1, _aten.unique_consecutive.default: 3}
#: What ``AccumulateGrad`` makes a parameter's gradient with.
_ACCUMULATING = (_aten.detach.default, _aten.clone.default)

#: Operators of libraries that give a tensor of the card on memory that it does not hold.
_OF_OTHERS = {
    "_C.get_cuda_view_from_cpu_tensor.default", "_C.weak_ref_tensor.default", "sgl_kernel.weak_ref_tensor.default",
}  # fmt: skip

#: Arguments by name.
Named = dict[str, object]
#: The answer of an interceptor that leaves a call to the next.
NOT_HANDLED: Final = object()


class RecordingMode(TorchDispatchMode):  # type: ignore[misc]
    """Shows every operator below autograd to a :class:`Recorder`."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._routes: dict[Any, Route] = {}
        self.results = FakeResults()
        self.without_body: set[OpOverload] = set()  # whose body in Python ended in an error
        self.in_decomposition = False  # what runs now stands in place of a kernel, below autograd

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper around ``__torch_dispatch__``: nothing is compiled here, and the wrapper costs time."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object] = (), kwargs: Named | None = None
    ) -> object:
        recorder = self.recorder
        if func is _PRIM_DEVICE or recorder.is_paused:
            return func(*args, **(kwargs or {}))
        if recorder.storages.error is not None:
            recorder.storages.settle()
        if recorder.wrappers and not recorder.wrappers.isdisjoint(types):
            return self._by_class(func, types, args, kwargs or {})
        if len(types) > 1 or (types and types[0] is not FakeTensor):
            with without_classes(args, kwargs):
                return self._dispatched(func, args, kwargs or {})
        return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: OpOverload, args: Sequence[object], kwargs: Named) -> object:
        """The result of an operator that no class of tensors answers itself."""
        recorder = self.recorder
        route = self._routes.get(func)
        if route is None:
            route = self._routes[func] = Route(facts_of(func))
        if not route.has_tensors:
            return _without_tensors(func, args, kwargs)
        call = OperatorCall(route.facts, args, kwargs, current_graph_task_id() != -1)
        for attempt in route.before_noted:
            result = attempt(self, call)
            if result is not NOT_HANDLED:
                return result
        recorder.count_unmodelled(call)
        recorder.note(call)
        if torch.is_grad_enabled():
            if recorder.written_views.is_waiting:
                recorder.written_views.note_use(args)
            if route.facts.writes_first:
                recorder.written_views.note_write(args[0], args)
        return self.go_on(route, call)

    def _by_class(
        self, func: OpOverload, types: Sequence[type], args: Sequence[object], kwargs: dict[str, object]
    ) -> object:
        """The result by the class of a tensor around others, which unwraps them: the operators on them come here. It is
        not shown fake tensors, which are plain ones on a card. Where C++ unwraps a class, its own method calls the
        operator again."""
        kinds = tuple(kind for kind in types if not issubclass(kind, FakeTensor))
        if len(kinds) == len(types) or not self.recorder.unwrapped_in_cpp.isdisjoint(kinds):
            return NotImplemented
        for kind in kinds:
            with self:
                out = kind.__torch_dispatch__(func, kinds, args, kwargs)  # type: ignore[attr-defined]
            if out is not NotImplemented:
                return out
        return NotImplemented

    def go_on(self, route: Route, call: OperatorCall) -> object:
        """Answer a call that is in the trace."""
        for attempt in route.noted:
            result = attempt(self, call)
            if result is not NOT_HANDLED:
                return result
        out = self.run(call)
        if call.facts.relaid is not None:
            out = call.facts.relaid(call.args, call.kwargs, out, self.recorder.card.torch_version)
        return self.finish(call, out)

    def run(self, call: OperatorCall) -> object:
        """The result of the operator, of fake tensors."""
        return self.results.run(call.func, call.args, call.kwargs)

    def go_on_as(self, func: OpOverload, call: OperatorCall) -> object:
        """Answer a call that is in the trace as one of another operator, with the memory of the one that is there."""
        route = self._routes.get(func)
        if route is None:
            route = self._routes[func] = Route(facts_of(func))
        other = OperatorCall(route.facts, call.args, call.kwargs, call.in_backward)
        other.rule = call.rule
        return self.go_on(route, other)

    def finish(self, call: OperatorCall, out: object) -> object:
        """Record the results of the operator."""
        self.recorder.births.record(call, out)
        if self.recorder.collected is not None:
            self.recorder.collected.follow(call.args, out)
        self.recorder.values.follow(call.func, call.args, call.kwargs, out)
        if call.facts.tracks_value and "alpha" not in call.kwargs:
            remark = device_values.follow(self.recorder.values, call.func, call.args, out)
            if remark:
                self.recorder.assumed[remark] += 1
        return out


@contextlib.contextmanager
def recording(recorder: Recorder, numbers: Numbers | None) -> Iterator[None]:
    """Show ``recorder`` every operator until the end; ``numbers`` begin with the program's first node."""
    with RecordingMode(recorder) as mode:
        Patches().threads.mode = mode
        recorder.calibrate()
        if numbers is not None:
            numbers.begin()
        yield


def _without_tensors(func: OpOverload, args: Sequence[object], kwargs: Named) -> object:
    """What an operator answers that is given no tensor. One that gives nothing sets something for a library's kernels,
    perhaps by asking CUDA (``deep_gemm::set_pdl``), and they do not run here."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        if func._schema.returns or func.namespace == "aten":
            raise
        return None


Attempt = Callable[[RecordingMode, OperatorCall], Any]


@dataclass(frozen=True)
class Interceptor:
    """One kind of call. ``applies`` selects the operators (None: all); ``attempt`` answers a call, or
    :data:`NOT_HANDLED`. ``is_noted``: the call is an operator of the trace before the attempt is made."""

    name: str
    why: str
    applies: Callable[[OperatorFacts], bool] | None
    attempt: Attempt
    is_noted: bool = True


class Route:
    """The interceptors that can apply to one operator."""

    def __init__(self, facts: OperatorFacts) -> None:
        self.facts = facts
        chosen = [i for i in INTERCEPTORS if i.applies is None or i.applies(facts)]
        self.before_noted = tuple(i.attempt for i in chosen if not i.is_noted)
        self.noted = tuple(i.attempt for i in chosen if i.is_noted)
        types = " ".join(str(one.type) for one in (*facts.func._schema.arguments, *facts.func._schema.returns))
        #: Whether a tensor may go in or come out. What asks a library for its version has none, and is no operator of
        #: the trace: it is called when the library is imported, which may be in the middle of a step.
        self.has_tensors = "Tensor" in types or "Any" in types


# --- calls that are no operators of the trace, or note themselves -----------------------------------------------------


def _pinned(mode: RecordingMode, call: OperatorCall) -> object:
    if call.func is _PIN_MEMORY:
        with mode:
            return torch.empty_like(call.args[0], pin_memory=True).copy_(call.args[0])
    if not call.kwargs.get("pin_memory"):
        return NOT_HANDLED
    mode.recorder.note(call)
    out = call.func(*call.args, **{**call.kwargs, "pin_memory": False})
    mode.recorder.storages.see(out, place=Place.PINNED)
    out._graphmem_pinned = True
    return out


def _pinned_copy(mode: RecordingMode, call: OperatorCall) -> object:
    """``pin_out`` in ``_to_copy`` (ATen/native/TensorConversions.cpp): for a copy that nobody waits for."""
    if not call.kwargs.get("non_blocking") or not on_device(call.args):
        return NOT_HANDLED
    device = call.kwargs.get("device")
    if device is None or device.type != "cpu":
        return NOT_HANDLED
    out: torch.Tensor = mode.run(call)
    mode.recorder.storages.see(out, place=Place.PINNED)
    out._graphmem_pinned = True
    return mode.finish(call, out)


def _of_others(mode: RecordingMode, call: OperatorCall) -> object:
    """A tensor of the card that takes no memory: on pinned memory of the host (``cudaHostGetDevicePointer``), or on
    that of a tensor that may be given back (what a CUDA graph has written)."""
    other: Any = call.args[0]
    with mode.recorder.paused():
        named = {"dtype": other.dtype, "device": cards().own}
        out = mode.results.run(_EMPTY_STRIDED, (other.shape, other.stride()), named)
    mode.recorder.storages.see(out, place=Place.PINNED)
    return out


def _collective(mode: RecordingMode, call: OperatorCall) -> object:
    mode.recorder.note(call)
    flat = collectives.flat_copy_bytes(call.func, call.args)
    mode.recorder.storages.take_and_give(flat, Category.COMMUNICATION, "flat copy of a collective's list")
    group = collectives.group_of(call.args, mode.recorder.groups.ranks)
    mode.recorder.groups.note(call.func, call.args, group)
    if group.name in mode.recorder.groups.ranks:
        _record_use(mode, call, call.args)
    if exchanged.follow(mode.recorder.values, call.func, call.args, group, mode.recorder.post):
        mode.recorder.note_once(exchanged.OTHERS_HOLD_THE_SAME)
    return collectives.collective(call.func, call.args)


def _functional_collective(mode: RecordingMode, call: OperatorCall) -> object:
    if not mode.recorder.groups.note_functional(call.func, call.args):
        return NOT_HANDLED
    out = mode.finish(call, mode.run(call))
    _record_use(mode, call, (*call.args, out))
    return out


def _record_use(mode: RecordingMode, call: OperatorCall, tensors: object) -> None:
    """Record for the allocator the uses of a collective's tensors that older versions of PyTorch record."""
    recorder = mode.recorder
    if collectives.records_use(call.func, call.args, recorder.card.torch_version, os.environ):
        for tensor in tensors_in(tensors):
            recorder.storages.record_stream(tensor, collectives.NCCL_STREAM)


def _bookkeeping(_: RecordingMode, call: OperatorCall) -> object:
    if not collectives.is_bookkeeping(call.kwargs):
        return NOT_HANDLED
    return host_values.compute(call.func, call.args, call.kwargs)


def _host_values(mode: RecordingMode, call: OperatorCall) -> object:
    values = mode.recorder.values
    if call.func in _MAKES_SPARSE or not host_values.computable(values, call.func, call.args, call.kwargs):
        return NOT_HANDLED
    return values.run_for_real(call.func, call.args, call.kwargs)


def _data_on_host(mode: RecordingMode, call: OperatorCall) -> object:
    if on_device(call.args):
        return NOT_HANDLED
    known = mode.recorder.values.result(call.func, call.args, call.kwargs)
    if known is None:
        return NOT_HANDLED
    drawn = mode.recorder.values.drawn(call.args)
    if not drawn:
        return known
    if type(known) in (bool, int, float):
        return mode.recorder.assumed_values.drawn(known, drawn == INTEGERS)
    mode.recorder.assumed_values.selected(_rows(call, known))
    return known


def _is_set_to(_: RecordingMode, call: OperatorCall) -> object:
    """``is_set_to`` (ATen/native/TensorProperties.cpp): the same storage, seen in the same way."""
    one, other = ((t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()) for t in call.args)
    return bool(one == other)


def _stays_there(_: RecordingMode, call: OperatorCall) -> object:
    """Formulas in C++ move a tensor to the device where it finds the card's tensors (:data:`values.tensors.NOWHERE`):
    nothing is copied unless the type or the layout changes. A program's own move comes as the copy that it makes,
    ``_to_copy``."""
    tensor, given = call.args[0], call.kwargs
    is_move = call.func is _TO and not given.get("copy")
    if given.get("device") != _META or not tensor.is_cuda or not (is_move or _is_formula(call)):
        return NOT_HANDLED
    if given.get("memory_format") not in (None, torch.preserve_format):
        return NOT_HANDLED
    if given.get("dtype") in (None, tensor.dtype) and given.get("layout") in (None, tensor.layout):
        return tensor if is_move else tensor.detach()
    call.kwargs = {**given, "device": tensor.device}
    return NOT_HANDLED


def _is_formula(call: OperatorCall) -> bool:
    """Whether a formula calls: of a derivative in forward mode, or the engine's."""
    return called_by_engine() if call.in_backward else is_forward_derivative()


def _nested(mode: RecordingMode, call: OperatorCall) -> object:
    if not (call.facts.makes_nested and on_device(call.args)) and not nested.has_nested(call.args):
        return NOT_HANDLED
    recorder = mode.recorder
    recorder.note(call)
    assert call.facts.nested_decomposition is not None
    run = nested.NestedRun(
        recorder.values.of,
        functools.partial(nested_attention_backend, recorder.card),
        lambda remark: recorder.assumed.update([remark]),
        recorder.selection,
    )
    with mode:
        return call.facts.nested_decomposition(run, *call.args, **call.kwargs)


def _inference_decomposition(mode: RecordingMode, call: OperatorCall) -> object:
    is_whole = mode.in_decomposition or torch.is_inference_mode_enabled() or mode.recorder.wrappers
    if not is_whole and not any(t.is_inference() for t in tensors_in(call.args)):
        return NOT_HANDLED  # tensors that were made in it keep their composites whole elsewhere, too
    composite = mode.recorder.composites.get(call.func)
    if composite is not None and on_device(call.args):
        with mode:
            return composite(*call.args, **call.kwargs)
    if not call.facts.decomposes:
        return NOT_HANDLED
    with mode:
        return call.func._op_dk(_COMPOSITE, *call.args, **call.kwargs)


def _body_in_python(mode: RecordingMode, call: OperatorCall) -> object:
    """A function that needs what is not there (a kernel's compiler, a library's own C functions) ends in an error: the
    fake implementation is left then, and the doubt about the memory inside."""
    if call.func in mode.without_body:
        return NOT_HANDLED

    def body(_: object, *args: object, **kwargs: object) -> object:
        return call.func._op_dk(getattr(_KEYS, str(call.facts.python_kernel)), *args, **kwargs)

    try:
        return _in_place_of_kernel(mode, call, body)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        mode.without_body.add(call.func)
        return NOT_HANDLED


# --- operators of the trace -------------------------------------------------------------------------------------------


def _sparse(mode: RecordingMode, call: OperatorCall) -> object:
    decomposition = call.facts.sparse_decomposition
    if decomposition is None or not has_sparse(call.args):
        return NOT_HANDLED
    if call.func in sparse.PRODUCTS:
        mode.recorder.unmodelled[sparse.CUSPARSE] += 1
    return _coalesced(mode, call) if call.func is _COALESCE else _in_place_of_kernel(mode, call, decomposition)


def _made_sparse(mode: RecordingMode, call: OperatorCall) -> object:
    """A sparse tensor's indices are those it is made with; of real ones fake tensors make others."""
    values, is_coo = mode.recorder.values, call.func is _SPARSE
    known = [values.of(indices) for indices in (call.args[3:4] if is_coo else call.args[:2])]
    out: Any = mode.run(call) if is_coo else _in_place_of_kernel(mode, call, compressed.of_parts)
    if out is NOT_HANDLED:
        return out
    mode.finish(call, out)
    for indices, value in zip(sparse_parts(out), known, strict=False):
        if value is not None:
            values.learn(indices, value)
    return out


def _coalesced(mode: RecordingMode, call: OperatorCall) -> object:
    """A sparse tensor has as many values as distinct indices, and those are known where they came from the host."""
    values, decomposition = mode.recorder.values, functools.partial(sparse.coalesce, card=mode.recorder.card)
    indices = values.of(call.args[0]._indices())
    if indices is None:
        return _in_place_of_kernel(mode, call, decomposition)
    with unset_fake_temporarily():
        distinct = sparse.distinct(indices)
    if values.drawn([call.args[0]._indices()]):
        mode.recorder.assumed_values.selected(distinct.shape[1])
    with mode.recorder.selection.exactly(distinct.shape[1]):
        out: torch.Tensor = _in_place_of_kernel(mode, call, decomposition)
    values.learn(out._indices(), distinct)
    return out


def _gradient_of_written_view(mode: RecordingMode, call: OperatorCall) -> object:
    """Put the gradient of a view that was written to into a buffer of its base's size, as a card does."""
    recorder, gradient = mode.recorder, call.args[0]
    extent = recorder.written_views.extent() if call.in_backward and recorder.written_views.marked else None
    ref = None if extent is None else recorder.storages.of(gradient)
    if extent is None or ref is None or recorder.attribution.is_of_node(ref):
        return NOT_HANDLED
    if recorder.written_views.holds_alone(call.func, gradient):
        recorder.storages.renew(gradient, extent * gradient.element_size())
    else:
        with mode:
            buffer = gradient.new_empty(max(extent, gradient.numel()))
        call.args = (buffer[: gradient.numel()].view(gradient.shape), *call.args[1:])
    return NOT_HANDLED


def _fan_in(mode: RecordingMode, call: OperatorCall) -> object:
    recorder = mode.recorder
    if not call.in_backward or recorder.attribution.adds_in_formula(call.args[0]):
        return NOT_HANDLED
    if not recorder.fan_in.adds_in_place(call.args, call.kwargs):
        return NOT_HANDLED
    recorder.values.forget(call.args[0])
    return call.args[0]


def _accumulated_gradient(mode: RecordingMode, call: OperatorCall) -> object:
    if not call.in_backward:
        return NOT_HANDLED
    out = mode.run(call)
    mode.recorder.births.record(call, out)
    if node_name() == "AccumulateGrad":
        mode.recorder.storages.label(out, Category.GRADIENT)
    return out


def _in_place_gradients(mode: RecordingMode, call: OperatorCall) -> object:
    assert call.facts.in_place is not None
    in_place, nodes = call.facts.in_place
    node = node_name()
    if not call.in_backward or node not in nodes or torch.is_grad_enabled():
        return NOT_HANDLED
    operators = mode.recorder.builder.operators
    if (in_place, operators[mode.recorder.storages.operator - 1].name, node) in OUT_OF_PLACE_AFTER:
        return NOT_HANDLED
    ref = mode.recorder.storages.of(call.args[0])
    made_here = ref is not None and mode.recorder.attribution.is_of_node(ref)
    return mode.go_on_as(in_place, call) if made_here and called_by_engine() else NOT_HANDLED


def _gradient_formula(mode: RecordingMode, call: OperatorCall) -> object:
    formula = call.facts.gradient_formula
    assert formula is not None
    if not call.in_backward or node_name() != formula.node or torch.is_grad_enabled():
        return NOT_HANDLED
    if formula.since is not None and not formula.since.holds(mode.recorder.card.torch_version):
        return NOT_HANDLED
    with mode:
        out = formula.decomposition(mode.recorder.selection, *call.args, **call.kwargs)
    if out is not NotImplemented:
        return out
    if formula.remark is not None:
        mode.recorder.assumed[formula.remark] += 1
    return NOT_HANDLED


def _decision(mode: RecordingMode, call: OperatorCall) -> object:
    if call.func in COMPARISONS and on_device(call.args) and not call.in_backward:
        with mode:
            answer = COMPARISONS[call.func](*call.args, **call.kwargs)
        if answer is not None:
            return answer
    known = mode.recorder.values.result(call.func, call.args, call.kwargs)
    if known is not None:
        mode.recorder.refuse_in_graph_capture("a tensor's value is read back", call.args[0])
        is_number = type(known) in (bool, int, float) and not device_values.is_validation(call.args[0])
        drawn = mode.recorder.values.drawn(call.args) if is_number else 0
        return mode.recorder.assumed_values.drawn(known, drawn == INTEGERS) if drawn else known
    return _read_back(mode.recorder, call.func is _ITEM, call.args[0])


def _read_back(recorder: Recorder, is_item: bool, tensor: torch.Tensor) -> object:
    """The value that reading a tensor's unknown data gives."""
    recorder.refuse_in_graph_capture("a tensor's value is read back", tensor)
    value = recorder.values.number(tensor) if is_item else None
    if value is not None:
        return value
    if device_values.is_validation(tensor):
        recorder.assumed[device_values.VALID] += 1
        return True
    answer = device_values.answered()
    if answer is not None:
        value, remark = answer
        recorder.assumed[remark] += 1
        return value
    if device_values.goes_on(recorder.values, tensor):
        recorder.assumed[device_values.GOES_ON] += 1
        return True
    expected = device_values.expected(tensor)
    if expected is not None:
        recorder.assumed[expected[1]] += 1
        return expected[0]
    device_values.refuse_decisions()
    value = device_values.of_descent(tensor) if is_item else None
    if value is not None:
        recorder.assumed_values.logged += 1
        return value
    if not is_item or tensor.dtype is torch.bool:
        return recorder.assumed_values.answer(recorder.phases.iteration)
    if tensor.is_floating_point() or tensor.is_complex():
        return recorder.assumed_values.number()
    possible = recorder.values.numbers.possible(tensor)
    return recorder.assumed_values.whole_number(1 if possible is None else possible)


def _lists_in_subscript(mode: RecordingMode, call: OperatorCall) -> object:
    mode.recorder.storages.see_lists(call.args[1])
    return NOT_HANDLED


def _decomposed(mode: RecordingMode, call: OperatorCall) -> object:
    decomposition, before = call.facts.decomposition, DETERMINISTIC_BEFORE.get(call.func)
    if before is not None and not before[0].holds(mode.recorder.card.torch_version):
        decomposition = before[1]
    return NOT_HANDLED if decomposition is None else _in_place_of_kernel(mode, call, decomposition)


def _in_place_of_kernel(mode: RecordingMode, call: OperatorCall, decomposition: Callable[..., object]) -> object:
    selection = mode.recorder.selection
    if not (
        on_device(call.args)
        or selection.share is not None
        or call.facts.sized_by_data
        or call.facts.sparse_decomposition
        or call.func in sparse.OF_DENSE
    ):
        return NOT_HANDLED  # of the host nothing is needed but results whose size is data there too
    outer, mode.in_decomposition = mode.in_decomposition, True
    try:
        with mode:
            out = decomposition(selection, *call.args, **call.kwargs)
    finally:
        mode.in_decomposition = outer
    return NOT_HANDLED if out is NotImplemented else out


def _selecting(mode: RecordingMode, call: OperatorCall) -> object:
    selection = mode.recorder.selection
    known = mode.recorder.values.result(call.func, call.args, call.kwargs)
    rows = None if known is None else _rows(call, known)
    if rows is not None and mode.recorder.values.drawn(call.args):
        rows = mode.recorder.assumed_values.selected(rows)
    if known is None and call.func in VALUES and selection.share is None:
        rows = _values_at_most(mode, call)
    with contextlib.nullcontext() if rows is None else selection.exactly(rows):
        out = outputs_of(call.func, selection, call.args, call.kwargs)
    is_mask = call.func is _NONZERO and call.args[0].dtype is torch.bool
    if known is None and is_mask and out is not None:
        is_share = selection.share is not None and not mode.recorder.assumed_values.is_given()
        if not is_share or out.shape[0] == call.args[0].numel():
            mode.recorder.values.assume_selected(call.args[0], out.shape[0])
    return NOT_HANDLED if out is None else mode.finish(call, out)


def _values_at_most(mode: RecordingMode, call: OperatorCall) -> int | None:
    """How many distinct values a tensor of unknown ones has at most, where that is fewer than its elements."""
    tensor = call.args[0]
    below = mode.recorder.values.numbers.below(tensor)
    if below is None or below >= tensor.numel():
        return None
    return mode.recorder.assumed_values.selected(below, Code.TAKES_ALL, what="unique", candidates=below)


def _rows(call: OperatorCall, selected: object) -> int:
    """The number of elements that an operator has selected: the length of its first result, along its ``dim``."""
    first: torch.Tensor = selected[0] if isinstance(selected, (tuple, list)) else selected
    along = dict(enumerate(call.args)).get(_ALONG.get(call.func, -1), call.kwargs.get("dim"))
    return int(first.shape[along or 0])


def _fused_step(mode: RecordingMode, call: OperatorCall) -> object:
    return mode.finish(call, None)


INTERCEPTORS: tuple[Interceptor, ...] = (
    Interceptor(
        "pinned memory",
        "a build without a device could not make it",
        lambda facts: facts.takes_pinned,
        _pinned,
        is_noted=False,
    ),
    Interceptor(
        "memory of others",
        "vLLM's kernels read pinned memory where it is, and its graphs hold no results, by operators without shapes",
        lambda facts: facts.name in _OF_OTHERS,
        _of_others,
        is_noted=False,
    ),
    Interceptor(
        "collectives",
        "the other processes are not there; the tensors that they would fill are",
        lambda facts: facts.is_collective,
        _collective,
        is_noted=False,
    ),
    Interceptor(
        "pinned copies",
        "a copy to the host that nobody waits for is made in pinned memory",
        lambda facts: facts.func is _TO_COPY,
        _pinned_copy,
    ),
    Interceptor(
        "functional collectives",
        "a process group takes memory of NCCL's when it is first used",
        lambda facts: facts.func.namespace == "_c10d_functional",
        _functional_collective,
    ),
    Interceptor(
        "reducer's bookkeeping",
        "DistributedDataParallel's C++ reads and writes its host tensors of indices and flags",
        lambda facts: facts.makes_host_values,
        _bookkeeping,
        is_noted=False,
    ),
    Interceptor(
        "host values",
        "host tensors that are no fakes are computed; sparse ones are made fake",
        None,
        _host_values,
        is_noted=False,
    ),
    Interceptor(
        "data on the host",
        "the size of the outputs is data, which is known there: they are real",
        lambda facts: facts.sized_by_data,
        _data_on_host,
        is_noted=False,
    ),
    Interceptor(
        "the same memory",
        "C++ compares pointers, and fake tensors have none",
        lambda facts: facts.func is _IS_SET_TO,
        _is_set_to,
        is_noted=False,
    ),
    Interceptor(
        "moves of C++",
        "formulas of forward derivatives move tensors to their own device, which is another one to C++ here",
        lambda facts: facts.func in (_TO, _TO_COPY),
        _stays_there,
        is_noted=False,
    ),
    Interceptor(
        "nested tensors",
        "nn.TransformerEncoder packs padded sequences in evaluation; fake tensors cannot be nested",
        lambda facts: facts.nested_decomposition is not None,
        _nested,
        is_noted=False,
    ),
    Interceptor(
        "inference decomposition",
        "in inference mode composites arrive whole, and so they do from tensors around others and in place of a kernel",
        lambda facts: facts.is_composite or facts.decomposes,
        _inference_decomposition,
        is_noted=False,
    ),
    Interceptor(
        "bodies in Python",
        "an operator of torch.library takes memory inside, which the fake implementation of its shapes does not",
        lambda facts: facts.python_kernel is not None,
        _body_in_python,
        is_noted=False,
    ),
    Interceptor(
        "sparse tensors",
        "few operators work on fake ones; CUDA's are spelled out on indices and values",
        lambda facts: facts.sparse_decomposition is not None,
        _sparse,
    ),
    Interceptor(
        "sparse tensors that are made",
        "how many of their indices are distinct is data",
        lambda facts: facts.func is _SPARSE or facts.func in compressed.MAKING,
        _made_sparse,
    ),
    Interceptor(
        "views written to",
        "their gradients go through a buffer, but not where the view is called again",
        lambda facts: facts.is_view,
        _gradient_of_written_view,
    ),
    Interceptor(
        "fan-in",
        "the engine adds gradients in place, but not under a dispatch mode",
        lambda facts: facts.func is _ADD,
        _fan_in,
    ),
    Interceptor(
        "formulas on a card",
        "formulas avoid to read data of what is like a subclass, and ask the device",
        lambda facts: facts.gradient_formula is not None,
        _gradient_formula,
    ),
    Interceptor(
        "accumulated gradients",
        "what AccumulateGrad makes is a parameter's gradient",
        lambda facts: facts.func in _ACCUMULATING,
        _accumulated_gradient,
    ),
    Interceptor(
        "in-place gradients",
        "formulas write in place, but not on what is like a subclass",
        lambda facts: facts.in_place is not None,
        _in_place_gradients,
    ),
    Interceptor(
        "decisions",
        "a value is read back, and there is none: a known one, an assumed one, or a refusal",
        lambda facts: facts.is_decision,
        _decision,
    ),
    Interceptor(
        "lists in subscripts",
        "they become tensors below the dispatcher",
        lambda facts: facts.is_subscript,
        _lists_in_subscript,
    ),
    Interceptor(
        "decompositions",
        "kernels that are made of other operators are spelled out",
        lambda facts: facts.decomposition is not None,
        _decomposed,
    ),
    Interceptor(
        "selecting",
        "the size of the outputs is data; the user says how much is selected",
        lambda facts: facts.selects,
        _selecting,
    ),
    Interceptor(
        "fused optimizer steps",
        "one kernel in place, without a meta kernel",
        lambda facts: facts.is_step,
        _fused_step,
    ),
)
