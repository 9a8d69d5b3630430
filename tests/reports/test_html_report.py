"""The HTML report: one file that needs nothing else, with the figures of the estimate and nobody's markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.estimate import Estimate, LiveStorage, Timeline
from graphmem.units import GIB, format_bytes
from tests.support.estimates import failing_estimate, inference_estimate, training_estimate

_VOID = {"meta", "line", "rect", "polyline"}


class _Page(HTMLParser):
    """Text, elements and attributes; fails where elements do not close in order."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data = ""
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.feed(document)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        known = dict(attrs)
        if tag == "polyline":
            points = (known["points"] or "").split()
            self.curves[known["id"] or ""] = [(float(x), float(y)) for x, y in (point.split(",") for point in points)]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data += data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)


def _with_timeline(values: list[int]) -> Estimate:
    array = np.array(values, dtype=np.int64)
    return replace(training_estimate(), timeline=Timeline(array, array, array))


@pytest.mark.parametrize("estimate", [training_estimate(), failing_estimate(), inference_estimate()])
def test_it_holds_the_figures_and_the_json_report(estimate: Estimate) -> None:
    page = _Page(estimate.report("html"))
    text = " ".join(page.text)
    for level in ("requested", "allocated", "reserved", "device"):
        assert format_bytes(getattr(estimate, level)) in text
    for count in estimate.breakdown.values():
        assert not count or f"{count:,} B" in text
    for line in estimate.assumptions:
        assert line in text
    assert json.loads(page.data) == json.loads(estimate.to_json())
    if estimate.fit is not None:
        assert ("DOES NOT FIT" in text) is not estimate.fit.fits


def test_it_needs_nothing_from_anywhere() -> None:
    page = _Page(_with_timeline([1, 5, 2]).report("html"))
    assert not {name for name, _ in page.attributes} & {"src", "href", "onload", "srcset"}
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert not re.search(r"url\(|@import", training_estimate().report("html"))


def test_what_cannot_be_shown_has_no_title() -> None:
    estimate = _with_timeline([1, 5, 2])
    assert "Over the events" in estimate.report("html")
    without = replace(estimate, timeline=None)
    assert estimate.report(details=True) == without.report(details=True)
    assert estimate.report("markdown", details=True) == without.report("markdown", details=True)


def test_names_of_users_are_no_markup() -> None:
    bad = "</script><script>alert(1)</script><b>"
    estimate = replace(training_estimate(), model=bad, assumptions=(bad,), step=bad)
    page = _Page(estimate.report("html"))
    assert page.tags.count("script") == 1
    assert "b" not in page.tags
    assert json.loads(page.data)["model"] == bad


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4000))
def test_no_peak_is_lost_in_the_plot(values: list[int]) -> None:
    page = _Page(replace(_with_timeline(values), fit=None).report("html"))
    curve = page.curves["reserved"]
    assert len(curve) <= 960
    highest = min(y for _, y in curve)
    assert highest == (12 if max(values) else 276)
    assert all(80 <= x <= 960 for x, _ in curve)


def test_the_end_of_the_card_is_drawn_where_it_is_in_sight() -> None:
    estimate = _with_timeline([GIB, 3 * GIB])
    assert estimate.fit is not None
    outside = estimate.device - estimate.reserved

    def on(capacity: int) -> str:
        assert estimate.fit is not None
        return replace(estimate, fit=replace(estimate.fit, capacity_bytes=capacity + outside)).report("html")

    assert 'id="capacity"' in on(4 * GIB)
    assert "the card ends for them, 4.00 GiB" in on(4 * GIB)
    far = on(80 * GIB)
    assert 'id="capacity"' not in far
    assert "far above: where the card ends for them, 80.00 GiB" in far


def test_a_phone_shows_the_page_at_its_own_width() -> None:
    page = training_estimate().report("html")
    assert '<meta name="viewport" content="width=device-width' in page
    assert page.count("<table>") == page.count('<div class="wide"><table>')


def test_a_report_over_its_budget_says_so_first() -> None:
    estimate = training_estimate()
    over = estimate.device - 1
    assert estimate.report(details=True, budget_bytes=over).startswith("OVER THE BUDGET")
    assert estimate.report(budget_bytes=over).splitlines()[2].startswith("OVER THE BUDGET")
    assert "OVER THE BUDGET" in estimate.report("html", budget_bytes=over).split("<h2>")[0]
    assert estimate.report(details=True, budget_bytes=estimate.device).startswith("Within the budget of")
    assert "budget" not in estimate.report().lower()


def test_printing_is_a_screen_and_a_notebook_shows_tables() -> None:
    estimate = training_estimate()
    shown = str(estimate).splitlines()
    assert len(shown) <= 24
    assert str(estimate) == estimate.report()
    assert "--details" in shown[-1]
    assert len(repr(estimate)) < 200
    tables = estimate._repr_html_()
    assert _Page(tables).tags.count("table") >= 1
    assert "<html" not in tables


def test_a_parameter_is_named_as_the_model_names_it() -> None:
    estimate = training_estimate()
    parameter = LiveStorage(GIB, "PARAMETER", "wte.weight", "aten._to_copy.default", "", "model.py:1", "build")
    assert "_to_copy" not in replace(estimate, top=(parameter,)).report(details=True)
