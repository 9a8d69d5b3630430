"""Engines' logs: what is read in them, however they are wrapped, and beside which prediction it is put."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphmem.cli.main import cli
from graphmem.errors import SourceError, UsageError
from graphmem.serving import engine_named
from graphmem.serving.from_log import compared
from graphmem.serving.logs import Log, Reader, lines_of, services_in, settings_in
from graphmem.units import GIB, MIB

NEW = """\
INFO 11-02 10:00:00 [api_server.py:1980] vLLM API server version 0.32.0
INFO 11-02 10:00:00 [utils.py:253] non-default args: {'model_tag': 'Qwen/Qwen3-4B', 'api_key': ['hidden'], 'model': 'Qwen/Qwen3-4B', 'max_model_len': 8192, 'gpu_memory_utilization': 0.8, 'compilation_config': {'mode': 3, 'cudagraph_capture_sizes': [1, 2, 4]}, 'some_new_option': 3}
INFO 11-02 10:00:05 [core.py:105] Initializing a V1 LLM engine (v0.32.0) with config: model='Qwen/Qwen3-4B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
INFO 11-02 10:00:09 [gpu_worker.py:1] GPU 0: NVIDIA H100 80GB HBM3
INFO 11-02 10:00:20 [model_runner.py:425] Model loading took 7.6 GiB memory and 5.912 seconds
INFO 11-02 10:00:30 [gpu_worker.py:760] Available KV cache memory: 54.20 GiB
INFO 11-02 10:00:30 [kv_cache_utils.py:2329] GPU KV cache size: 394,656 tokens, Maximum concurrency for 8,192 tokens per request: 48.18x
INFO 11-02 10:00:40 [gpu_worker.py:1000] Free memory on device (78.6/79.18 GiB) on startup. Desired GPU memory utilization is (0.8, 63.34 GiB). Actual usage is 8.1 GiB for consumed memory (weights + non-torch), 1.2 GiB for peak activation, and 0.3 GiB for CUDAGraph memory.
"""  # noqa: E501
OLD = """\
INFO 11-21 08:10:36 api_server.py:592] vLLM API server version 0.8.5
INFO 11-21 08:10:36 api_server.py:593] args: Namespace(subparser='serve', model_tag='meta-llama/Llama-3.1-8B', host=None, lora_modules=None, tensor_parallel_size=2, gpu_memory_utilization=0.95, max_num_seqs=None, enforce_eager=True, dispatch_function=<function serve at 0x7f>)
(VllmWorkerProcess pid=7) INFO 11-21 model_runner.py:1115] Model loading took 7.5122 GB and 4.1 seconds
(VllmWorkerProcess pid=7) INFO 11-21 worker.py:267] the current vLLM instance can use total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.95) = 22.40GiB
(VllmWorkerProcess pid=7) INFO 11-21 worker.py:267] model weights take 7.51GiB; non_torch_memory takes 0.25GiB; PyTorch activation peak memory takes 0.90GiB; the rest of the memory reserved for KV Cache is 13.74GiB.
INFO 11-21 worker.py:267] model weights take 7.51GiB; non_torch_memory takes 0.24GiB; PyTorch activation peak memory takes 1.20GiB; the rest of the memory reserved for KV Cache is 13.45GiB.
INFO 11-21 executor_base.py:110] # cuda blocks: 13772, # CPU blocks: 4096
INFO 11-21 executor_base.py:115] Maximum concurrency for 131072 tokens per request: 1.68x
"""  # noqa: E501
SGLANG = """\
[2025-01-23 09:20:01] server_args=ServerArgs(model_path='meta-llama/Llama-3.1-8B', tokenizer_path='x', dtype='auto', tp_size=1, mem_fraction_static=0.88, max_running_requests=None)
[2025-01-23 09:20:05 TP0] Load weight begin. avail mem=78.81 GB
[2025-01-23 09:20:11 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.72 GB, mem usage=15.09 GB.
[2025-01-23 09:20:12 TP0] max_total_num_tokens=444500, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=4097, context_len=131072
"""  # noqa: E501
TENSORRT = """\
[TensorRT-LLM][INFO] TRTGptModel maxBatchSize: 64
[TensorRT-LLM][INFO] TRTGptModel maxNumTokens: 4096
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 31.84 GiB, available: 17.83 GiB
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 8219
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 16.05 GiB for max tokens in paged KV cache (263008).
"""
TGI = """\
2024-11-21T08:10:36Z INFO text_generation_launcher: Args { model_id: "meta-llama/Llama-3.1-8B", revision: None, num_shard: Some(2), quantize: None, max_concurrent_requests: 64, max_total_tokens: Some(8192), port: 80 }
2024-11-21T08:11:36Z INFO text_generation_launcher: KV-cache blocks: 900000, size: 1
"""  # noqa: E501
LLAMA_CPP = """\
ggml_cuda_init: found 2 CUDA devices:
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes
llama_model_loader: loaded meta data with 29 key-value pairs and 292 tensors from /models/x.gguf (version GGUF V3)
load_tensors: offloaded 33/33 layers to GPU
load_tensors:        CUDA0 model buffer size =  2403.49 MiB
load_tensors:        CUDA1 model buffer size =  2000.00 MiB
load_tensors:   CPU_Mapped model buffer size =   281.81 MiB
llama_context: n_ctx         = 8192
llama_context: flash_attn    = enabled
llama_kv_cache_unified:      CUDA0 KV buffer size =  1024.00 MiB
llama_context:      CUDA0 compute buffer size =   560.00 MiB
llama_context:  CUDA_Host compute buffer size =    24.01 MiB
"""


def _reader(engine: str) -> Reader:
    found: Reader = engine_named(engine).log  # type: ignore[attr-defined]
    return found


def _read(engine: str, text: str, tmp_path: Path) -> Log:
    path = tmp_path / "engine.log"
    path.write_text(text)
    log = _reader(engine).read(lines_of(path))
    assert log is not None
    return log


def _values(log: Log) -> dict[str, float]:
    return {name: printed.value / (GIB if printed.is_size else 1) for name, printed in log.printed.items()}


def test_what_vllm_says(tmp_path: Path) -> None:
    log = _read("vllm", NEW, tmp_path)
    assert (log.version, log.model, log.gpu) == ("0.32.0", "Qwen/Qwen3-4B", "H100-80GB")
    assert log.total_bytes == round(79.18 * GIB)
    assert _values(log) == pytest.approx({
        "weights": 7.6, "KV cache": 54.2, "tokens": 394_656, "concurrency": 48.18, "consumed": 8.1,
        "activation peak and graphs": 1.2,
    })  # fmt: skip
    assert log.settings["max_model_len"] == "8192"
    assert json.loads(log.settings["compilation_config"].replace("'", '"'))["mode"] == 3
    assert not any("hidden" in text for text in log.settings.values())


def test_what_older_ones_say_of_several_ranks(tmp_path: Path) -> None:
    log = _read("vllm", OLD, tmp_path)
    assert (log.version, log.model, log.total_bytes) == ("0.8.5", "meta-llama/Llama-3.1-8B", round(23.58 * GIB))
    assert log.settings["tensor_parallel_size"] == "2"
    assert log.settings["enforce_eager"] == "True"
    assert "max_num_seqs" not in log.settings
    values = _values(log)
    assert (values["KV cache"], values["activation peak"], values["blocks"]) == pytest.approx((13.45, 1.2, 13772))
    assert log.printed["KV cache"].highest == pytest.approx(13.74 * GIB)


@pytest.mark.parametrize(
    ("engine", "text", "settings", "printed"),
    [
        ("sglang", SGLANG, {"tp_size": "1", "mem_fraction_static": "0.88", "context_length": "131072"},
         {"weights": 15.09, "available": 63.72, "tokens": 444_500}),
        ("tensorrtllm", TENSORRT, {"max_batch_size": "64", "max_num_tokens": "4096"},
         {"KV buffer": 16.05, "available": 17.83, "tokens": 263_008, "blocks": 8219}),
        ("tgi", TGI, {"num_shard": "2", "max_total_tokens": "8192", "max_concurrent_requests": "64"},
         {"blocks": 900_000}),
        ("llamacpp", LLAMA_CPP, {"n_gpu_layers": "33", "ctx_size": "8192", "flash_attn": "on"},
         {"weights": 4403.49 / 1024, "KV buffer": 1.0, "compute buffer": 560 / 1024}),
    ],
)  # fmt: skip
def test_what_other_engines_say(
    engine: str, text: str, settings: dict[str, str], printed: dict[str, float], tmp_path: Path
) -> None:
    log = _read(engine, text, tmp_path)
    assert settings.items() <= dict(log.settings).items()
    assert _values(log) == pytest.approx(printed)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda line: f"vllm-1  | {line}",
        lambda line: f"\x1b[0;36m(EngineCore_0 pid=12)\x1b[0;0m {line}\r",
        lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2025-01-01T00:00:00Z"}),
        lambda line: f"2025-01-01T00:00:00.123456789Z stderr F {line}",
    ],
)
def test_a_log_is_the_same_however_it_is_wrapped(wrapped: Any, tmp_path: Path) -> None:
    text = "\n".join(map(wrapped, NEW.splitlines()))
    assert _read("vllm", text, tmp_path) == _read("vllm", NEW, tmp_path)


def test_text_of_windows_and_the_last_of_several_starts(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes((OLD.replace("13.45GiB", "-1.00GiB") + OLD).encode("utf-16"))
    log = _reader("vllm").read(lines_of(path))
    assert log is not None
    assert _values(log)["KV cache"] == pytest.approx(13.45)


def _run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["serve", *words])
    return result.exit_code, result.output


def test_the_comparison_names_the_term_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(NEW)
    code, text = _run("--from-log", str(path))
    assert code == 0, text
    assert "Furthest off:" in text
    assert "not followed: some_new_option 3" in " ".join(text.split())
    code, text = _run("--from-log", str(path), "--format", "json", "--max-num-seqs", "64")
    document = json.loads(text)
    assert document["schema"] == "graphmem.serving_log/1"
    terms = {term["name"]: term for term in document["terms"]}
    assert terms["KV cache"]["printed"] == pytest.approx(54.2 * GIB)
    parts = terms["consumed"]["predicted"] + terms["activation peak and graphs"]["predicted"]
    requested = 0.8 * round(79.18 * GIB)
    assert terms["KV cache"]["predicted"] + parts == pytest.approx(requested, abs=MIB)
    page = tmp_path / "page.html"
    assert _run("--from-log", str(path), "--format", "html", "-o", str(page))[0] == 0
    assert "graphmem.serving_log/1" in page.read_text()


def test_what_the_environment_chose_is_told_by_lines(tmp_path: Path) -> None:
    told = "INFO llm_engine.py:230] Initializing a V0 LLM engine (v0.8.5) with config: model='x'\n"
    first = _read("vllm", told + "Using FlashInfer for top-p & top-k sampling.\n" + OLD, tmp_path)
    assert (first.settings["use_v1"], first.settings["use_flashinfer_sampler"]) == ("False", "True")
    assert "use_v1" not in _read("vllm", NEW, tmp_path).settings


def test_what_is_outside_torch_belongs_to_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(OLD.replace("0.8.5", "0.7.3").replace("tensor_parallel_size=2", "tensor_parallel_size=1"))
    report = compared(path, gpu="RTX-3090")
    assert report.given is not None
    assert report.decides is not None
    assert report.decides.predicted - report.given.predicted == pytest.approx(0.25 * GIB, abs=MIB)
    assert (report.served.version, report.served.cards) == ("0.7", 1)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (b"", (), "has no figure of memory"),
        (b"\x7fELF\x00\x01" * 99, (), "is no text"),
        (b"hello\nworld\n", (), "has no figure of memory"),
        (OLD.encode(), ("--gpu", "H100"), "give the card with --gpu"),
        (OLD.encode(), ("--engine", "tgi"), "has no figure of memory that tgi prints"),
        (OLD.encode(), ("--engine", "onnxruntimegenai"), "logs of onnxruntimegenai are not read; accepted: vllm"),
    ],
)
def test_what_is_missing_is_asked_for_in_one_line(
    content: bytes, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(content)
    code, text = _run("--from-log", str(path), *words)
    assert code == 1
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "lacks", "decides"),
    [
        ("Automatically detected platform rocm.\n" + OLD, "does not name its card: give --gpu", "KV cache"),
        (NEW.replace("Qwen/Qwen3-4B", "/models/mine").replace("7.6 GiB", "9.9 GiB"), "whose configuration", "KV cache"),
        (TENSORRT, "does not name its model", "KV buffer"),
    ],
)
def test_lines_are_put_beside_each_other_where_nothing_is_predicted(
    content: str, lacks: str, decides: str, tmp_path: Path
) -> None:
    path = tmp_path / "engine.log"
    path.write_text(content)
    code, text = _run("--from-log", str(path))
    assert code == 0, text
    assert lacks in " ".join(text.split())
    report = compared(path)
    assert report.decides is not None
    assert report.decides.name == decides
    assert report.decides.share == pytest.approx(0, abs=0.02)
    with pytest.raises(UsageError, match=lacks):
        report.served  # noqa: B018


def test_hostile_logs_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "engine.log"
    path.write_text(NEW + "non-default args: {" + "[" * 200_000 + "\n" + "'a': " * 50_000 + "\n" + "=" * 300_000)
    assert len(max(lines_of(path), key=len)) <= 1 << 16
    assert _reader("vllm").read(lines_of(path)) is not None
    words = [f"service{number} | a line" for number in range(100_000)]
    assert services_in([*words, *["a line"] * 100_000]) == {None: [*words, *["a line"] * 100_000]}
    monkeypatch.setattr("graphmem.serving.logs._MOST_BYTES", 1000)
    with pytest.raises(SourceError, match="give the part of it from the engine's start on"):
        lines_of(path)
    with pytest.raises(SourceError, match="does not exist"):
        lines_of(tmp_path / "none")


@pytest.mark.parametrize("number", ["9" * 400, "9" * 6000, "0." + "3" * 6000, "²"])
@pytest.mark.parametrize(
    "text", ["54.20", "7.6 GiB memory", "394,656", "79.18 GiB)", "0.32.0", "8192", "utilization is (0.8"]
)
def test_numbers_that_are_none_are_passed_over_or_refused(text: str, number: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    assert text in NEW
    path.write_text(NEW.replace(text, re.sub(r"[\d.,]*\d", number, text, count=1)), encoding="utf-8")
    code, said = _run("--from-log", str(path))
    assert code in (0, 1)
    assert "bug in graphmem" not in said
    assert code == 0 or said.count("\n") == 1


def test_settings_as_python_and_rust_write_them() -> None:
    assert settings_in("a=1, b='x, y', c=None, d=[1, {2: 3}], e=f(g=2), h='cut") == {
        "a": "1", "b": "x, y", "d": "[1, {2: 3}]", "e": "f(g=2)", "h": "cut",
    }  # fmt: skip
    assert settings_in("{'a': 'b', 'c': {'d': 1}, 'e': True}") == {"a": "b", "c": "{'d': 1}", "e": "True"}


def test_a_part_that_explains_little_is_not_named_as_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    lines = [line for line in NEW.splitlines() if "Free memory" not in line]
    path.write_text("\n".join(lines).replace("54.20 GiB", "40.00 GiB").replace("7.6 GiB", "7.5 GiB"))
    text = " ".join(compared(path, gpu="H100").report().split())
    assert "Nothing else that it prints explains that: furthest off is weights" in text
    path.write_text("\n".join(lines).replace("54.20 GiB", "-1.20 GiB"))
    below = compared(path, gpu="H100").decides
    assert below is not None
    assert below.share is None
    assert "e+" not in compared(path, gpu="H100").report()


def test_what_a_log_cannot_answer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(NEW)
    code, said = _run("--from-log", str(path), "--load", "4")
    assert (code, said.count("\n")) == (1, 1)
    assert "--load is not asked of a log" in said
