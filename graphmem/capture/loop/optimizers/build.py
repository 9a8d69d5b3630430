"""The optimizers of the default step, built by name: one, or two where an optimizer is made for some tensors only; an
optimizer of the user's own (``--optimizer package.module:Class``); the schedulers of learning rates.

The code of any subclass of ``torch.optim.Optimizer`` runs on fake tensors like the model's, so its states and the
temporaries of its step are whatever it allocates.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from graphmem.capture.loop.optimizers.bitsandbytes_states import QuantizedOptimizer
from graphmem.capture.loop.optimizers.lion import Lion
from graphmem.errors import CaptureError, UsageError
from graphmem.training import OPTIMIZERS, SCHEDULERS, Training
from graphmem.training.optimizers import BITSANDBYTES, LION, TRANSFORMERS

#: Learning rates for classes that have no default; the value changes no byte.
_LEARNING_RATES = {"sgd": 1e-3, "muon": 1e-3, "sgd8bit": 1e-3, "sgd32bit": 1e-3}


def make_optimizers(
    model: nn.Module, training: Training, own: type[torch.optim.Optimizer] | None = None
) -> tuple[list[torch.optim.Optimizer], list[str]]:
    """The optimizers over the parameters that require a gradient, and remarks for the reader.

    Muon is for matrices and SparseAdam for sparse gradients; the other parameters get AdamW, as in the documentation
    of both. ``own`` is the user's class, if ``training`` names one and it is imported already. Raises
    :class:`CaptureError` if there is nothing to train or the library refuses.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise CaptureError("no parameter of the model requires a gradient, so there is nothing to train")
    kind, options = own or _class_of(training), dict(training.optimizer_args)
    if training.optimizer in _LEARNING_RATES:
        options.setdefault("lr", _LEARNING_RATES[training.optimizer])
    chosen = parameters
    if training.optimizer == "muon":
        chosen = _matrices(model, parameters)
    elif training.optimizer == "sparseadam":
        chosen = _with_sparse_gradients(model, parameters)
    optimizers = [_made(kind, chosen, options, training)]
    known = {id(parameter) for parameter in chosen}
    others = [parameter for parameter in parameters if id(parameter) not in known]
    if not others:
        return optimizers, list(_left_in_fp32(optimizers[0], chosen))
    optimizers.append(torch.optim.AdamW(others))
    return optimizers, [f"{training.optimizer} steps {len(chosen)} of the parameters, adamw the other {len(others)}"]


#: The part of the values that must lie in small tensors to be worth a remark.
_NOTABLE = 0.1


def _left_in_fp32(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[str]:
    """That an optimizer of 8 bits keeps states in fp32, where tensors are too small for it and these are many."""
    if not isinstance(optimizer, QuantizedOptimizer) or optimizer.bits != 8:
        return
    least = optimizer.min_8bit_size
    small = [one.numel() for one in parameters if one.numel() < least]
    if sum(small) > _NOTABLE * sum(one.numel() for one in parameters):
        yield f"{len(small)} of {len(parameters)} parameters have fewer than {least:,} values: their states are fp32"


def iterations_of_history(optimizer: torch.optim.Optimizer) -> int:
    """Steps after which the history of L-BFGS is full and a new pair has replaced the oldest; 0 for other optimizers.

    The first evaluation makes no pair, and a new pair exists before the oldest goes (``torch/optim/lbfgs.py``).
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return 0
    group: dict[str, int] = optimizer.param_groups[0]
    return math.ceil((group["history_size"] + 2) / max(1, group["max_iter"]))


def _class_of(training: Training) -> Callable[..., torch.optim.Optimizer]:
    named = OPTIMIZERS[training.optimizer]
    if named.library == BITSANDBYTES:
        return lambda parameters, **options: QuantizedOptimizer(named.class_name, parameters, **options)
    if named.library == LION:
        return Lion
    if named.library == TRANSFORMERS:
        return _transformers_adafactor()
    kind = getattr(torch.optim, named.class_name, None)
    if kind is None:
        raise CaptureError(f"torch {torch.__version__} has no optimizer {named.class_name}")
    found: Callable[..., torch.optim.Optimizer] = kind
    return found


def _transformers_adafactor() -> Callable[..., torch.optim.Optimizer]:
    try:
        from transformers.optimization import Adafactor
    except ImportError:
        raise CaptureError(
            "transformersadafactor is transformers' own optimizer, which is not installed: pip install transformers, "
            "or use adafactor, the one of torch"
        ) from None
    found: Callable[..., torch.optim.Optimizer] = Adafactor
    return found


def _made(
    kind: Callable[..., torch.optim.Optimizer], parameters: Sequence[Any], options: dict[str, Any], training: Training
) -> torch.optim.Optimizer:
    """Make the optimizer. Raises :class:`CaptureError` where it refuses its arguments."""
    try:
        return kind(parameters, **options)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        first = (str(error).splitlines() or ["no message"])[0]
        named = OPTIMIZERS.get(training.optimizer)
        name = f"{named.library}.{named.class_name}" if named else training.optimizer
        raise CaptureError(f"{name} refused its arguments: {first}") from None


def _matrices(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Two-dimensional parameters that are not embeddings (``torch/optim/_muon.py``, documentation of ``Muon``)."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in embeddings]
    if not matrices:
        raise CaptureError("muon steps the matrices of a model, and this one has none; choose another optimizer")
    return matrices


def _with_sparse_gradients(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    found = [parameter for parameter in parameters if id(parameter) in sparse]
    if not found:
        raise CaptureError(
            "sparseadam does not support dense gradients, and no embedding of the model has sparse ones; build it with "
            "nn.Embedding(..., sparse=True) or use adam"
        )
    return found


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """A scheduler of that class of ``torch.optim.lr_scheduler``, with rates that any loop could have."""
    options = dict(SCHEDULERS[name])
    if name in ("LambdaLR", "MultiplicativeLR"):
        options["lr_lambda"] = _constant
    if name in ("CyclicLR", "OneCycleLR") and not {"momentum", "betas"} & optimizer.defaults.keys():
        options["cycle_momentum"] = False
    scheduler: lr_scheduler.LRScheduler = getattr(lr_scheduler, name)(optimizer, **options)
    return scheduler


def _constant(step: int) -> float:
    return 1.0


# --- optimizers of the user's own -------------------------------------------------------------------------------------


def own_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The class that ``module:Class`` or ``module.py:Class`` names.

    Imports the module, so it is called before anything of torch is replaced for a capture. Raises
    :class:`~graphmem.errors.GraphmemError` where the module or the class is not there, where it is no optimizer, and
    where its step needs a closure, which the default loop gives to L-BFGS alone.
    """
    from graphmem.sources.factory import find_factory  # it knows how to import what a user names

    kind, _ = find_factory(name, "optimizer")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(
            f"{name} is {_what(kind)}; --optimizer takes a name, or module:Class of a subclass of torch.optim.Optimizer"
        )
    if needs_closure(kind) and not issubclass(kind, torch.optim.LBFGS):
        raise CaptureError(
            f"the step of {name} needs a closure, which the default loop does not give; write the loop "
            "yourself as a step function"
        )
    return kind


def needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """True if ``step`` cannot be called without an argument."""
    parameters = list(inspect.signature(kind.step).parameters.values())[1:]
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return any(one.kind in fixed and one.default is inspect.Parameter.empty for one in parameters)


def _what(found: object) -> str:
    return f"the class {found.__qualname__}" if isinstance(found, type) else f"a {type(found).__name__}"
