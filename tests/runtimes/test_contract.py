"""What every runtime keeps, whoever brings it: graphmem's own, and a toy that is registered as one from elsewhere."""

from __future__ import annotations

import contextlib
import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import graphmem
from graphmem import plugins, runtimes
from graphmem.devices import custom_device, device_named
from graphmem.diagnostics import Code, Diagnostic
from graphmem.errors import SourceError, UsageError
from graphmem.estimate import LEVELS, Estimate
from graphmem.runtimes.base import Graphs, Runtime, Setting
from graphmem.trace import Category, Trace, TraceBuilder
from graphmem.units import GIB, MIB
from tests.runtimes import toy
from tests.support import onnx_samples
from tests.support.examples import examples

NAMES = (*runtimes.built_in(), "toy")
TOY = EntryPoint("toy", "tests.runtimes.toy:RUNTIME", runtimes.GROUP)
SETTING = Setting(device_named("T4"), (2, 13))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points of what is installed; no variable of the environment sets an option."""
    entries = [TOY]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry for entry in entries if entry.group == group])
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.delenv(variable, raising=False)
    return entries


@pytest.fixture(params=NAMES)
def runtime(request: pytest.FixtureRequest, installed: list[EntryPoint]) -> Runtime[Any]:
    return runtimes.runtime_named(request.param)


# --- names ------------------------------------------------------------------------------------------------------------


def test_the_built_in_runtimes_are_the_modules_of_the_package() -> None:
    folder = Path(runtimes.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(runtimes.built_in()) == modules - {"__init__", "base", "bfc"}
    assert runtimes.runtime_names() == NAMES
    assert [one.name for one in runtimes.all_runtimes()] == list(NAMES)


def test_a_runtime_goes_by_its_name_and_its_spellings(runtime: Runtime[Any]) -> None:
    assert isinstance(runtime, Runtime)
    assert runtime.name.isalnum()
    assert runtime.name == runtime.name.lower()
    for spelling in (runtime.name, *runtime.spellings):
        for written in (spelling, spelling.upper(), f" {spelling[:2]}-{spelling[2:]}_ "):
            assert runtimes.runtime_named(written) is runtime


def test_no_two_runtimes_share_a_name() -> None:
    names = [name for one in runtimes.all_runtimes() for name in (one.name, *one.spellings)]
    assert len(names) == len(set(names))


def test_an_unknown_runtime_is_refused_wherever_one_is_named(tmp_path: Path) -> None:
    accepted = f"unknown runtime 'paddle'; accepted: {', '.join(NAMES)}"
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    for ask in (
        lambda: runtimes.runtime_named("paddle"),
        lambda: graphmem.analyze(model, batch=2, runtime="paddle"),
        lambda: graphmem.replay_trace(small_trace(), runtime="paddle"),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert str(caught.value) == accepted


@pytest.mark.parametrize(
    "stage",
    ["answering/question", "answering/runs", "answering/stages", "answering/summarize", "replay", "reports/estimate"],
)
def test_the_stages_know_no_runtime_by_name(stage: str) -> None:
    source = (Path(graphmem.__file__).parent / f"{stage}.py").read_text(encoding="utf-8")
    assert not set(re.findall(r"\w+", source)) & set(NAMES)


def test_the_levels_are_those_of_an_estimate_in_words(runtime: Runtime[Any]) -> None:
    assert tuple(name for name, _ in runtime.levels) == LEVELS
    assert all(words.isprintable() and words for _, words in runtime.levels)


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_are_read_alike_every_time(runtime: Runtime[Any]) -> None:
    assert runtime.parse(None, SETTING) == runtime.parse(None, SETTING) == runtime.parse("", SETTING)
    words = runtime.describe(runtime.parse(None, SETTING), SETTING)
    assert words
    assert words.isprintable()
    assert runtime.plan_options(runtime.parse(None, SETTING)) == runtime.plan_options(runtime.parse("", SETTING))


@pytest.mark.parametrize("wrong", ["no_such_option:1", "no_such_option=1", "?!"])
def test_an_option_that_nobody_has_is_refused_in_one_line(runtime: Runtime[Any], wrong: str) -> None:
    with pytest.raises(UsageError) as caught:
        runtime.parse(wrong, SETTING)
    message = str(caught.value)
    assert message.isprintable()
    assert wrong.partition(":")[0].partition("=")[0] in message
    with pytest.raises(UsageError) as again:
        graphmem.replay_trace(small_trace(), runtime=runtime.name, alloc_conf=wrong)
    assert str(again.value) == message


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30))
def test_any_text_is_read_or_refused(runtime: Runtime[Any], text: str) -> None:
    with contextlib.suppress(UsageError):
        words = runtime.describe(runtime.parse(text, SETTING), SETTING)
        assert words == runtime.describe(runtime.parse(text, SETTING), SETTING)


# --- runs -------------------------------------------------------------------------------------------------------------


def small_trace() -> Trace:
    builder = TraceBuilder("small")
    operator = builder.operator("op", phase=builder.phase(1, "forward"))
    builder.alloc(3 * MIB, operator, Category.PARAMETER)
    builder.free(builder.alloc(5 * MIB + 17, operator, Category.ACTIVATION), operator)
    return builder.build()


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Storages of all sizes that come and go in any order over three phases."""
    builder = TraceBuilder("drawn")
    operators = [builder.operator(f"op{n}", phase=builder.phase(n + 1, "forward")) for n in range(3)]
    live: list[int] = []
    steps = draw(st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(0, 8), st.sampled_from(list(Category)))))
    for position, (size, place, category) in enumerate(steps):
        operator = operators[position * 3 // len(steps)]
        if place < len(live) and place % 2:
            builder.free(live.pop(place), operator)
        else:
            live.append(builder.alloc(size, operator, category))
    return builder.build()


def check(estimate: Estimate, runtime: Runtime[Any]) -> None:
    """What holds of any estimate."""
    assert estimate.runtime == runtime.name
    peaks = [estimate.peak, *(phase.peak for phase in estimate.phases)]
    for peak in peaks:
        assert 0 <= peak.requested_bytes <= peak.allocated_bytes <= peak.reserved_bytes <= peak.device_bytes
    assert estimate.ideal_bytes == estimate.requested
    assert sum(estimate.breakdown.values()) == estimate.device
    assert all(size >= 0 for size in estimate.breakdown.values())
    if estimate.moment.event >= 0:
        assert estimate.timeline is not None
        assert estimate.find_segments is not None
        segments = estimate.find_segments()
        blocks = [block for segment in segments for block in segment.blocks]
        held = sum(block.size for block in blocks if block.state != "free")
        assert (
            sum(segment.total_size for segment in segments) == estimate.timeline.reserved_bytes[estimate.moment.event]
        )
        assert held == estimate.timeline.allocated_bytes[estimate.moment.event]
    assert estimate.fit is not None
    assert json.loads(estimate.to_json()) == json.loads(json.dumps(estimate.to_dict()))


def parameters_of(*sizes: int) -> Trace:
    """Weights of so many bytes, a third of them in each of three phases."""
    builder = TraceBuilder("weights")
    operators = [builder.operator(f"op{n}", phase=builder.phase(n + 1, "forward")) for n in range(3)]
    for position, size in enumerate(sizes):
        builder.alloc(size, operators[position * 3 // len(sizes)], Category.PARAMETER)
    return builder.build()


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces())
@example(trace=parameters_of(0, 0, 0, 1, 0, 1))
def test_the_levels_are_ordered_and_the_breakdown_sums_up(runtime: Runtime[Any], trace: Trace) -> None:
    estimate = graphmem.replay_trace(trace, runtime=runtime.name, device="T4")
    check(estimate, runtime)
    assert estimate.fits("T4")
    again = graphmem.replay_trace(trace, runtime=runtime.name, device="T4")
    assert again.to_json() == estimate.to_json()


@pytest.mark.parametrize("spelled", [0, 1])
def test_a_card_that_is_too_small_is_told_from_one_that_is_not(runtime: Runtime[Any], spelled: int) -> None:
    builder = TraceBuilder("large")
    operator = builder.operator("the large one", phase=builder.phase(1, "forward"))
    for _ in range(3):
        builder.alloc(2 * GIB, operator, Category.ACTIVATION)
    name = (runtime.name, *runtime.spellings)[min(spelled, len(runtime.spellings))]
    large = graphmem.replay_trace(builder.build(), runtime=name, device=custom_device(24 * GIB))
    small = graphmem.replay_trace(builder.build(), runtime=name, device=custom_device(5 * GIB))
    assert large.fit is not None
    assert small.fit is not None
    assert (large.fit.fits, small.fit.fits) == (True, False)
    assert small.fit.failed_at is not None
    assert small.fit.failed_at.operator == "the large one"
    check(large, runtime)


def test_a_graph_is_planned_captured_or_refused(runtime: Runtime[Any], tmp_path: Path) -> None:
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    if runtime.graphs is Graphs.CAPTURED:
        pytest.importorskip("torch")
    if runtime.graphs is Graphs.REFUSED:
        accepted = ", ".join(
            sorted(one.name for one in runtimes.all_runtimes() if one.graphs is not Graphs.REFUSED)[:-1]
        )
        with pytest.raises(UsageError, match=rf"ONNX graphs run under --runtime {accepted} or \w+, not {runtime.name}"):
            graphmem.analyze(model, batch=4, runtime=runtime.name)
        return
    first = graphmem.analyze(model, batch=4, runtime=runtime.name, device="T4")
    check(first, runtime)
    assert graphmem.analyze(model, batch=4, runtime=runtime.name, device="T4").to_json() == first.to_json()
    with pytest.raises((UsageError, SourceError), match=r"own precision|plans no graphs"):
        graphmem.analyze(model, batch=4, runtime=runtime.name, training=graphmem.Inference(dtype="bf16"))


def test_a_graph_is_trained_only_where_it_is_captured(runtime: Runtime[Any], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    if runtime.graphs is Graphs.CAPTURED:
        check(graphmem.analyze(model, batch=4, runtime=runtime.name, training=True, device="T4"), runtime)
        return
    with pytest.raises(UsageError, match=f"an ONNX graph is trained under --runtime pytorch, not {runtime.name}"):
        graphmem.analyze(model, batch=4, runtime=runtime.name, training=True)


def test_a_captured_step_is_taken_or_refused(runtime: Runtime[Any]) -> None:
    torch = pytest.importorskip("torch")
    step = (torch.nn.Linear(64, 64), torch.zeros(8, 64))
    if runtime.captures:
        check(graphmem.analyze(*step, runtime=runtime.name, device="T4"), runtime)
        return
    with pytest.raises(UsageError, match=f"export it to ONNX for {runtime.title}, or use --runtime .*pytorch"):
        graphmem.analyze(*step, runtime=runtime.name)


def test_changes_that_are_offered_can_be_made(runtime: Runtime[Any]) -> None:
    for change in runtime.changes(None, SETTING.device):
        assert change.words.isprintable()
        assert runtime.parse(change.alloc_conf, SETTING) != runtime.parse(None, SETTING)


# --- findings ---------------------------------------------------------------------------------------------------------


def test_findings_are_found_once_and_only_when_somebody_looks(tmp_path: Path) -> None:
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    toy.RUNTIME.looked = 0
    graphmem.fit(model, runtime="toy", device="T4", at_most=64)
    rows = graphmem.sweep(model, vary={"alloc_conf": ["", "round:64"]}, runtime="toy", device="T4", batch=2)
    estimate = graphmem.analyze(model, runtime="toy", device="T4", batch=2)
    assert (estimate.device, estimate.assumptions) != (0, ())
    assert toy.RUNTIME.looked == 0
    assert estimate.details == {"round_bytes": 1024}
    assert [one.message for one in estimate.diagnostics] == ["steps of 1024"]
    assert estimate.to_dict()["details"] == {"round_bytes": 1024}
    assert toy.RUNTIME.looked == 1
    assert rows[1].to_dict()["estimate"]["diagnostics"] == [Diagnostic(Code.NOTE, "steps of 64").to_dict()]
    assert toy.RUNTIME.looked == 2


# --- proof ------------------------------------------------------------------------------------------------------------


def test_who_names_no_recordings_is_in_doubt(runtime: Runtime[Any]) -> None:
    """A plug-in that says nothing of it claims nothing; graphmem's own name folders that are there."""
    estimate = graphmem.replay_trace(small_trace(), runtime=runtime.name, device="T4")
    names = [cause.name for cause in estimate.doubts.about("reserved")]
    assert (f"the runtime {runtime.name}" in names) == (not runtime.proven)
    if runtime.proven:
        assert any((Path(graphmem.__file__).parents[1] / runtime.proven).iterdir())


def test_a_plug_in_is_never_called_exact(tmp_path: Path) -> None:
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    estimate = graphmem.analyze(model, batch=4, runtime="toy", device="H200")
    assert "its allocator and its trace" in next(iter(estimate.doubts.about("allocated"))).source
    assert estimate.fit is not None
    assert (estimate.fit.verdict, estimate.interval("allocated")) == ("likely", (None, None))
    assert "exact" not in str(estimate)


# --- plug-ins ---------------------------------------------------------------------------------------------------------


def test_two_plug_ins_of_one_name_are_refused(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("toy", "tests.runtimes.toy:OTHER", runtimes.GROUP))
    with pytest.raises(
        UsageError, match=r"tests.runtimes.toy:OTHER and .*tests.runtimes.toy:RUNTIME both bring .*'toy'"
    ):
        runtimes.runtime_named("toy")


def test_a_plug_in_is_listed_once_however_often_it_is_found(installed: list[EntryPoint]) -> None:
    installed.append(TOY)  # as with two entries of one folder in sys.path
    assert runtimes.runtime_named("toy") is toy.RUNTIME


def test_a_plug_in_cannot_take_a_name_of_graphmem(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("mxnet", "tests.runtimes.toy:RUNTIME", runtimes.GROUP))
    with pytest.raises(UsageError, match="brings a runtime 'mxnet', which is graphmem's own"):
        runtimes.runtime_names()
    assert runtimes.runtime_named("mxnet").title == "MXNet"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("tests.runtimes.toy:ABSENT", "cannot be loaded: AttributeError"),
        ("tests.runtimes.nowhere:RUNTIME", "cannot be loaded: ModuleNotFoundError"),
        ("tests.runtimes.toy:Toy", "is a class; a runtime is an object"),
        ("tests.runtimes.toy:RUNTIME", "is entered as 'broken' and calls itself 'toy'"),
        (
            "json:dumps",
            "is no runtime, .* it lacks name, title, spellings, levels, graphs, captures, .*parse, describe",
        ),
    ],
)
def test_a_plug_in_that_is_no_runtime_is_refused(installed: list[EntryPoint], value: str, said: str) -> None:
    installed.append(EntryPoint("broken", value, runtimes.GROUP))
    with pytest.raises(UsageError, match=said) as caught:
        runtimes.runtime_named("broken")
    assert str(caught.value).isprintable()
    assert runtimes.runtime_named("ort").name == "onnxruntime"


def test_an_error_of_another_package_is_named_as_its(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("pages", "pagesruntime.made:RUNTIME", "graphmem.runtimes")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if entry.group == group else [])
    theirs: dict[str, Any] = {"__name__": "pagesruntime.made"}
    exec("def run(): return 1 / 0", theirs)
    with pytest.raises(ZeroDivisionError) as raised:
        theirs["run"]()
    assert plugins.package_at_fault(raised.value) == "the entry point pagesruntime.made:RUNTIME"
    with pytest.raises(ZeroDivisionError) as ours:
        _ = 1 / 0
    assert plugins.package_at_fault(ours.value) is None
