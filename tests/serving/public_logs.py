"""Figures of engines' public logs beside their predictions: ``golden/serving/*_logs.json``, one entry a log.

An entry has settings and figures of a start, no text of the log; ``off``: figures that are predicted otherwise, and
why. ``python -m tests.serving.public_logs`` writes the tables of reports/serving_logs.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from graphmem.devices import device_named
from graphmem.serving import engine_named
from graphmem.serving.base import Question, Served, ServedModel
from graphmem.serving.configurations import model_named
from graphmem.serving.llamacpp import LlamaCpp
from graphmem.serving.shapes import decoder, outside
from graphmem.serving.tensorrtllm import pool_bytes
from graphmem.serving.vllm.engine import VLLM
from graphmem.sources.hub import known_models
from graphmem.units import GIB, MIB
from tests import places
from tests.support import gguf

FILE = places.GOLDEN / "serving" / "vllm_logs.json"
REPORT = places.ROOT / "reports" / "serving_logs.md"
#: Settings that are not fields of a question.
_ARGUMENTS = (
    "enable_expert_parallel", "use_flashinfer_sampler", "use_v1", "enable_lora", "max_loras", "max_lora_rank",
    "compilation_config", "performance_mode", "limit_mm_per_prompt", "mm_processor_kwargs", "language_model_only",
    "enable_sleep_mode", "data_parallel_size",
)  # fmt: skip
_BEGIN, _END = "<!-- logs: begin -->\n", "<!-- logs: end -->\n"

Log = dict[str, Any]
POOLS: dict[str, dict[str, Log]] = json.loads((places.GOLDEN / "serving" / "pool_logs.json").read_text())
LLAMA_CPP: dict[str, Log] = json.loads((places.GOLDEN / "serving" / "llamacpp_logs.json").read_text())
#: The GGUF files of llama.cpp's logs: their published sizes, and types of tensors as their quantisation has them.
MADE = {
    "llama3-8b-q4_0": lambda: gguf.llama(32, 4096, 32, 8, 14336, 128256),
    "llama31-8b-q4_k_m": lambda: gguf.llama(
        32, 4096, 32, 8, 14336, 128256, context=131072, kind="q4_K", mixed=True, freqs=True
    ),
    "llama32-3b-q4_k_m": lambda: gguf.llama(
        28, 3072, 24, 8, 8192, 128256, context=131072, kind="q4_K", table_kind="q6_K", mixed=True, tied=True, freqs=True
    ),
    "llama2-7b-q4_k_m": lambda: gguf.llama(32, 4096, 32, 32, 11008, 32000, context=4096, kind="q4_K", mixed=True),
    "qwen3-14b-q8_0": lambda: gguf.llama(
        40, 5120, 40, 8, 17408, 151936, architecture="qwen3", head=128, context=32768, kind="q8_0", head_kind="q8_0",
        small=_norms(128),
    ),
    "qwen3-4b-q4_k_m": lambda: gguf.llama(
        36, 2560, 32, 8, 9728, 151936, architecture="qwen3", head=128, context=40960, kind="q4_K", table_kind="q6_K",
        mixed=True, tied=True, small=_norms(128),
    ),
    "qwen25-7b-q4_k_m": lambda: gguf.llama(
        28, 3584, 28, 4, 18944, 152064, architecture="qwen2", context=32768, kind="q4_K", mixed=True,
        small=_biases(3584, 512),
    ),
    "qwen25-3b-q8_0": lambda: gguf.llama(
        36, 2048, 16, 2, 11008, 151936, architecture="qwen2", context=128000, kind="q8_0", tied=True,
        small=_biases(2048, 256),
    ),
    "phi3-mini-q4_k_m": lambda: gguf.llama(
        32, 3072, 32, 32, 8192, 32064, architecture="phi3", context=4096, kind="q4_K", qkv_kind="q5_K", mixed=True
    ),
    "pythia-2.8b-f16": lambda: gguf.pythia(32, 2560, 32, 50304),
}  # fmt: skip


def _norms(head: int) -> list[tuple[str, int]]:
    return [("attn_q_norm.weight", head), ("attn_k_norm.weight", head)]


def _biases(queries: int, keys: int) -> list[tuple[str, int]]:
    return [("attn_q.bias", queries), ("attn_k.bias", keys), ("attn_v.bias", keys)]


@cache
def logs() -> dict[str, Log]:
    """The logs by name."""
    return {log["name"]: log for log in json.loads(FILE.read_text())["logs"]}


@cache
def _configuration(name: str) -> dict[str, Any]:
    own: dict[str, Any] | None = json.loads(FILE.read_text())["models"].get(name)
    if own is None:
        return dict(model_named(name).config)
    like = own.get("like")
    return own if like is None else {**known_models()[like], **own}


@dataclass(frozen=True)
class Compared:
    """GiB of the KV cache: printed, predicted, and predicted with the growth outside torch that the log prints."""

    printed: float
    predicted: float
    given: float

    @property
    def share(self) -> float:
        """How far off, of what was printed, given what belongs to the machine."""
        return self.given / self.printed - 1


def served(log: Log) -> Served:
    """The prediction of a log's start."""
    card = device_named(log["gpu"])
    if "total_gib" in log:
        card = replace(card, capacity_bytes=round(log["total_gib"] * GIB))
    settings = dict(log["settings"])
    arguments = tuple((name, str(settings.pop(name)).lower()) for name in _ARGUMENTS if name in settings)
    major, minor = log["version"].split(".")
    model = ServedModel(log["model"], _configuration(log["model"]))
    question = Question(model, card, version=(int(major), int(minor)), arguments=arguments, **settings)
    loaded = VLLM().loaded_while_profiling(question)
    return engine_named("vllm").serve(question.with_(non_torch_bytes=loaded))


@cache
def compared(name: str) -> Compared:
    """A log's KV cache and the predicted one."""
    log = logs()[name]
    answer = served(log)
    predicted = answer.kv_cache.available_bytes / GIB
    outside = log["printed"].get("outside torch")
    charged = sum(part.bytes for part in answer.parts if part.name == "outside torch") / GIB
    given = predicted if outside is None else predicted + charged - outside
    return Compared(log["printed"]["KV cache"], predicted, given)


@dataclass(frozen=True)
class Other:
    """A figure of another engine's log and the predicted one."""

    name: str
    engine: str
    figure: str
    printed: float
    predicted: float

    @property
    def share(self) -> float:
        """How far off, of what was printed."""
        return self.predicted / self.printed - 1


def llama_cpp(folder: Path, log: Log, gpu: str = "RTX-3090") -> Served:
    """The prediction of a llama.cpp log's start: of a file like the log's, or of the sizes that it prints alone."""
    if "sizes" in log:
        lines = [f"print_info: {name} = {value}" for name, value in log["sizes"].items()]
        found = LlamaCpp.log.model_in(lines)
        assert found is not None
        model = found[0]
    else:
        path = folder / f"{log['model']}.gguf"
        path.write_bytes(MADE[log["model"]]())
        model = model_named(str(path))
    question = Question(model, device_named(gpu), arguments=tuple(log["options"].items()))
    return engine_named("llamacpp").serve(question)


def llama_cpp_buffers(served: Served, log: Log) -> tuple[float, float]:
    """MiB of the card's buffers that the log prints: (printed, predicted)."""
    parts = {part.name: part.bytes / MIB for part in served.parts}
    cache = served.kv_cache.block_bytes * served.kv_cache.blocks / MIB
    named = (("model", parts["weights"]), ("kv", cache), ("compute", parts["compute buffer"]))
    known = [(log[f"{name}_buffer_mib"], predicted) for name, predicted in named if f"{name}_buffer_mib" in log]
    return sum(printed for printed, _ in known), sum(predicted for _, predicted in known)


def sglang(log: Log) -> Served:
    """The prediction of an SGLang log's start, given what was free before loading."""
    cards = log.get("tp", 1)
    card = device_named(log.get("gpu", "H100"))
    before = sum(figure.bytes for figure in outside(card, cards))
    card = replace(card, capacity_bytes=round(log["free_before_gib"] * GIB) + before)
    given = (("mem-fraction-static", str(log["fraction"])),) if "fraction" in log else ()
    arguments = (*given, ("tp", str(cards)))
    return engine_named("sglang").serve(Question(model_named(log["model"]), card, arguments=arguments))


def tensorrt_llm(log: Log) -> tuple[float, float]:
    """Tokens of a TensorRT-LLM log's pool (printed, predicted), given what was available or the pool's bytes."""
    if "model" in log:
        token = decoder(Question(model_named(log["model"]), device_named("H100")), 1).token_bytes(log["element"])
    else:
        token = 2 * log["layers"] * log["kv_heads"] * log["head_dim"] * log["element"]
    if "available_gib" not in log:
        return log["tokens"], log["pool_gib"] * GIB / token
    pool, page = pool_bytes(int(log["available_gib"] * GIB), log["fraction"]), token * log["page"]
    return log["tokens"], (-(-pool // page) if "rounds_up" in log else pool // page) * log["page"]


def other_engines() -> Iterator[Other]:
    """The logs of llama.cpp, SGLang and TensorRT-LLM."""
    with TemporaryDirectory() as folder:
        for name, log in LLAMA_CPP.items():
            yield Other(name, "llama.cpp", "buffers, MiB", *llama_cpp_buffers(llama_cpp(Path(folder), log), log))
    for name, log in POOLS["sglang"].items():
        yield Other(name, "SGLang", "tokens, given free memory", log["tokens"], sglang(log).kv_cache.tokens)
    for name, log in POOLS["tensorrtllm"].items():
        given = "available" if "available_gib" in log else "the pool"
        yield Other(name, "TensorRT-LLM", f"tokens, given {given}", *tensorrt_llm(log))


def table() -> str:
    """All logs as a table, with the shares within bounds before it."""
    found = {name: compared(name) for name in logs()}
    good = sum(abs(one.share) <= 0.02 for one in found.values())
    fair = sum(abs(one.share) <= 0.05 for one in found.values())
    alone = sum(abs(one.predicted / one.printed - 1) <= 0.02 for one in found.values())
    others = list(other_engines())
    near = sum(abs(one.share) <= 0.02 for one in others)
    lines = [
        f"{len(found) + len(others)} logs, {good + near} within 2 %. Of vLLM {len(found)}: the KV cache within 2 % in "
        f"{good}, within 5 % in {fair}; with nothing taken from the log but settings and the card's memory, within 2 % "
        f"in {alone}.",
        "",
        "| log | version | card | KV cache printed (GiB) | predicted | given the growth outside torch | off |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found.items():
        log = logs()[name]
        cards = log["settings"].get("tensor_parallel_size", 1)
        given = f"{one.given:.2f}" if "outside torch" in log["printed"] else ""
        lines.append(
            f"| {name} | {log['version']} | {cards} x {log['gpu']} | {one.printed:.2f} | {one.predicted:.2f} "
            f"| {given} | {one.share:+.2%} |"
        )
    lines += ["", "| log | engine | figure | printed | predicted | off |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [
        f"| {one.name} | {one.engine} | {one.figure} | {one.printed:,.10g} | {one.predicted:,.0f} | {one.share:+.2%} |"
        for one in others
    ]
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The report with the table of today."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    REPORT.write_text(with_table(REPORT.read_text()))
