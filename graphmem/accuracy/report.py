"""The accuracy report: comparisons and published figures in, Markdown and one self-contained HTML file out.

Kinds of truth stand in sections of their own and are never added up. The same input gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from graphmem.accuracy.compare import Comparison
from graphmem.accuracy.record import GPU, OK, OUT_OF_MEMORY, STUB_DRIVER
from graphmem.accuracy.statistics import ErrorSummary, summarize_errors
from graphmem.errors import UsageError
from graphmem.training import Training
from graphmem.units import format_bytes

WORST = 10

_INTRODUCTIONS = {
    GPU: "Peaks measured by `graphmem measure` on real cards. Device memory is what the run added to the card's use.",
    STUB_DRIVER: "Peaks of the real CUDA build of PyTorch on a driver that pretends to be a card: the allocator, the "
    "operators and cuDNN's plans are the real ones; what the driver and the context take is not there, so there is "
    "no device level.",
}
_TITLES = {GPU: "Real GPUs", STUB_DRIVER: "Stub driver"}
_LEVELS = {GPU: ("allocated", "reserved", "device"), STUB_DRIVER: ("allocated", "reserved")}
_AWAITS = {
    GPU: "No record yet. `graphmem measure --zoo` on a machine with a CUDA GPU makes them; put the file under "
    "`models_zoo/measured/<gpu>/`.",
    STUB_DRIVER: "No record.",
}


@dataclass(frozen=True)
class Group:
    """The errors of one level, or of one kind of case."""

    name: str
    summary: ErrorSummary


@dataclass(frozen=True)
class Section:
    """One kind of truth. ``levels`` summarises every level; ``groups`` reserved memory by what the cases are."""

    title: str
    introduction: str
    comparisons: tuple[Comparison, ...]
    levels: tuple[Group, ...]
    groups: tuple[tuple[str, tuple[Group, ...]], ...]
    failures: int
    capped: tuple[Comparison, ...]
    not_compared: tuple[tuple[str, str], ...]
    worst: tuple[Comparison, ...]


def render_markdown(comparisons: Sequence[Comparison], published: Any, about: str) -> str:
    """The report as Markdown. ``about`` says which versions made the predictions."""
    return _render("accuracy.md.j2", comparisons, published, about)


def render_html(comparisons: Sequence[Comparison], published: Any, about: str) -> str:
    """The report as one HTML file with its plots inside; raises :class:`UsageError` without matplotlib."""
    return _render("accuracy.html.j2", comparisons, published, about)


def published_figures() -> Any:
    """What other estimators' authors reported of theirs."""
    return json.loads(files("graphmem.accuracy").joinpath("published.json").read_text(encoding="utf-8"))


def section(source: str, comparisons: Sequence[Comparison]) -> Section:
    """Everything the report says about the records of one source."""
    mine = [item for item in comparisons if item.record.machine is not None and item.record.machine.source == source]
    free = [item for item in mine if item.is_comparable and item.record.cap_bytes is None]
    levels = [Group(level, _summary(free, level)) for level in _LEVELS[source]] if free else []
    return Section(
        title=_TITLES[source],
        introduction=_INTRODUCTIONS[source] if mine else _AWAITS[source],
        comparisons=tuple(free),
        levels=tuple(levels),
        groups=tuple((name, _groups(free, key)) for name, key in _KEYS.items()) if free else (),
        failures=sum(item.exceeds_cap for item in free),
        capped=tuple(item for item in mine if item.record.cap_bytes is not None),
        not_compared=tuple((item.record.case.name, _why_not(item)) for item in mine if not item.is_comparable),
        worst=tuple(sorted(free, key=lambda item: (-abs(item.error("reserved")), item.record.case.name))[:WORST]),
    )


def reason(comparison: Comparison) -> str:
    """What is known about a difference, from both sides' figures."""
    words = []
    if comparison.error("reserved") == 0 and comparison.error("allocated") == 0:
        return "equal to the byte"
    if comparison.error("allocated") == 0:
        words.append("allocated peak equal: the segments differ")
    if comparison.predicted.estimated_buffer_bytes:
        words.append(
            f"cuDNN workspaces are estimates, up to {format_bytes(comparison.predicted.estimated_buffer_bytes)}"
        )
    if comparison.predicted.unknown:
        words.append(f"{comparison.predicted.unknown} times something not modelled")
    measured = comparison.record.measured
    if measured is not None and measured.retries:
        words.append(f"{measured.retries} retries with an emptied cache")
    return "; ".join(words) or "not explained"


# --- groups -----------------------------------------------------------------------------------------------------------


def _family(comparison: Comparison) -> str:
    from graphmem.errors import SourceError
    from graphmem.sources.zoo import zoo_entry

    try:
        return str(zoo_entry(comparison.record.case.model.removeprefix("zoo:")).family)
    except SourceError:
        return "other"


def _optimizer(comparison: Comparison) -> str:
    step = comparison.record.case.step
    return step.optimizer if isinstance(step, Training) else "inference"


def _precision(comparison: Comparison) -> str:
    step = comparison.record.case.step
    return f"{step.amp} autocast" if step.amp else step.dtype


def _card(comparison: Comparison) -> str:
    machine = comparison.record.machine
    assert machine is not None
    return f"{machine.gpu}, PyTorch {machine.versions.get('torch', '?')}"


_KEYS: dict[str, Callable[[Comparison], str]] = {
    "family": _family,
    "optimizer": _optimizer,
    "precision": _precision,
    "card": _card,
}


def _groups(comparisons: Sequence[Comparison], key: Callable[[Comparison], str]) -> tuple[Group, ...]:
    found: dict[str, list[Comparison]] = {}
    for item in comparisons:
        found.setdefault(key(item), []).append(item)
    return tuple(Group(name, _summary(items, "reserved")) for name, items in sorted(found.items()))


def _summary(comparisons: Sequence[Comparison], level: str) -> ErrorSummary:
    return summarize_errors([item.error(level) for item in comparisons])


def _why_not(comparison: Comparison) -> str:
    if comparison.predicted.error:
        return f"no prediction: {comparison.predicted.error}"
    if comparison.record.status == OUT_OF_MEMORY:
        return "ran out of memory"
    return comparison.record.error or comparison.record.status


# --- rendering --------------------------------------------------------------------------------------------------------


def _render(template: str, comparisons: Sequence[Comparison], published: Any, about: str) -> str:
    try:
        import jinja2
    except ImportError:
        raise UsageError("the accuracy report needs jinja2; install it with: pip install 'graphmem[report]'") from None
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=template.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(percent=_percent, signed=_signed, size=format_bytes)
    environment.globals.update(reason=reason, ok=OK, error_plot=_error_plot, scatter_plot=_scatter_plot)
    sections = [section(source, comparisons) for source in (GPU, STUB_DRIVER)]
    return environment.get_template(template).render(sections=sections, published=published, about=about) + "\n"


def _template(name: str) -> str:
    return files("graphmem.accuracy").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.3f} %"


def _error_plot(comparisons: Sequence[Comparison]) -> Any:
    from graphmem.accuracy.plots import error_plot

    return error_plot([item.error("reserved") for item in comparisons])


def _scatter_plot(comparisons: Sequence[Comparison]) -> Any:
    from graphmem.accuracy.plots import scatter_plot

    return scatter_plot([(item.measured_bytes("reserved"), item.predicted_bytes("reserved")) for item in comparisons])
