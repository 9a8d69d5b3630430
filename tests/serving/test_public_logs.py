"""Starts of vLLM that people published: their settings and figures against predictions, and the report of all."""

from __future__ import annotations

import pytest

from graphmem.devices import device_named
from graphmem.serving import engine_named
from graphmem.serving.base import Question
from graphmem.serving.configurations import model_named
from tests.serving import public_logs
from tests.serving.public_logs import compared, logs, served
from tests.support.examples import but_slow

#: Of models that no family follows: their steps are captured.
_CAPTURED = ("exaone-4.0-32b-fp8-l40s-0.11",)


@pytest.mark.parametrize("name", but_slow(logs(), _CAPTURED))
def test_the_cache_is_within_two_percent_of_what_was_printed(name: str) -> None:
    """And activations are as printed, in two digits of a GiB, but for what a log's entry says is off: that it is."""
    log, found = logs()[name], compared(name)
    answer = served(log)
    parts = {part.name: part.bytes / 2**30 for part in answer.parts}
    weights = parts["weights"] + parts.get("adapters", 0)
    printed = log["printed"]
    good = {"KV cache": abs(found.share) <= 0.02}
    if "activation" in printed:
        good["activation"] = parts["activation peak"] == pytest.approx(printed["activation"], abs=0.006)
    if "weights" in printed:
        good["weights"] = weights == pytest.approx(printed["weights"], rel=0.007)
    if "tokens" in printed and good["KV cache"]:
        good["tokens"] = answer.kv_cache.tokens == pytest.approx(printed["tokens"], rel=0.02)
    assert {name for name, is_good in good.items() if not is_good} == set(log.get("off", ()))


@pytest.mark.parametrize("other", list(public_logs.other_engines()), ids=lambda other: other.name)
def test_other_engines_figures_are_within_two_percent(other: public_logs.Other) -> None:
    assert abs(other.share) <= 0.02


def test_the_report_is_of_today() -> None:
    page = public_logs.REPORT.read_text()
    assert public_logs.with_table(page) == page, "run python -m tests.serving.public_logs"


def test_a_card_that_shares_the_hosts_memory_has_small_batches() -> None:
    """As public logs of such cards print: NVML does not say how much memory they have."""
    gb10 = engine_named("vllm").serve(Question(model_named("Qwen/Qwen3-0.6B"), device_named("GB10")))
    assert (gb10.settings["max_num_batched_tokens"], gb10.settings["max_num_seqs"]) == (2048, 256)


def test_a_video_of_qwen3_vl_was_counted_with_its_times() -> None:
    """Under 0.11, as its log says: a budget of 153,600 tokens, profiled with one video."""
    (note,) = (one for one in served(logs()["qwen3-vl-30b-a3b-3090-tp4-0.11"]).notes if "encoder cache" in one)
    assert note.endswith("1 video item of 153,600 tokens; encoder cache: 153,600 tokens")
