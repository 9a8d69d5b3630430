"""One capture for every setting that only a replay sees: the same bytes as an analysis of each."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphmem
from graphmem.answering import runs, stages
from graphmem.answering.question import Question, capture_key, card_facts
from graphmem.base.versions import NEWEST
from graphmem.devices import DEFAULT_DEVICE, Device, as_cuda, custom_device, device_named
from graphmem.errors import UsageError
from graphmem.estimate import Estimate
from graphmem.run import Run
from graphmem.runtimes.onnxruntime import runtime as onnxruntime
from graphmem.trace import to_json
from graphmem.training import Inference, Training
from graphmem.units import GIB, MIB
from tests.support import onnx_samples
from tests.support.examples import examples, first_quick

torch = pytest.importorskip("torch")

from graphmem.capture.session.session import capture  # noqa: E402

nn = torch.nn
CONFIGURATIONS = ["", "expandable_segments:True", "max_split_size_mb:64", "nonsense:1"]
CARD_FACTS = ("sm_count", "max_threads_per_sm", "cublas_workspace_bytes", "vendor")
CARDS = [
    custom_device(700 * MIB),
    custom_device(24 * GIB),
    device_named("T4"),
    device_named("A10G"),
    device_named("MI300X"),
]


def step(batch: int = 4) -> Any:
    """A model of several kinds of kernels, with its inputs."""
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16), nn.Softmax(-1))
    return nn.Sequential(*layers), torch.zeros(batch, 3, 16, 16)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """The questions for which something was captured or planned."""
    asked: list[Question] = []
    record = runs.record

    def noted(question: Question, loaded: Any, say: Any, calls: Any = None) -> Run:
        asked.append(question)
        return record(question, loaded, say, calls)

    monkeypatch.setattr(runs, "record", noted)
    return asked


def alone(**options: Any) -> str:
    """The answer of one analysis, or its error."""
    try:
        return graphmem.analyze(**options).without_events().to_json()
    except graphmem.GraphmemError as error:
        return str(error)


#: The same, once for the same options.
alone_once = functools.cache(alone)


def separately(vary: dict[str, list[Any]], analysed: Callable[..., str] = alone, **options: Any) -> list[str]:
    """The rows of a sweep over two settings, each by an analysis of its own."""
    (first, firsts), (second, seconds) = vary.items()
    return [analysed(**{**options, first: a, second: b}) for a in firsts for b in seconds]


def together(vary: dict[str, list[Any]], **options: Any) -> list[Any]:
    rows = graphmem.sweep(vary=vary, **options)
    return [row.error if row.estimate is None else row.estimate.to_json() for row in rows]


# --- the key ----------------------------------------------------------------------------------------------------------

#: Another value of each argument, and whether a captured trace depends on it.
OTHERS: dict[str, tuple[Any, bool]] = {
    "bounds": (True, False),
    "batch": (8, True),
    "seq_len": (128, True),
    "training": (Inference(), True),
    "runtime": ("mxnet", False),
    "device": ("T4", True),
    "alloc_conf": ("expandable_segments:True", False),
    "dims": ({"n": 2}, True),
    "input_shapes": ({"x": (1, 2)}, True),
    "input_values": ({"n": (3,)}, True),
    "trip_count": (4, True),
    "shapes": ("batch=1;batch=2", True),
    "iterations": (5, True),
    "top": (3, False),
    "torch_version": ("2.6", True),
    "build_on": ("device", True),
    "trust": (True, True),
    "layers": (4, True),
    "margin": ("p99", False),
}


def test_the_key_tells_apart_what_a_capture_depends_on_and_nothing_else() -> None:
    assert set(OTHERS) == {field.name for field in fields(Question)} - {"model", "example_inputs", "cudnn"}
    usual = capture_key(Question(step))
    assert usual == capture_key(Question(step))
    for name, (value, matters) in OTHERS.items():
        assert (capture_key(Question(step, **{name: value})) != usual) is matters, name
    for one in fields(Training):
        others: dict[str, Any] = {"optimizer": "sgd", "dtype": "bf16", "amp": "bf16", "grad_accum": 2}
        other = others.get(one.name)
        if other is not None:
            assert capture_key(Question(step, training=Training(**{one.name: other}))) != usual


class _Watched(Device):
    """A card that notes which of its facts were looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        _Watched.seen.add(name)
        return super().__getattribute__(name)


def test_every_fact_of_the_card_that_a_capture_looks_at_is_in_the_key_or_noted_when_it_is_told() -> None:
    """A fact that kernels may look at and the key does not hold would let one card's trace stand for another's."""
    card = as_cuda(device_named("A10G"))
    watched = _Watched(**{field.name: getattr(card, field.name) for field in fields(Device)})
    known = {"compute_capability", *CARD_FACTS}
    told: set[str] = set()

    def run(session: Any) -> None:
        model, inputs = step()
        model.cuda()(inputs.cuda()).sum().backward()

    _Watched.seen.clear()
    capture(run, source="", device=watched, torch_version=NEWEST, asked=told)
    assert told == set()
    assert _Watched.seen - {"capability", "limits", "__class__"} == known
    assert card_facts(card) == tuple(getattr(card, name) for name in ("compute_capability", *CARD_FACTS))

    def asks(session: Any) -> None:
        properties = torch.cuda.get_device_properties(0)
        assert (properties.name, properties.total_memory) == (card.name, card.capacity_bytes)

    capture(asks, source="", device=card, torch_version=NEWEST, asked=told)
    assert told == {"name", "total_bytes"}


def test_a_plan_depends_on_what_the_planner_looks_at(tmp_path: Path) -> None:
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))

    def key(**options: Any) -> Any:
        return capture_key(Question(model, **options))

    usual = key(batch=2, device="A100-40GB", cudnn="never")
    assert usual != key(batch=2, device="A100-80GB", cudnn="never")  # which may have room for a block of a pattern
    without, changed = "enable_mem_pattern:0", "arena_extend_strategy:kSameAsRequested,gpu_mem_limit:1GiB"
    assert key(batch=2, device="A100-40GB", cudnn="never", alloc_conf=without) == key(
        batch=2, device="A100-80GB", cudnn="never", alloc_conf=f"{without},{changed}"
    )
    assert usual != key(batch=2, device="H100", cudnn="never")  # cuDNN has other plans there
    for other in ("enable_mem_pattern:0", "provider:cpu", "graph_optimization_level:basic"):
        assert usual != key(batch=2, device="A100-40GB", cudnn="never", alloc_conf=other), other
    assert usual != key(batch=2, device="A100-40GB", runtime="tensorflow")
    assert key(batch=2, runtime="tensorflow") == key(batch=2, runtime="tf", alloc_conf="allow_growth:true")
    with pytest.raises(UsageError, match="no memory option 'nonsense'"):
        key(batch=2, alloc_conf="nonsense:1")


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equal_keys_give_equal_traces(data: st.DataObject) -> None:
    def question() -> Question:
        steps: list[Any] = [Training(), Training("sgd"), Inference()]
        return Question(
            step,
            batch=data.draw(st.sampled_from([2, 4])),
            training=data.draw(st.sampled_from(steps)),
            device=data.draw(st.sampled_from(CARDS)),
            alloc_conf=data.draw(st.sampled_from(CONFIGURATIONS[:3])),
        )

    first, second = question(), question()
    traces = [to_json(runs.record(one, runs.load(one)).trace) for one in (first, second)]
    if capture_key(first) == capture_key(second):
        assert traces[0] == traces[1]


# --- sweeps -----------------------------------------------------------------------------------------------------------

_TWO = st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cards=st.lists(st.sampled_from(CARDS), min_size=1, max_size=3, unique_by=lambda card: card.name),
    other=st.sampled_from(["alloc_conf", "batch", "runtime", "iterations"]),
    chosen=_TWO,
)
def test_a_sweep_gives_what_separate_analyses_give(cards: list[Any], other: str, chosen: list[int]) -> None:
    values: dict[str, list[Any]] = {
        "alloc_conf": CONFIGURATIONS,
        "batch": [1, 2, 3, 4],
        "runtime": ["pytorch", "tensorflow", "mxnet", "onnxruntime"],
        "iterations": [1, 2, 3, 4],
    }
    vary: dict[str, list[Any]] = {"device": cards, other: [values[other][number] for number in chosen]}
    expected = separately(vary, alone_once, model=step)
    if all(not answer.startswith("{") for answer in expected):
        with pytest.raises(graphmem.GraphmemError):
            graphmem.sweep(step, vary=vary)
    else:
        assert together(vary, model=step) == expected


def test_settings_that_only_a_replay_sees_share_one_capture(recorded: list[Question]) -> None:
    vary: dict[str, list[Any]] = {
        "alloc_conf": CONFIGURATIONS,
        "device": [custom_device(size * GIB) for size in (2, 8, 24)],
    }
    rows = graphmem.sweep(step, vary=vary)
    assert len(recorded) == 1
    assert [row.estimate is None for row in rows] == [conf == "nonsense:1" for conf in CONFIGURATIONS for _ in range(3)]
    assert all("nonsense" in row.error for row in rows if row.error)


def test_settings_that_the_allocator_cannot_tell_apart_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, replayed = list[Question](), stages._replayed

    def counted(question: Question, *rest: Any, **options: Any) -> Estimate:
        answered.append(question)
        return replayed(question, *rest, **options)

    monkeypatch.setattr(stages, "_replayed", counted)
    alike = ["", "max_split_size_mb:512", "garbage_collection_threshold:0.8"]
    vary: dict[str, list[Any]] = {"device": [custom_device(24 * GIB), custom_device(400 * MIB)], "alloc_conf": alike}
    rows = together(vary, model=step)
    assert len(answered) == 1 + len(alike)  # the second card is too small
    assert rows == separately(vary, alone_once, model=step)


def test_a_step_that_cannot_be_captured_is_tried_once(recorded: list[Question]) -> None:
    def broken() -> Any:
        raise RuntimeError("no such layer")

    with pytest.raises(graphmem.GraphmemError, match="no such layer"):
        graphmem.sweep(broken, vary={"alloc_conf": CONFIGURATIONS[:3]})
    assert len(recorded) == 1


def _by_free_memory() -> Any:
    return nn.Linear(64, 64), torch.zeros(torch.cuda.mem_get_info()[0] // GIB * 128, 64)


def _by_total_memory() -> Any:
    return nn.Linear(64, 64), torch.zeros(torch.cuda.get_device_properties(0).total_memory // GIB * 128, 64)


def _by_name() -> Any:
    return nn.Linear(64, 64), torch.zeros(len(torch.cuda.get_device_name()) * 128, 64)


def _by_runtime_call() -> Any:
    return nn.Linear(64, 64), torch.zeros(torch.cuda.cudart().cudaMemGetInfo(0)[1] // GIB * 128, 64)


def _by_printed_properties() -> Any:
    return nn.Linear(64, 64), torch.zeros(len(str(torch.cuda.get_device_properties("cuda"))) * 128, 64)


@pytest.mark.parametrize(
    "factory", first_quick([_by_free_memory, _by_name, _by_runtime_call, _by_total_memory, _by_printed_properties], 3)
)
def test_a_step_that_asks_the_card_is_captured_for_each_that_says_otherwise(
    factory: Callable[[], Any], recorded: list[Question]
) -> None:
    small, large = custom_device(9 * GIB), custom_device(24 * GIB)
    vary: dict[str, list[Any]] = {"device": [small, large, large], "alloc_conf": CONFIGURATIONS[:1]}
    answers = together(vary, model=factory, training=False)
    assert len(recorded) == 2
    assert answers == separately(vary, model=factory, training=False)
    assert answers[0] != answers[1] == answers[2]


def test_a_factory_that_keeps_a_state_is_made_anew_for_every_capture(tmp_path: Path) -> None:
    file = tmp_path / "stateful.py"
    file.write_text(
        "import torch\ncalls = [0]\n\ndef build(batch=1):\n    calls[0] += 1\n"
        "    return torch.nn.Linear(64, 64), torch.zeros(batch * calls[0], 64)\n"
    )
    vary: dict[str, list[Any]] = {"batch": [1, 2], "alloc_conf": ["", "max_split_size_mb:64"]}
    assert together(vary, model=f"{file}:build") == separately(vary, model=f"{file}:build")


def test_the_least_that_would_do_is_not_sought_for_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row that does not fit says so, and looks for more when somebody asks."""
    sought: list[object] = []
    monkeypatch.setattr(stages, "least_that_fits", counting(sought, stages.least_that_fits))
    options: dict[str, Any] = {"batch": 8, "vary": {"device": [custom_device(700 * MIB)]}}
    [kept] = graphmem.sweep("zoo:vgg16", store=tmp_path / "rows.jsonl", **options)
    rows = graphmem.sweep("zoo:vgg16", **options)
    assert kept.figures["fits"] == "no"
    assert "NOT FIT" in str(rows)
    assert not sought
    assert rows[0].estimate is not None
    assert rows[0].estimate.details["least"]["bytes"] > 700 * MIB
    assert len(sought) == 1


def counting(calls: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, noting each call."""

    def noting(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return function(*given, **named)

    return noting


def test_an_onnx_file_is_read_once_for_all_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphmem.sources import onnx_file

    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    vary: dict[str, list[Any]] = {"batch": [1, 2, 8], "alloc_conf": ["", "enable_mem_pattern:0", "gpu_mem_limit:1MiB"]}
    expected = separately(vary, model=model, device="T4")
    read: list[Any] = []
    once = onnx_file.read_onnx
    monkeypatch.setattr(onnx_file, "read_onnx", counting(read, once))
    assert together(vary, model=model, device="T4", jobs=1) == expected
    assert len(read) == 1
    read.clear()
    graphmem.fit(model, device="T4", at_most=512)
    assert len(read) == 1


def test_neither_fit_nor_a_table_pays_for_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    looked: list[Any] = []
    find = onnxruntime.findings
    monkeypatch.setattr(onnxruntime, "findings", counting(looked, find))
    graphmem.fit(model, device="T4", at_most=512)
    graphmem.advise(model, batch=8, device="T4")
    rows = graphmem.sweep(model, vary={"batch": [1, 2]}, device="T4")
    assert looked == []
    assert rows[1].estimate is not None
    assert "reserved_bytes_with" in rows[1].estimate.details
    assert rows[1].estimate.diagnostics == tuple(rows[1].estimate.diagnostics)
    assert len(looked) == 1


# --- side by side -----------------------------------------------------------------------------------------------------


def test_jobs_give_what_one_process_gives(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    file = tmp_path / "model.py"
    file.write_text("import torch\n\ndef build(batch=1):\n    return torch.nn.Linear(64, 64), torch.zeros(batch, 64)\n")
    vary: dict[str, list[Any]] = {"batch": [1, 512], "alloc_conf": ["", "nonsense:1", "max_split_size_mb:64"]}
    said: list[str] = []
    answers = together(vary, model=f"{file}:build", jobs=2, say=said.append)
    assert answers == together(vary, model=f"{file}:build")
    assert sum("nonsense" in answer for answer in answers) == 2
    assert said


@pytest.mark.slow
def test_jobs_give_what_one_process_gives_of_onnx(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    onnx = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    both: dict[str, list[Any]] = {"batch": [1, 2], "alloc_conf": ["", "enable_mem_pattern:0"]}
    assert together(both, model=onnx, jobs=2) == together(both, model=onnx)


def test_a_model_that_cannot_be_sent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("joblib")
    module = nn.Linear(4, 4)
    module.lock = threading.Lock()
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        graphmem.sweep(module, torch.zeros(2, 4), vary={"iterations": [1, 2]}, jobs=2)


def test_jobs_without_joblib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(UsageError, match=r"pip install 'graphmem\[parallel\]'"):
        graphmem.sweep(step, vary={"batch": [1, 2]}, jobs=2)
    with pytest.raises(UsageError, match="jobs is a whole number of at least 1"):
        graphmem.sweep(step, vary={"batch": [1, 2]}, jobs=0)


def test_the_card_assumed_for_kernels_is_the_default_one() -> None:
    assert card_facts(device_named("MI300X"))[:3] == card_facts(device_named(DEFAULT_DEVICE))[:3]


def test_a_search_by_template_writes_what_it_may_try_next_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open the pretended card takes as long as to write a dozen short traces."""
    from graphmem.capture.templates.template import Template

    opened: list[int] = []
    write = Template.traces

    def counted(self: Template, sizes: Sequence[int], card: Any) -> Any:
        opened.append(len(sizes))
        return write(self, sizes, card)

    monkeypatch.setattr(Template, "traces", counted)
    (tmp_path / "mlp.py").write_text(
        "import torch\nfrom torch import nn\ndef build(batch):\n"
        "    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))\n"
        "    return model, torch.zeros(batch, 784)\n"
    )
    found = graphmem.fit(f"{tmp_path / 'mlp.py'}:build", device="T4")
    assert found.above is not None
    assert len(opened) < 1.5 * len(found.tried)
