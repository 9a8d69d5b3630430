"""``graphmem serve``: what a user asks and sees, and the engine's own refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import graphmem
from graphmem.cli.main import cli
from graphmem.devices import device_named
from graphmem.errors import UsageError
from graphmem.serving import base, engine_named, engine_names
from graphmem.serving.base import Question
from graphmem.serving.configurations import model_named
from graphmem.serving.vllm.kv_cache import Group, Layout, Spec
from graphmem.sources.hub import known_models
from tests.support.examples import examples

LLAMA = "meta-llama/Llama-3.1-8B"


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["serve", *arguments])
    return result.exit_code, result.output


def _json(*arguments: str) -> dict[str, Any]:
    code, text = _run(*arguments, "--format", "json", "--no-advice")
    assert code == 0, text
    document: dict[str, Any] = json.loads(text)
    return document


def test_the_waterfall_sums_to_the_card() -> None:
    found = _json(LLAMA, "--gpu", "H100", "--max-model-len", "8192")
    parts = sum(part["bytes"] for part in found["waterfall"])
    assert parts + found["kv_cache"]["available_bytes"] == found["total_bytes"]
    assert found["kv_cache"]["blocks"] == found["kv_cache"]["available_bytes"] // found["kv_cache"]["block_bytes"]


def test_lengths_are_a_distribution_through_the_given_points() -> None:
    long = _json(LLAMA, "--gpu", "H100", "--lengths", "p50=4000,p99=30000")["concurrency_at_lengths"]
    short = _json(LLAMA, "--gpu", "H100", "--lengths", "p50=800,p99=6000")["concurrency_at_lengths"]
    same = _json(LLAMA, "--gpu", "H100", "--lengths", "p50=131072")
    assert short > 4 * long
    assert same["concurrency_at_lengths"] == same["kv_cache"]["concurrency"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "200000"], "greater than the derived max_model_len (131072)"),
        (["--tp", "3"], "accepted here: 1, 2, 4, 8, 16, 32"),
        (["-tp=3"], "accepted here: 1, 2, 4, 8, 16, 32"),
        (["--gpu-memory-utilization", "1.2"], "accepted: above 0, to 1"),
        (["--kv-cache-dtype", "int3"], "accepted: auto"),
        (["--block-size", "10"], "multiples of 16"),
        (["--gpu", "T4"], "at least 8.0"),
        (["--gpu", "MI300X"], "NVIDIA's cards only"),
        (["--engine", "nowhere"], "accepted: vllm, llamacpp"),
        (["--engine-version", "0.5"], "accepted: 0.6 and later"),
        (["--engine-version", "new"], "is no version"),
        (["--lengths", "p50"], "p50=800,p99=6000"),
        (["--lengths", "p50=800,p40=900"], "must rise"),
        (["--find", "batch"], "accepted: max-model-len, max-num-seqs, tp"),
        (["--max-num-batched-tokens", "100", "--max-num-seqs", "200"], "--max-num-seqs 100 or less"),
        (["--engine-arg", "enable_dbo=1"], "is not followed"),
        (["--max-loras", "2"], "no effect without --enable-lora"),
        (["--enable-lora", "--max-lora-rank", "24"], "accepted: 1, 8, 16"),
        (["--pipeline-parallel-size", "40"], "more than the model's"),
        (["--compilation-config", "[]"], "accepted: a JSON object"),
        (["--compilation-config", '{"mode": 0}'], "not compiled are not followed"),
        (["--cudagraph-capture-sizes", "0"], "whole numbers from 1"),
        (["--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"], "smaller than max_model_len (131072)"),
    ],
)
def test_bad_input_is_one_line_with_what_would_do(arguments: Sequence[str], message: str) -> None:
    code, text = _run(LLAMA, *([] if "--gpu" in arguments else ["--gpu", "H100"]), *arguments)
    assert code == 1
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "RTX-3090"], "the estimated maximum model length is"),
        (["--gpu", "RTX-4060"], "out of memory while loading"),
        (["--gpu", "A10G", "--gpu-memory-utilization", "0.999"], "on startup is less than desired"),
    ],
)
def test_an_engine_that_does_not_start_is_an_answer(arguments: Sequence[str], message: str) -> None:
    code, text = _run(LLAMA, *arguments)
    assert code == 3
    assert "DOES NOT START" in text
    assert message in " ".join(text.split())


def test_find_is_the_last_that_starts() -> None:
    found = graphmem.serve(LLAMA, gpu="RTX-3090", enforce_eager=True, find="max-model-len", advice=False)
    assert found.found is not None
    name, length = found.found
    assert name == "max-model-len"
    assert found.starts
    longer = graphmem.serve(LLAMA, gpu="RTX-3090", enforce_eager=True, max_model_len=length + 1, advice=False)
    assert not longer.starts


def test_the_fewest_cards_and_the_most_sequences() -> None:
    large = graphmem.serve("Llama-3.1-70B", gpu="H100", max_model_len=8192, find="tp", enforce_eager=True, advice=False)
    assert large.found == ("tp", 2)
    many = graphmem.serve(LLAMA, gpu="L40S", lengths={50: 2000}, find="max-num-seqs", enforce_eager=True, advice=False)
    assert many.found is not None
    assert many.concurrency >= many.found[1] > 50


def test_cards_for_a_load_hold_it() -> None:
    found = graphmem.serve(LLAMA, gpu="H100", lengths={50: 800, 99: 6000}, load=64, enforce_eager=True, advice=False)
    assert found.choices
    assert all(choice.concurrency >= 64 for choice in found.choices)
    memory = [choice.memory_bytes for choice in found.choices]
    assert memory == sorted(memory)


def test_the_answer_begins_with_whether_the_cards_hold_the_load() -> None:
    asked = (LLAMA, "--gpu", "L40S", "--max-model-len", "8192", "--enforce-eager", "--no-advice")
    lengths = ("--lengths", "p50=800,p99=6000")
    said = {
        (): "STARTS on L40S-48GB: the KV cache has room for",
        ("--load", "8"): "HOLDS 8 requests at once on L40S-48GB",
        ("--load", "64"): "DOES NOT HOLD 64 requests at once",
        ("--load", "64", *lengths): "HOLDS 64 requests at once on L40S-48GB: the KV cache has room for",
        ("--load", "100", *lengths, "--max-num-seqs", "32"): "and the engine runs at most 32 at once",
    }
    for options, words in said.items():
        code, text = _run(*asked, *options)
        text = " ".join(text.split())
        assert words in text
        assert code == (3 if "DOES NOT HOLD" in text or "at most 32 at once" in words else 0)
        assert ("of shorter ones for more" in text) == ("--lengths" not in options)


def test_where_no_card_is_named_a_load_is_a_question_about_cards() -> None:
    """With prices the machine to rent is the answer; one that the default card does not hold is no failure."""
    code, text = _run(LLAMA, "--max-model-len", "8192", "--enforce-eager", "--no-advice", "--load", "4000")
    assert code == 0
    assert "DOES NOT HOLD" in text


def test_one_quantile_says_that_all_requests_are_taken_for_equal() -> None:
    asked = (LLAMA, "--gpu", "L40S", "--max-model-len", "8192", "--enforce-eager", "--no-advice", "--load", "8")
    words = "every request is taken for as long as --lengths says"
    assert words in " ".join(_run(*asked, "--lengths", "p50=800")[1].split())
    assert words not in " ".join(_run(*asked, "--lengths", "p50=800,p99=6000")[1].split())


def test_an_unknown_card_is_told_the_options_that_there_are() -> None:
    code, text = _run(LLAMA, "--gpu", "RTX-9090")
    assert code == 1
    assert "--gpu-memory" in text
    assert "--gpu-like" not in text


def test_changes_are_answers_of_their_own() -> None:
    found = graphmem.serve(LLAMA, gpu="H100", enforce_eager=True)
    assert {change.option for change in found.changes} >= {"--kv-cache-dtype fp8", "--tp 2"}
    one = next(change for change in found.changes if "fp8" in change.option)
    asked = graphmem.serve(LLAMA, gpu="H100", enforce_eager=True, kv_cache_dtype="fp8", advice=False)
    assert asked.served.kv_cache.tokens == one.tokens == found.served.kv_cache.tokens + one.gained_tokens


def test_text_and_html(tmp_path: Path) -> None:
    code, text = _run(LLAMA, "--gpu", "L40S", "--max-model-len", "8192", "--enforce-eager")
    assert code == 0
    assert "requests of 8,192 tokens" in text
    page = tmp_path / "page.html"
    _run(LLAMA, "--gpu", "L40S", "--enforce-eager", "--format", "html", "-o", str(page))
    data = page.read_text().split('id="graphmem-serving">')[1].split("</script>")[0]
    assert json.loads(data)["schema"] == "graphmem.serving/1"


def test_models_are_found_by_folder_file_and_name(tmp_path: Path) -> None:
    config = known_models()[LLAMA]
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = [
        model_named(name).config for name in (str(tmp_path), str(tmp_path / "config.json"), "llama-3.1-8b-instruct")
    ]
    assert named == [config] * 3
    with pytest.raises(graphmem.GraphmemError, match=r"did you mean meta-llama/Llama-3\.1-8B"):
        model_named("meta-llama/Llama-3.1-8X")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "dinosaur"}, "names the model type 'dinosaur', which this transformers does not know"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_a_configuration_that_is_none_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()[LLAMA] | changes))
    code, text = _run(str(tmp_path), "--gpu", "H100")
    assert code == 1
    assert message in text


def test_versions_differ_where_the_register_says() -> None:
    new, old = (graphmem.serve(LLAMA, gpu="H100", engine_version=v, advice=False).served for v in ("0.32", "0.11"))
    assert new.settings["gpu_memory_utilization"] == 0.92
    assert old.settings["gpu_memory_utilization"] == 0.9
    assert (new.settings["model_runner"], old.settings["model_runner"]) == ("V2", "V1")
    assert "CUDA graphs, estimated" not in {part.name for part in old.parts}


def test_nothing_of_torch_is_imported() -> None:
    program = (
        "import sys; from graphmem.serving.answer import serve; serve('opt-125m', gpu='H100'); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_engine_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        name, title, newest = "other", "Other", "1.0"

        def serve(self, question: Question) -> base.Served:
            return replace(engine_named("vllm").serve(question), engine="Other")

    class Entry:
        name, value, dist = "other", "package:ENGINE", None

        def load(self) -> object:
            return Other()

    entries = [Entry()]
    monkeypatch.setattr("graphmem.plugins.entry_points", lambda group: entries)
    assert engine_names()[0] == "vllm"
    assert engine_names()[-1] == "other"
    found = graphmem.serve(LLAMA, gpu="H100", engine="other", enforce_eager=True, advice=False)
    assert found.served.engine == "Other"
    entries[:] = [Entry()]
    monkeypatch.setattr(Entry, "load", lambda self: Other)
    with pytest.raises(UsageError, match="is a class; an engine is an object"):
        engine_named("other")
    entries[:] = [Entry()]
    monkeypatch.setattr(Entry, "load", lambda self: object())
    with pytest.raises(UsageError, match=r"is no engine, .* it lacks name, title, newest, serve"):
        engine_named("other")


@pytest.mark.parametrize("spelling", ["vllm", "llama-cpp", "TensorRT_LLM"])
def test_an_engine_goes_by_any_spelling_and_none_may_take_its_name(
    monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    assert engine_named(spelling).name == spelling.lower().replace("-", "").replace("_", "")
    second = EntryPoint(spelling, "somewhere:ENGINE", "graphmem.serving")
    monkeypatch.setattr("graphmem.plugins.entry_points", lambda group: [second])
    with pytest.raises(UsageError, match=r"brings an engine .*graphmem's own"):
        engine_names()


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 20), st.integers(1, 80), st.none() | st.integers(1, 9000)), min_size=1, max_size=4
    ),
    st.integers(1, 1 << 38),
    st.integers(1, 1 << 18),
)
@settings(max_examples=examples(24))
def test_the_longest_request_is_the_last_that_fits(
    kinds: list[tuple[int, int, int | None]], available: int, most: int
) -> None:
    groups = tuple(Group(Spec(page, window), layers) for page, layers, window in kinds)
    layout = Layout(groups, 16, 4096)
    longest = layout.longest(available, most)
    assert longest == 0 or layout.needed(longest) <= available
    assert longest == most or layout.needed(longest + 1) > available


def test_a_card_that_others_use_is_refused_as_the_engine_does() -> None:
    question = Question(model_named(LLAMA), device_named("H100"), entry="nowhere")
    with pytest.raises(UsageError, match="accepted: server, llm"):
        engine_named("vllm").serve(question)


def _safetensors(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


def test_headers_of_a_checkpoint_are_read_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()[LLAMA]))
    tensors = {"lm_head.weight": {"dtype": "BF16", "shape": [4, 2]}, "x": {"dtype": "F8_E4M3", "shape": [3]}}
    (tmp_path / "model.safetensors").write_bytes(_safetensors({"__metadata__": {}, **tensors}))
    checkpoint = model_named(str(tmp_path)).checkpoint
    assert checkpoint is not None
    assert (checkpoint.bytes, checkpoint.has_head) == (19, True)
    assert any("2 tensors, 19 B" in note for note in graphmem.serve(str(tmp_path), gpu="H100").served.notes)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 64, _safetensors([1]), _safetensors({"x": {"dtype": "F3", "shape": [1]}}), bytes(8) + b"{}"],
)
def test_a_broken_checkpoint_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()[LLAMA]))
    (tmp_path / "model.safetensors").write_bytes(content)
    code, text = _run(str(tmp_path), "--gpu", "H100")
    assert code == 1
    assert "model.safetensors" in text
    assert text.count("\n") == 1


def test_public_logs_with_complete_settings() -> None:
    """Figures of public logs, within 2 %: vllm#10517 (RTX 3090, 0.6.4: 1952 blocks with 0.35 GiB outside torch) and
    vllm#54479 (two RTX 4090, 0.28: 5315 blocks)."""
    card = replace(device_named("RTX-3090"), capacity_bytes=int(23.58 * 2**30))
    first = Question(
        model_named(LLAMA), card, version=(0, 8), max_model_len=20000, max_num_batched_tokens=20000, max_num_seqs=256,
        gpu_memory_utilization=0.9, non_torch_bytes=int(0.35 * 2**30),
    )  # fmt: skip
    assert engine_named("vllm").serve(first).kv_cache.blocks == pytest.approx(1952, rel=0.02)
    card = replace(device_named("RTX-4090"), capacity_bytes=int(23.55 * 2**30))
    second = Question(
        model_named("Qwen3-32B-AWQ"), card, tensor_parallel_size=2, max_model_len=8192, max_num_batched_tokens=5120,
        max_num_seqs=72, gpu_memory_utilization=0.85, alloc_conf="expandable_segments:True",
    )  # fmt: skip
    assert engine_named("vllm").serve(second).kv_cache.blocks == pytest.approx(5315, rel=0.02)


_VALUES = st.sampled_from(
    [
        *(None, 0, -1, 1, 3, 10**9, 10**30, 1.5, float("nan"), True, "", "x", [], [1], {}),
        {"rope_type": "yarn", "factor": "x"},
        {"quant_method": "awq", "bits": 0},
        {"quant_method": "gptq", "group_size": "x"},
        {"quant_method": 3},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "fp8", "weight_block_size": "x"},
    ]
)
_KEYS = sorted({key for config in known_models().values() for key in config} | {"quantization_config", "layer_types"})


@given(st.sampled_from(sorted(known_models())), st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=2))
@settings(max_examples=examples(30), deadline=None)
def test_any_configuration_is_answered_or_refused(name: str, changes: dict[str, Any]) -> None:
    model = base.ServedModel(name, known_models()[name] | changes)
    question = Question(model, device_named("H100"), enforce_eager=True, max_num_batched_tokens=2048, max_num_seqs=64)
    try:
        cache = engine_named("vllm").serve(question).kv_cache
    except graphmem.GraphmemError:
        return
    assert cache.blocks == max(0, cache.available_bytes // cache.block_bytes)


def test_the_installed_version_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphmem.serving.answer.metadata.version", lambda name: "0.11.2")
    assert graphmem.serve(LLAMA, gpu="H100", enforce_eager=True, advice=False).served.version == "0.11"
    monkeypatch.setattr("graphmem.serving.answer.metadata.version", lambda name: "0.99.0")
    newer = graphmem.serve(LLAMA, gpu="H100", enforce_eager=True, advice=False)
    assert newer.served.version == "0.32"
    assert any("followed as 0.32" in line for line in newer.assumptions)


OVER_TIME = ("--enforce-eager", "--lengths", "p50=800,p99=6000", "--output-lengths", "p50=200,p99=1000")


def test_a_load_over_time() -> None:
    found = _json(LLAMA, "--gpu", "RTX-3090", "--max-model-len", "8192", "--arrivals", "6/s", "--duration", "2min",
                  *OVER_TIME)["over_time"]  # fmt: skip
    answer = found["answer"]
    assert answer["requests"] == pytest.approx(720, rel=0.15)
    assert answer["first_preemption"] is not None
    assert 0 < answer["mean_used"] < answer["most_used"] <= 1
    assert sum(point["preemptions"] for point in answer["timeline"]) == answer["preemptions"]
    assert max(point["used"] for point in answer["timeline"]) == answer["most_used"]
    assert found["speed"]["predicted"]
    enough = [one for one in found["tried"] if one["enough"]]
    assert min(one["copies"] for one in enough) == found["copies"] > 1
    few = _json(LLAMA, "--gpu", "RTX-3090", "--max-model-len", "8192", "--arrivals", "6/min", "--duration", "5min",
                "--step-time", "20ms", *OVER_TIME)["over_time"]  # fmt: skip
    assert (few["copies"], few["answer"]["preemptions"], few["speed"]["predicted"]) == (1, 0, False)


def test_a_load_of_a_file(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{second:02}.6805900,{100 + second},30" for second in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    found = _json(LLAMA, "--gpu", "L40S", "--enforce-eager", "--trace", str(trace))["over_time"]["answer"]
    assert (found["requests"], found["seconds"], found["finished"]) == (40, 99.0, 40)
    page = tmp_path / "page.html"
    code, text = _run(LLAMA, "--gpu", "L40S", "--enforce-eager", "--trace", str(trace), "--no-advice")
    assert code == 0
    assert "speed by a roofline, not measured" in text
    code, text = _run("opt-125m", "--gpu", "L40S", "--enforce-eager", "--trace", str(trace), "--no-advice")
    assert code == 0
    assert "speed is not predicted; by default" in text  # what OPT's products are is not known
    _run(LLAMA, "--gpu", "L40S", "--trace", str(trace), "--enforce-eager", "--format", "html", "-o", str(page))
    assert '<figure class="curves"' in page.read_text()


def _found(path: Path, text: str, *arguments: str) -> tuple[int, int]:
    path.write_text(text)
    answer = _json(LLAMA, "--gpu", "L40S", "--enforce-eager", "--trace", str(path), *arguments)["over_time"]["answer"]
    return answer["asked_tokens"], answer["found_tokens"]


def test_prompts_that_begin_alike_are_found(tmp_path: Path) -> None:
    """Two prompts of 1,600 tokens with 1,024 in common, and a third with 512: by hashes and by names."""
    hashes = [[1, 2, 3, 4], [1, 2, 5, 6], [1, 7, 8, 9]]
    rows = [
        {"timestamp": 9000 * at, "input_length": 1600, "output_length": 5, "hash_ids": h} for at, h in enumerate(hashes)
    ]
    by_hash = _found(tmp_path / "mooncake.jsonl", "\n".join(map(json.dumps, rows)))
    named = "timestamp,prompt,output,prefix,prefix_tokens\n0,1600,5,a,1024\n9,1600,5,a,1024\n18,1600,5,a,512\n"
    assert by_hash == _found(tmp_path / "named.csv", named) == (4800, 1024 + 512)
    plain = "timestamp,prompt,output\n0,1600,5\n9,1600,5\n18,100,5"
    assert _found(tmp_path / "plain.csv", plain, "--shared-prefix", "1000") == (3300, 62 * 16 + 6 * 16)
    assert _found(tmp_path / "plain.csv", plain) == (3300, 0)
    off = _found(tmp_path / "plain.csv", plain, "--shared-prefix", "1000", "--no-enable-prefix-caching")
    assert off == (3300, 0)
    for own in ("named.csv", "mooncake.jsonl"):
        code, text = _run(LLAMA, "--gpu", "L40S", "--trace", str(tmp_path / own), "--shared-prefix", "1000")
        assert (code, text.count("\n")) == (1, 1)
        assert "says itself how its prompts begin: leave out --shared-prefix 1000" in text


def test_blocks_that_left_the_card_come_from_the_host(tmp_path: Path) -> None:
    """Four beginnings in turn, of which the card holds three."""
    path = tmp_path / "turns.csv"
    rows = [f"{9 * at},4000,5,p{at % 4},4000" for at in range(12)]
    path.write_text("\n".join(["timestamp,prompt,output,prefix,prefix_tokens", *rows]))
    asked = (LLAMA, "--gpu", "L40S", "--enforce-eager", "--max-model-len", "8192", "--num-gpu-blocks-override", "800",
             "--trace", str(path))  # fmt: skip
    without = _json(*asked)["over_time"]["answer"]
    host = _json(*asked, "--kv-offloading-size", "8")["over_time"]["answer"]
    assert without["found_tokens"] < 8 * 1000  # those that were to be taken last
    assert without["loaded_tokens"] == 0
    assert host["found_tokens"] + host["loaded_tokens"] == 8 * 4000
    assert host["tokens_computed"] == without["tokens_computed"] - 8 * 3999 + without["found_tokens"]
    assert host["ttft_p50"] < without["ttft_p50"]
    small = _json(*asked, "--kv-offloading-size", "1")["over_time"]["answer"]
    assert small["loaded_tokens"] < host["loaded_tokens"]


def test_prefill_and_decode_apart() -> None:
    asked = (LLAMA, "--gpu", "L40S", "--max-model-len", "8192", "--arrivals", "4/s", "--duration", "2min", *OVER_TIME,
             "--max-tpot", "50ms", "--price", "1.5")  # fmt: skip
    found = _json(*asked, "--disaggregated")["over_time"]
    apart, both = found["apart"], next(one for one in found["tried"] if one["copies"] == found["copies"])
    assert apart["cards"] == apart["prefill"] + apart["decode"]
    assert apart["price_of_all"] == 1.5 * apart["cards"]
    assert apart["tpot_p99"] <= 0.05 >= both["tpot_p99"]
    assert 50e6 < apart["moved_bytes"] < 500e6
    slow = _json(*asked, "--disaggregated", "--kv-links", "0.5,32")["over_time"]["apart"]
    assert slow["ttft_p99"] > apart["ttft_p99"]
    text = " ".join(_run(*asked, "--disaggregated", "--kv-offloading-size", "8")[1].split())
    assert "1 prefill" in text
    assert "With a token every 50 ms both ways take 2 cards. With another --max-tpot" in text
    assert "engines of one role keep nothing on the host (--kv-offloading-size)" in text
    code, text = _run("google/gemma-3-12b-it", *asked[1:], "--disaggregated")
    assert (code, text.count("\n")) == (1, 1)
    assert "one group of layers" in text


def test_copies_that_follow_the_load(tmp_path: Path) -> None:
    path = tmp_path / "day.csv"
    busy = [f"{3600 + at / 12},2000,100" for at in range(12 * 600)]
    path.write_text("\n".join(["timestamp,prompt,output", "0,50,5", *busy, "7200,50,5", "10800,50,5"]))
    asked = (LLAMA, "--gpu", "L40S", "--enforce-eager", "--trace", str(path), "--price", "2", "--autoscale", "30min")
    found = _json(*asked)["over_time"]
    scaling = found["scaling"]
    copies = [one["copies"] for one in scaling["intervals"]]
    assert copies == [1, 0, found["copies"], 0, 1, 0, 1]
    assert scaling["copy_hours"] == pytest.approx(0.5 * (found["copies"] + 2) + 1 / 60 + (found["copies"] + 3) / 12)
    assert scaling["fixed_cost"] == pytest.approx(2 * found["copies"] * (10860 / 3600 + 1 / 12))
    text = _run(*asked)[1]
    assert re.search(rf"1:00 to 1:30 +4\.00 +{found['copies']}\n", text)
    path.write_text("timestamp,prompt,output\n0,50,5\n7205,50,5")
    assert re.search(r"2:00 to 2:01:05 ", _run(*asked)[1])


def test_a_spreadsheet_of_a_load_has_what_was_tried() -> None:
    """Units as people write them, and figures in seconds and dollars."""
    asked = (LLAMA, "--gpu", "L40S", "--max-model-len", "8192", "--arrivals", "4rps", "--duration", "2 minutes",
             *OVER_TIME, "--max-tpot", "50msec", "--price", "1.5", "--format", "csv")  # fmt: skip
    code, text = _run(*asked)
    assert code == 0
    header, *rows = next(part for part in text.split("\n\n") if part.startswith("engines,")).splitlines()
    assert header.startswith("engines,cards,cache,preempted,wait_seconds,first_token_seconds,each_token_seconds,")
    assert "an_hour_dollars" in header
    assert [row.split(",")[0] for row in rows] == [str(number + 1) for number in range(len(rows))]
    assert [row.rpartition(",")[2] for row in rows][-1] == "enough"


def test_requests_that_the_engine_refuses_are_carried_by_no_number() -> None:
    asked = (LLAMA, "--gpu", "L40S", "--max-model-len", "1024", "--arrivals", "1/s", "--duration", "2min", *OVER_TIME)
    load = _json(*asked)["over_time"]
    assert load["copies"] is None
    assert load["answer"]["refused"] > load["answer"]["requests"] // 4
    assert "NO number of engines like this carries the load" in _run(*asked)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shared-prefix", "500"], "--shared-prefix belongs to a load over time"),
        (["--autoscale", "10min"], "--autoscale belongs to a load over time"),
        (["--step-time", "20ms"], "--step-time belongs to a load over time"),
        (["--kv-offloading-size", "8GiB"], "a number of GiB above 0, without the unit"),
        (["--arrivals", "5/s", *OVER_TIME, "--max-tpot", "50"], "--max-tpot '50' is no time"),
        (["--arrivals", "5/s", *OVER_TIME, "--shared-prefix", "9000"], "is longer than nearly all prompts"),
        (["--arrivals", "5/s", *OVER_TIME, "--kv-links", "50"], "GB/s of a card to other engines and to its host"),
        (["--arrivals", "5/s", *OVER_TIME, "--autoscale", "1min"], "shorter than --startup 300s"),
        (["--arrivals", "5/s", *OVER_TIME, "--max-tpot", "fast"], "--max-tpot 'fast' is no time"),
        (["--arrivals", "5", *OVER_TIME], "5/s, 300/min"),
        (["--arrivals", "5/s"], "wants --lengths"),
        (["--arrivals", "5/s", "--duration", "soon", *OVER_TIME], "--duration 'soon' is no time"),
        (["--arrivals", "9999/s", "--duration", "9d", *OVER_TIME], "give a shorter --duration"),
        (
            ["--arrivals", "9/s", "--duration", "1d", "--lengths", "p50=9", "--output-lengths", "p50=9000"],
            "300,000,000",
        ),
        (["--output-lengths", "p50=9"], "give --arrivals"),
        (["--arivals", "5/s"], "did you mean --arrivals?"),
        (["--trace", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--trace", "nowhere.csv", "--arrivals", "1/s"], "comes from one of them"),
        (["--trace", "nowhere.csv", "--duration", "5min"], "comes from one of them"),
        (["--tokens-per-second", "-1"], "a number above 0"),
    ],
)
def test_a_load_that_is_none_is_one_line(arguments: Sequence[str], message: str) -> None:
    code, text = _run(LLAMA, "--gpu", "H100", "--no-advice", *arguments)
    assert code == 1
    assert message in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"", b"a,b,c\n1,2,3", b"timestamp,prompt,output", b"timestamp,prompt,output\n1,2",
        b"timestamp,prompt,output\n1,0,5", b"timestamp,prompt,output\n1,99999999999,5",
        b"timestamp,prompt,output\nnan,1,5", b"\xff\xfe\x00,prompt",
        b"timestamp,prompt,output,prefix\n1,2,3,a", b"timestamp,prompt,output,prefix,prefix_tokens\n1,2,3,a,0",
        b'{"timestamp": 1}', b'{"timestamp": 1, "input_length": 9, "output_length": 9, "hash_ids": [1, 2]}', b"{",
        b'{"timestamp": 1, "input_length": 9, "output_length": 9, "hash_ids": [[]]}', b'{"timestamp": "NaN"}\n{}',
        b"timestamp,prompt,output\n1,2,3\x00\n" + b"9" * 20_000, b"timestamp,prompt,output\n0001-01-01,1,1",
    ],
)  # fmt: skip
def test_a_broken_trace_is_one_line(content: bytes, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_bytes(content)
    code, text = _run(LLAMA, "--gpu", "H100", "--no-advice", "--trace", str(trace))
    assert code == 1
    assert "trace.csv" in text
    assert text.count("\n") == 1


def _at(version: tuple[int, int], gpu: str = "H100", **options: Any) -> base.Served:
    return engine_named("vllm").serve(Question(model_named(LLAMA), device_named(gpu), version=version, **options))


def _part(served: base.Served, name: str) -> int:
    return next((part.bytes for part in served.parts if part.name == name), 0)


def test_the_samplers_sort_of_older_versions_is_in_the_peak() -> None:
    """Beside 16-bit logits: in fp32, sorted, their places, a range of places, and room to sort both by segment."""
    rows, vocab = 1024, 128256
    sorts, does_not = (_part(_at(version), "activation peak") for version in ((0, 16), (0, 17)))
    hidden = 8192 * 4096 * 2 + 2 * rows * 4096 * 2
    assert sorts == pytest.approx(rows * vocab * (2 + 4 + 4 + 8 + 8 + 4 + 8) + hidden, rel=0.01)
    assert does_not < 0.6 * sorts
    few = _part(_at((0, 16), max_num_seqs=64, max_num_batched_tokens=512), "activation peak")
    workspace = 32 * 2**20
    assert few == pytest.approx(64 * vocab * (2 + 4 + 4 + 8 + 8 + 8 + 4 + 12) + workspace, rel=0.02)  # as pairs, twice


def test_what_versions_charge_and_choose_by_themselves() -> None:
    assert [_at(version).settings["gpu_memory_utilization"] for version in ((0, 19), (0, 20))] == [0.9, 0.92]
    assert [bool(_part(_at(version), "CUDA graphs, estimated")) for version in ((0, 19), (0, 20))] == [False, True]
    assert [bool(_part(_at(version), "segment slack")) for version in ((0, 26), (0, 27))] == [False, True]
    outside = [_part(_at(version, tensor_parallel_size=2), "outside torch") for version in ((0, 8), (0, 9), (0, 11))]
    assert outside[0] > outside[1] > outside[2] == 0
    assert not _part(_at((0, 9)), "outside torch")
    runners = {version: _at(version).settings["model_runner"] for version in ((0, 23), (0, 24), (0, 25), (0, 32))}
    assert list(runners.values()) == ["V1", "V2", "V2", "V2"]


def test_the_first_engine_takes_a_whole_prompt_and_does_not_compile() -> None:
    whole, chunked = _at((0, 7), max_model_len=20000), _at((0, 7), max_model_len=40000)
    assert (whole.settings["max_num_batched_tokens"], whole.settings["max_num_seqs"]) == (20000, 256)
    assert chunked.settings["max_num_batched_tokens"] == 2048
    old = _at((0, 8), "T4", dtype="half", max_model_len=4096)
    assert old.settings["max_num_batched_tokens"] == 4096  # cards below 8.0 went to the first engine


def test_what_variables_of_the_environment_chose() -> None:
    sorts = _part(_at((0, 11)), "activation peak")
    flashinfer = _part(_at((0, 11), arguments=(("use_flashinfer_sampler", "true"),)), "activation peak")
    buffer = device_named("H100").sm_count * 128256 * 4  # Triton's, which FlashInfer has not
    assert flashinfer == pytest.approx(_part(_at((0, 17)), "activation peak") - buffer, rel=0.01) != sorts
    first = _at((0, 9), max_model_len=20000, arguments=(("use_v1", "false"),))
    assert first.settings["max_num_batched_tokens"] == 20000


def test_a_newer_version_is_taken_as_the_newest_and_says_how_far_off_it_may_be() -> None:
    newer, newest = _at((0, 99), enforce_eager=True), _at((0, 33), enforce_eager=True)
    assert newer.kv_cache == newest.kv_cache
    assert (newer.basis, newest.basis) == ("logs", "recordings")
    assert "vLLM 0.99 is newer than what is followed" in newer.notes[0]
    assert f"{newest.kv_cache.tokens:,}" in newer.notes[0]


def test_recordings_are_claimed_where_one_holds_the_card_and_the_quantisation() -> None:
    gptq = {**known_models()[LLAMA], "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    served = [
        _at((0, 32), "B200", enforce_eager=True),
        _at((0, 32), "T4", dtype="half", enforce_eager=True, max_model_len=64),
        engine_named("vllm").serve(Question(base.ServedModel("gptq", gptq), device_named("H100"), enforce_eager=True)),
    ]  # fmt: skip
    assert [one.basis for one in served] == ["formula"] * 3
