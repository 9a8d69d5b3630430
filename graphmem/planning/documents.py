"""The documents of answers that are several analyses: the largest size, every combination, what saves memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphmem.answering.sized import BY_TEMPLATE
from graphmem.estimate import LEVELS, Estimate, Fit, no_card_named
from graphmem.reports.document import (
    Cell,
    Choices,
    Column,
    Curve,
    Curves,
    Document,
    Facts,
    HeatMap,
    Items,
    Moments,
    Section,
    Shares,
    Stack,
    Stacks,
    Table,
    Text,
    Value,
    section,
)
from graphmem.reports.estimate import WORDS, edge, parts
from graphmem.units import format_bytes

if TYPE_CHECKING:
    from graphmem.planning.advise import Advice, Advised
    from graphmem.planning.largest import Largest
    from graphmem.planning.sweep import Row, Rows


def verdict_words(fit: Fit, no: str = "does not fit") -> str:
    """``fits``, ``likely fits (97 %)``, ``does not fit``; ``fits (cached segments given back)`` where the figure of a
    run without a limit may be above the card's capacity."""
    likely, chance = "" if fit.is_sure else "likely ", f" ({fit.chance})" if fit.chance else ""
    flushed = " (cached segments given back)" if fit.needs_cache_flush else ""
    return f"{likely}{'fits' if fit.is_expected else no}{chance}{flushed}"


def _on_card(fit: Fit | None) -> str:
    return "" if fit is None else f"{verdict_words(fit, 'DOES NOT FIT')} {fit.gpu}"


def _assumed_card(estimate: Estimate | None) -> list[str]:
    """A line for the reader where the card of the estimate was not named but assumed."""
    return [no_card_named(estimate.gpu)] if estimate is not None and estimate.card_assumed else []


def _sentences(*lines: str) -> list[Section]:
    return [section("", Text(lines))] if lines else []


#: Cases of a page that can be chosen, of which each takes some kilobytes there.
_MOST_CASES = 64


def _cases(names: Sequence[str], found: Mapping[tuple[str, ...], Estimate]) -> list[Choices]:
    """What the memory is made of in each of several estimates, by the settings of each; all bars have one scale."""
    axes = [(name, _in_order(values[at] for values in found)) for at, name in enumerate(names)]
    if not 1 < len(found) <= _MOST_CASES or all(len(values) < 2 for _, values in axes):
        return []
    room = max(one.device for one in found.values())
    cases = {values: (_said(one), _made_of(one, room)) for values, one in found.items()}
    return [Choices(axes, cases, next(iter(found)))]


def _in_order(values: Iterable[str]) -> list[str]:
    """Each value once: numbers by size, others as they came."""
    found = list(dict.fromkeys(values))
    return sorted(found, key=float) if all(map(_is_number, found)) else found


def _said(estimate: Estimate) -> Text:
    """Whether it fits and whether a template wrote it; the levels of the peak."""
    fit, how = estimate.fit, "by template" if is_by_template(estimate) else "analysed"
    needs = f"{format_bytes(estimate.device)} of device memory ({how})."
    head = needs if fit is None else f"{_on_card(fit)}: {needs}"
    head = f"Fails on any card: {estimate.failure}. {needs}" if estimate.failure else head
    levels = ", ".join(f"{level} {format_bytes(getattr(estimate, level))}" for level in LEVELS[:-1])
    tone = "no" if estimate.failure else "" if fit is None else "yes" if fit.is_expected else "no"
    return Text([head[0].upper() + head[1:], f"{levels}."], tone)


def is_by_template(estimate: Estimate) -> bool:
    """Whether a template wrote the run, as its assumptions say."""
    return any(one.startswith(BY_TEMPLATE) for one in estimate.assumptions)


def _made_of(estimate: Estimate, room: int) -> Shares:
    total = ("together", sum(estimate.breakdown.values()))
    return Shares(parts(estimate), total, edge(estimate), room=room)


def with_sizes(
    document: Document, sizes: Mapping[str, Mapping[int, Estimate]], estimate: Estimate, missing: str = ""
) -> Document:
    """The document of an estimate, with others to choose among behind its events: by the name of a size and its value,
    of which the ``estimate``'s own is seen first; ``missing``: why there are none, in a sentence."""
    made = _sentences(*[missing] if missing and not sizes else [])
    for name, found in sizes.items():
        own = next(value for value, one in found.items() if not is_by_template(one) and one.peak == estimate.peak)
        cases = _cases([name], {(f"{value:,}",): one for value, one in sorted(found.items())})
        made += [section(f"At another {name}, all else as it is", replace(one, first=(f"{own:,}",))) for one in cases]
    events = (at for at, one in enumerate(document.sections, 1) if any(isinstance(b, Moments) for b in one.blocks))
    at = next(events, len(document.sections))
    return replace(document, sections=(*document.sections[:at], *made, *document.sections[at:]))


# --- the largest size -------------------------------------------------------------------------------------------------


def of_fit(found: Largest) -> Document:
    """The answer in one line, the two sizes that prove it, the safe one, and others tried."""
    name, shown = found.name, found.estimate or found.above
    assert shown is not None
    assert shown.fit is not None
    fit = shown.fit
    about = (("model", shown.model), ("step", shown.step), ("gpu", f"{fit.gpu}, {format_bytes(fit.capacity_bytes)}"))
    by_value = {found.safe_value: found.safe, found.value: found.estimate, found.above_value: found.above}
    rows = [
        (value, estimate.fit.device_bytes, *_spare(estimate.fit, estimate is found.above))
        for value, estimate in by_value.items()
        if estimate is not None and estimate.fit is not None
    ]
    columns = [
        Column(name, "count"), Column("device memory", "bytes", bars=True), Column("of the card", "figure"),
        Column(name="fits"),
    ]  # fmt: skip
    tried = dict.fromkeys(f"{value:,}" for value, _ in found.tried)  # a size may be captured after its template
    sections = [
        section("", Facts(about)),
        section("", Text(tuple(_answer(found, name)), "yes" if found.value else "no")),
        section("", Table(columns, rows)),
        section("", *_peaks(found, fit), Text([f"analysed: {'; '.join(tried)}"])),
    ]
    sizes: dict[tuple[str, ...], Estimate] = {(f"{value:,}",): one for value, one in sorted(found.sizes.items())}
    if cases := _cases([name], sizes):
        first = next((at for at in sizes if at == (f"{found.value:,}",)), next(iter(sizes)))
        sections.append(section(f"What it is made of, by {name}", *(replace(one, first=first) for one in cases)))
    if shown.assumptions:
        sections.append(section("Assumed", Items(shown.assumptions)))
    return Document("fit", f"The largest {name} of {shown.model}", sections, found.to_dict)


def _peaks(found: Largest, fit: Fit) -> list[Curves]:
    """The peak over the size, where more than one was analysed."""
    sizes, peaks = zip(*found.tried, strict=True) if found.tried else ((), ())
    if len(sizes) < 2:
        return []
    room = (fit.capacity_bytes - fit.others_bytes, f"where {fit.gpu} ends")
    return [Curves([Curve("device memory", peaks)], "", "", "bytes", limit=room, over=(sizes, found.name))]


def _answer(found: Largest, name: str) -> Iterator[str]:
    if found.value:
        yield f"The largest {name} that fits is {found.value:,}."
        assert found.estimate is not None
        yield from ([f"BUT {found.estimate.failure}."] if found.estimate.failure else [])
        yield _margin(found, name)
    else:
        yield f"DOES NOT FIT: not even {name} {found.above_value:,} fits."
    if found.above is None:
        yield f"The search ended there: {found.stopped_by}."


def _margin(found: Largest, name: str) -> str:
    """The memory that the largest size leaves on the card, how far that is known, and the size that is safe."""
    assert found.estimate is not None
    assert found.estimate.fit is not None
    fit, doubts = found.estimate.fit, found.estimate.doubts
    spare = f"It leaves {format_bytes(fit.margin_bytes)}"
    if not doubts.about("device"):
        return f"{spare}."
    words = "safe" if fit.margin is None else f"safe at p{100 * fit.margin:g}"
    least, most = found.estimate.interval("device")
    if most is None:
        causes = ", ".join(cause.name for cause in doubts.causes if cause.spread("device").above)
        return f"{spare}; which {name} is {words} cannot be told, as nothing bounds: {causes}."
    more = most - found.estimate.device
    known = f"{spare}, which may be {format_bytes(more)} less"
    known += " or any amount more" if least is None else f" or {format_bytes(found.estimate.device - least)} more"
    if found.safe_value == found.value:
        flushes = "; where it takes more, cached segments are given back" if more > fit.margin_bytes else ""
        return f"{known}: it is {words}{flushes}."
    return f"{known}: {name} {found.safe_value:,} is {words}." if found.safe else f"{known}: no {name} is {words}."


def _spare(fit: Fit, is_above: bool) -> tuple[str, str]:
    """(what is spare or missing, whether it fits) of one row: the two never contradict each other."""
    spare = f"{format_bytes(abs(fit.margin_bytes))} {'spare' if fit.margin_bytes >= 0 else 'missing'}"
    return spare, "leaves less than --spare" if is_above and fit.is_expected else verdict_words(fit)


# --- every combination ------------------------------------------------------------------------------------------------


#: Rows of a table that a person reads; of more, a screen shows the first, and a file all.
_MOST_ROWS = 1_000


def of_sweep(rows: Rows) -> Document:
    """A row for every combination; those that could not be analysed have their reason below."""
    names = list(rows[0].words)
    shown: list[tuple[Value, ...]] = []
    whole: list[tuple[Value, ...]] = []
    errors: list[str] = []
    for row in rows:
        words, figures = row.words, row.figures
        settings = *words.values(), *([f"{rows.prices[row.settings['device'].name]:g}"] if rows.prices else [])
        whole.append((*settings, *(figures[name] for name in (*LEVELS, "capacity", "fits")), figures["error"] or ""))
        if len(shown) < _MOST_ROWS:
            levels = "---" if figures["error"] else [figures[level] for level in LEVELS[1:]]
            shown.append((*settings, *levels, "error" if figures["error"] else figures["on_card"]))
        why = figures["error"] or (row.estimate.failure or row.estimate.ends_early if row.estimate is not None else "")
        if why and len(errors) < _MOST_ROWS:
            errors.append(f"{' '.join(words.values())}: {why}")
    counted = {name for name in names if all(_is_number(row.words[name]) for row in rows)}
    settled = [Column(name, "figure" if name in counted else "") for name in names]
    settled += [Column("price", "figure")] if rows.prices else []
    of_levels = [Column(level, "bytes", bars=level == "device") for level in LEVELS]
    notes = [*_cheapest(rows), *_assumed_card(next((row.estimate for row in rows if row.estimate), None))]
    if len(rows) > len(shown):
        notes.append(f"{len(rows) - len(shown):,} more rows: --format csv or json has them all")
    table = Table([*settled, *of_levels[1:], Column(wraps=False, name="fits")], shown)
    columns = [*settled, *of_levels, Column("capacity", "bytes"), Column("fits"), Column("error")]
    found = {tuple(row.words.values()): row.estimate for row in rows if row.estimate is not None}
    fits = [row.estimate.fit for row in rows if row.estimate is not None and row.estimate.fit is not None]
    fitting = sum(fit.is_expected for fit in fits)
    of = f"{fitting:,} of {len(rows):,} combinations fit."
    head = [section("", Text([of], "yes" if fitting else "no"))] if any(row.figures["capacity"] for row in rows) else []
    sections = [*head, section("", table), *_sentences(*errors, *notes)]
    if maps := _heat_maps(names, rows):
        sections.append(section(f"Over two settings ({_HEAT_KEY})", *maps))
    sections += [section("Over one setting", one) for one in _lines(names, found)]
    sections += [section("What it is made of", one) for one in _cases(names, found)]
    title = f"Combinations of {', '.join(names)}"
    return Document("sweep", title, sections, rows.to_dict, Table(columns, whole))


#: Maps of a page, and their cells together.
_MOST_MAPS, _MOST_CELLS = 24, 1_000
#: What the colours and signs of a heat map mean.
_HEAT_KEY = "the stronger the colour, the fuller the card; a cross: does not fit, a wave: likely, -: not analysed"


def _heat_maps(names: Sequence[str], rows: Rows) -> list[HeatMap]:
    """The device memory over the two settings with the most values, a map for every combination of the others."""
    cells = {tuple(row.words.values()): _cell(row) for row in rows}
    values = [_in_order(case[at] for case in cells) for at in range(len(names))]
    by_count = sorted((at for at in range(len(names)) if len(values[at]) > 1), key=lambda at: -len(values[at]))
    if len(by_count) < 2 or len(cells) > _MOST_CELLS:
        return []
    across, down = by_count[:2]
    if not all(map(_is_number, values[across])) and all(map(_is_number, values[down])):
        across, down = down, across
    others = [at for at in range(len(names)) if at not in (across, down)]
    maps: dict[tuple[str, ...], dict[tuple[str, str], Cell]] = {}
    for case, cell in cells.items():
        maps.setdefault(tuple(case[at] for at in others), {})[case[down], case[across]] = cell
    if len(maps) > _MOST_MAPS:
        return []
    axes, most = [(names[at], values[at]) for at in (down, across)], max(cell.size or 0 for cell in cells.values())
    return [
        HeatMap(axes[0], axes[1], found, most, ", ".join(f"{names[at]} {case[n]}" for n, at in enumerate(others)))
        for case, found in maps.items()
    ]


def _cell(row: Row) -> Cell:
    figures = row.figures
    verdict = figures["error"] or figures["on_card"] or "no card"
    return Cell(figures["device"], verdict, figures["capacity"] or 0, tuple(row.words.values()))


#: Curves that can be told apart, and values of a setting that make one.
_MOST_LINES, _LEAST_POINTS = 8, 3


def _lines(names: Sequence[str], found: Mapping[tuple[str, ...], Estimate]) -> Iterator[Curves]:
    """The device memory over each setting that is a number and has several values, a curve for every combination of the
    others; with the end of the card where all are on one."""
    rooms = {edge(one) for one in found.values()}
    card = next(iter(rooms)) if len(rooms) == 1 else None
    for at, name in enumerate(names):
        sizes = sorted({float(values[at]) for values in found if _is_number(values[at])})
        others = dict.fromkeys(_without(values, at) for values in found)
        whole = len(sizes) * len(others) == len(found)
        if len(sizes) < _LEAST_POINTS or len(others) > _MOST_LINES or not whole:
            continue
        by_size = sorted(found.items(), key=lambda item: float(item[0][at]))
        curves = [
            Curve(
                " ".join(other) or "device memory",
                [one.device for values, one in by_size if _without(values, at) == other],
            )
            for other in others
        ]
        limit = None if card is None else (card[1], f"where {card[0]} ends")
        yield Curves(curves, "", "", "bytes", limit=limit, over=(sizes, name))


def _without(values: tuple[str, ...], at: int) -> tuple[str, ...]:
    return (*values[:at], *values[at + 1 :])


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def _cheapest(rows: Rows) -> Iterator[str]:
    """The first card that fits surely, and the first that is likely to, where cards stand by their prices."""
    if not rows.prices:
        return
    found = 0.0
    for verdict, words in (("yes", "fits"), ("likely", "is likely to fit")):
        row = next((one for one in rows if (one.figures["fits"] or "").split(",")[0] == verdict), None)
        if row is None or (found and rows.prices[row.settings["device"].name] >= found):
            continue
        card = row.settings["device"].name
        others = ", ".join(f"{name} {value}" for name, value in row.words.items() if name != "gpu")
        found = rows.prices[card]
        yield f"The cheapest card that {words}: {card} at {found:g}{f' with {others}' if others else ''}."
    if not found:
        yield "No card that has a price fits."


# --- what saves memory ------------------------------------------------------------------------------------------------


def of_advice(advised: Advised) -> Document:
    """A row for every change that saves memory; those that do not, and those that are not possible, below."""
    base = advised.base
    fails = [f"BUT {base.failure}."] if base.failure else []
    saving = [one for one in advised.advice if one.estimate is not None and one.saved_bytes > 0]
    useless = [_useless(one, base) for one in advised.advice if one.estimate is not None and one.saved_bytes <= 0]
    impossible = [f"not possible: {one.change}: {one.reason}" for one in advised.advice if one.estimate is None]
    verdict = "" if base.fit is None else f", {_on_card(base.fit)}"
    verdict = ", and fails on any card" if base.failure else verdict
    as_it_is = ("as it is", f"{format_bytes(base.device)} of device memory{verdict}")
    sections = [section("", Facts((("model", base.model), ("step", base.step), as_it_is))), *_sentences(*fails)]
    if saving:
        followed = [one for one in advised.steps if one.estimate is not None]
        sections.insert(0, section("", _at_best(base, max((*saving, *followed), key=lambda one: one.saved_bytes))))
        sizes = Column("saves", "bytes"), Column("needs", "bytes", bars=True)
        columns = (*sizes, Column(name="fits"), Column("change"), Column("options"))
        sections.append(section("", Table(columns, list(map(_change, saving)))))
        last = followed[-1].estimate if followed else None
        alone = [one for one in saving if last is None or one.estimate is not last]
        for title, changes in (("One change after the other", followed), ("Each change alone", alone)):
            if changes:
                wholes = {"as it is": base} | {one.change: one.estimate for one in changes if one.estimate is not None}
                sections.append(section(f"{title} (a frame: what it saves)", stacks(wholes, edge(base))))
    else:
        sections += _sentences("No change that was tried saves memory.")
    nothing = [f"saves nothing: {', '.join(useless)}"] if useless else []
    sections += _sentences(*nothing, *impossible, *_assumed_card(base))
    return Document("advice", f"What saves memory in {base.model}", sections, advised.to_dict)


def _at_best(base: Estimate, best: Advice) -> Text:
    """What the step needs as it is and at best, and whether it fits then."""
    assert best.estimate is not None
    fit = best.estimate.fit
    words = "" if fit is None else f", {_on_card(fit)}"
    tone = "" if fit is None or base.failure else "yes" if fit.is_expected else "no"
    needs = f"From {format_bytes(base.device)} of device memory down to {format_bytes(best.estimate.device)}{words}"
    return Text([f"{needs}.", f"With {best.options}"], tone)


def stacks(wholes: Mapping[str, Estimate], room: tuple[str, int] | None) -> Stacks:
    """What the device memory is made of in each of several estimates, by their names."""
    parts = dict.fromkeys(name for one in wholes.values() for name in one.breakdown)
    rows = [
        Stack(name, [one.breakdown.get(part, 0) for part in parts], "" if one.fit is None else verdict_words(one.fit))
        for name, one in wholes.items()
    ]
    return Stacks([WORDS.get(part, part).partition(" (")[0] for part in parts], rows, room)


def _useless(one: Advice, base: Estimate) -> str:
    """A change that saves nothing; why, where 8-bit states turn out to be none."""
    assert one.estimate is not None
    states = [estimate.breakdown.get("OPTIMIZER_STATE", 0) for estimate in (base, one.estimate)]
    if not one.options.endswith("8bit") or states[0] > states[1]:
        return one.change
    return f"{one.change} (those of tensors below 4,096 values stay in fp32)"


def _change(one: Advice) -> tuple[Value, ...]:
    assert one.estimate is not None
    fit = one.estimate.fit
    return one.saved_bytes, one.estimate.device, "" if fit is None else verdict_words(fit), one.change, one.options
