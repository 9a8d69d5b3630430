"""The result of loading a source: something whose step can be captured, or a graph that can be planned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

from graphmem.base.records import dataclass
from graphmem.diagnostics import Diagnostic
from graphmem.errors import SourceError, said
from graphmem.sources.losses import OfTargets
from graphmem.training.generation import Generation
from graphmem.training.program import Program

if TYPE_CHECKING:
    from graphmem.cudnn.library import Cudnn
    from graphmem.devices import Device
    from graphmem.graph.model import Graph
    from graphmem.runtimes.base import Taken


@dataclass(frozen=True)
class OnnxModel:
    """Loaded ONNX graphs with every dimension bound: for each session the shapes of its runs, in order.

    ``runtime`` is natural to inference, ``trained_by`` to training.
    """

    runtime: ClassVar[str] = "onnxruntime"
    trained_by: ClassVar[str] = "pytorch"
    name: str
    sessions: tuple[tuple[Graph, ...], ...]

    @property
    def graph(self) -> Graph:
        """The first run of the first session."""
        return self.sessions[0][0]


class Arguments(tuple[Any, ...]):
    """Several positional arguments, where one could be a tuple too."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that the user asked for; None where the source's own default applies. ``weights``, ``dtype``,
    ``attention_mask`` and ``generate`` as of :class:`graphmem.training.Inference`: only a source that ``quantizes`` is
    given the first, only one that ``masks`` a mask. Where something is to be generated, the inputs are its prompt.
    ``layers``: of a model whose number of them can be chosen (:attr:`TorchModel.layers`). ``cards``: how many a program
    sees that runs on several by itself."""

    batch: int | None = None
    seq_len: int | None = None
    training: bool = True
    iterations: int | None = None
    weights: str | None = None
    dtype: str = "fp32"
    attention_mask: str | None = None
    generate: Generation | None = None
    layers: int | None = None
    cards: int = 1


@dataclass(frozen=True)
class Built:
    """A PyTorch model with the inputs of its step.

    ``inputs`` is a tensor, a tuple (positional) or a dict (keyword arguments); ``loss`` is a callable on the model's
    output, or None for the default, and its attribute ``targets``, if it has one, moves to the device with the inputs;
    ``notes`` are assumptions to show, ``remarks`` what else a reader must know. ``batch_of`` makes the inputs of
    another batch, where that needs no second model. ``draft``: the model that drafts what it generates.
    """

    model: Any
    inputs: Any
    loss: Callable[[Any], Any] | None = None
    notes: tuple[str, ...] = ()
    batch_of: Callable[[Sizes], Any] | None = None
    draft: Any = None
    remarks: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class TorchModel:
    """A model of PyTorch operators that can be built on fake tensors. ``build`` returns None if it ran the whole step
    itself, which ``step_words`` then describes. ``framework`` made the model, ``runtime`` is natural to it. Instead of
    building anything, a ``program`` is run. ``quantizes``: it can build the model with quantised weights; ``masks``:
    its batches can carry an attention mask. ``planned``: its own ``runtime`` tells the step without a capture,
    given the card and the cuDNN to ask; None where it does not. ``captured``: whether the step can be captured at all.
    ``layers``: how many layers the model has, all alike, where ``build`` can be asked for another number of them."""

    name: str
    build: Callable[[Sizes], Built | None]
    notes: tuple[str, ...] = field(default=())
    framework: str = "PyTorch"
    runtime: str = "pytorch"
    step_words: str = ""
    program: Program | None = None
    quantizes: bool = False
    masks: bool = False
    planned: Callable[[Sizes, Device, Cudnn | None], Taken | None] | None = None
    captured: bool = True
    layers: int | None = None


def call_factory(factory: Callable[..., object], name: str, sizes: Sizes) -> Built | None:
    """Call a user's factory with whichever of ``batch`` and ``seq_len`` it names, and check what it returns.

    Returns None when the factory is a custom step: it returned nothing and has run its iterations itself. Raises
    :class:`SourceError` when it returns something else than ``(model, inputs)``, ``(model, inputs, loss)`` with
    ``loss(output)``, or ``(model, inputs, targets, loss)`` with ``loss(output, targets)``, or when a size was asked for
    that it does not take, or needs an argument that graphmem does not know.
    """
    result = factory(**known_arguments(factory, name, sizes))
    if result is None:
        return None
    wanted = (
        "return (model, inputs), (model, inputs, loss) or (model, inputs, targets, loss), "
        "or run the whole step and return None"
    )
    if not isinstance(result, tuple) or len(result) not in (2, 3, 4):
        raise SourceError(f"{name} returned {_describe(result)}; it should {wanted}")
    model, inputs, *rest = result
    if not callable(getattr(model, "forward", None)):
        raise SourceError(f"the first value that {name} returned is {_describe(model)}, not a torch.nn.Module")
    loss = rest[-1] if rest else None
    if loss is not None and not callable(loss):
        raise SourceError(f"the loss that {name} returned is {_describe(loss)}, not a callable on the model's output")
    if len(rest) < 2:
        if loss is not None:
            _check_loss(loss, name, 1)
        return Built(model, inputs, loss)
    if loss is None:
        raise SourceError(f"{name} returned targets and no loss; the fourth value is a callable: loss(output, targets)")
    _check_loss(loss, name, 2)
    return Built(model, inputs, OfTargets(loss, rest[0]))


#: How factories name the sizes that ``--batch`` and ``--seq-len`` give.
_SPELLINGS = {"batch": ("batch", "batch_size", "bs"), "seq_len": ("seq_len", "seq_length", "sequence_length")}


def known_arguments(factory: Callable[..., object], name: str, sizes: Sizes) -> Mapping[str, int]:
    """The sizes that were given, under the names the factory has for them (``batch`` or ``batch_size``, ``seq_len`` or
    ``seq_length``, ...). Raises :class:`SourceError`."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {}
    for key, value in (("batch", sizes.batch), ("seq_len", sizes.seq_len)):
        if value is None:
            continue
        own = spelled(key, parameters) or (key if takes_any else None)
        if own is None:
            option = _option(key)
            raise SourceError(
                f"{name} has no parameter {key!r}, which {option} and graphmem fit give; write def {name}({key}): ... "
                f"and make its inputs of that size, or leave {option} out"
            )
        arguments[own] = value
    for parameter in parameters.values():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY,
        )  # fmt: skip
        if required and parameter.name not in arguments:
            size = next((key for key, spellings in _SPELLINGS.items() if parameter.name in spellings), None)
            if size is not None:
                raise SourceError(f"{name} needs {parameter.name!r}; give {_option(size)} N")
            raise SourceError(f"{name} needs an argument {parameter.name!r}; graphmem passes only batch and seq_len")
    return arguments


def not_imported(model: str, package: str, title: str, install: str, error: Exception) -> SourceError:
    """The error of a library that ``model`` needs and that raised ``error`` when it was imported: it is absent, or it
    is there and does not load (a shared library that is missing, another version's files), and then why."""
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return SourceError(f"{model} needs {title}; install it with: pip install '{install}'")
    return SourceError(
        f"{model} needs {title}, which is installed here and cannot be imported; install it again. Its import said: "
        f"{said(error)}"
    )


def require_torch(model: str, extra: str = "torch") -> None:
    """Raises :class:`SourceError` where PyTorch cannot be imported, which this ``extra`` of graphmem brings."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        raise not_imported(model, "torch", "PyTorch", f"graphmem[{extra}]", error) from None


def refuse_seq_len(sizes: Sizes, name: str) -> None:
    """For models whose inputs have no sequence. Raises :class:`SourceError` where a sequence length was given."""
    if sizes.seq_len is not None:
        raise SourceError(f"{name} has no sequence whose length --seq-len could set; drop it")


def spelled(size: str, parameters: Container[str]) -> str | None:
    """The name that a factory with these ``parameters`` has for ``size`` (``batch`` or ``seq_len``), or None."""
    return next((spelling for spelling in _SPELLINGS[size] if spelling in parameters), None)


def _option(size: str) -> str:
    return f"--{size.replace('_', '-')}"


_NOT_OF_OUTPUT = (
    "cannot be called with the model's output alone; return (model, inputs, targets, loss) for one that is called as "
    "loss(output, targets)"
)
_NOT_OF_TARGETS = (
    "beside targets cannot be called as loss(output, targets); write one that takes both, for example "
    "torch.nn.functional.cross_entropy"
)


def _check_loss(loss: Callable[..., object], name: str, arguments: int) -> None:
    """Raises :class:`SourceError` for a loss that cannot be called with the output alone, or with the targets too."""
    try:
        inspect.signature(loss).bind(*[None] * arguments)
    except TypeError:
        wrong = _NOT_OF_OUTPUT if arguments == 1 else _NOT_OF_TARGETS
        raise SourceError(f"the loss that {name} returned {wrong}") from None
    except ValueError:  # a builtin without a signature
        return


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
