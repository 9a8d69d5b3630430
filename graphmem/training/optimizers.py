"""The optimizers a step may use, by name in lower case, and the options each accepts.

The names of options are those of torch 2.13 (``torch/optim/*.py``; an older torch may lack one and says so when the
step is built), bitsandbytes 0.50.2 (``bitsandbytes/optim/*.py``), lion-pytorch 0.2 and transformers 5
(``transformers/optimization.py``). Nothing here imports torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping

from graphmem.base.records import public_value
from graphmem.errors import UsageError

#: An option of an optimizer as the command line or a caller gives it.
OptionValue = bool | int | float | str | None | tuple["OptionValue", ...]

#: Libraries whose optimizers are known.
TORCH, BITSANDBYTES, LION, TRANSFORMERS = "torch.optim", "bitsandbytes.optim", "lion_pytorch", "transformers"

_COMMON = ("lr", "weight_decay", "foreach", "maximize", "differentiable")
_BETAS = ("betas", "eps", *_COMMON, "capturable")

#: lower-case name -> (class name in ``torch.optim``, accepted option names)
_OF_TORCH: dict[str, tuple[str, tuple[str, ...]]] = {
    "sgd": ("SGD", (*_COMMON, "momentum", "dampening", "nesterov", "fused")),
    "adam": ("Adam", (*_BETAS, "amsgrad", "fused", "decoupled_weight_decay")),
    "adamw": ("AdamW", (*_BETAS, "amsgrad", "fused")),
    "adagrad": ("Adagrad", (*_COMMON, "lr_decay", "initial_accumulator_value", "eps", "fused")),
    "adadelta": ("Adadelta", (*_COMMON, "rho", "eps", "capturable")),
    "adamax": ("Adamax", _BETAS),
    "asgd": ("ASGD", (*_COMMON, "lambd", "alpha", "t0", "capturable")),
    "nadam": ("NAdam", (*_BETAS, "momentum_decay", "decoupled_weight_decay")),
    "radam": ("RAdam", (*_BETAS, "decoupled_weight_decay")),
    "rmsprop": ("RMSprop", (*_COMMON, "alpha", "eps", "momentum", "centered", "capturable")),
    "rprop": ("Rprop", ("lr", "etas", "step_sizes", "foreach", "maximize", "differentiable", "capturable")),
    "adafactor": ("Adafactor", ("lr", "beta2_decay", "eps", "d", "weight_decay", "foreach", "maximize")),
    "lbfgs": (
        "LBFGS",
        ("lr", "max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),
    ),
    "muon": (
        "Muon",
        ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    ),
    "sparseadam": ("SparseAdam", ("lr", "betas", "eps", "maximize")),
}

_TRANSFORMERS_ADAFACTOR = (
    "lr", "eps", "clip_threshold", "decay_rate", "beta1", "weight_decay", "scale_parameter", "relative_step",
    "warmup_init",
)  # fmt: skip
_QUANTIZED = ("lr", "weight_decay", "min_8bit_size")
_TWO_STATES = (*_QUANTIZED, "betas", "eps")
#: family in lower case -> (family, whether there are paged classes, accepted option names)
_OF_BITSANDBYTES: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "adam": ("Adam", True, _TWO_STATES),
    "adamw": ("AdamW", True, _TWO_STATES),
    "ademamix": ("AdEMAMix", True, (*_TWO_STATES, "alpha", "t_alpha", "t_beta3")),
    "lion": ("Lion", True, (*_QUANTIZED, "betas")),
    "sgd": ("SGD", False, (*_QUANTIZED, "momentum", "dampening", "nesterov")),
    "rmsprop": ("RMSprop", False, (*_QUANTIZED, "alpha", "eps", "momentum", "centered")),
    "adagrad": ("Adagrad", False, (*_QUANTIZED, "lr_decay", "initial_accumulator_value", "eps")),
}


@public_value(frozen=True, slots=True)
class Named:
    """An optimizer: where it comes from, the name of its class there, and the options it accepts."""

    library: str
    class_name: str
    options: tuple[str, ...]


def _table() -> dict[str, Named]:
    """The optimizers by name, in lower case: of PyTorch, of transformers, Lion, and bitsandbytes' by bits."""
    table = {name: Named(TORCH, *row) for name, row in _OF_TORCH.items()}
    table["lion"] = Named(LION, "Lion", ("lr", "betas", "weight_decay", "decoupled_weight_decay"))
    table["transformersadafactor"] = Named(TRANSFORMERS, "Adafactor", _TRANSFORMERS_ADAFACTOR)
    for family, has_paged, options in _OF_BITSANDBYTES.values():
        for paged in ("", "Paged") if has_paged else ("",):
            # AdEMAMix's class without a number keeps other states than its 32-bit one.
            for bits in ("8bit", "32bit", "") if family == "AdEMAMix" else ("8bit", "32bit"):
                class_name = f"{paged}{family}{bits}"
                table[class_name.lower()] = Named(BITSANDBYTES, class_name, options)
    return table


#: lower-case name -> the optimizer
OPTIMIZERS: dict[str, Named] = _table()

#: Other spellings: classes of bitsandbytes whose states have 32 bits by default, and the names that
#: transformers' ``TrainingArguments(optim=...)`` gives them (``OptimizerNames``).
_SPELLINGS = {
    **{f"paged{name}": f"paged{name}32bit" for name in ("adam", "adamw", "lion")},
    **{f"{name}bnb8bit": f"{name}8bit" for name in _OF_BITSANDBYTES},
    **{f"{name}bnb32bit": f"{name}32bit" for name in _OF_BITSANDBYTES},
    "adamwtorch": "adamw",
    "rmspropbnb": "rmsprop32bit",
}


def check_optimizer(name: object) -> str:
    """The canonical (lower-case) name, or ``module:Class`` as it is. Raises :class:`UsageError` naming the nearest."""
    if is_own(name):
        return str(name).strip()
    key = str(name).strip().lower().replace("_", "").replace("-", "")
    key = _SPELLINGS.get(key, key)
    if key in OPTIMIZERS:
        return key
    near = difflib.get_close_matches(key, OPTIMIZERS, n=8, cutoff=0)
    close = sorted(near, key=lambda one: one[:3] != key[:3])[:3]
    raise UsageError(
        f"unknown optimizer {name!r}; the nearest are {', '.join(close)}, 'graphmem help optimizer' lists all, and one "
        "of your own is module:Class"
    )


def is_own(name: object) -> bool:
    """True if it names a class of the user's: ``package.module:Class`` or ``module.py:Class``."""
    return ":" in str(name)


def check_option(optimizer: str, option: str) -> None:
    """Raise :class:`UsageError` when the optimizer has no such option. A class of the user's answers for itself."""
    if is_own(optimizer):
        return
    accepted = OPTIMIZERS[optimizer].options
    if option not in accepted:
        raise UsageError(f"optimizer {optimizer} has no option {option!r}; accepted: {', '.join(accepted)}")


def parse_optimizer_arg(text: str) -> tuple[str, OptionValue]:
    """Read ``name=value``: ``("momentum", 0.9)``, ``("foreach", False)``, ``("betas", (0.9, 0.95))``.

    Values are Python literals; ``true``, ``false`` and ``none`` in any case are the constants, ``a,b`` is a tuple, and
    anything else is text. Raises :class:`UsageError` when there is no ``=`` or no name.
    """
    name, separator, value = text.partition("=")
    name = name.strip()
    if not separator or not name.isidentifier():
        raise UsageError(f"cannot read optimizer argument {text!r}; write name=value, for example momentum=0.9")
    return name, parse_value(value.strip())


def parse_value(text: str) -> OptionValue:
    """A Python literal (numbers, text, tuples, ``true``/``false``/``none`` in any case), or else the text itself."""
    constants: dict[str, OptionValue] = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return freeze(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def freeze(value: object) -> OptionValue:
    """Turn lists into tuples, so that a step stays a hashable value. Raises :class:`TypeError` for other containers."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is not an option value")


def pairs_of(name: str, given: object) -> tuple[tuple[str, OptionValue], ...]:
    """The options of ``given``, a mapping or pairs, the last of each name. Raises :class:`UsageError`."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        return tuple({str(key): freeze(value) for key, value in pairs}.items())  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise UsageError(
            f"{name} are (name, value) pairs of numbers, text, booleans or tuples, not {given!r}"
        ) from None
