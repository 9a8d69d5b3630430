"""Command lines and files of servers as they stand, and options that once stopped an answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from graphmem.cli.main import cli
from graphmem.devices import device_named
from graphmem.errors import GraphmemError, UsageError
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served
from graphmem.serving.commands import asked_by, asked_in
from graphmem.serving.configurations import model_named

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vllm serve M -tp 2 --port 80", "M --engine vllm --tp 2 --port 80"),
        ("CUDA_VISIBLE_DEVICES=0 /opt/bin/vllm serve --model M --max-model-len=9", "M --engine vllm --max-model-len=9"),
        ("python3 -m vllm.entrypoints.openai.api_server --model=M --enforce-eager", "M --engine vllm --enforce-eager"),
        ("python -m sglang.launch_server --tp 2 --model-path M", "M --engine sglang --tp 2"),
        ("trtllm-serve serve M --tp_size 2", "M --engine tensorrtllm --tp_size 2"),
        ("text-generation-launcher --model-id M", "M --engine tgi"),
        ("./build/bin/llama-server -m m.gguf -ngl 20", "m.gguf --engine llamacpp -ngl 20"),
        ("docker run --gpus all -v /vllm:/m -p 80:80 vllm/vllm-openai:latest --model M", "M --engine vllm"),
        ("docker run -it lmsysorg/sglang:latest python3 -m sglang.launch_server --model M", "M --engine sglang"),
        ("sglang serve --model-path M", "M --engine sglang"),
        ("vllm serve -tp=2 --max_num_seqs 9 M", "M --engine vllm --tp=2 --max-num-seqs 9"),
        ("PYTORCH_CUDA_ALLOC_CONF=a:1 X=2 vllm serve M -O3", "M --engine vllm --optimization-level 3 --alloc-conf a:1"),
        ("vllm serve M --cuda-graph-sizes 1 2 --port 80", "M --engine vllm --cuda-graph-sizes 1+2 --port 80"),
        ("docker run -e MODEL_ID=M -e NUM_SHARD=2 x/text-generation-inference:3", "M --engine tgi --num-shard 2"),
        ("LLAMA_ARG_MODEL=m.gguf LLAMA_ARG_CTX_SIZE=9 llama-server", "m.gguf --engine llamacpp --ctx-size 9"),
    ],
)
def test_a_command_line_as_it_stands(line: str, words: str) -> None:
    assert asked_by(line.split()) == [word.replace("+", " ") for word in words.split()]


def test_a_composed_server_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "services:\n  llm:\n    image: vllm/vllm-openai:v0.11.0\n    command: --model M --max-model-len 9\n"
    for name in ("own.yml", "compose.yaml"):
        Path(name).write_text(text)
    words = ["M", "--engine", "vllm", "--max-model-len", "9"]
    assert asked_by(["docker", "compose", "-f", "own.yml", "up", "-d"]) == words
    assert asked_by(["docker-compose", "up"]) == words
    Path("other.yml").write_text(text.replace("9", "7"))
    assert asked_by(["docker", "compose", "--file=other.yml", "up"])[-1] == "7"
    with pytest.raises(UsageError, match="several compose files are not merged here"):
        asked_by(["docker", "compose", "-f", "own.yml", "-f", "other.yml", "up"])


def test_entries_of_objects_are_put_together() -> None:
    line = """vllm serve M --speculative-config {"method":"mtp"} --speculative_config.num_speculative_tokens 2
        -O.cudagraph_mode=FULL --limit-mm-per-prompt.image 4 --hf-overrides.a.b_c x"""
    found = asked_by(line.split())
    assert found[:3] == ["M", "--engine", "vllm"]
    objects = {name: json.loads(text) for name, text in zip(found[3::2], found[4::2], strict=True)}
    assert objects == {
        "--speculative-config": {"method": "mtp", "num_speculative_tokens": 2},
        "--compilation-config": {"cudagraph_mode": "FULL"},
        "--limit-mm-per-prompt": {"image": 4},
        "--hf-overrides": {"a": {"b_c": "x"}},
    }


def test_a_file_of_options_is_weaker_than_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("model: M\nmax-model-len: 9\ndtype: half\nenforce-eager: true\ntrust_remote_code: false\n")
    found = asked_by(["vllm", "serve", "--config", str(path), "--max_model_len", "8"])
    assert found == ["M", "--engine", "vllm", "--max-model-len", "8", "--dtype", "half", "--enforce-eager"]
    path.write_text("- a")
    with pytest.raises(UsageError, match="no file of options"):
        asked_by(["vllm", "serve", f"--config={path}"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("vllm bench throughput --model M", "starts no server that is known"),
        ("llama-server -hf a/b:Q4_K_M -c 9", "would fetch that file"),
        ("vllm serve --port 80", "names no model"),
    ],
)
def test_a_command_line_that_starts_none_says_so(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asked_by(line.split())


def test_a_containers_variables_are_options(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    image = "image: x/text-generation-inference:3"
    for variables in ("[MODEL_ID=M, NUM_SHARD=2]", "{MODEL_ID: M, NUM_SHARD: 2}"):
        path.write_text(f"services: {{s: {{{image}, environment: {variables}}}}}")
        assert asked_in(path) == ["M", "--engine", "tgi", "--num-shard", "2"]
    path.write_text(f"c: [{{{image}, args: [--num-shard, '4'], env: [{{name: MODEL_ID, value: M}}]}}]")
    assert asked_in(path) == ["M", "--engine", "tgi", "--num-shard", "4"]


def test_options_of_other_releases_are_taken() -> None:
    usual = _served(max_model_len=8192)
    older = (("device", "cuda"), ("max-seq-len-to-capture", "8192"), ("limit-mm-per-prompt", "image=4,video=1"))
    assert _served(*older, max_model_len=8192).kv_cache == usual.kv_cache
    with pytest.raises(GraphmemError, match="accepted: a JSON object"):
        _served(("limit-mm-per-prompt", "image=many"))
    scaled = _served(("rope-scaling", '{"rope_type": "linear", "factor": 2.0}'), max_model_len=8192)
    assert scaled.settings["max_model_len"] == 8192


_COMPOSE = """
services:
  web: {image: nginx, command: nginx -g daemon}
  llm:
    image: vllm/vllm-openai:v0.10.1
    command: >
      --model M --max-model-len 8192
      --served-model-name q
"""
_MANIFEST = """
kind: Service
---
kind: Deployment
spec: {template: {spec: {containers: [
  {name: a, image: x/y:1, command: [/bin/sh, -c, "exec vllm serve M --dtype half"]}
]}}}
"""
_VALUES = """
servingEngineSpec:
  modelSpec:
  - {name: l, modelURL: M, vllmConfig: {tensorParallelSize: 2, maxModelLen: 4096, extraArgs: ["--enforce-eager"]}}
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_COMPOSE, "M --engine vllm --max-model-len 8192 --served-model-name q"),
        (_MANIFEST, "M --engine vllm --dtype half"),
        (_VALUES, "M --engine vllm --tp 2 --max-model-len 4096 --enforce-eager"),
    ],
)
def test_a_file_that_starts_a_server(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    assert asked_in(path) == words.split()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "it is not YAML"),
        ("services: {web: {image: nginx, command: run}}", "starts no server that is known"),
        (_VALUES.replace("servingEngineSpec", "a") + _VALUES, "starts 2 servers (M, M); give a file with one"),
        ("a: &x [1]\nb: *x", "has an alias"),
        ('command: "vllm serve \'M"', "is no command line"),
        ("command: vllm serve M -o/tmp/x", "-o/tmp/x is no option of the engine's"),
        ("command: vllm serve M --trace=/etc/passwd", "--trace is no option of the engine's"),
    ],
)
def test_a_file_that_starts_none_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yml"
    path.write_text(text)
    result = CliRunner().invoke(cli, ["serve", str(path), "--gpu", "H100"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert message in result.output


def test_the_command_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "compose.yml"
    path.write_text(_COMPOSE.replace("--model M", f"--model {LLAMA}"))
    common = ["serve", "--gpu", "L40S", "--no-advice", "--enforce-eager"]
    for words in ([*common, str(path)], [*common, "--", "vllm", "serve", LLAMA, "--max-model-len", "8192"]):
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, result.output
        assert "requests of 8,192 tokens" in " ".join(result.output.split())
    result = CliRunner().invoke(cli, [*common, "--", "make", "tea"])
    assert (result.exit_code, "starts no server" in result.output) == (1, True)


def _served(*arguments: tuple[str, str], gpu: str = "L40S", **options: Any) -> Served:
    question = Question(model_named(LLAMA), device_named(gpu), arguments=arguments, enforce_eager=True, **options)
    return engine_named("vllm").serve(question)


def _parts(served: Served) -> dict[str, int]:
    return {part.name: part.bytes for part in served.parts}


def test_options_with_an_effect() -> None:
    usual = _served(max_model_len=8192)
    overridden = _served(("hf-overrides", '{"num_hidden_layers": 16}'), max_model_len=8192)
    assert overridden.kv_cache.block_bytes * 2 == usual.kv_cache.block_bytes
    offloaded = _served(("cpu-offload-gb", "4"), max_model_len=8192)
    assert usual.weights_bytes - offloaded.weights_bytes == 4 << 30
    assert offloaded.kv_cache.available_bytes - usual.kv_cache.available_bytes == 4 << 30
    throughput = _served(("performance-mode", "throughput"), max_model_len=8192).settings
    assert throughput["max_num_batched_tokens"] == 2 * usual.settings["max_num_batched_tokens"]
    assert throughput["max_num_seqs"] == 2 * usual.settings["max_num_seqs"]
    shared = _served(("dcp", "2"), max_model_len=8192, tensor_parallel_size=16)
    whole = _served(max_model_len=8192, tensor_parallel_size=16)
    assert shared.kv_cache.tokens == pytest.approx(2 * whole.kv_cache.tokens, rel=0.01)


def test_a_model_that_pools_has_no_sampler_and_no_head() -> None:
    usual, pooling = _served(max_model_len=8192), _served(("task", "embed"), max_model_len=8192)
    assert usual.weights_bytes - pooling.weights_bytes == pytest.approx(128256 * 4096 * 2, rel=0.01)
    assert (pooling.settings["model_runner"], pooling.basis) == ("V2", "recordings")
    assert _parts(pooling)["buffers per sequence"] == 0


def test_the_longest_that_fits_is_chosen() -> None:
    fits = _served(gpu="RTX-3090", max_model_len=-1)
    assert fits.refusal is None
    assert 8192 < fits.settings["max_model_len"] < 131072
    assert _served(max_model_len=-1).settings["max_model_len"] == 131072


@pytest.mark.parametrize("name", ["attention-backend", "kv-transfer-config", "moe-backend"])
def test_options_whose_memory_is_not_followed_say_so(name: str) -> None:
    served = _served((name, "X"), max_model_len=8192)
    assert any(note.startswith(f"--{name}: ") and "not counted" in note for note in served.notes)
    assert served.basis == "formula"


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("vllm", [("enable-dbo", "true")], "--enable-dbo is not followed; nearest: --enable-lora, --enable-eplb, "),
        ("vllm", [("dcp", "2")], "accepted with 1 cards and 8 heads of keys: 1"),
        ("vllm", [("runner", "swim")], "accepted: auto, generate, none, pooling"),
        ("sglang", [("mem-fraction", "1")], "nearest: --mem-fraction-static"),
    ],
)
def test_what_is_not_followed_names_the_nearest(
    engine: str, arguments: Sequence[tuple[str, str]], message: str
) -> None:
    with pytest.raises(GraphmemError) as error:
        engine_named(engine).serve(Question(model_named(LLAMA), device_named("H100"), arguments=tuple(arguments)))
    assert message in str(error.value)


def test_a_servers_own_options_change_nothing() -> None:
    words = (("host", "0.0.0.0"), ("port", "80"), ("trust-remote-code", "true"), ("served-model-name", "x"))
    for engine in ("vllm", "sglang", "tgi", "tensorrtllm"):
        asked = Question(model_named(LLAMA), device_named("H100"))
        plain = engine_named(engine).serve(asked)
        assert engine_named(engine).serve(asked.with_(arguments=words)).kv_cache == plain.kv_cache
