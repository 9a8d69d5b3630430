"""The answers of several analyses, each as some lines, a table and remarks: for a terminal, a file or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from graphmem.estimate import LEVELS, Fit
from graphmem.planning.advise import Advice, Advised
from graphmem.planning.fit import Largest
from graphmem.planning.sweep import Row, words_of
from graphmem.reports import html, pages
from graphmem.reports.tables import assumed_card, plain_table, verdict_words, wrapped
from graphmem.reports.text import clean
from graphmem.units import format_bytes


@dataclass(frozen=True)
class Sheet:
    """``about``: (name, value) of what was asked; ``answer``: sentences; a table, of which a title that ends with ``>``
    stands over figures; ``remarks``: (title, lines), without a title where the lines are sentences."""

    about: Sequence[tuple[str, str]]
    answer: Sequence[str]
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[tuple[str, Sequence[str]]]

    def text(self) -> str:
        """In at most 80 columns but for the table; ends in a newline."""
        head = [f"{name:<8} {value}" for name, value in self.about]
        blocks = ["\n".join(head)] if head else []
        if self.answer:
            blocks.append("\n".join(part for line in self.answer for part in wrapped(line, "")))
        if self.rows:
            blocks.append(plain_table(self.titles, self.rows).rstrip("\n"))
        for title, lines in self.remarks:
            indents = ("  - ", "    ") if title else ("", "  ")
            blocks.append("\n".join([*filter(None, [title]), *(p for one in lines for p in wrapped(one, *indents))]))
        return "\n\n".join(blocks) + "\n"

    def html(self) -> str:
        """For a notebook."""
        titles = [f">{title[:-1]}" if title.endswith(">") else title for title in self.titles]
        about = html.rows_of((), [(name, value) for name, value in self.about]) if self.about else ""
        answer = "".join(f"<p>{escape(line)}</p>" for line in self.answer)
        remarks = "".join(
            f"<p>{escape(title)}</p><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
            for title, lines in self.remarks
        )
        return pages.notebook(f"{about}{answer}{html.rows_of(titles, self.rows) if self.rows else ''}{remarks}")


# --- the largest size -------------------------------------------------------------------------------------------------


def of_fit(found: Largest) -> Sheet:
    """The sheet of ``fit``: the answer in one line, the two sizes that prove it, the safe one, and others tried."""
    name, shown = found.name, found.estimate or found.above
    assert shown is not None
    assert shown.fit is not None
    answer = [f"DOES NOT FIT: not even {name} {found.above_value:,} fits."]
    if found.value:
        answer = [f"The largest {name} that fits is {found.value:,}.", _margin(found, name)]
    if found.above is None:
        answer.append(f"The search ended there: {found.stopped_by}.")
    shown_rows = {found.safe_value: found.safe, found.value: found.estimate, found.above_value: found.above}
    rows = [
        (f"{value:,}", format_bytes(estimate.fit.device_bytes), *_verdict(estimate.fit, estimate is found.above))
        for value, estimate in shown_rows.items()
        if estimate is not None and estimate.fit is not None
    ]
    tried = ", ".join(f"{value:,}" for value, _ in found.tried)
    return Sheet(
        (("model", shown.model), ("step", shown.step), _card(shown.fit)),
        answer,
        (f"{name}>", "device memory>", "of the card>", ""),
        rows,
        _remarks(("", [f"analysed: {tried}"]), ("Assumed", [clean(line) for line in shown.assumptions])),
    )


def _card(fit: Fit) -> tuple[str, str]:
    return "gpu", f"{fit.gpu}, {format_bytes(fit.capacity_bytes)}"


def _remarks(*told: tuple[str, Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    return [(title, lines) for title, lines in told if lines]


def _margin(found: Largest, name: str) -> str:
    """The memory that the largest size leaves on the card, how far that is known, and the size that is safe."""
    assert found.estimate is not None
    assert found.estimate.fit is not None
    fit, doubts = found.estimate.fit, found.estimate.doubts
    spare = f"It leaves {format_bytes(fit.margin_bytes)}"
    if not doubts.about("device"):
        return f"{spare}."
    words = "safe" if fit.margin is None else f"safe at p{100 * fit.margin:g}"
    less, more = doubts.most("device"), doubts.least("device")
    if less is None:
        causes = ", ".join(cause.name for cause in doubts.causes if cause.spread("device").above)
        return f"{spare}; which {name} is {words} cannot be told, as nothing bounds: {causes}."
    known = f"{spare}, known to within {format_bytes(less)} less"
    known += " and any more" if more is None else f" and {format_bytes(-more)} more"
    if found.safe_value == found.value:
        return f"{known}: it is {words}."
    return f"{known}: {name} {found.safe_value:,} is {words}." if found.safe else f"{known}: no {name} is {words}."


def _verdict(fit: Fit, is_above: bool) -> tuple[str, str]:
    """(what is spare or missing, whether it fits) of one row: the two never contradict each other."""
    spare = f"{format_bytes(abs(fit.margin_bytes))} {'spare' if fit.margin_bytes >= 0 else 'missing'}"
    words = verdict_words(fit)
    if fit.needs_cache_flush:
        words += " (cached segments given back)"
    if is_above and fit.fits:
        words = "leaves less than --spare"
    return spare, words


# --- every combination ------------------------------------------------------------------------------------------------


def of_sweep(rows: Sequence[Row]) -> Sheet:
    """A row for every combination; those that could not be analysed have their reason below."""
    settings = [words_of(row.settings) for row in rows]
    lines = [[*words.values(), *_outcome(row)] for words, row in zip(settings, rows, strict=True)]
    errors = [
        f"{' '.join(words.values())}: {row.error}" for words, row in zip(settings, rows, strict=True) if row.error
    ]
    notes = assumed_card(next((row.estimate for row in rows if row.estimate), None))
    titles = [*(f"{name}>" for name in settings[0]), *(f"{level}>" for level in LEVELS[1:]), ""]
    return Sheet((), (), titles, lines, _remarks(("", [*map(clean, errors), *notes])))


def _outcome(row: Row) -> list[str]:
    estimate = row.estimate
    if estimate is None:
        return ["-", "-", "-", "error"]
    fit = estimate.fit
    verdict = "" if fit is None else f"{_loud(fit)} {fit.gpu}"
    return [*map(format_bytes, (estimate.allocated, estimate.reserved, estimate.device)), verdict]


def _loud(fit: Fit) -> str:
    return verdict_words(fit).replace("does not fit", "DOES NOT FIT")


# --- what saves memory ------------------------------------------------------------------------------------------------


def of_advice(advised: Advised) -> Sheet:
    """A row for every change that saves memory; those that do not, and those that are not possible, below."""
    base = advised.base
    saving = [one for one in advised.advice if one.estimate is not None and one.saved_bytes > 0]
    useless = [one.change for one in advised.advice if one.estimate is not None and one.saved_bytes <= 0]
    impossible = [f"not possible: {one.change}: {clean(one.reason)}" for one in advised.advice if one.estimate is None]
    verdict = "" if base.fit is None else f", {_loud(base.fit)} {base.fit.gpu}"
    return Sheet(
        (
            ("model", base.model),
            ("step", base.step),
            ("as it is", f"{format_bytes(base.device)} of device memory{verdict}"),
        ),
        () if saving else ("No change that was tried saves memory.",),
        ("saves>", "needs>", "", "change", "options"),
        [_change(one) for one in saving],
        _remarks(
            ("", [f"saves nothing: {', '.join(useless)}"] if useless else []),
            ("", [*impossible, *assumed_card(base)]),
        ),
    )


def _change(one: Advice) -> tuple[str, ...]:
    assert one.estimate is not None
    fit = one.estimate.fit
    needs = format_bytes(one.estimate.device)
    return format_bytes(one.saved_bytes), needs, "" if fit is None else verdict_words(fit), one.change, one.options


def advice_text(advised: Advised) -> str:
    """For a terminal, where changes and their options are too long for columns."""
    sheet = of_advice(advised)
    changes = []
    for saved, needs, verdict, change, options in sheet.rows:
        told = f"saves {saved} (needs {needs}{f', {verdict}' if verdict else ''}): {change}"
        changes += [*wrapped(told, ""), *wrapped(options, "    ")]
    head = Sheet(sheet.about, sheet.answer, (), (), ()).text()
    remarks = Sheet((), (), (), (), sheet.remarks).text() if sheet.remarks else ""
    return "\n".join(block for block in (head, "".join(f"{line}\n" for line in changes), remarks) if block)
