"""``fit``, ``sweep``, ``advise``, ``compare`` and ``--budget`` as programs: what they print and how they exit."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from graphmem.cli.main import cli
from tests.support import onnx_samples


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="graphmem")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))


def test_fit_names_the_size_and_shows_the_two_that_prove_it(model: str) -> None:
    found = run("fit", model, "--gpu", "T4", "--at-most", "4096", "--format", "json")
    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["schema"] == "graphmem.fit/1"
    assert document["largest"] == 4096
    shown = run("fit", model, "--gpu", "T4", "--at-most", "4096").stdout
    assert "The largest batch that fits is 4,096." in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_fit_exits_with_3_where_nothing_fits(model: str) -> None:
    result = run("fit", model, "--gpu-memory", "100MiB")
    assert result.exit_code == 3
    assert "not even batch 1 fits" in result.stdout


def test_fit_needs_a_card_and_no_batch(model: str) -> None:
    assert "which card?" in run("fit", model).stderr
    assert "is what is searched" in run("fit", model, "--gpu", "T4", "-b", "2").stderr


def test_fit_finds_symbolic_dimensions(model: str) -> None:
    result = run("fit", model, "--gpu", "T4", "--find", "dim:batch", "--at-most", "16")
    assert "The largest dim:batch that fits is 16." in result.stdout, result.stderr


_GPT2 = {"model_type": "gpt2", "n_positions": 48, "n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64}


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(_GPT2))
    return f"hf:{tmp_path / 'config.json'}"


def test_fit_stops_where_the_positions_of_the_model_end(gpt2: str) -> None:
    result = run("fit", gpt2, "-b", "1", "--find", "seq-len", "--gpu", "T4", "--format", "json")
    document = json.loads(result.stdout)
    assert document["largest"] == 48
    assert "the table of 48 positions of the model" in document["stopped_by"]
    none = run("fit", gpt2, "-b", "1", "--find", "seq-len", "--multiple-of", "64", "--gpu", "T4")
    assert (none.exit_code, "no multiple of 64 is at most 48" in none.stderr) == (1, True)


def test_a_watch_whose_step_fails_on_any_card_fails(gpt2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = f'[tool.graphmem.watch.%s]\nmodel = "{gpt2}"\nbatch = 1\nseq_len = %d\n'
    Path("pyproject.toml").write_text(table % ("short", 48) + table % ("long", 49))
    result = run("check")
    assert (result.exit_code, "1 of 2 watches pass" in result.stdout) == (3, True)
    assert "long: 49 tokens are more than the table of 48 positions" in " ".join(result.stdout.split())


@pytest.mark.parametrize(("options", "code"), [((), 1), (("--fail-on-oom",), 3)])
def test_a_step_that_fails_on_any_card_is_an_error(gpt2: str, options: tuple[str, ...], code: int) -> None:
    result = run("analyze", gpt2, "-b", "1", "-s", "49", "--gpu", "T4", *options)
    assert result.exit_code == code
    assert "FAILS BEFORE MEMORY MATTERS: 49 tokens" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_states_of_small_tensors_are_why_eight_bits_save_nothing(gpt2: str) -> None:
    words = " ".join(run("advise", gpt2, "-b", "1", "-s", "16", "--gpu", "T4").stdout.split())
    assert "8-bit optimizer states (those of tensors below 4,096 values stay in fp32)" in words
    eight_bits = ("-b", "1", "-s", "16", "--optimizer", "adamw8bit", "--details")
    words = " ".join(run("analyze", gpt2, *eight_bits).stdout.split())
    assert "16 of 16 parameters have fewer than 4,096 values: their states are fp32" in words


@pytest.mark.slow
def test_options_stay_whole_where_there_is_room_for_them(gpt2: str) -> None:
    lines = run("advise", gpt2, "-b", "4096", "-s", "48", "--gpu", "T4").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert any("--checkpoint-activations" in line for line in lines)


def test_a_sweep_is_a_table_json_or_csv(model: str) -> None:
    options = ("sweep", model, "--vary", "batch=1,64", "--vary", "gpu=T4,A10G")
    rows = list(csv.DictReader(io.StringIO(run(*options, "--format", "csv").stdout)))
    assert [(row["batch"], row["gpu"]) for row in rows] == [
        ("1", "T4-16GB"), ("1", "A10G-24GB"), ("64", "T4-16GB"), ("64", "A10G-24GB")
    ]  # fmt: skip
    analysed = json.loads(run("analyze", model, "-b", "64", "--gpu", "T4", "--format", "json").stdout)
    assert int(rows[2]["device_bytes"]) == analysed["peak"]["device_bytes"]
    assert rows[2]["fits"] == "yes"
    document = json.loads(run(*options, "--format", "json").stdout)
    assert document["rows"][2]["settings"] == {"batch": 64, "device": "T4-16GB"}
    assert document["rows"][2]["estimate"] == {**analysed, "at_peak": None}, "the same, without its events"
    assert run(*options).stdout.count("fits") == 4


def test_processes_and_the_compiler_are_varied(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "m.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(256, 256), torch.zeros(8, 256)\n"
    )
    options = ("sweep", f"{tmp_path / 'm.py'}:make", "--vary", "ddp=off,2", "--vary", "compile=off", "--format", "json")
    rows = json.loads(run(*options).stdout)["rows"]
    assert [row["settings"] for row in rows] == [{"ddp": None, "compile": None}, {"ddp": 2, "compile": None}]
    assert "DDP over 2 processes" in rows[1]["estimate"]["step"]


def test_jobs_change_nothing_but_the_time(model: str) -> None:
    pytest.importorskip("joblib")
    options = ("sweep", model, "--vary", "batch=1,64", "--vary", "alloc-conf=enable_mem_pattern:0;io_binding:1")
    alone, side_by_side = run(*options, "--format", "json"), run(*options, "--format", "json", "--jobs", "2")
    assert side_by_side.exit_code == 0, side_by_side.stderr
    assert side_by_side.stdout == alone.stdout


def test_a_card_that_was_assumed_is_told(model: str) -> None:
    for options in (("sweep", model, "--vary", "batch=1,2"), ("advise", model, "-b", "2")):
        assert "no GPU was named: H100-80GB" in run(*options).stdout
        assert "no GPU was named" not in run(*options, "--gpu", "T4").stdout


def test_a_card_that_was_assumed_is_told_where_it_decides(model: str, tmp_path: Path) -> None:
    over = run("analyze", model, "-b", "1", "--budget", "100MiB")
    assert "on H100-80GB, as no --gpu was given" in over.stderr
    assert "H100-80GB (assumed: no --gpu)" in over.stdout
    trace = str(tmp_path / "trace.json")
    assert "on H100-80GB, as no --gpu was given" in run("export", model, "-b", "1", "-o", trace).stderr
    assert "no --gpu" not in run("export", model, "-b", "1", "--gpu", "T4", "-o", trace).stderr
    assert "H100-80GB (assumed: no --gpu)" in run("replay", trace).stdout
    assert "assumed: no --gpu" not in run("replay", trace, "--gpu", "T4").stdout


def test_a_combination_that_fails_is_shown_and_makes_the_exit_code_1(model: str) -> None:
    result = run("sweep", model, "--vary", "dtype=fp32,bf16", "-b", "2")
    assert result.exit_code == 1
    assert "own precision" in result.stdout


def test_a_sweep_by_prices_names_the_cheapest_card_that_fits(tmp_path: Path) -> None:
    model = str(onnx_samples.save(onnx_samples.perceptron(), tmp_path))
    prices = tmp_path / "prices.toml"
    prices.write_text('L4 = 0.8\nT4 = 0.35\n"A10G" = 1.2\n')
    found = run("sweep", model, "--vary", "batch=2", "--prices", str(prices))
    assert found.exit_code == 0, found.stderr
    rows = [line.split()[:3] for line in found.stdout.splitlines()[3:6]]
    assert found.stdout.startswith("3 of 3 combinations fit.\n")
    assert rows == [["T4-16GB", "2", "0.35"], ["L4-24GB", "2", "0.8"], ["A10G-24GB", "2", "1.2"]]
    assert "The cheapest card that fits: T4-16GB at 0.35 with batch 2." in found.stdout
    document = json.loads(run("sweep", model, "--prices", str(prices), "-b", "2", "--format", "json").stdout)
    assert document["prices"] == {"L4-24GB": 0.8, "T4-16GB": 0.35, "A10G-24GB": 1.2}
    unpriced = run("sweep", model, "--vary", "gpu=H200", "-b", "2", "--prices", str(prices))
    assert (unpriced.exit_code, "has no price; priced: L4-24GB, T4-16GB" in unpriced.stderr) == (1, True)
    nothing = run("sweep", model)
    assert (nothing.exit_code, "nothing is varied" in nothing.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vary", "colour=red"], "--vary knows no 'colour'"),
        (["--vary", "batch"], "NAME=V1,V2"),
        (["--vary", "fsdp=two"], "--vary fsdp: 'two' is no whole number"),
        (["--vary", "ddp=off,on"], "--vary ddp: among how many processes: write a number, as in off,4"),
        (["--vary", "batch=4..1"], "a range of 0 numbers"),
        (["--vary", "dim:b=1..9:x"], "'x' is no whole number"),
        (["--vary", "batch=1,x"], "--vary batch: 'x' is no whole number"),
        (["--vary", "batch=1", "--vary", "batch=2"], "given twice"),
        (["--vary", "batch=1", "-b", "2"], "leave one out"),
        (["--vary", "checkpoint-activations=yes"], "neither on nor off"),
        (["--vary", "gpu=H9000"], "unknown GPU"),
    ],
)
def test_a_wrong_setting_of_a_sweep_is_one_line(model: str, arguments: list[str], said: str) -> None:
    result = run("sweep", model, *arguments)
    assert result.exit_code == 1
    assert said in result.stderr


def test_advice_for_a_session_is_about_its_arena_and_true(model: str) -> None:
    request, batch = (model, "--gpu", "T4", "--format", "json"), ("-b", "300000")
    advised = json.loads(run("advise", *request, *batch).stdout)
    assert len(advised["advice"]) == 5
    for one in advised["advice"]:
        given = one["options"].replace("--batch", "-b").split()
        again = json.loads(run("analyze", *request, *([] if "-b" in given else batch), *given).stdout)
        assert one["device_bytes"] == again["peak"]["device_bytes"]
        assert one["saved_bytes"] == advised["base"]["peak"]["device_bytes"] - one["device_bytes"]
    assert any(one["saved_bytes"] > 0 for one in advised["advice"])


def test_advice_that_saves_nothing_says_so(model: str) -> None:
    result = run("advise", model, "--gpu", "T4", "-b", "1", "--runtime", "tensorflow")
    assert result.exit_code == 0, result.stderr
    assert "No change that was tried saves memory." in result.stdout


def test_two_reports_are_compared(model: str, tmp_path: Path) -> None:
    before, after = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    for batch, name in (("1", before), ("500000", after)):
        assert run("analyze", model, "-b", batch, "--gpu", "T4", "--format", "json", "-o", name).exit_code == 0
    document = json.loads(run("compare", before, after, "--format", "json").stdout)
    first, second = (json.loads(Path(name).read_text()) for name in (before, after))
    for level in ("requested", "allocated", "reserved", "device"):
        change = second["peak"][f"{level}_bytes"] - first["peak"][f"{level}_bytes"]
        assert document["peak"][level]["change"] == change
    assert sum(row["change"] for row in document["breakdown"].values()) == document["peak"]["device"]["change"]
    shown = run("compare", before, after).stdout
    assert shown.startswith("Device memory grows by ")
    assert "Peak memory" in shown
    assert run("compare", after, before).stdout.startswith("Device memory shrinks by ")
    assert run("compare", before, before).stdout.startswith("Device memory stays at ")
    assert run("compare", before, after, "--max-growth", "1B").exit_code == 3
    assert run("compare", after, before, "--max-growth", "1B").exit_code == 0
    assert run("compare", before, after, "--max-growth", "1%").exit_code == 3
    assert run("compare", before, after, "--max-growth", "999999%").exit_code == 0
    assert (
        "--max-growth 5: a share or a size? Write 5% or 5MiB"
        in run("compare", before, after, "--max-growth", "5").output
    )


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    for name, content in (("x", "{}"), ("y", "{"), ("z", '{"schema": "graphmem.estimate/1"}')):
        (tmp_path / name).write_text(content)
        result = run("compare", str(tmp_path / name), str(tmp_path / name))
        assert result.exit_code == 1
        assert result.stderr.startswith("graphmem: ")
        assert "bug" not in result.stderr


def test_a_budget_is_an_exit_code(model: str) -> None:
    options = ("analyze", model, "-b", "1", "--gpu", "T4", "--details")
    assert run(*options, "--budget", "1GiB").exit_code == 0
    over = run(*options, "--budget", "100MiB")
    assert over.exit_code == 3
    assert "over the budget of 100.00 MiB" in over.stderr
    first, rest = over.stdout.split("\n\n", 1)
    assert first.startswith("OVER THE BUDGET of 100.00 MiB")
    assert rest == run(*options).stdout


def test_a_list_given_to_an_option_of_one_value_names_the_way_to_vary_it(model: str) -> None:
    result = run("sweep", model, "--vary", "amp=off", "--batch", "1,2")
    assert (result.exit_code, "--vary batch=V1,V2" in result.stderr) == (2, True)
