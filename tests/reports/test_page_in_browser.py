"""The page in a real browser: what is shown there after clicks and keys is what the trace says. Skipped where there is
no Chromium with its driver, or no Selenium."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import graphmem
from graphmem.cli.main import cli
from graphmem.estimate import Estimate
from graphmem.reports import Answer, format_named
from graphmem.reports.document import Block, Choices, Column, Curve, Curves, Document, Points, Table, Text, section
from graphmem.reports.tree import owner
from graphmem.trace import Place, Trace
from graphmem.units import GIB, MIB, format_bytes
from tests.support import axe
from tests.support.estimates import stepping_estimate

webdriver = pytest.importorskip("selenium.webdriver")
_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (_BROWSER and _DRIVER), reason="there is no Chromium with its driver")

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1400,2000",
)  # fmt: skip
_SEARCH = "input[aria-label='Search flame graph and table']"


class _Browser:
    """A page that is open: its elements by CSS selector, and what they show."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def open(self, path: Path) -> None:
        self.driver.get(path.as_uri())
        self.until(lambda: self.run("const at = document.getElementById('moments'); return !at || at.dataset.ready"))

    def until(self, holds: Callable[[], object]) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 10, 0.02).until(lambda _: holds())

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def one(self, selector: str, text: str = "") -> Any:
        """The first element of a selector, with this text."""
        return next(one for one in self.all(selector) if text in one.text)

    def texts(self, selector: str) -> Sequence[str]:
        found: Sequence[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector
        )
        return found

    def press(self, element: Any, *keys: str) -> None:
        element.send_keys(*keys)

    @property
    def event(self) -> int:
        """The chosen moment."""
        return int(self.one("[role=slider]").get_attribute("aria-valuenow"))

    @property
    def seen(self) -> tuple[int, int]:
        """The first and the last event that the timeline shows."""
        at = self.one("[role=slider]")
        return int(at.get_attribute("data-from")), int(at.get_attribute("data-to"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Browser]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for flag in (*_FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_DRIVER))
    yield _Browser(driver)
    driver.quit()


@pytest.fixture(scope="module")
def estimate() -> Estimate:
    return stepping_estimate()


@pytest.fixture
def page(browser: _Browser, estimate: Estimate, tmp_path: Path) -> _Browser:
    """The page of the estimate, just opened."""
    path = tmp_path / "page.html"
    path.write_text(estimate.report("html"), encoding="utf-8")
    browser.open(path)
    return browser


def _live(trace: Trace, event: int) -> list[tuple[int, str, str]]:
    """(bytes, module, source) of the storages on the device at an event, by the trace."""
    makers, found = trace.births(), []
    for index in trace.live_at(event):
        storage, maker = trace.storages[index], trace.operators[makers[index]]
        if storage.place is Place.DEVICE:
            found.append((storage.bytes, owner(storage, maker), maker.source))
    return found


def _shows_moment(page: _Browser, estimate: Estimate, event: int) -> None:
    """The title, the levels and the table are those of the event."""
    trace, timeline = estimate.trace, estimate.timeline
    assert trace is not None
    assert timeline is not None
    live = _live(trace, event)
    title, *_ = page.texts("#moments h3")
    assert f"event {event:,}: {format_bytes(sum(one[0] for one in live))} requested in {len(live)} storages" in title
    readout = " ".join(page.texts(".readout p"))
    for level in ("requested", "allocated", "reserved"):
        assert f"{level} {format_bytes(int(getattr(timeline, f'{level}_bytes')[event]))}" in readout
    operator = trace.operators[int(trace.event_operators[event])]
    assert operator.name in readout
    assert operator.source in readout
    shown = page.texts("[role=tabpanel] tbody td:first-child")
    assert list(shown) == [format_bytes(size) for size, _, _ in sorted(live, reverse=True)]


def test_it_opens_at_the_peak_and_asks_nobody_for_anything(page: _Browser, estimate: Estimate) -> None:
    assert page.event == estimate.moment.event
    _shows_moment(page, estimate, estimate.moment.event)
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.driver.get_log("browser") == []
    blocked = "const done = arguments[0]; fetch('https://example.org/').then(() => done(false), () => done(true))"
    assert page.driver.execute_async_script(blocked)
    assert any("Content Security Policy" in line["message"] for line in page.driver.get_log("browser"))


def test_the_waterfall_ends_where_the_sum_does(page: _Browser, estimate: Estimate) -> None:
    assert estimate.fit is not None
    bars = page.run(
        "return [...document.querySelectorAll('td.bar rect')].map(r => [r.x.baseVal.value, r.width.baseVal.value])"
    )
    *parts, (_, whole) = bars
    assert np.allclose([x for x, _ in parts], [0, *np.cumsum([width for _, width in parts])[:-1]], atol=0.1)
    assert abs(sum(width for _, width in parts) - whole) < 0.1


def test_the_segments_at_the_peak_sum_up(page: _Browser, estimate: Estimate) -> None:
    assert estimate.timeline is not None
    reserved, allocated = (
        format_bytes(int(level[estimate.moment.event]))
        for level in (estimate.timeline.reserved_bytes, estimate.timeline.allocated_bytes)
    )
    (said,) = page.texts(".segments > p")
    assert said.startswith(f"{reserved} reserved in {len(page.all('.segments tbody tr'))} segments")
    assert f"{allocated} are held" in said


def test_keys_and_clicks_choose_a_moment(page: _Browser, estimate: Estimate) -> None:
    from selenium.webdriver import ActionChains, Keys

    slider, last = page.one("[role=slider]"), len(estimate.trace or ()) - 1
    page.press(slider, Keys.END)
    assert page.event == last
    page.press(slider, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert page.event == last - 2
    _shows_moment(page, estimate, last - 2)
    page.press(slider, "p")
    assert page.event == estimate.moment.event
    ActionChains(page.driver).move_to_element_with_offset(page.one("[role=slider] .u-over"), 20, 0).click().perform()
    assert page.event != estimate.moment.event
    _shows_moment(page, estimate, page.event)
    page.one("button", "Peak").click()
    assert page.event == estimate.moment.event


def test_the_timeline_zooms_pans_and_is_brushed(page: _Browser, estimate: Estimate) -> None:
    from selenium.webdriver import ActionChains, Keys

    slider, whole = page.one("[role=slider]"), (0, len(estimate.trace or ()) - 1)
    assert page.seen == whole
    page.press(slider, Keys.HOME, "+", "+")
    near = page.seen
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 4, abs=2)
    page.press(slider, Keys.PAGE_DOWN)
    assert page.seen[0] > near[0]
    assert page.seen[1] - page.seen[0] == pytest.approx(near[1] - near[0], abs=1)
    page.press(slider, "0")
    assert page.seen == whole
    chosen, plot = page.event, page.one("[role=slider] .u-over")
    ActionChains(page.driver).move_to_element_with_offset(plot, -200, 0).click_and_hold().move_by_offset(
        300, 0
    ).release().perform()
    assert whole[0] < page.seen[0] < page.seen[1] < whole[1]
    assert page.event == chosen, "to drag is not to choose"
    page.one("button", "All").click()
    assert page.seen == whole
    ActionChains(page.driver).move_to_element_with_offset(
        page.one(".strip .u-over"), 0, 0
    ).click_and_hold().move_by_offset(200, 0).release().perform()
    assert page.seen[0] == pytest.approx(whole[1] / 2, abs=1)


def test_the_stack_is_divided_by_module_and_by_phase(page: _Browser, estimate: Estimate) -> None:
    choose = "const at = arguments[0]; at.value = arguments[1]; at.dispatchEvent(new Event('change'))"
    for by, known in (("module", "layers.3"), ("phase", "made in build"), ("category", "parameters")):
        page.run(choose, page.one("#moments select"), by)
        keys = dict(re.findall(r"(.+) ([\d.]+) (?:MiB|B)$", text)[0] for text in page.texts(".legend li"))
        assert known in keys
        layers = sum(float(size) for name, size in keys.items() if not name.endswith("(line)"))
        assert layers == pytest.approx(estimate.requested / MIB, abs=0.05)


def test_the_flame_graph_looks_closer_and_is_searched(page: _Browser, estimate: Estimate) -> None:
    from selenium.webdriver import Keys

    assert estimate.trace is not None
    live = _live(estimate.trace, estimate.moment.event)
    whole, layer = (sum(size for size, module, _ in live if of in (module, "")) for of in ("", "layers.2"))
    page.one(".flame button[aria-label^='2:']").click()
    said = page.one("#moments .said[aria-live]")
    assert f"layers / 2: {format_bytes(layer)}, {100 * layer / whole:.1f} %" in said.text
    page.press(page.one(".flame button[tabindex='0']"), Keys.ESCAPE)
    assert said.text.startswith(f"layers: {format_bytes(whole)}")
    page.press(page.driver.switch_to.active_element, Keys.ARROW_DOWN)
    assert page.driver.switch_to.active_element.get_attribute("aria-label").startswith("3:")
    page.one("[role=tab]", "source line").click()
    page.press(page.one(_SEARCH), "model.py:12")
    found = sum(size for size, _, source in live if source == "model.py:12")
    assert f"found {format_bytes(found)}" in said.text
    assert len(page.all(".flame .hit")) == 1
    assert len(page.all("[role=tabpanel] tbody tr")) == sum(source == "model.py:12" for _, _, source in live)


def test_tables_of_the_moment_are_sorted(page: _Browser) -> None:
    page.one("[role=tab]", "modules").click()
    head = page.one("[role=tabpanel] .sort", "module")
    first = [tuple(page.texts("[role=tabpanel] tbody td:first-child"))]
    for _ in range(3):
        head.click()
        first.append(tuple(page.texts("[role=tabpanel] tbody td:first-child")))
    largest, up, down, again = first
    assert up == tuple(sorted(largest))
    assert down == up[::-1]
    assert again == largest


@contextmanager
def _shown_at(page: _Browser, width: int, scheme: str = "light") -> Iterator[None]:
    """A window of this width, for readers of light or of dark pages."""
    run = page.driver.execute_cdp_cmd
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
    try:
        run("Emulation.setDeviceMetricsOverride", size)
        run("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        yield
    finally:
        run("Emulation.clearDeviceMetricsOverride", {})
        run("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page: _Browser, width: int, scheme: str) -> None:
    with _shown_at(page, width, scheme):
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off"
        assert axe.serious(page.driver) == []


def test_a_row_that_is_wider_than_a_phone_is_folded(browser: _Browser, tmp_path: Path) -> None:
    columns = [Column(name, "bytes") for name in ("saves", "before", "after", "needs", "spare")]
    rows = [(1000 * MIB,) * 5] * 2
    path = tmp_path / "table.html"
    document = Document("toy", "toy", [section("wide", Table(columns, rows))], dict)
    path.write_text(format_named("html").render(document), encoding="utf-8")
    with _shown_at(browser, 390):
        browser.open(path)
        assert browser.run("return [...document.querySelectorAll('.wide')].every(e => e.scrollWidth <= e.clientWidth)")
        assert browser.run("return document.querySelector('td.n').dataset.title") == "saves"
        assert axe.serious(browser.driver) == []


def test_axe_finds_nothing_serious_in_pictures(browser: _Browser, tmp_path: Path) -> None:
    axes = Column("memory", "bytes"), Column("time", "seconds")
    points = Points(axes, [("fits", [(2 * MIB, 0.1, "a")]), ("does not", [(9 * MIB, 0, "b")])], (4 * MIB, "end"), "a")
    powers = Curves([Curve("at once", [900, 9])], "", "", "figure", over=([1, 512], "length"), doubling=True)
    path = tmp_path / "answer.html"
    document = Document("toy", "toy", [section("pictures", points, powers)], dict)
    path.write_text(format_named("html").render(document), encoding="utf-8")
    browser.open(path)
    assert axe.serious(browser.driver) == []


def test_cases_are_chosen_by_sliders_and_lists(browser: _Browser, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    pairs = [(size, kind) for size in ("1", "2", "1,024") for kind in ("bf16", "off")]
    cases: dict[tuple[str, ...], list[Block]] = {(size, kind): [Text([f"{kind} at {size}"])] for size, kind in pairs}
    del cases["1,024", "off"]
    block = Choices([("batch", ["1", "2", "1,024"]), ("amp", ["bf16", "off"])], cases, ("2", "bf16"))
    path = tmp_path / "answer.html"
    path.write_text(format_named("html").render(Document("toy", "toy", [section("", block)], dict)), encoding="utf-8")
    browser.open(path)
    seen = lambda: list(browser.texts(".choices > :not([hidden], .tools)"))  # noqa: E731
    slider = browser.one("input[type=range]")
    assert (seen(), slider.get_attribute("aria-valuetext")) == (["bf16 at 2"], "2")
    browser.press(slider, Keys.ARROW_RIGHT)
    assert (seen(), slider.get_attribute("aria-valuetext")) == (["bf16 at 1,024"], "1,024")
    browser.run("const a = arguments[0]; a.value = 'off'; a.dispatchEvent(new Event('change'))", browser.one("select"))
    assert seen() == ["This combination was not analysed."]
    browser.press(slider, Keys.HOME)
    assert seen() == ["off at 1"]


def _opened(browser: _Browser, tmp_path: Path, answer: Answer) -> Any:
    """The JSON document of an answer whose page is open: what the page itself embeds."""
    path = tmp_path / "answer.html"
    answer.save(path)
    browser.open(path)
    return json.loads(browser.run("return document.querySelector('script[type=\"application/json\"]').textContent"))


def _told_by_keys(browser: _Browser, figure: str) -> list[str]:
    """What a picture tells of each of its places, by keys from the first to the last; axe finds nothing."""
    from selenium.webdriver import Keys

    assert axe.serious(browser.driver) == []
    picture = browser.one(f"{figure} [role=slider]")
    browser.press(picture, Keys.HOME)
    told = []
    for _ in range(int(picture.get_attribute("aria-valuemax")) + 1):
        told.append(picture.get_attribute("aria-valuetext"))
        assert browser.texts(f"{figure} .said")[0] == told[-1]
        browser.press(picture, Keys.ARROW_RIGHT)
    return told


def test_a_serving_page_tells_the_requests_at_each_length(browser: _Browser, tmp_path: Path) -> None:
    report = graphmem.serve("mistralai/Mistral-7B-v0.1", gpu="A100-80GB", advice=False)
    document = _opened(browser, tmp_path, report)
    most, rows = document["settings"]["max_model_len"], document["by_length"]
    assert [row["tokens"] for row in rows] == [256 << power for power in range(8)]
    assert rows[-1] == {"tokens": most, "requests": document["kv_cache"]["concurrency"]}
    again = graphmem.serve("mistralai/Mistral-7B-v0.1", gpu="A100-80GB", advice=False, lengths={50: 1024, 99: 1024})
    assert rows[2]["requests"] == again.concurrency_at_lengths
    told = _told_by_keys(browser, "figure.curves")
    shown = [tuple(float(figure.replace(",", "")) for figure in re.findall(r"[\d,.]*\d", text)) for text in told]
    assert shown == [(row["tokens"], round(row["requests"], 2)) for row in rows]


def test_a_plan_page_marks_the_chosen_layout_among_all(browser: _Browser, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model, batch = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 4)), torch.empty(1, 512)
    ask: dict[str, Any] = {"gpus": "4xA100-80GB", "global_batch": 8, "frameworks": ["ddp"], "confirm": 1}
    document = _opened(browser, tmp_path, graphmem.plan(model, batch, advice=False, **ask))
    layouts = [*document["fitting"], *document["others"]]
    expected = []
    for one in layouts:
        size = one["captured"]["fit"]["device_bytes"] if one["captured"] else one["bound_bytes"]
        chosen = one == document["fitting"][0]
        group = "fits (chosen)" if chosen else "a bound, not captured"
        seconds = sum(one[f"{why}_seconds"] for why in ("sending", "recomputing", "waiting"))
        expected.append((f"{one['words']}: ", size, seconds, group))
    told = _told_by_keys(browser, "figure.points")
    assert len(told) == len(layouts)
    for (words, size, seconds, group), text in zip(sorted(expected, key=lambda one: one[1:3]), told, strict=True):
        assert text.startswith(words)
        assert text.endswith(group)
        size_told, unit, seconds_told = re.findall(r": ([\d.,]+) (\w+), ([\d.]+) s, ", text)[0]
        assert float(size_told) == pytest.approx(size / {"GiB": GIB, "MiB": MIB}[unit], abs=0.006)
        assert float(seconds_told) == pytest.approx(seconds, rel=0.005)


def test_a_page_of_advice_draws_what_each_change_leaves(browser: _Browser, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model, batch = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.Linear(2048, 64)), torch.empty(4096, 512)
    document = _opened(browser, tmp_path, graphmem.advise(model, batch, device="T4", steps=True))
    base, saving = document["base"], [one for one in document["advice"] if (one["saved_bytes"] or 0) > 0]
    assert len(saving) > 3
    assert sum(base["breakdown"].values()) == base["peak"]["device_bytes"]
    steps, alone = document["steps"], [one for one in saving if "together" not in one["change"]]
    lines = [f"{one['change']}: {format_bytes(one['device_bytes'])} (fits), {format_bytes(one['saved_bytes'])} less "
             "than as it is" for one in (*steps, *alone)]  # fmt: skip
    assert [one.partition(";")[0] for one in browser.run(
        "return [...document.querySelectorAll('tr[data-said]')].map(row => row.dataset.said)"
    ) if not one.startswith("as it is")] == lines  # fmt: skip
    assert steps[-1]["change"].startswith("and ")
    saving = steps
    whole, told = format_bytes(base["peak"]["device_bytes"]), _told_by_keys(browser, "figure.stacks")
    parts = re.findall(r"([a-z][a-z ]+) [\d.]+ \w+", told[0].partition("; ")[2])
    assert told[0].startswith(f"as it is: {whole} (fits); parameters {format_bytes(base['breakdown']['PARAMETER'])}, ")
    assert set(parts) <= set(browser.texts("figure.stacks .legend li"))
    widths = browser.run(
        "return [...document.querySelector('.stacks').querySelectorAll('tr')]"
        ".map(row => [...row.querySelectorAll('rect')]"
        ".map(one => [one.x.baseVal.value, one.width.baseVal.value, one.getAttribute('fill')]))")  # fmt: skip
    edge, scale = (
        browser.run("return document.querySelector('.edge').style.left"),
        base["fits"]["capacity_bytes"] * 1.01,
    )
    assert edge == f"{100 / 1.01:.2f}%"
    for row, size in zip(widths, [0, *(one["saved_bytes"] for one in saving)], strict=True):
        assert sum(width for _, width, _ in row) == pytest.approx(1000 * base["peak"]["device_bytes"] / scale, abs=0.1)
        assert sum(width for _, width, fill in row if fill == "none") == pytest.approx(1000 * size / scale, abs=0.1)
    browser.one(".stacks tr:nth-child(3)").click()
    assert browser.texts("figure.stacks .said")[0] == told[2]


def test_a_sweep_is_a_heat_map_for_each_other_setting_and_its_cells_choose(browser: _Browser, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model, batch = torch.nn.Linear(1024, 1024), torch.empty(1, 1024)
    vary: dict[str, Any] = {"batch": [1, 500_000, 1_500_000], "device": ["A10G", "T4-16GB"], "amp": [None, "bf16"]}
    document = _opened(browser, tmp_path, graphmem.sweep(model, batch, vary=vary))
    assert axe.serious(browser.driver) == []
    assert list(browser.texts(".heat caption")) == ["amp off", "amp bf16"]
    fits = set()
    for row in document["rows"]:
        settings, found = row["settings"], row["estimate"]
        amp = "off" if settings["amp"] is None else "bf16"
        case = [str(settings["batch"]), settings["device"], amp]
        at = json.dumps(case, separators=(",", ":"))
        text, colour, title = browser.run(
            "const [at] = [...document.querySelectorAll('.heat td')].filter(a => a.dataset.case === arguments[0]);"
            "return [at.innerText, at.style.background, at.title]", at)  # fmt: skip
        fit, size = found["fits"], found["peak"]["device_bytes"]
        full = size / fit["capacity_bytes"]
        cross = "" if fit["fits"] else "\N{MULTIPLICATION X} "
        assert text.split("\n") == [f"{cross}{format_bytes(size)}", f"{100 * full:.0f} %"]
        assert float(colour.rpartition(",")[2].strip(" )")) == pytest.approx(0.55 * min(1, full), abs=0.006)
        assert title.startswith(f"gpu {case[1]}, batch {case[0]}: {'fits' if fit['fits'] else 'DOES NOT FIT'}")
        fits.add(fit["fits"])
    assert fits == {True, False}
    cell = next(one for one in browser.all(".heat [data-case] button") if "\N{MULTIPLICATION X}" in one.text)
    cell.click()
    (verdict,) = browser.texts(".choices > :not([hidden]) .verdict p:first-child")
    assert f"{cell.text.split()[1]} GiB of device memory" in verdict
    assert verdict.startswith("DOES NOT FIT T4-16GB")
    assert browser.one("select").get_attribute("value") == "T4-16GB"


def test_the_page_of_an_analysis_has_other_batches(browser: _Browser, tmp_path: Path) -> None:
    from selenium.webdriver import Keys

    pytest.importorskip("torch")
    program, page = tmp_path / "model.py", tmp_path / "page.html"
    program.write_text(
        "import torch\ndef build(batch):\n    return torch.nn.Linear(512, 512), torch.empty(batch, 512)\n"
    )
    asked = ["analyze", f"{program}:build", "-b", "64", "--gpu", "T4", "--html", str(page)]
    assert CliRunner().invoke(cli, asked).exit_code == 0
    browser.open(page)
    slider = browser.one("input[type=range]")
    told = []
    for key in (Keys.NULL, Keys.HOME, Keys.END):
        browser.press(slider, key)
        value = int(slider.get_attribute("aria-valuetext"))
        document = graphmem.analyze(f"{program}:build", batch=value, device="T4").to_dict()
        (verdict,) = browser.texts(".choices > :not([hidden]) .verdict p:first-child")
        how = "analysed" if value == 64 else "by template"
        needs = format_bytes(document["peak"]["device_bytes"])
        assert verdict == f"Fits T4-16GB: {needs} of device memory ({how})."
        shown = browser.texts(".choices > :not([hidden]) tr:last-child td.exact")
        assert shown == [f"{sum(document['breakdown'].values()):,} B"]
        told.append(value)
    assert told[1] < told[0] == 64 < told[2]


def test_a_comparison_page_says_what_grew(browser: _Browser, tmp_path: Path, estimate: Estimate) -> None:
    assert estimate.trace is not None
    grows = [replace(one, bytes=3 * one.bytes) if one.label == "layers.2.weight" else one
             for one in estimate.trace.storages]  # fmt: skip
    after = graphmem.replay_trace(replace(estimate.trace, storages=tuple(grows)), device="T4")
    before = graphmem.replay_trace(estimate.trace, device="T4")
    document = _opened(browser, tmp_path, graphmem.compare(before, after))
    assert before.fit is not None
    assert document["card"] == {"gpu": before.gpu, "bytes": before.fit.capacity_bytes}
    assert browser.all("figure.stacks .edge")
    assert f"The line is where {before.gpu} ends." in " ".join(
        browser.texts("figure.stacks figcaption, figure.stacks p")
    )
    shown = [tuple(row) for row in browser.run(
        "return [...document.querySelectorAll('section:nth-last-of-type(-n+2) tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))")]  # fmt: skip
    assert shown == [
        (name, *(format_bytes(row[when]) for when in ("before", "after")), f"+{format_bytes(row['change'])}")
        for by in ("modules", "lines") for name, row in document[by].items() if row["change"]
    ]  # fmt: skip
    assert shown[0][0] == "layers.2"
    parts = document["breakdown"]
    for when, told in zip(("before", "after"), _told_by_keys(browser, "figure.stacks"), strict=True):
        assert told.startswith(f"{when}: {format_bytes(sum(row[when] for row in parts.values()))}")
        assert f"parameters {format_bytes(parts['PARAMETER'][when])}, " in told
    bars = browser.run(
        "return [...document.querySelector('section:last-of-type tbody tr').cells].slice(1)"
        ".map(cell => parseFloat(cell.style.getPropertyValue('--part')))")  # fmt: skip
    row = next(iter(document["lines"].values()))
    most = max(size for one in document["lines"].values() for size in (one["before"], one["after"]))
    assert bars == pytest.approx([100 * row["before"] / most, 100 * row["after"] / most, 100], abs=0.06)


def test_a_notebook_shows_an_estimate_to_look_around_in(browser: _Browser, tmp_path: Path, estimate: Estimate) -> None:
    from selenium.webdriver import Keys

    shown, plotted = (one._repr_mimebundle_()["text/html"] for one in (estimate, estimate.plot()))
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><html lang=en><title>cells</title>{shown}{plotted}</html>", encoding="utf-8")
    for number in range(2):
        browser.driver.get(path.as_uri())
        frame = browser.all("iframe")[number]
        assert browser.run("try { return !arguments[0].contentDocument } catch { return true }", frame), "apart"
        browser.driver.switch_to.frame(frame)
        browser.until(lambda: browser.run("return document.getElementById('moments').dataset.ready"))
        _shows_moment(browser, estimate, estimate.moment.event)
        browser.press(browser.one("[role=slider]"), Keys.HOME)
        _shows_moment(browser, estimate, 0)
        browser.driver.switch_to.default_content()
    written = tmp_path / "run.html"
    estimate.plot().save(written)
    browser.open(written)
    _shows_moment(browser, estimate, estimate.moment.event)


def test_other_answers_have_tables_to_sort_and_curves(browser: _Browser, tmp_path: Path) -> None:
    rows = [(f"row {number}", size) for number, size in enumerate((5, 1 << 31, 700, 1 << 20, *range(10)))]
    curve = Curves([Curve("device memory", [1 * MIB, 2 * MIB, 5 * MIB])], "", "", "bytes", over=([1, 2, 4], "batch"))
    parts = Table([Column("name"), Column("size", "bytes")], rows), curve
    path = tmp_path / "answer.html"
    path.write_text(format_named("html").render(Document("toy", "toy", [section("", *parts)], dict)), encoding="utf-8")
    browser.open(path)
    browser.one(".sort", "size").click()
    assert list(browser.texts("tbody td:first-child"))[:3] == ["row 1", "row 3", "row 2"]
    browser.press(browser.one("input[type=search]"), "row 1")
    assert browser.run("return [...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).length") == 5
    assert browser.one("figure [role=slider]").get_attribute("aria-label") == "device memory up to 5 MiB"
    assert len(browser.all("figure canvas")) == 1
