"""Records, their comparison with predictions, and the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphmem.accuracy.case import Case, case_of
from graphmem.accuracy.compare import Comparison, Predicted
from graphmem.accuracy.document import document_of
from graphmem.accuracy.published.case import (
    ModelSpec,
    OwnLoop,
    PublishedCase,
    PublishedComparison,
    Script,
    Skipped,
    end_of_card,
    predict_published,
)
from graphmem.accuracy.published.cases import NOT_HERE, PROGRAMS, cited, programs_in, published_cases, verdicts
from graphmem.accuracy.published.section import published_reason, published_section, sample
from graphmem.accuracy.record import (
    FAILED,
    GPU,
    OK,
    ONNXRUNTIME_CPU,
    OUT_OF_MEMORY,
    STUB_DRIVER,
    DeviceUse,
    Machine,
    Measured,
    Record,
    append,
    read_folder,
    read_records,
)  # fmt: skip
from graphmem.accuracy.report import Contents, reason, section
from graphmem.accuracy.statistics import percentile, summarize_errors
from graphmem.base.figures import BOUNDS, Cause, Doubts, bounded
from graphmem.base.versions import version_named
from graphmem.devices import device_named
from graphmem.errors import SourceError, TraceError
from graphmem.estimate import Peak
from graphmem.reports import format_named
from graphmem.trace import Category, TraceBuilder
from graphmem.training import Inference, Training
from tests import places
from tests.recorded import verdicts as recorded_verdicts
from tests.support.shapes import differences

MIB = 1 << 20
CASE = case_of("zoo:mlp", Training(optimizer="adam", optimizer_args=(("betas", (0.9, 0.95)),)), batch=8)
MACHINE = Machine(STUB_DRIVER, "a card", (9, 0), 132, 2048, 80 << 30, {"torch": "2.13.0"})


def _record(reserved: int = 100 * MIB, **changes: object) -> Record:
    device = DeviceUse("nvml", 10 * MIB, 300 * MIB, 400 * MIB, reserved + 310 * MIB)
    measured = Measured(90 * MIB, 95 * MIB, reserved, 0, device, ({"allocated_peak_bytes": 95 * MIB},))
    return replace(Record(CASE, OK, MACHINE, measured, date="2026-01-01"), **changes)  # type: ignore[arg-type]


def _compared(record: Record, reserved: int = 100 * MIB, **predicted: object) -> Comparison:
    peak = Peak(90 * MIB, 95 * MIB, reserved, reserved + 300 * MIB)
    return Comparison(record, replace(Predicted(peak), **predicted))  # type: ignore[arg-type]


# --- cases and records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASE, case_of("train.py:build", Inference(dtype="bf16"), alloc_conf="a:1")])
def test_a_case_survives_json(case: Case) -> None:
    assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_a_case_is_named_after_what_makes_it() -> None:
    assert CASE.name == "mlp-training-b8"
    assert (
        case_of("dir/train.py:build", Inference(), 2, 3, 1, "x:1,y:2").name
        == "dir-train.py-build-inference-b2-s3-x-1,y-2"
    )


def test_a_case_says_what_is_unusual_of_its_step() -> None:
    step = Training(optimizer="sgd", amp="bf16", checkpoint_activations=True, grad_accum=4)
    assert case_of("zoo:gpt2", step).name == "gpt2-training-optimizer-sgd-checkpoint_activations-grad_accum-4"
    session = case_of(
        "a/b.onnx", Inference(), None, None, 3, "provider:cpu,enable_mem_pattern:0", "onnxruntime", "batch=1"
    )
    assert session.name == "b-inference-batch=1-enable_mem_pattern-0"


def test_records_of_the_first_schema_are_read(tmp_path: Path) -> None:
    document = json.loads(_record().to_line())
    document["schema"] = 1
    del document["case"]["runtime"], document["case"]["shapes"]
    (tmp_path / "old.jsonl").write_text(json.dumps(document))
    assert read_records(tmp_path / "old.jsonl") == [_record()]


def test_a_graph_and_recorded_allocations_are_found_beside_the_records(tmp_path: Path) -> None:
    session = replace(CASE, model="net.onnx", runtime="onnxruntime")
    machine = Machine.of_cpu(ONNXRUNTIME_CPU, "x86_64", {"onnxruntime": "1.31.1"})
    measured = Measured(None, MIB, 2 * MIB, 0, None)
    (tmp_path / "net.onnx").touch()
    append(tmp_path / "a.jsonl", [Record(session, OK, machine, measured, trace="gone.json.gz")])
    (found,) = read_folder(tmp_path)
    assert (found.case.model, found.trace) == (str(tmp_path / "net.onnx"), "gone.json.gz")
    assert (found.measured, found.machine) == (measured, machine)


def test_records_survive_a_file(tmp_path: Path) -> None:
    records = [_record(), Record(CASE, FAILED, error="no such thing"), _record(cap_bytes=5)]
    append(tmp_path / "b.jsonl", records[:1])
    append(tmp_path / "b.jsonl", records[1:])
    assert read_records(tmp_path / "b.jsonl") == records
    assert read_folder(tmp_path) == records


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "b.jsonl, line 1"),
        ('{"schema": 99}', "a record of schema 99"),
        ('{"schema": 1}', "not a record"),
        ('{"schema": 1, "case": {"name": "x"}, "status": "ok"}', "line 1"),
    ],
)
def test_a_damaged_record_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "b.jsonl").write_text(line)
    with pytest.raises(TraceError, match=message):
        read_records(tmp_path / "b.jsonl")


# --- errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_signed_and_relative_to_the_measured_value() -> None:
    compared = _compared(_record(reserved=200 * MIB), reserved=190 * MIB)
    assert compared.error("reserved") == pytest.approx(-0.05)
    assert compared.error("allocated") == 0
    assert compared.measured_bytes("device") == 500 * MIB  # what the run added to the card's use


@pytest.mark.parametrize(("reserved", "fails"), [(101 * MIB, False), (102 * MIB, True)])
def test_a_run_that_needs_a_hundredth_more_than_its_estimate_is_a_failure(reserved: int, fails: bool) -> None:
    assert _compared(_record(reserved)).exceeds_cap is fails


def test_percentiles_are_values_of_the_list() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [1, 1, 2, 3, 4]
    summary = summarize_errors([0.0, -0.1, 0.2, 0.0])
    assert (summary.count, summary.exact, summary.largest, summary.under_estimated) == (4, 2, 0.2, 0.25)
    assert (summary.median_signed, summary.median) == (0.0, 0.0)


# --- published figures ------------------------------------------------------------------------------------------------

OWN_LOOP = OwnLoop(ModelSpec("torchvision", "vgg16"), Training(optimizer="sgd"), 8, 4)
PUBLISHED_CASE = PublishedCase(
    "xMem", OWN_LOOP, "RTX-3060-12GB", "2.6",
    "device", 100 * MIB, (("DNNMem", 50 * MIB), ("xMem", 101 * MIB)),
)  # fmt: skip


def _own_loop(case: PublishedCase) -> OwnLoop:
    assert isinstance(case.run, OwnLoop)
    return case.run


def _with_batch(batch: int, **changes: Any) -> PublishedCase:
    return replace(PUBLISHED_CASE, run=replace(OWN_LOOP, batch=batch), **changes)


PUBLISHED = [
    PublishedComparison(PUBLISHED_CASE, 98 * MIB, context_bytes=MIB, estimated_buffer_bytes=2 * MIB),
    PublishedComparison(_with_batch(16, estimates=()), 120 * MIB, context_is_measured=True),
    PublishedComparison(_with_batch(32), error="torchvision is not installed"),
]


def test_estimators_are_compared_on_the_same_runs() -> None:
    found = published_section(PUBLISHED, [Skipped("xMem", "out of memory")], "all")
    (source,) = found.sources
    assert [(item.name, item.summary.count, item.failures) for item in source.estimators] == [
        ("graphmem", 2, 1), ("DNNMem", 1, 1), ("xMem", 1, 0),
    ]  # fmt: skip
    assert [_own_loop(item.case).batch for item in source.comparisons] == [16, 8]  # the largest error first
    assert found.skipped == (
        ("xMem", "no prediction: torchvision is not installed", 1), ("xMem", "out of memory", 1),
    )  # fmt: skip
    assert published_reason(PUBLISHED[0]) == "context assumed, 1.00 MiB; cuDNN workspaces are estimates, up to 2.00 MiB"
    assert published_reason(PUBLISHED[1]) == ""


def test_a_sample_is_spread_over_every_source() -> None:
    cases = [_with_batch(batch) for batch in range(10)]
    cases += [replace(PUBLISHED_CASE, source="other")]
    chosen = sample(cases, 3)
    assert [(case.source, _own_loop(case).batch) for case in chosen] == [
        ("xMem", 0),
        ("xMem", 3),
        ("xMem", 6),
        ("other", 8),
    ]


def test_the_cited_table_is_read_as_cases() -> None:
    cases = published_cases(None)
    assert len(cases) > 20
    first = next(case for case in cases if isinstance(case, PublishedCase) and isinstance(case.run, OwnLoop))
    assert first.name == "convnext_tiny, batch 200, adam, RTX-3060-12GB"
    assert (_own_loop(first).model.side, first.measured_bytes, dict(first.estimates)["xMem"]) == (
        86,
        3308 * MIB,
        3510 * MIB,
    )


def test_every_cited_program_exists_and_its_source_says_where_it_is_from() -> None:
    table = json.loads((PROGRAMS / "cases.json").read_text(encoding="utf-8"))
    for source in table["sources"]:
        assert source["url"].startswith("https://")
        assert source["date"]
        assert source["about"]
        assert (PROGRAMS / "programs" / source["program"]).is_file()
    cases = [case for case in programs_in(PROGRAMS) if isinstance(case, PublishedCase)]
    assert {case.level for case in cases} == {"allocated", "reserved", "device"}
    for case in cases:
        device_named(case.gpu)  # raises for what is not known, as the next
        version_named(case.torch_version)


def test_an_installed_graphmem_says_where_the_programs_are(tmp_path: Path) -> None:
    (left_out,) = programs_in(tmp_path)
    assert left_out == Skipped("runs rebuilt as programs", NOT_HERE)
    section = published_section(PUBLISHED[:1], [left_out], "all")
    assert section.skipped == (("runs rebuilt as programs", NOT_HERE, 1),)


def test_a_folder_with_programs_is_read_as_that_of_the_source_is() -> None:
    assert published_cases(PROGRAMS) == programs_in(PROGRAMS)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "it is not JSON"), ("[]", "list indices"), ('{"sources": [{"runs": [{}]}]}', "it lacks 'measured'")],
)
def test_a_damaged_table_of_programs_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "cases.json").write_text(text)
    with pytest.raises(SourceError, match=f"cases.json is not a table of published runs: .*{message}"):
        published_cases(tmp_path)


def test_a_published_script_is_predicted_to_the_byte() -> None:
    case = next(case for case in programs_in(PROGRAMS) if isinstance(case, PublishedCase) and "104604" in case.name)
    assert predict_published(case).peak_bytes == case.measured_bytes == 16908288


def test_a_published_run_on_several_cards_is_that_of_one_of_its_processes() -> None:
    found = [case for case in programs_in(PROGRAMS) if isinstance(case, PublishedCase) and isinstance(case.run, Script)]
    together = [case for case in found if isinstance(case.run, Script) and case.run.processes > 1]
    assert len(together) >= 10
    assert len({case.source for case in together}) >= 3
    case = next(case for case in together if "adam ddp" in case.name)
    assert case.name == "zero_recipe adam ddp on 2 cards, V100-32GB"
    predicted = predict_published(case)
    assert predicted.peak_bytes is not None
    assert predicted.peak_bytes // 10**6 * 10**6 == case.measured_bytes == 656 * 10**6  # printed in whole MB
    conf = {case.run.alloc_conf for case in together if isinstance(case.run, Script)}
    assert conf == {"", "expandable_segments:True"}


def test_what_is_counted_from_a_sample_with_the_model_there_is_less_by_the_models_segments() -> None:
    run = Script(str(PROGRAMS / "programs" / "mlp_random.py"), ("1000", "1000", "3", "uniform", "2048", "relu", "0"))
    case = replace(PUBLISHED_CASE, run=run, level="reserved")
    whole, beyond = predict_published(case), predict_published(replace(case, beyond_model=True))
    assert whole.peak_bytes is not None
    assert beyond.peak_bytes is not None
    # Four weights of 3.8 MiB share a segment of 20 MiB, and their biases one of 2.
    assert whole.peak_bytes - beyond.peak_bytes == 22 * MIB


def test_what_a_process_took_beside_its_allocator_is_added_where_its_source_measured_it() -> None:
    case = next(case for case in programs_in(PROGRAMS) if isinstance(case, PublishedCase) and "104604" in case.name)
    grown = predict_published(replace(case, level="reserved", grown_bytes=3 * MIB))
    plain = predict_published(replace(case, level="reserved"))
    assert grown.peak_bytes is not None
    assert plain.peak_bytes is not None
    assert grown.peak_bytes - plain.peak_bytes == 3 * MIB
    assert published_reason(grown) == "with 3.00 MiB of kernels and libraries loaded after the first sample"


def test_a_measured_figure_is_as_wide_as_its_last_digit() -> None:
    case = next(
        case for case in programs_in(PROGRAMS) if isinstance(case, PublishedCase) and "enzo forward 128," in case.name
    )
    assert case.rounded_bytes == round((1 << 30) / 2000)  # three digits of GiB
    for off_by, inside in ((case.rounded_bytes, True), (case.rounded_bytes + 1, False)):
        judged = PublishedComparison(case, peak_bytes=case.measured_bytes - off_by).judged()
        assert judged.interval.contains(judged.measured) is inside


def test_a_full_card_is_as_uncertain_as_its_context() -> None:
    builder = TraceBuilder("100 MiB, which stay in the cache when they are freed, before 120")
    operator = builder.operator("aten.empty", phase=builder.phase(1, "forward"))
    for size in (100 * MIB, 120 * MIB):
        builder.free(builder.alloc(size, operator, Category.TEMPORARY), operator)
    trace = builder.build()

    def told(off_by: int) -> tuple[int | None, int | None]:
        context = Cause("CUDA context", BOUNDS, "", {"device": bounded(-off_by, off_by)})
        found = Doubts(end_of_card(trace, Doubts((context,)), 230 * MIB, 220 * MIB, "2.6"))
        return found.least("reserved"), found.most("reserved")

    assert told(20 * MIB) == (-100 * MIB, 0)  # with 20 MiB less room the cache is given back first
    assert told(MIB) == (0, 0)


def test_a_program_that_fails_has_no_prediction() -> None:
    case = replace(PUBLISHED_CASE, run=Script(str(PROGRAMS / "programs" / "pytorch_issues.py"), ()), level="allocated")
    assert "IndexError" in predict_published(case).error


def test_levels_are_told_apart_and_each_estimator_is_beside_graphmem_on_its_own_runs() -> None:
    whole = replace(PUBLISHED[1], case=replace(PUBLISHED[1].case, others_bytes=MIB))
    process, card = published_section([PUBLISHED[0], whole], [], "all").levels
    assert (process.name, card.name) == ("process", "whole card")
    assert [item.name for item in process.estimators] == [
        "graphmem", "DNNMem", "xMem", "graphmem on the runs of DNNMem", "graphmem on the runs of xMem",
    ]  # fmt: skip
    assert [item.name for item in card.estimators] == ["graphmem"]


def test_what_cudnn_says_stands_in_a_row_of_its_own() -> None:
    asked = replace(PUBLISHED[0], asked_bytes=100 * MIB)
    (level,) = published_section([asked], [], "all").levels
    assert [(item.name, item.summary.largest) for item in level.estimators[:2]] == [
        ("graphmem", 0.02), ("graphmem, cuDNN asked", 0.0),
    ]  # fmt: skip
    assert "+0.00 % with cuDNN asked" in published_reason(asked)


def test_a_table_in_a_folder_is_read_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    common = {"name": "xMem", "gpu": "RTX-3060-12GB", "torch": "2.6", "level": "reserved", "unit": "MiB"}
    model = {"library": "torchvision", "name": "mnasnet1_0", "side": 86, "classes": 10}
    training = {"optimizer": "adamw", "optimizer_args": [["lr", 0.001]], "zero_grad_at": "before_forward"}
    run = {"model": model, "training": training, "batch": 8, "measured": 2, "beyond_model": True, "grown_mib": 26}
    table = {
        "sources": [{**common, "runs": [run]}],
        "not_usable": [{"source": "xMem", "figures": 2, "why": "out of memory"}],
    }
    (tmp_path / "cases.json").write_text(json.dumps(table))
    case, first, second = published_cases(tmp_path)
    assert isinstance(case, PublishedCase)
    assert _own_loop(case).step == Training(
        optimizer="adamw", optimizer_args=(("lr", 1e-3),), zero_grad_at="before_forward"
    )
    assert (_own_loop(case).model.classes, case.estimates, case.measured_bytes) == (10, (), 2 * MIB)
    assert (case.beyond_model, case.grown_bytes) == (True, 26 * MIB)
    assert first == second == Skipped("xMem", "out of memory")
    with pytest.raises(SourceError, match="holds no table, cases"):
        published_cases(tmp_path / "nothing")


# --- the report -------------------------------------------------------------------------------------------------------


def _comparisons() -> list[Comparison]:
    gpu = replace(MACHINE, source=GPU, gpu="H200")
    other = replace(CASE, name="second")
    return [
        _compared(_record()),
        _compared(_record(110 * MIB, case=other), estimated_buffer_bytes=3 * MIB, unknown=2),
        _compared(_record(machine=gpu), reserved=90 * MIB),
        _compared(_record(machine=gpu, status=OUT_OF_MEMORY)),
        _compared(_record(machine=gpu, cap_bytes=1)),
        Comparison(_record(machine=gpu), Predicted(error="it cannot be built")),
    ]


def test_kinds_of_truth_are_never_mixed() -> None:
    stub, gpu = section(STUB_DRIVER, _comparisons()), section(GPU, _comparisons())
    assert [len(part.comparisons) for part in (stub, gpu)] == [2, 1]
    assert [group.name for group in stub.levels] == ["allocated", "reserved"]
    assert [group.name for group in gpu.levels] == ["allocated", "reserved", "device"]
    assert (stub.failures, gpu.failures, len(gpu.capped)) == (1, 1, 1)
    assert [why for _, why in gpu.not_compared] == ["ran out of memory", "no prediction: it cannot be built"]


def test_the_worst_come_first_and_have_their_reasons() -> None:
    worst = section(STUB_DRIVER, _comparisons()).worst
    assert [item.record.case.name for item in worst] == ["second", CASE.name]
    assert reason(worst[0]) == (
        "allocated peak equal: the segments differ; cuDNN workspaces are estimates, up to 3.00 MiB; "
        "2 times something not modelled"
    )
    assert reason(worst[1]) == "equal to the byte"


def _rendered(form: str, comparisons: list[Comparison], about: str = "By us.") -> str:
    runs = published_section(PUBLISHED, [Skipped("other", "too little is said")] * 3, "all are predicted")
    return format_named(form).render(document_of(Contents(comparisons, runs, cited(), about)))


def test_verdicts_stand_beside_what_was_recorded() -> None:
    """The table that comes with graphmem is that of the rows beside the recordings."""
    rows = recorded_verdicts.read()
    assert verdicts() == recorded_verdicts._short(rows)
    assert sum(row[1] for row in verdicts()) == len(rows)
    (_, count, equal, exact, met, *_) = recorded_verdicts._cells("all", rows)
    counted = f"both peaks in {equal} of {count}; where the answer says exact, in {met} of {exact}"
    assert counted in (places.ROOT / "README.md").read_text(encoding="utf-8")
    document = document_of(Contents([], None, cited(), "By us.", (), [["cuDNN asked", 4, 3, *[2] * 6, 1, 0]]))
    assert "| cuDNN asked | 4 | 3 | 2 |" in format_named("markdown").render(document)


def test_the_report_is_the_same_for_the_same_input() -> None:
    first, second = (_rendered("markdown", _comparisons()) for _ in range(2))
    assert first == second
    assert "| reserved | 2 | 1 |" in first
    assert "| xMem | 2025 | 3.66 % | 9.46 % |" in first


def test_a_report_without_real_gpus_says_that_it_awaits_them() -> None:
    text = _rendered("markdown", _comparisons()[:2])
    assert "No record yet. graphmem measure --zoo" in text


def test_the_report_has_every_format() -> None:
    document = json.loads(_rendered("json", _comparisons()))
    assert document["schema"] == "graphmem.accuracy/1"
    assert differences(document) == []
    assert [one["predicted"] is None for one in document["cases"]] == [
        one.predicted.peak is None for one in _comparisons()
    ]
    assert "equal to the byte" in _rendered("text", _comparisons())
    assert "case,measured_allocated_bytes" in _rendered("csv", _comparisons())


def test_the_html_is_one_file_with_its_plots() -> None:
    pytest.importorskip("matplotlib")
    first, second = (_rendered("html", _comparisons(), "By <us>.") for _ in range(2))
    assert first == second
    assert first.count("<svg") == 6
    assert "By &lt;us&gt;." in first
    assert "src=" not in first
