"""Public benchmarks of serving engines beside the roofline: ``golden/serving/speed.csv``, one a row.

``part``: those marked ``derived`` give the roofline its rates and its interval (:func:`interval`), those marked
``kept`` do not; every second source is kept. ``measure``: ``out/s`` tokens of answers a second of all cards, ``all/s``
those of prompts too, ``itl`` milliseconds between tokens, ``ttft`` milliseconds to the first one. ``python -m
tests.serving.public_speed`` writes the table of reports/serving_speed.md.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from graphmem.devices import device_named
from graphmem.serving.base import Question, ServedModel
from graphmem.serving.roofline import FAST, SLOW, Roofline, roofline
from graphmem.serving.shapes import FOLLOWED, LATENT, decoder
from graphmem.sources.hub import known_model, known_models
from tests import places

FILE = places.GOLDEN / "serving" / "speed.csv"
REPORT = places.ROOT / "reports" / "serving_speed.md"
_BEGIN, _END = "<!-- speed: begin -->\n", "<!-- speed: end -->\n"
#: What counts as near, as a part of the measured speed, either way.
NEAR = 0.25
#: Tokens of prompts that are read in one step.
_STEP_TOKENS = 8192
#: Configurations that the table of models does not have.
_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-235B-A22B": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "DeepSeek-V3.1": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """A row of the file."""

    part: str
    engine: str
    model: str
    quantization: str
    kv_cache: str
    card: str
    cards: int
    batch: int
    prompt: int
    output: int
    measure: str
    value: float
    source: str

    @property
    def predicted(self) -> float:
        """The same measure by the roofline."""
        line, prompt, output, batch = _roofline(self), self.prompt, self.output, self.batch
        if self.measure == "ttft":
            return 1000 * line.reading(1, prompt)
        together = max(1, min(batch, _STEP_TOKENS // prompt))
        reading = line.reading(together, prompt) / together
        answering = line.answering(batch, prompt + output / 2)
        if self.measure == "itl":  # other prompts are read meanwhile
            return 1000 * (answering + (batch - 1) * reading / output)
        speed = batch * output / (batch * reading + (output - 1) * answering)
        return speed * (prompt + output) / output if self.measure == "all/s" else speed

    @property
    def ratio(self) -> float:
        """The measured speed over the predicted one."""
        ratio = self.value / self.predicted
        return ratio if self.measure.endswith("/s") else 1 / ratio

    @property
    def is_near(self) -> bool:
        """Whether the predicted speed is within :data:`NEAR` of the measured one."""
        return abs(1 / self.ratio - 1) <= NEAR

    @property
    def is_held(self) -> bool:
        """Whether the measured speed lies in the interval."""
        return SLOW <= self.ratio <= FAST

    @property
    def witness(self) -> str:
        """Who measured it: points of one source have one weight together."""
        return self.source.split(" (")[0]


def _roofline(row: Benchmark) -> Roofline:
    config = _CONFIGS.get(row.model) or known_models()[known_model(row.model) or row.model]
    device, quantization = device_named(row.card), row.quantization or None
    question = Question(
        ServedModel(row.model, config), device, tensor_parallel_size=row.cards, quantization=quantization
    )
    kept = decoder(question, row.cards, FOLLOWED | LATENT).token_bytes(1 if row.kv_cache == "fp8" else 2)
    return roofline(question.model, device, row.cards, kept, quantization)


@cache
def benchmarks() -> tuple[Benchmark, ...]:
    """All rows."""
    whole = ("cards", "batch", "prompt", "output")
    with FILE.open(newline="") as file:
        return tuple(
            Benchmark(**{**row, **{name: int(row[name]) for name in whole}, "value": float(row["value"])})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        )


def of(part: str) -> list[Benchmark]:
    """Rows of a part."""
    return [row for row in benchmarks() if row.part == part]


def interval(rows: Sequence[Benchmark]) -> tuple[float, float, float]:
    """Ratios below which a tenth, half and nine tenths of the rows' weight lie."""
    number = Counter(row.witness for row in rows)
    found: list[float] = []
    reached, whole = 0.0, float(len(number))
    for row in sorted(rows, key=lambda one: one.ratio):
        reached += 1 / number[row.witness]
        while len(found) < 3 and reached >= (0.1, 0.5, 0.9)[len(found)] * whole - 1e-9:
            found.append(row.ratio)
    return found[0], found[1], found[2]


def table() -> str:
    """How near both parts are, and groups of one source, model and cards with their ratios."""
    lines = []
    for part, words in (("derived", "give the roofline its rates"), ("kept", "were kept back")):
        rows = of(part)
        within, near = sum(row.is_held for row in rows), sum(row.is_near for row in rows)
        sources = len({row.witness for row in rows})
        lines.append(
            f"- {len(rows)} points of {sources} sources {words}: {near} are predicted within {NEAR:.0%}, {within} lie "
            "in the interval."
        )
    lines += ["", "| part | source | engine | model | cards | points | near | measured over predicted speed |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    groups: dict[tuple[str, ...], list[Benchmark]] = {}
    for row in benchmarks():
        model = f"{row.model} {row.quantization}".strip()
        key = (row.part, row.source, row.engine, model, f"{row.cards} x {row.card}")
        groups.setdefault(key, []).append(row)
    for names, rows in groups.items():
        ratios = sorted(row.ratio for row in rows)
        near = sum(row.is_near for row in rows)
        lines.append(f"| {' | '.join(names)} | {len(rows)} | {near} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The report with the table of today."""
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    REPORT.write_text(with_table(REPORT.read_text()))
