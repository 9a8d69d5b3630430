"""What every report format keeps, graphmem's own and one of another package: the one of docs/adding/report.md."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphmem import plugins
from graphmem.cli.main import cli
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.reports import FORMATS, Format, format_named, format_of_file
from graphmem.reports.document import (
    UNITS,
    Code,
    Column,
    Curve,
    Curves,
    Document,
    Facts,
    Items,
    Moments,
    Shares,
    Table,
    Text,
    clean,
    section,
)
from graphmem.reports.formats import text
from tests import places
from tests.support import onnx_samples
from tests.support.estimates import failing_estimate, inference_estimate, training_estimate
from tests.support.examples import but_slow, examples

PAGE = places.ROOT / "docs" / "adding" / "report.md"
NAMES = (*FORMATS.own(), "chat")


def _of_the_page() -> Format:
    """The example of the page, run as it is written there."""
    written = re.search(r"^    from graphmem[\s\S]*?^    FORMAT = Chat\(\)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert written is not None
    names: dict[str, Any] = {}
    exec(re.sub("^    ", "", written[0], flags=re.M), names)
    found: Format = names["FORMAT"]
    return found


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The entry points of what is installed."""
    if not PAGE.exists():
        pytest.skip("the installed package is tested, without the checkout")
    chat = _of_the_page()
    entries: list[Any] = [
        SimpleNamespace(name="chat", group="graphmem.reports", value="page:FORMAT", dist=None, load=lambda: chat)
    ]
    entries = [_Entry(**vars(entries[0]))]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [one for one in entries if one.group == group])
    return entries


class _Entry:
    def __init__(self, name: str, group: str, value: str, dist: Any, load: Callable[[], object]) -> None:
        self.name, self.group, self.value, self.dist, self.load = name, group, value, dist, load


def _document(words: str, size: int, share: float) -> Document:
    """One with every kind of block, in which users' ``words`` stand wherever text does."""
    columns = [Column(words), *(Column(unit, unit) for unit in UNITS)]
    row = [words, *(f"{words}" if unit == "figure" else size for unit in UNITS)]
    blocks = (
        Text((words, words), "no"),
        Items((words,)),
        Facts(((words, words), (f"  {words}", words))),
        Table(columns, (row, row)),
        Shares(((words, size, words), ("nothing", 0, "")), (words, size)),
        Curves(
            (Curve(words, (share, 0.0, 1.0)),), words, words, "share", at=(1, words), limit=(1.5, words), marks=(0,),
            marked=words, caption=words, brief=True, over=((1, 2, 5), words),
        ),
        Moments(lambda: {"strings": [words]}),
        Code(words, words),
    )  # fmt: skip
    return Document("toy", words, (section(words, *blocks), section("", *blocks)), lambda: {"said": words})


class _Page(HTMLParser):
    """Fails where elements do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", NAMES)
def test_a_format_goes_by_its_name_and_its_ends_of_files(name: str) -> None:
    found = format_named(name)
    assert found.name == name
    assert format_named(f" {name.upper()} ") is found
    for suffix in found.suffixes:
        assert format_of_file(f"a{suffix}") is found
    assert format_of_file("a.unknown") is None
    assert FORMATS.names() == NAMES


HOSTILE = (
    "</script><script>alert(1)</script>",
    "a|b\n# c",
    "`x` **y** [z](w)",
    "\x1b[31m",
    "数据" * 40,
    "",
    '"',
    "]]>",
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.sampled_from(HOSTILE) | st.text(max_size=30), size=st.integers(0, 1 << 50), share=st.floats(0, 1))
def test_any_document_is_written_and_no_name_is_markup(name: str, words: str, size: int, share: float) -> None:
    shown = format_named(name).render(_document(words, size, share), 80)
    assert shown.endswith("\n")
    shown.encode("utf-8", "backslashreplace")
    if name in ("html", "notebook"):
        page = _Page(shown)
        assert page.tags.count("script") == 2 * (name == "html")
        assert not {"b", "a", "img"} & set(page.tags)
    elif name == "json":
        assert json.loads(shown) == {"said": words}
    elif name == "csv":
        rows = [row for row in csv.reader(io.StringIO(shown, newline="")) if row]
        assert rows[1][0] == clean(words)
        assert str(size) in rows[1]
    else:
        assert all(line.isprintable() for line in shown.split("\n"))
    if name == "markdown":
        prose = re.sub(r"(?m)^(`{3,})\n[\s\S]*?\n\1$", "", shown)
        assert not re.search(r"(?<!\\)<", prose)
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in prose.split("\n")} <= {0, 3, 5, 6, len(UNITS) + 2}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("estimate", [training_estimate(), failing_estimate(), inference_estimate()])
def test_an_estimate_is_written_in_every_format(name: str, estimate: Estimate) -> None:
    shown = estimate.report(name)
    assert estimate.report(name) == shown
    peak = str(estimate.device) if name in ("json", "csv") else f"{estimate.device / (1 << 20):.2f} MiB"
    assert peak in shown or f"{estimate.device / (1 << 30):.2f} GiB" in shown


def test_an_estimate_for_a_spreadsheet_begins_with_what_it_is_of() -> None:
    estimate = failing_estimate()
    (row,) = csv.DictReader(io.StringIO("\n".join(estimate.report("csv").splitlines()[:2])))
    assert (row["model"], row["gpu"], row["fits"]) == (estimate.model, estimate.gpu, "no")


def test_a_line_of_text_is_broken_only_where_it_is_too_long() -> None:
    assert text.folded("some words and --an-option=value", 20) == ["some words and", "--an-option=value"]
    assert text.folded("x" * 25, 20) == ["x" * 20, "x" * 5]
    assert text.folded("", 20) == [""]
    rows = [("a name", "12", "words that are folded"), ("b", "3", "")]
    lines = text.columns(rows, (False, True, False), (True, False, True), 24)
    assert lines == ["a name  12  words that", "            are folded", "b        3"]
    assert text.columns(rows, (False, True, False), (False, False, False), 10)[1] == "b        3"


# --- in commands ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(onnx_samples.save(onnx_samples.perceptron(), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def commands(model: str) -> dict[str, tuple[str, ...]]:
    """A question of every kind that is answered without PyTorch."""
    report = str(Path(model).with_name("report.json"))
    assert run("analyze", model, "-b", "2", "--gpu", "T4", "-o", report).exit_code == 0
    return {
        "analyze": ("analyze", model, "-b", "2", "--gpu", "T4"),
        "fit": ("fit", model, "--gpu", "T4", "--at-most", "2"),
        "sweep": ("sweep", model, "--vary", "batch=1,2", "--gpu", "T4"),
        "advise": ("advise", model, "-b", "300000", "--gpu", "T4"),
        "serve": ("serve", "meta-llama/Llama-3.1-8B", "--gpu", "H100", "--enforce-eager", "--no-advice"),
        "compare": ("compare", report, report),
        "gpus": ("gpus", "T4"),
        "zoo": ("zoo", "--family", "Llama"),
    }


KINDS = ("analyze", "fit", "sweep", "advise", "serve", "compare", "gpus", "zoo")


@pytest.mark.parametrize("kind", but_slow(KINDS, {"fit", "advise"}))
def test_every_command_means_the_same_by_a_format(
    kind: str, commands: dict[str, tuple[str, ...]], tmp_path: Path
) -> None:
    said = {name: run(*commands[kind], "--format", name).stdout for name in NAMES}
    assert run(*commands[kind], "--format", "table").stdout == run(*commands[kind]).stdout == said["text"]
    assert json.loads(said["json"])["schema"].startswith("graphmem.")
    assert said["markdown"].startswith("# ")
    assert _Page(said["html"]).tags.count("h1") == 1
    assert said["notebook"].startswith('<div class="graphmem">')
    assert len(list(csv.reader(io.StringIO(said["csv"])))) > 1 or kind == "gpus"
    assert said["chat"].startswith("*")
    for name, end in (("markdown", "md"), ("html", "html"), ("json", "json"), ("csv", "csv"), ("chat", "chat")):
        written = tmp_path / f"answer.{end}"
        assert run(*commands[kind], "-o", str(written)).exit_code == 0
        assert written.read_text(encoding="utf-8") == said[name]


def test_a_format_that_there_is_not_is_a_wrong_option() -> None:
    wrong = run("gpus", "--format", "pdf")
    assert wrong.exit_code == 2
    names = "text, markdown, json, html, csv, notebook, slurm, kubernetes, chat"
    assert f"accepted: {names}" in " ".join(wrong.stderr.split())


def test_an_explicit_format_wins_over_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cards.html"
    assert run("gpus", "--format", "json", "-o", str(path)).exit_code == 0
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "graphmem.gpus/1"


def test_a_name_that_is_taken_and_an_object_that_lacks_something_are_refused(installed: list[Any]) -> None:
    installed.append(EntryPoint("html", "mine:FORMAT", "graphmem.reports"))
    with pytest.raises(UsageError, match="brings a report format 'html', which is graphmem's own"):
        FORMATS.names()
    installed[-1] = _Entry("half", "graphmem.reports", "mine:HALF", None, lambda: SimpleNamespace(name="half"))
    with pytest.raises(UsageError, match=r"mine:HALF .* is no report format, .* it lacks .*render"):
        format_named("half")


def test_a_command_of_another_package_is_found(installed: list[Any]) -> None:
    import click

    @click.command("mine", short_help="Mine.")
    def mine() -> None:
        click.echo("done")

    installed.append(_Entry("mine", "graphmem.commands", "mine:COMMAND", None, lambda: mine))
    assert run("mine").stdout == "done\n"
    assert "Mine." in run("--help").stdout


def test_bars_of_what_does_not_fit_end_at_the_edge() -> None:
    """Parts that sum to more than their room, as weights of a card that is too small, with what is left below zero."""
    shares = Shares((("weights", 61 << 30, ""), ("left", -(47 << 30), "")), ("card", 14 << 30), as_bars=True)
    lines = format_named("text").render(Document("x", "x", (section("", shares),), dict), 100).splitlines()
    assert max(map(len, lines)) <= 100
