"""The document of a plan: the layouts that fit, why others are not among them, and the configuration of the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphmem.planning.layouts.search import TIGHT, Candidate
from graphmem.reports.document import (
    Block,
    Code,
    Column,
    Document,
    Facts,
    Items,
    Points,
    Section,
    Table,
    Text,
    Value,
    section,
)
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from graphmem.estimate import Fit
    from graphmem.planning.layouts.plan import Plan

#: Columns of the text: a row a layout.
_WIDTH = 110
#: Layouts that were not captured, listed at most.
_MOST_OPEN = 5
#: Of several.
_STATUSES = {
    "fits": "fit", "does not fit": "do not fit", "refused by its bound": "refused by their bounds",
    "refused by a capture": "refused by a capture of a smaller one",
    "fits when cached segments are given back": "tight",
    "smaller than one that fits": "smaller than ones that fit",
}  # fmt: skip


def of_plan(plan: Plan, counts: Counter[str], details: bool) -> Document:
    """The plan, of whose layouts there are so many of each status (``counts``); ``details`` adds the files of the best
    one's configuration."""
    job = plan.job
    title = f"{job.shape.name} on {job.cluster.describe()}"
    return Document("plan", title, tuple(_sections(plan, counts, details)), plan.to_dict, _every_layout(plan), _WIDTH)


def _sections(plan: Plan, counts: Counter[str], details: bool) -> Iterator[Section]:
    job = plan.job
    length = f" of {job.seq_len:,} tokens" if job.seq_len else ""
    about = (
        ("model", f"{job.shape.name}, {_count(job.shape.parameters)} parameters"),
        ("cards", f"{job.cluster.describe()}, {format_bytes(job.cluster.card.capacity_bytes)} each"),
        ("step", f"{job.step.describe()}; {job.sequences:,} sequences{length}"),
    )
    yield section("", Facts(about))
    yield section("", Text(tuple(_verdict(plan)), "yes" if plan.fitting else "no"))
    if plan.fitting:
        yield section("Layouts that fit, each captured; the cheapest first", _fitting(plan))
    yield section("What a step costs, over the memory of a card", _costs(plan))
    yield _others(plan, counts)
    if plan.advice:
        changes = [f"{one.change} ({one.option}): {_saved(one.saved_bytes) or one.reason}" for one in plan.advice]
        yield section("In the first one, each a capture", Items(changes))
    if plan.files and plan.best is not None:
        model, layout = job.shape.name.partition(" ")[0], plan.best.layout.options()
        words = (
            f"Its configuration (--write FOLDER): {', '.join(one.name for one in plan.files)}",
            f"Its figure: graphmem analyze {model} {layout}{_asked(plan)}",
        )
        yield section("", Text(words), *([Code(one.name, one.text) for one in plan.files] if details else []))
    for name, lines in (("Assumed", plan.assumptions), ("Notes", plan.notes)):
        if lines:
            yield section(name, Items(lines))


def _count(number: int) -> str:
    return f"{number / 1e9:,.2f} billion" if number >= 1e9 else f"{number / 1e6:,.2f} million"


def _asked(plan: Plan) -> str:
    """The options of ``graphmem analyze`` for the step of the best layout."""
    step, length = plan.job.step, plan.job.seq_len
    assert plan.best is not None
    words = [f"-s {length}"] if length else []
    words += [f"--amp {step.amp}"] if step.amp else []
    words += [f"--dtype {step.dtype}"] if step.dtype != "fp32" else []
    words += [f"--optimizer {step.optimizer}"] if step.optimizer != "adamw" else []
    words += [f"--loop {step.loop}"] if step.loop != "hold" else []
    words += [f"--alloc-conf {plan.best.alloc_conf}"] if plan.best.alloc_conf else []
    return "".join(f" {word}" for word in (*words, f"--gpu {plan.job.cluster.card.name}"))


def _saved(count: int | None) -> str:
    if count is None:
        return ""
    return f"saves {format_bytes(count)}" if count > 0 else f"costs {format_bytes(-count)}" if count else "no change"


def _verdict(plan: Plan) -> Iterator[str]:
    best = plan.best
    if best is not None and best.estimate is not None and best.estimate.fit is not None:
        fit = best.estimate.fit
        with_conf = f", with {best.alloc_conf}" if best.alloc_conf else ""
        tight = f" ({best.status})" if best.status == TIGHT else ""
        yield f"BEST{_how_sure(fit)}: {best.layout.words()}{with_conf}"
        yield (
            f"{format_bytes(fit.device_bytes)} of {format_bytes(fit.capacity_bytes)} on each card, "
            f"{format_bytes(fit.margin_bytes)} spare{tight}"
        )
        if best.estimate.failure:
            yield f"BUT {best.estimate.failure}."
        plain = [(number, one) for number, one in enumerate(plan.fitting, 1) if not one.layout.recompute]
        if best.layout.recompute and plain:
            yield f"the first without recomputation is no. {plain[0][0]}: {plain[0][1].layout.words()}"
        return
    closest = plan.closest
    if closest is not None and closest.estimate is not None:
        yield f"NOTHING FITS of {plan.captured} layouts that were captured."
        yield f"closest: {closest.layout.words()}, {closest.reason}"
    else:
        yield "NOTHING FITS."
    left = len(plan.open())
    if left:
        yield f"{left} more may fit by their bounds: --confirm {plan.captured + min(left, 16)} captures more"


def _how_sure(fit: Fit) -> str:
    """That the best one may not fit, where it is not sure."""
    chance = f" ({fit.chance})" if fit.chance else ""
    return "" if fit.is_sure else f", LIKELY to fit{chance}"


def _fitting(plan: Plan) -> Table:
    """A row a layout; figures that are zero in all of them have no column."""
    columns = (
        Column(name="number", unit="count"), Column("layout"), Column("a card", "bytes", bars=True),
        Column("spare", "bytes"),
        Column("sent near", "decimal"), Column("far", "decimal"), Column("host", "decimal"),
        Column("sending, s", "seconds"), Column("again, s", "seconds"), Column("waiting, s", "seconds"),
        Column(name="remark"),
    )  # fmt: skip
    rows = [_row(number, one) for number, one in enumerate(plan.fitting, 1)]
    kept = [index for index in range(len(columns)) if index < 2 or any(row[index] for row in rows)]
    return Table([columns[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _row(number: int, one: Candidate) -> tuple[Value, ...]:
    assert one.estimate is not None
    assert one.estimate.fit is not None
    fit, cost = one.estimate.fit, one.cost
    remark = "segments that grow" if one.alloc_conf else "tight" if one.status == TIGHT else ""
    if not remark and fit.verdict != "yes":
        remark = f"likely ({fit.chance})" if fit.chance else "likely"
    seconds = (round(time, 2) for time in (cost.sending, cost.recomputing, cost.waiting))
    sent = cost.sent
    return (
        number, one.layout.words(), fit.device_bytes, fit.margin_bytes, sent.near, sent.far, sent.host, *seconds, remark
    )  # fmt: skip


#: Layouts that need more than so many cards' memory are left out of the picture, which would be of them alone.
_FAR = 2


def _costs(plan: Plan) -> Points:
    """Every layout by its memory, captured or bounded, and by the seconds of its step beside its computation."""
    capacity = plan.job.cluster.card.capacity_bytes - plan.job.cluster.card.others_bytes
    groups: dict[str, list[tuple[float, float, str]]] = {}
    far = 0
    for one in (*plan.fitting, *plan.others):
        size = _memory(one)
        if size > _FAR * capacity:
            far += 1
            continue
        groups.setdefault(_group(one), []).append((size, one.cost.seconds, one.layout.words()))
    beyond = f"; {far} that need more than {_FAR} cards' memory are not shown" if far else ""
    return Points(
        (Column("memory of a card", "bytes"), Column("seconds of a step beside its computation", "seconds")),
        [(name, groups.get(name, [])) for name in _GROUPS],
        (capacity, f"where {plan.job.cluster.card.name} ends"),
        "" if plan.best is None else plan.best.layout.words(),
        f"Seconds are by simple formulas (see what is assumed), not predicted{beyond}.",
    )


#: Groups of the picture in their order.
_GROUPS = ("fits", TIGHT, "likely fits", "does not fit", "a bound, not captured")


def _group(one: Candidate) -> str:
    if one.estimate is None or one.estimate.fit is None:
        return "a bound, not captured"
    if one.estimate.fit.is_expected:
        return TIGHT if one.status == TIGHT else "fits" if one.estimate.fit.is_sure else "likely fits"
    return "does not fit"


def _memory(one: Candidate) -> int:
    """What it holds on a card, or what it needs at least where it was not captured."""
    if one.estimate is None:
        return one.bound.bytes
    return one.estimate.device if one.estimate.fit is None else one.estimate.fit.device_bytes


def _others(plan: Plan, counts: Counter[str]) -> Section:
    counted = ", ".join(f"{count} {_STATUSES.get(status, status)}" for status, count in counts.most_common())
    reasons = [f"{kind} ({count}): {reason}" for kind, count, reason in plan.reasons()]
    blocks: list[Block] = [Items(reasons)] if reasons else []
    left = plan.open()
    if left and plan.fitting:
        blocks.append(Text(["Not captured, the cheapest first; what they need at least is a bound, not a figure:"]))
        shown = [
            f"at least {format_bytes(one.bound.bytes)}: {one.layout.words()}, {one.cost.seconds:.2f} s"
            for one in left[:_MOST_OPEN]
        ]
        blocks.append(Items([*shown, *([f"{len(left) - _MOST_OPEN} more"] if len(left) > _MOST_OPEN else [])]))
    return section(f"{sum(counts.values())} layouts: {counted}", *blocks)


def _every_layout(plan: Plan) -> Table:
    """One row a layout, of those that fit and of the others."""
    sizes = ("device", "margin", "bound", "sent_near", "sent_far", "sent_host")
    columns = (
        Column("layout"), Column("options"), Column("status"), *(Column(name, "bytes") for name in sizes),
        Column("sending", "seconds"), Column("recomputing", "seconds"), Column("reason"),
    )  # fmt: skip
    return Table(columns, [_whole_row(one) for one in (*plan.fitting, *plan.others)])


def _whole_row(one: Candidate) -> tuple[Value, ...]:
    fit = one.estimate.fit if one.estimate is not None else None
    sent = one.cost.sent
    return (
        one.layout.words(), one.layout.options(), one.status, one.estimate.device if one.estimate is not None else None,
        fit.margin_bytes if fit is not None else None, one.bound.bytes, sent.near, sent.far, sent.host,
        one.cost.sending, one.cost.recomputing, one.reason,
    )  # fmt: skip
