"""The command line as a whole: exit codes, errors in one line, files written whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from graphmem.base import versions
from graphmem.cli.analyze import analyze_command
from graphmem.cli.main import cli
from graphmem.cli.output import working
from graphmem.cli.replay import replay_command
from graphmem.devices import all_devices, device_named
from graphmem.errors import CaptureError, UsageError
from graphmem.estimate import Estimate
from graphmem.training import Inference, Training
from graphmem.units import GIB
from tests.support import platforms
from tests.support.estimates import failing_estimate, training_estimate


class Recorder:
    """Stands for ``graphmem.analyze``: remembers what it was asked and answers with ``result`` or raises it."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.result: Estimate | BaseException = training_estimate()

    def analyze(self, model: str, **request: Any) -> Estimate:
        return self._answer(model=model, **request)

    def replay_trace(self, trace: object, **request: Any) -> Estimate:
        return self._answer(trace=trace, **request)

    def _answer(self, **request: Any) -> Estimate:
        self.asked = request
        print("the model's own code prints this")
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "graphmem.analyze", recorder)
    return recorder


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="graphmem")


def one_line(result: Result) -> str:
    """The error text, which must be one line that begins with the program's name."""
    lines = result.stderr.strip().splitlines()
    ours = [line for line in lines if line.startswith("graphmem: ")]
    assert len(ours) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return ours[0]


def test_analyze_prints_the_report(recorder: Recorder) -> None:
    result = run("analyze", "net.py:build")
    assert result.exit_code == 0, result.output
    assert "FITS H100-80GB" in result.stdout
    assert "the model's own code" not in result.stdout
    assert "the model's own code" in result.stderr


def test_warnings_of_libraries_are_not_shown() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for shows in (False, True):
            with working(shows_warnings=shows):
                for module in ("torch.jit", "transformers", "torches", "mine"):
                    warnings.warn_explicit(module, FutureWarning, f"{module}.py", 1, module, {})
    assert [str(one.message) for one in seen] == ["torches", "mine", "torch.jit", "transformers", "torches", "mine"]


def test_json_on_stdout_is_only_json(recorder: Recorder) -> None:
    result = run("analyze", "net.py:build", "--format", "json")
    assert json.loads(result.stdout)["schema"] == "graphmem.estimate/1"


def test_the_options_reach_the_library(recorder: Recorder) -> None:
    options = (
        "-b 8 --seq-len 512 --optimizer sgd --optimizer-arg momentum=0.9 --optimizer-arg foreach=false --amp bf16 "
        "--dtype bf16 --grad-accum 2 --checkpoint-activations --clip-grad-norm 1 --gpu a100-80gb --iterations 3 "
        "--alloc-conf expandable_segments:True --runtime pytorch --torch-version 2.6 --dim s:0=7 "
        "--input-shape input:0:1x3x8x8 --input-shape flag:scalar --build-on device --loop drop --no-grad-scaler "
        "--lr-scheduler cosine --zero-grad-at before-forward"
    )
    result = run("analyze", "net.py:build", *options.split())
    assert result.exit_code == 0, result.output
    asked = recorder.asked
    assert asked["training"] == Training(
        optimizer="sgd",
        optimizer_args=(("momentum", 0.9), ("foreach", False)),
        dtype="bf16",
        amp="bf16",
        checkpoint_activations=True,
        grad_accum=2,
        clip_grad_norm=1.0,
        loop="drop",
        grad_scaler=False,
        lr_scheduler="cosine",
        zero_grad_at="before_forward",
    )
    assert asked["device"] is device_named("A100-80GB")
    assert asked["dims"] == {"s:0": 7}
    assert asked["input_shapes"] == {"input:0": (1, 3, 8, 8), "flag": ()}
    assert (asked["batch"], asked["seq_len"], asked["iterations"]) == (8, 512, 3)
    assert (asked["alloc_conf"], asked["runtime"]) == ("expandable_segments:True", "pytorch")
    assert (asked["torch_version"], asked["build_on"]) == ("2.6", "device")


def test_batches_that_differ_reach_the_library(recorder: Recorder) -> None:
    options = (
        "--seq-lens 100,128,115 --last-batch 3 --eval-batches 2 --eval-batch-size 16 --steps-per-epoch 3 "
        "--gradient-accumulation-steps 2 --max-grad-norm 0.5"
    )
    result = run("analyze", "net.py:build", "-b", "8", *options.split())
    assert result.exit_code == 0, result.output
    assert recorder.asked["training"] == Training(
        seq_lens=(100, 128, 115), last_batch=3, eval_batches=2, eval_batch_size=16, steps_per_epoch=3, grad_accum=2,
        clip_grad_norm=0.5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (["m.onnx"], Inference()),
        (["M.ONNX", "--dtype", "fp16"], Inference(dtype="fp16")),
        (["m.onnx", "--training"], Training()),
        (["m.onnx", "--optimizer", "adam"], Training(optimizer="adam")),
        (["net.py:build"], Training()),
        (["hf:gpt2", "--inference", "--amp", "fp16"], Inference(amp="fp16")),
    ],
)
def test_the_step_follows_from_the_model_unless_told(recorder: Recorder, arguments: list[str], step: object) -> None:
    assert run("analyze", *arguments).exit_code == 0
    assert recorder.asked["training"] == step


def test_gpu_memory_makes_a_card_of_that_size(recorder: Recorder) -> None:
    run("analyze", "m.onnx", "--gpu-memory", "24GiB", "--gpu", "t4")
    assert recorder.asked["device"].capacity_bytes == 24 * GIB
    assert recorder.asked["device"].compute_capability == (7, 5)
    run("analyze", "m.onnx")
    assert recorder.asked["device"] is None


def test_not_fitting_is_an_exit_code_only_when_asked(recorder: Recorder) -> None:
    recorder.result = failing_estimate()
    plain, checked = run("analyze", "m.py:f"), run("analyze", "m.py:f", "--fail-on-oom")
    assert (plain.exit_code, checked.exit_code) == (0, 3)
    assert plain.stdout == checked.stdout
    assert "DOES NOT FIT" in plain.stdout
    recorder.result = training_estimate()
    assert run("analyze", "m.py:f", "--fail-on-oom").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "H1000"], "H100-80GB"),
        (["--gpu-memory", "lots"], "24GiB"),
        (["--gpu-memory", "0"], "more than 0"),
        (["--gpu-memory", "9" * 400], "no GPU has"),
        (["--gpu-memory", "24"], "write a unit: 24GiB"),
        (["--gpu", "FooCard", "--gpu-memory", "20GB"], "--gpu-like NAME says which known one it is like"),
        (["--optimizer", "sdg"], "the nearest are sgd, "),
        (["--optimizer-arg", "momentum"], "name=value"),
        (["--optimizer-arg", "momentum=1"], "betas"),
        (["--dtype", "int8"], "bf16"),
        (["--amp", "fp8"], "fp16"),
        (["--zero-grad", "x"], "set_to_none"),
        (["--clip-grad-norm", "-1"], "above 0"),
        (["--clip-grad-norm", "nan"], "above 0"),
        (["--inference", "--clip-grad-norm", "0"], "--clip-grad-norm"),
        (["--inference", "--optimizer", "sgd"], "--optimizer"),
        (["--dim", "n"], "NAME=VALUE"),
        (["--dim", "n=x"], "NAME=VALUE"),
        (["--input-shape", "x:1xx3"], "NAME:1x3x224x224"),
        (["-o", "/no/such/place/x"], "no directory"),
        (["-o", "/"], "directory"),
    ],
)
def test_a_bad_value_is_one_clear_line_and_exit_1(recorder: Recorder, arguments: list[str], said: str) -> None:
    result = run("analyze", "net.py:build", *arguments)
    assert result.exit_code == 1
    assert said in one_line(result)
    assert not recorder.asked, "nothing is analysed before the options are checked"


@pytest.mark.parametrize("arguments", [["--nope"], ["--batch", "0"], ["--batch", "x"], ["--format", "yaml"], []])
def test_wrong_option_syntax_is_exit_2(recorder: Recorder, arguments: list[str]) -> None:
    model = ["net.py:build"] if arguments else []
    assert run("analyze", *model, *arguments).exit_code == 2


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (UsageError("unknown runtime 'x'; accepted: pytorch"), "unknown runtime"),
        (CaptureError("line one\nline two\x1b[31m"), r"line one line two\x1b[31m"),
        (SystemExit(5), "ended the program itself"),
        (MemoryError(), "not enough memory"),
        (KeyError("x"), "bug in graphmem"),
    ],
)
def test_an_error_is_one_line_and_exit_1(recorder: Recorder, raised: BaseException, said: str) -> None:
    recorder.result = raised
    result = run("analyze", "net.py:build")
    assert result.exit_code == 1
    assert said in one_line(result)
    assert result.stdout == ""


def test_a_newer_pytorch_is_named_and_no_bug(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_text", lambda: "2.99.0+cu140")
    recorder.result = KeyError("x")
    text = one_line(run("analyze", "net.py:build"))
    assert f"PyTorch 2.99.0 is newer than {versions.words(versions.NEWEST)}, the newest known" in text
    assert "bug" not in text


def test_the_traceback_is_there_for_those_who_ask(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.result = KeyError("x")
    monkeypatch.setenv("GRAPHMEM_DEBUG", "1")
    result = run("analyze", "net.py:build")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def test_a_file_is_written_whole_with_usual_permissions(recorder: Recorder, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    result = run("analyze", "m.py:f", "--format", "json", "-o", str(target))
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert json.loads(target.read_text())["peak"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    (tmp_path / "plain").touch()
    assert target.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failure_leaves_the_old_file_alone(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.txt"
    target.write_text("old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    result = run("analyze", "m.py:f", "-o", str(target))
    assert result.exit_code == 1
    assert "No space left" in one_line(result)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


def test_an_error_of_the_analysis_writes_nothing(recorder: Recorder, tmp_path: Path) -> None:
    recorder.result = CaptureError("no")
    assert run("analyze", "m.py:f", "-o", str(tmp_path / "x")).exit_code == 1
    assert list(tmp_path.iterdir()) == []


@platforms.LINKS
def test_writing_through_a_link_keeps_the_link(recorder: Recorder, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run("analyze", "m.py:f", "-o", str(tmp_path / "link")).exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert "FITS" in (tmp_path / "real").read_text()


def test_a_device_file_is_written_not_replaced(recorder: Recorder) -> None:
    assert run("analyze", "m.py:f", "-o", os.devnull).exit_code == 0
    assert not Path(os.devnull).is_file()


def test_gpus_lists_every_card() -> None:
    result = run("gpus")
    assert result.exit_code == 0
    for device in all_devices():
        assert device.name in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120


def test_gpus_in_json_has_bytes_and_sources() -> None:
    document = json.loads(run("gpus", "--format", "json").stdout)
    assert document["schema"] == "graphmem.gpus/1"
    assert {card["name"] for card in document["gpus"]} == {device.name for device in all_devices()}
    assert all(card["capacity_source"] and card["context_source"] for card in document["gpus"])


def test_one_gpu_shows_its_sources() -> None:
    result = run("gpus", "t4")
    assert device_named("t4").capacity_source in " ".join(result.stdout.split())
    assert run("gpus", "t5").exit_code == 1


def test_python_m_graphmem_is_the_same_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "graphmem", "gpus", "zzz"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("graphmem: unknown GPU 'zzz'")
    assert len(result.stderr.splitlines()) == 1


OPTIONS = st.sampled_from(
    sorted(
        {written for command in (analyze_command, replay_command) for p in command.params for written in p.opts}
        - {"model", "snapshot", "-o", "--output", "--html"}
    )
)
VALUES = st.one_of(
    st.text(max_size=30),
    st.integers().map(str),
    st.floats().map(str),
    st.from_regex(r"[a-z_]{1,8}[=:][0-9x,.]{1,12}", fullmatch=True),
    st.sampled_from(["sgd", "bf16", "H100", "24GiB", "1e400GiB", "momentum=0.9", "x:1x2", "off", "json"]),
    st.sampled_from(["\0", "\ud800", "\x1b[31m"]),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=20), st.lists(st.tuples(OPTIONS, VALUES), max_size=5))
@example("m.onnx", [("--gpu-memory", "9" * 5000)])
@example("m.onnx", [("--dim", "x=" + "9" * 5000)])
@example("m.onnx", [("--optimizer-arg", "lr=" + "(" * 500)])
@example("m.onnx", [("--optimizer-arg", "lr={1}")])
def test_no_option_value_ever_shows_a_traceback(recorder: Recorder, model: str, options: list[tuple[str, str]]) -> None:
    result = run("analyze", *(part for option in options for part in option), "--", model)
    assert result.exit_code in (0, 1, 2, 3)
    assert "Traceback" not in result.stderr
    assert "bug in graphmem" not in result.stderr


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_fits_a_terminal(name: str) -> None:
    result = CliRunner().invoke(cli, [name, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("name", ["H100x4", "4xH100", "4 x h100"])
def test_several_cards_are_told_from_one(name: str) -> None:
    with pytest.raises(UsageError, match=r"several cards.*H100-80GB.*plan --gpus 4xH100-80GB"):
        device_named(name)


@pytest.mark.parametrize(("text", "length"), [("8k", 8000), ("8K", 8192), ("4096", 4096)])
def test_serve_reads_numbers_as_the_engine_does(text: str, length: int) -> None:
    result = run("serve", "Llama-3.1-8B", "--gpu", "H100", "--max-model-len", text, "--format", "json", "--no-advice")
    assert json.loads(result.stdout)["settings"]["max_model_len"] == length
    assert "no whole number" in run("serve", "Llama-3.1-8B", "--max-model-len", "8x").stderr
