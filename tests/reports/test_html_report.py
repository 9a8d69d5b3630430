"""The HTML report: one file that needs nothing else, with the figures of the estimate and nobody's markup."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphmem.estimate import Estimate, LiveStorage
from graphmem.reports import format_named
from graphmem.reports.document import Curve, Curves, Document, section
from graphmem.reports.estimate import WORDS
from graphmem.trace import Place
from graphmem.units import GIB, format_bytes
from tests import places
from tests.support.estimates import failing_estimate, inference_estimate, stepping_estimate, training_estimate

_VOID = {"meta"}


class _Page(HTMLParser):
    """Text, elements and attributes; fails where elements do not close in order."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data, self.script = "", ""
        self.feed(document)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append("json" if ("type", "application/json") in attrs else tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() in (tag, "json")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "json":
            self.data += data
        elif self.open and self.open[-1] == "script":
            self.script += data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)


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


def test_it_needs_nothing_from_anywhere_and_its_policy_allows_nothing_else() -> None:
    shown = stepping_estimate().report("html")
    page = _Page(shown)
    assert not {name for name, _ in page.attributes} & {"src", "href", "onload", "srcset"}
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("script") == 2
    assert not re.search(r"url\(|@import", shown)
    (policy,) = (value for name, value in page.attributes if name == "content" and "default-src" in (value or ""))
    allowed = b64encode(sha256(page.script.encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{allowed}';")


def test_the_script_is_built_of_its_sources_and_has_their_licences() -> None:
    script = files("graphmem.reports").joinpath("page", "page.js").read_text(encoding="utf-8")
    sources = places.ROOT / "page"
    if not sources.exists():
        pytest.skip("the installed package is tested, without the checkout")
    found = sha256()
    for path in sorted(path for path in sources.iterdir() if path.suffix in (".js", ".css", ".json")):
        found.update(f"{path.name}\n{path.read_text(encoding='utf-8')}\n".encode())
    assert f"of sources {found.hexdigest()}" in script, "built anew by: cd page && npm run build"
    locked = json.loads((sources / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name in ("uplot", "d3-hierarchy"):
        assert f"{name} {locked[f'node_modules/{name}']['version']}" in script
    assert script.count("Permission") == 2
    assert all(
        one.get("resolved", "https://registry.npmjs.org/").startswith("https://registry.npmjs.org/")
        for one in locked.values()
    )
    assert "</script" not in script.lower()


def test_what_cannot_be_shown_has_no_title() -> None:
    estimate = stepping_estimate()
    assert "Over the events" in estimate.report("html")
    without = replace(estimate, timeline=None)
    assert "Over the events" not in without.report("html")
    assert estimate.report(details=True).replace("Over the events of the run\n", "") == without.report(details=True)


def test_names_of_users_are_no_markup() -> None:
    bad = "</script><script>alert(1)</script><b>"
    estimate = replace(training_estimate(), model=bad, assumptions=(bad,), step=bad)
    page = _Page(estimate.report("html"))
    assert page.tags.count("script") == 2
    assert "b" not in page.tags
    assert json.loads(page.data)["model"] == bad


def _moments(estimate: Estimate) -> dict[str, Any]:
    """The tables of a page's moments, as its script reads them."""
    (packed,) = (value for name, value in _Page(estimate.report("html")).attributes if name == "data-tables")
    found: dict[str, Any] = json.loads(zlib.decompress(b64decode(packed or "")))
    for table in ("events", "storages"):
        for name in found["steps"]:
            if name in found[table]:
                found[table][name] = np.cumsum(found[table][name]).tolist()
    return found


def test_the_moments_are_those_of_the_trace() -> None:
    estimate = stepping_estimate()
    trace, timeline, found = estimate.trace, estimate.timeline, _moments(estimate)
    assert trace is not None
    assert timeline is not None
    assert found["events"]["allocated"] == timeline.allocated_bytes.tolist()
    assert found["events"]["reserved"] == timeline.reserved_bytes.tolist()
    assert found["events"]["operator"] == trace.event_operators.tolist()
    assert found["peak"] == estimate.moment.event
    rows = list(zip(*(found["storages"][name] for name in ("bytes", "category", "born", "lasts")), strict=True))
    for event in range(len(trace)):
        sizes = Counter[str]()
        for size, category, born, lasts in rows:
            if born <= event and (not lasts or event < born + lasts):
                sizes[found["categories"][category]] += size
        known = Counter[str]()
        for one in (trace.storages[index] for index in trace.live_at(event)):
            known[WORDS[one.category.name]] += one.bytes if one.place is Place.DEVICE else 0
        assert +sizes == +known
        assert sum(sizes.values()) == timeline.requested_bytes[event]


def test_the_segments_are_those_that_are_reserved_at_the_peak() -> None:
    estimate = stepping_estimate()
    timeline, event = estimate.timeline, estimate.moment.event
    assert timeline is not None
    blocks = [block for segment in _moments(estimate)["segments"] for block in segment["blocks"]]
    assert sum(map(abs, blocks)) == timeline.reserved_bytes[event]
    assert sum(block for block in blocks if block > 0) == timeline.allocated_bytes[event]
    assert min(blocks) < 0, "there are holes"


def test_the_edge_of_the_card_is_that_of_segments() -> None:
    estimate = stepping_estimate()
    assert estimate.fit is not None
    name, room = _moments(estimate)["edge"]
    assert (name, room + estimate.device - estimate.reserved) == (estimate.fit.gpu, estimate.fit.capacity_bytes)
    assert _moments(replace(estimate, fit=None))["edge"] is None


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=4000))
def test_no_peak_is_lost_in_the_plot_of_a_notebook(values: list[int]) -> None:
    shown = format_named("notebook").render(
        Document("toy", "toy", [section("", Curves([Curve("size", values)], "", "", "bytes"))], dict)
    )
    (points,) = re.findall(r'points="([^"]*)"', shown)
    ys = [float(point.split(",")[1]) for point in points.split()]
    assert len(ys) <= 960
    assert min(ys) == (2 if max(values) else 198)
    assert format_bytes(max(values)) in shown or not max(values)


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
    bundle = estimate._repr_mimebundle_()
    tables = bundle["text/html"]
    assert bundle["text/plain"] == str(estimate)
    assert _Page(tables).tags.count("table") >= 1
    assert "<html" not in tables


def test_a_parameter_is_named_as_the_model_names_it() -> None:
    estimate = training_estimate()
    parameter = LiveStorage(GIB, "PARAMETER", "wte.weight", "aten._to_copy.default", "", "model.py:1", "build")
    assert "_to_copy" not in replace(estimate, top=(parameter,)).report(details=True)
