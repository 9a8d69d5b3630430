"""llama.cpp against figures of public logs, and GGUF headers that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from graphmem.cli.main import cli
from graphmem.devices import device_named
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served
from graphmem.serving.configurations import model_named
from graphmem.units import MIB
from tests.serving.public_logs import LLAMA_CPP, MADE, llama_cpp
from tests.support import gguf


def _served(folder: Path, model: str, options: dict[str, str], gpu: str = "RTX-3090") -> Served:
    return llama_cpp(folder, {"model": model, "options": options}, gpu)


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_figures_of_public_logs(name: str, tmp_path: Path) -> None:
    """Weights and cache as printed (two digits of a MiB; in one log 8 KiB more, unexplained); the compute buffer within
    0.1 %."""
    log = LLAMA_CPP[name]
    served = llama_cpp(tmp_path, log)
    parts = {part.name: part.bytes for part in served.parts}
    if "model_buffer_mib" in log:
        assert parts["weights"] / MIB == pytest.approx(log["model_buffer_mib"], abs=0.015)
    if "kv_buffer_mib" in log:
        assert served.kv_cache.block_bytes * served.kv_cache.blocks == log["kv_buffer_mib"] * MIB
    if "compute_buffer_mib" in log:
        assert parts["compute buffer"] / MIB == pytest.approx(log["compute_buffer_mib"], rel=1e-3)


def test_fewer_layers_on_the_card(tmp_path: Path) -> None:
    whole, half, none = (_served(tmp_path, "llama3-8b-q4_0", {"ngl": layers}) for layers in ("all", "17", "0"))
    assert whole.settings["n_gpu_layers"] == 33
    assert half.kv_cache.block_bytes * 2 == whole.kv_cache.block_bytes  # 16 layers and the output
    assert whole.weights_bytes > half.weights_bytes > none.weights_bytes == 0
    assert none.kv_cache.block_bytes == 0
    others = {"lv": "4", "cram": "0", "fit": "off", "prio_batch": "2", "s": "1", "ngl": "99"}  # nothing of the card
    assert _served(tmp_path, "llama3-8b-q4_0", others) == whole


def test_a_quantised_cache_and_what_would_fit(tmp_path: Path) -> None:
    plain = _served(tmp_path, "llama31-8b-q4_k_m", {"c": "131072"})
    small = _served(tmp_path, "llama31-8b-q4_k_m", {"c": "131072", "ctk": "q8_0", "ctv": "q8_0"})
    assert small.kv_cache.block_bytes * 32 == plain.kv_cache.block_bytes * 17
    tight = _served(tmp_path, "llama31-8b-q4_k_m", {"c": "131072"}, gpu="RTX-4060")
    assert tight.refusal is not None
    asked = int(tight.refusal.split("--ctx-size ")[1].split()[0])
    assert _served(tmp_path, "llama31-8b-q4_k_m", {"c": str(asked)}, gpu="RTX-4060").refusal is None
    assert _served(tmp_path, "llama31-8b-q4_k_m", {"c": str(asked + 256)}, gpu="RTX-4060").refusal is not None


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["serve", *arguments])
    return result.exit_code, result.output


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(MADE["llama3-8b-q4_0"]())
    code, text = _run(str(path), "--gpu", "RTX-3090", "-ngl", "20", "-c", "4096", "-fa", "off")
    assert code == 0, text
    assert "ctx_size 4096" in text
    assert "figures of public logs" in text


def _experts(folder: Path, *arguments: tuple[str, str]) -> Served:
    """A model of four layers of experts."""
    tensors: list[tuple[str, str, list[int]]] = [
        ("token_embd.weight", "q8_0", [64, 512]),
        ("output.weight", "q8_0", [64, 512]),
    ]
    for layer in range(4):
        tensors += [(f"blk.{layer}.ffn_{name}_exps.weight", "q8_0", [512, 512, 8]) for name in ("up", "gate", "down")]
        tensors.append((f"blk.{layer}.attn_q.weight", "q8_0", [64, 64]))
    sizes = {"block_count": 4, "attention.head_count": 4, "embedding_length": 64, "expert_used_count": 2,
             "feed_forward_length": 4096}  # fmt: skip
    metadata = {"general.architecture": "qwen3moe", **{f"qwen3moe.{name}": value for name, value in sizes.items()}}
    path = folder / "experts.gguf"
    path.write_bytes(gguf.header(metadata, tensors))
    question = Question(model_named(str(path)), device_named("RTX-3090"), arguments=(("c", "512"), *arguments))
    return engine_named("llamacpp").serve(question)


def test_experts_and_chosen_tensors_stay_on_the_host(tmp_path: Path) -> None:
    layer = 3 * 512 * 512 * 8 // 32 * 34
    whole, two = _experts(tmp_path), _experts(tmp_path, ("n-cpu-moe", "2"))
    assert whole.weights_bytes - two.weights_bytes == 2 * layer
    assert whole.weights_bytes - _experts(tmp_path, ("cpu-moe", "true")).weights_bytes == 4 * layer
    chosen = _experts(tmp_path, ("ot", r"blk\.[01]\.ffn_up_exps=CPU,\.ffn_down_exps=CPU"))
    assert whole.weights_bytes - chosen.weights_bytes == 2 * layer // 3 + 4 * layer // 3
    assert any("stay on the host" in note for note in two.notes)


def test_where_the_cache_is_and_what_older_builds_reserve_is_said(tmp_path: Path) -> None:
    served = _served(tmp_path, "llama3-8b-q4_0", {"c": "4096", "no-kv-offload": "true"})
    assert served.kv_cache.block_bytes == 0
    assert any("the KV cache (0.50 GiB) is on the host" in note for note in served.notes)
    assert any("--n-outputs-max 512" in note for note in served.notes)
    older = _served(tmp_path, "llama3-8b-q4_0", {"c": "4096", "n-outputs-max": "512"})
    assert not any("--n-outputs-max" in note for note in older.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-ngl", "x"], "accepted: a whole number from 0"),
        (["--cache-type-k", "q2_0"], "accepted: f32, f16"),
        (["--ctv", "q8_0", "--flash-attn", "off"], "requires Flash Attention"),
        (["--tp", "2"], "llama.cpp has no --tp"),
        (["--gpu-memory-utilization", "0.8"], "has no --gpu-memory-utilization"),
        (["--mmproj", "8"], "--mmproj is not followed; nearest: --"),
        (["-ot", "[=CPU"], "accepted: EXPRESSION=CPU"),
        (["-c", "4096", "--ctx-size", "1"], "given twice"),
        (["-c", "4096", "8192"], "neither an option nor the value of one"),
        (["--engine-version", "9.9"], "followed as 0.3 only"),
        (["--arrivals", "1/s", "--lengths", "p50=9", "--output-lengths", "p50=9"], "scheduler is not followed"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf.llama(2, 64, 4, 2, 128, 1000, kind="q8_0", head_kind="q8_0"))
    code, text = _run(str(path), "--engine", "llamacpp", "--gpu", "RTX-3090", *arguments)
    assert code == 1
    assert message in text
    assert text.count("\n") == 1


_SOUND = gguf.llama(1, 64, 4, 2, 128, 100, kind="q8_0", head_kind="q8_0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off"),
        (b"GGML" + bytes(40), "begins with"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "tensors; at most"),
        (_SOUND[:-9], "cut off"),
        (gguf.header({"general.architecture": "llama"}, [("x", "q4_0", (31,))]), "sizes [31]"),
        (gguf.header({"general.architecture": "mamba"}, []), "'mamba' is not followed"),
        (gguf.header({"general.architecture": "llama"}, []), "llama.block_count is None"),
        (gguf.header({"general.architecture": "llama", "llama.block_count": 1 << 20}, []), "up to 4096"),
    ],
)
def test_a_file_that_is_none_is_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    code, text = _run(str(path), "--engine", "llamacpp", "--gpu", "RTX-3090")
    assert code == 1
    assert message in text
    assert text.count("\n") == 1


def test_all_parts_of_a_split_file_are_read(tmp_path: Path) -> None:
    whole = MADE["llama3-8b-q4_0"]()
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(whole)
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(gguf.header({}, [("blk.0.extra.weight", "f32", (1024,))]))
    found = model_named(str(tmp_path / "m-00001-of-00002.gguf")).checkpoint
    assert found is not None
    assert found.tensors["blk.0.extra.weight"] == 4096
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    code, text = _run(str(tmp_path / "m-00001-of-00002.gguf"), "--engine", "llamacpp")
    assert (code, text.count("\n")) == (1, 1)
    assert "does not exist" in text
