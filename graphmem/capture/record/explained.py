"""The facts known of an operator, in words: for :mod:`graphmem.explain`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from graphmem.capture.kernels import RULES
from graphmem.capture.operators.facts import OperatorFacts, facts_of
from graphmem.capture.record.dispatch import INTERCEPTORS
from graphmem.errors import UsageError
from graphmem.torch_names import private

_PACKAGE = Path(__file__).parents[2]


def explained(name: str) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Of each overload that ``name`` means: its name, its schema, and its known facts as (subject, words).

    Raises :class:`UsageError` for a name that the installed PyTorch does not know, with those that are like it.
    """
    found = map(facts_of, overloads_named(name))
    return [(facts.name, str(facts.func._schema), list(_known(facts))) for facts in found]


def overloads_named(name: str) -> list[Any]:
    """The overloads that are meant by ``aten.add`` (all of them) or by ``aten.add.Tensor`` (one).

    Raises :class:`UsageError` for a name that nothing bears.
    """
    parts = name.strip().replace("::", ".").removeprefix("torch.ops.").split(".")
    registered = _registered()
    for namespace, operator, *rest in (spelled for spelled in (parts, ["aten", *parts]) if len(spelled) > 1):
        known = registered.get((namespace, operator))
        if known is None or len(rest) > 1:
            continue
        if rest and rest[0] not in known:
            spelled = ", ".join(f"{namespace}.{operator}.{overload}" for overload in known)
            raise UsageError(f"{namespace}.{operator} has no overload {rest[0]!r}; it has {spelled}")
        packet = getattr(getattr(torch.ops, namespace), operator)
        return [getattr(packet, overload) for overload in (rest or known)]
    wanted = "::".join(parts[:2] if len(parts) > 1 else ["aten", *parts])
    near = difflib.get_close_matches(wanted, ["::".join(key) for key in registered], n=3)
    like = f"; near it: {', '.join(found.replace('::', '.') for found in near)}" if near else ""
    raise UsageError(f"PyTorch {torch.__version__} knows no operator {name!r}{like}")


def _registered() -> dict[tuple[str, str], list[str]]:
    """(namespace, operator) -> overloads, of all that the dispatcher knows."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(private("torch._C._dispatch_get_all_op_names", "operators cannot be listed", list)()):
        operator, _, overload = name.partition(".")
        namespace, _, operator = operator.partition("::")
        found.setdefault((namespace, operator), []).append(overload or "default")
    return found


# --- one overload -----------------------------------------------------------------------------------------------------


def _known(facts: OperatorFacts) -> Iterator[tuple[str, str]]:
    """Known facts as (subject, words), for people."""
    for subject, words_of in _SUBJECTS:
        words = words_of(facts)
        if words is not None:
            yield subject, words
    for interceptor in INTERCEPTORS:
        if interceptor.applies is not None and interceptor.applies(facts):
            yield "intercepted", f"{interceptor.name}: {interceptor.why}"


def _is_answered(facts: OperatorFacts) -> bool:
    """True if no kernel of it is ever recorded: other operators are, or it is answered."""
    is_made = facts.decomposition is not None or facts.is_composite or facts.decomposes
    return is_made or facts.selects or facts.is_step or facts.is_collective or facts.is_decision


def _rule(facts: OperatorFacts) -> str | None:
    if facts.rule is not None:
        return _where(RULES[facts.name])
    return None if _is_answered(facts) else "none; it is taken to allocate its outputs and nothing else"


def _unchecked(facts: OperatorFacts) -> str | None:
    if facts.is_checked or _is_answered(facts):
        return None
    return "no rule, and no recording proves that it takes nothing but its outputs"


def _unproven_layouts(facts: OperatorFacts) -> str | None:
    if not facts.unproven_layouts or _is_answered(facts):
        return None
    return f"proven of contiguous inputs, not of those that are {', '.join(sorted(facts.unproven_layouts))}"


def _in_place(facts: OperatorFacts) -> str | None:
    if facts.in_place is None:
        return None
    in_place, nodes = facts.in_place
    return f"{in_place} in place, where {', '.join(sorted(nodes))} calls it"


def _formula(facts: OperatorFacts) -> str | None:
    if facts.gradient_formula is None:
        return None
    return f"other in {facts.gradient_formula.node} on a card (capture/operators/gradient_formulas.py)"


def _composite(facts: OperatorFacts) -> str | None:
    if facts.is_composite:
        return "calls what CUDA's version calls (capture/operators/composites.py)"
    if facts.is_fused_on_cuda:
        return "one kernel in a CUDA build, and only there (capture/operators/composites.py)"
    return "made of other operators; they are recorded in its place" if facts.decomposes else None


def _where_or_none(function: Callable[..., object] | None) -> str | None:
    return None if function is None else _where(function)


#: Subjects in the order of reports, each with the words for an operator; None where nothing is known of it.
_SUBJECTS: tuple[tuple[str, Callable[[OperatorFacts], str | None]], ...] = (
    ("kernel rule", _rule),
    ("not modelled", lambda facts: facts.unmodelled),
    ("not checked", _unchecked),
    ("not checked", _unproven_layouts),
    ("decomposition", lambda facts: _where_or_none(facts.decomposition)),
    ("sparse", lambda facts: _where_or_none(facts.sparse_decomposition)),
    ("in backward", _in_place),
    ("in backward", _formula),
    ("composite", _composite),
    ("shapes", lambda facts: _where_or_none(facts.shape)),
    ("autocast", lambda facts: facts.autocast),
    ("layout", lambda facts: None if facts.relaid is None else _LAYOUT),
    ("cuBLAS", lambda facts: _CUBLAS if facts.calls_cublas else None),
    ("values", lambda facts: _VALUES if facts.tracks_value else None),
)
_LAYOUT = "outputs are laid out as CUDA's kernel does (capture/operators/output_layouts.py)"
_CUBLAS = "is called, and takes its workspace at a thread's first call"
_VALUES = "known ones are followed through it (capture/values/device_values.py)"


def _where(function: Callable[..., object]) -> str:
    """Name, file, line and first sentence of a function."""
    function = inspect.unwrap(function)
    code = function.__code__
    text = f"{function.__name__.strip('_')} ({Path(code.co_filename).relative_to(_PACKAGE)}:{code.co_firstlineno})"
    written = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    return f"{text}: {written}" if written else text
