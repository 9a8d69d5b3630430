"""The script of a CUDA operator: its allocations and frees while it runs, in order.

A fake operator shows only its outputs. The CUDA kernel behind it may take buffers and give them back before it
returns, and may lay its outputs out otherwise than the fake one. A *rule* looks at the :class:`Call`, its arguments by
the names of the operator's schema, and returns the :class:`Script` of allocations and frees in the order of the real
build. Operators without a rule allocate their outputs in order and nothing else.

How to write one: docs/adding/kernel_rule.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
import torch.utils.deterministic

from graphmem.base import versions
from graphmem.capture.kernels.parts.layout import bytes_of
from graphmem.cudnn.library import Cudnn
from graphmem.devices import Device
from graphmem.devices.capabilities import Capability
from graphmem.torch_names import private

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Card:
    """The card as kernels see it, and how it is used. ``torch_version`` is (major, minor).

    ``cudnn_workspaces``: whether cuDNN's plans claim workspaces. False gives the runs of a cuDNN that needs none.
    ``in_graph_capture``: whether the current stream is being captured into a CUDA graph. ``in_backward``: whether
    autograd's engine calls the kernel.
    """

    device: Device
    torch_version: tuple[int, int] = versions.NEWEST
    cudnn_workspaces: bool = True
    in_graph_capture: bool = False
    in_backward: bool = False
    #: The cuDNN to ask for the plans of convolutions; None where they are predicted.
    cudnn: Cudnn | None = field(default=None, compare=False)
    #: Convolutions that this run has timed already (the cache of ``Conv_v8.cpp`` under ``cudnn.benchmark``).
    timed: set[object] = field(default_factory=set, compare=False)
    #: What cuDNN would have been asked, where its plan was predicted.
    predicted: set[object] = field(default_factory=set, compare=False)

    #: Of the device: what its compute capability implies, its multiprocessors, and the threads that one can hold.
    limits: Capability = field(init=False, repr=False, compare=False)
    sm_count: int = field(init=False, repr=False, compare=False)
    max_threads_per_sm: int = field(init=False, repr=False, compare=False)

    def used(self, *, in_graph_capture: bool, in_backward: bool) -> Card:
        """The same card, with the same notes, as a call finds it."""
        return replace(self, in_graph_capture=in_graph_capture, in_backward=in_backward)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", self.device.limits)
        object.__setattr__(self, "sm_count", self.device.sm_count)
        object.__setattr__(self, "max_threads_per_sm", self.device.max_threads_per_sm)


# --- calls ------------------------------------------------------------------------------------------------------------


class Arguments:
    """The arguments of one call under their names in the operator's schema.

    ``call.weight``, ``call.dim``: an argument as it was given, or the schema's default. A name that the schema lacks is
    an AttributeError; :meth:`get` is for rules of several overloads of which some lack it.
    """

    __slots__ = ("_args", "_kwargs", "_signature")

    def __init__(self, signature: Signature, args: Sequence[object], kwargs: dict[str, object]) -> None:
        self._signature = signature
        self._args = args
        self._kwargs = kwargs

    def __getattr__(self, name: str) -> Any:
        position = self._signature.positions.get(name)
        if position is None:
            known = ", ".join(self._signature.positions)
            raise AttributeError(f"{self.operator} has no argument {name!r}; it has {known}")
        if position < len(self._args):
            return self._args[position]
        return self._kwargs.get(name, self._signature.defaults[position])

    def get(self, name: str, default: object = None) -> Any:
        """The argument of this name; ``default`` where this overload of the operator has none."""
        return getattr(self, name) if name in self._signature.positions else default

    @property
    def operator(self) -> str:
        """The operator's full name, for example ``aten.sum.dim_IntList``."""
        return self._signature.operator

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        """The arguments that are tensors, in the order of the schema: for operators that name the same one otherwise,
        as ``mat1`` of addmm and ``batch1`` of baddbmm."""
        values = (getattr(self, name) for name in self._signature.positions)
        return [value for value in values if isinstance(value, torch.Tensor)]


class Call(Arguments):
    """One call of an operator: its arguments, its outputs, and the card. ``outputs``: the output tensors; anything that
    is no tensor, such as a gradient that was not asked for, is left out of the list and of the counting."""

    __slots__ = ("card", "outputs")

    def __init__(
        self,
        signature: Signature,
        args: Sequence[object],
        kwargs: dict[str, object],
        outputs: Sequence[torch.Tensor],
        card: Card,
    ) -> None:
        super().__init__(signature, args, kwargs)
        self.outputs = outputs
        self.card = card

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first output: the argument ``dtype`` where the operator has one and it was given."""
        return self.outputs[0].dtype


def named(operator: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The function takes its operator's arguments as one value, by their names, behind any parameters of its own."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        own = len(inspect.signature(function).parameters) - 1

        @wraps(function)
        def run(*args: object, **kwargs: object) -> T:
            return function(*args[:own], Arguments(_signature(operator), args[own:], kwargs))

        return run

    return decorate


@dataclass(frozen=True, slots=True)
class Signature:
    """An operator's schema, as far as its calls are bound by it: argument -> position, and the defaults by position
    (None for arguments without one)."""

    operator: str
    positions: dict[str, int]
    defaults: tuple[Any, ...]


def signature_of(operator: str) -> Signature | None:
    """The schema of an operator by full name, for example ``aten.sum.dim_IntList``; None if torch knows none, which is
    not remembered: a library that is imported later may bring it."""
    try:
        return _signature(operator)
    except RuntimeError:
        return None


_schema: Any = private(
    "torch._C._get_schema",
    "arguments of operators are found by going through PyTorch's modules of them",
    lambda name, overload: getattr(_packet(name), overload or "default")._schema,
)


def _packet(name: str) -> Any:
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)


@cache
def _signature(operator: str) -> Signature:
    namespace, name, overload = operator.split(".")
    schema = _schema(f"{namespace}::{name}", "" if overload == "default" else overload)
    positions = {argument.name: position for position, argument in enumerate(schema.arguments)}
    return Signature(operator, positions, tuple(argument.default_value for argument in schema.arguments))


# --- scripts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """``kind``: ``output`` (birth of output number ``index``; ``bytes`` overrides the fake size if not None),
    ``take`` (a buffer of ``bytes`` with a ``label``, ``index`` its token), ``give`` (token ``index`` goes back),
    ``product`` (cuBLAS is called) or ``empty_cache`` (the allocator gives its unused memory back to the driver).
    ``plans``: the sizes that do as well, in the order of trial, ``bytes`` first, where there are others. ``shape``
    stands for the calls that share which of them was had."""

    kind: str
    index: int
    bytes: int | None = None
    label: str = ""
    plans: tuple[int, ...] = ()
    shape: object = None


#: What an output of an operator that runs inside another is there: see :meth:`Script.call`.
Birth = int | str | None


@dataclass(slots=True)
class Script:
    """Builder of the steps of one operator call."""

    steps: list[Step] = field(default_factory=list)
    _tokens: int = 0

    @staticmethod
    def of(call: Call) -> Script:
        """A script in which all outputs are allocated first, in their order."""
        return Script().outputs(*range(len(call.outputs)))

    def output(self, index: int = 0, size: int | None = None) -> Script:
        """Output ``index`` (position among the output tensors) is allocated here, of ``size`` bytes if given."""
        self.steps.append(Step("output", index, size))
        return self

    def outputs(self, *indices: int) -> Script:
        """These outputs are allocated here, in this order."""
        self.steps.extend(Step("output", index) for index in indices)
        return self

    def take(self, size: int, label: str) -> int:
        """A buffer of ``size`` bytes is allocated here. Returns the token to give it back with."""
        return self.take_for_plan((size,), label, None)

    def scratch(self, size: int, label: str) -> Script:
        """A buffer of ``size`` bytes is allocated here and given back at once."""
        self.give(self.take(size, label))
        return self

    def take_for_plan(self, plans: tuple[int, ...], label: str, shape: object) -> int:
        """The workspace of a library's call is allocated here: of the first plan, in bytes, unless only a later one has
        its memory. Returns the token to give it back with."""
        self._tokens += 1
        self.steps.append(Step("take", self._tokens, plans[0], label, plans if len(plans) > 1 else (), shape))
        return self._tokens

    def contiguous(self, tensor: torch.Tensor, label: str) -> list[int]:
        """The copy that ``tensor.contiguous()`` makes if it must, as a list of none or one token."""
        return [] if tensor.is_contiguous() else [self.take(bytes_of(tensor), label)]

    def give(self, *tokens: int) -> Script:
        """The buffers go back, in this order."""
        self.steps.extend(Step("give", token) for token in tokens)
        return self

    def product(self) -> Script:
        """The operator calls cuBLAS here, whose workspace is taken now unless the thread holds it already."""
        self.steps.append(Step("product", 0))
        return self

    def call(
        self,
        operator: str,
        *args: object,
        card: Card,
        outputs: Sequence[torch.Tensor],
        births: Sequence[Birth],
        **kwargs: object,
    ) -> list[int]:
        """Another operator runs inside this one: the steps of its rule are written here.

        ``outputs``: the tensors it returns, or tensors of the same layout on the meta device. ``births``: the place of
        each here: the number of an output of this operator, the label of a buffer that the caller gives back (their
        tokens are returned, in order of ``births``), or None for one that exists already, as for ``topk_out``.
        """
        if len(outputs) != len(births):
            raise ValueError(f"{len(outputs)} outputs, but {len(births)} births")
        name = operator if operator.count(".") == 2 else f"{operator}.default"
        tokens: dict[int, int] = {}
        waiting = dict(enumerate(births))  # outputs that the other script does not mention are born last
        held: dict[int, int] = {}

        def birth(index: int, size: int | None) -> None:
            where = waiting.pop(index, None)
            if isinstance(where, int):
                self.output(where, size)
            elif where is not None:
                held[index] = self.take(bytes_of(outputs[index]) if size is None else size, where)

        for step in (run_rule(name, args, kwargs, outputs, card) or Script()).steps:
            if step.kind == "output":
                birth(step.index, step.bytes)
            elif step.kind == "take":
                plans = step.plans or (step.bytes or 0,)
                tokens[step.index] = self.take_for_plan(plans, step.label, step.shape)
            elif step.kind == "give":
                self.give(tokens[step.index])
            else:
                self.steps.append(step)
        for index in list(waiting):
            birth(index, None)
        return [held[index] for index in sorted(held)]

    def empty_cache(self) -> None:
        """The operator calls ``CUDACachingAllocator::emptyCache``."""
        self.steps.append(Step("empty_cache", 0))


# --- rules ------------------------------------------------------------------------------------------------------------

#: What an operator does to memory on this call; None for "nothing but its outputs".
Rule = Callable[[Call], "Script | None"]
#: The same before the call is bound: (positional args, keyword args, output tensors, card).
BoundRule = Callable[[Sequence[object], dict[str, Any], Sequence[torch.Tensor], Card], "Script | None"]

#: The rules by full name of their operator.
RULES: dict[str, Rule] = {}


#: The rules whose whole sequences recordings hold, each with where they are. Every other rule is doubted.
PROOFS: dict[str, str] = {}


def rule(
    *operators: str, proof: str = "", torch_before: tuple[int, int] | None = None, library: str | None = None
) -> _Register:
    """Register a rule for operators by full name, for example ``aten.sum.dim_IntList``.

    ``proof``: where recordings hold its whole sequence; without one, reports call the operator not checked.
    A name that the newest PyTorch does not know (for rules of another package: the installed one) is refused, unless
    the rule is for versions ``torch_before`` some (major, minor), or for the operators of an optional ``library``, such
    as torchvision. Other versions may lack some
    operators, whose rules are then never asked. A second rule for an operator is refused. Raises ValueError.
    """

    def register(function: Rule) -> Rule:
        for operator in operators:
            if operator in RULES:
                raise ValueError(f"{operator} has a rule already: {RULES[operator].__qualname__}")
            is_own = function.__module__.startswith("graphmem.")
            _refuse_unknown(operator, torch_before, library, is_own=is_own)
            RULES[operator] = function
            if proof:
                PROOFS[operator] = proof
        return function

    return register


#: Registers a rule that the recordings of graphmem's own tests hold.
recorded_rule = partial(rule, proof="tests/golden/pytorch")
_Register = Callable[[Rule], Rule]
_RUNNING = versions.version_of(torch.__version__)


def _refuse_unknown(operator: str, torch_before: tuple[int, int] | None, library: str | None, *, is_own: bool) -> None:
    if operator.count(".") != 2:
        raise ValueError(f"{operator}: a rule wants namespace.operator.overload, for example aten.topk.default")
    if torch_before is not None and torch_before > versions.NEWEST:
        raise ValueError(
            f"{operator}: torch_before={torch_before} says nothing, the newest version is {versions.NEWEST}"
        )
    sayable = torch_before is not None or library is not None
    if (_RUNNING == versions.NEWEST or not is_own) and not sayable and signature_of(operator) is None:
        raise ValueError(f"{operator}: PyTorch {torch.__version__} knows no such operator")


def rule_of(operator: str) -> BoundRule | None:
    """The rule of an operator by full name, which binds every call to the operator's schema; None if it has none."""
    function = RULES.get(operator)
    signature = signature_of(operator) if function is not None else None
    if function is None or signature is None:
        return None

    def bound(
        args: Sequence[object], kwargs: dict[str, object], outputs: Sequence[torch.Tensor], card: Card
    ) -> Script | None:
        return function(Call(signature, args, kwargs, outputs, card))

    return bound


def run_rule(
    operator: str, args: Sequence[object], kwargs: dict[str, object], outputs: Sequence[torch.Tensor], card: Card
) -> Script | None:
    """The script that an operator's rule gives for one call; None if it has no rule, or takes only its outputs."""
    bound = rule_of(operator)
    return bound(args, kwargs, outputs, card) if bound is not None else None


def scratch_of_deterministic_fill(script: Script, element_bytes: int) -> Script:
    """Add the scratch to the end of ``script``, after an output was resized: one element, where deterministic
    algorithms and ``fill_uninitialized_memory`` are on, else nothing. The same script is returned.

    New memory is filled then: ``resize_`` makes a tensor of one element, only to set it to the grown storage
    (``fill_resize_deterministic_``, ATen/native/Resize.h, 2.13); ``empty`` fills in place and takes nothing.
    """
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
        script.scratch(element_bytes, "element of new memory")
    return script


class Gradients:
    """The outputs of a backward operator, by their number in its ``output_mask``. Masked ones are missing from the
    operator's output tensors."""

    def __init__(self, script: Script, mask: Sequence[bool]) -> None:
        wanted = [index for index, asked in enumerate(mask) if asked]
        self._script = script
        self._position = {index: position for position, index in enumerate(wanted)}
        self._made: set[int] = set()

    def __contains__(self, index: int) -> bool:
        return index in self._position

    def emit(self, *indices: int) -> bool:
        """Allocate those of them that are asked for and not made yet; whether there was one."""
        new = [index for index in indices if index in self._position and index not in self._made]
        self._made.update(new)
        self._script.outputs(*(self._position[index] for index in new))
        return bool(new)
