"""The time of an engine's step by the roofline: what is read over the card's bandwidth or what is computed over its
peak, whichever is longer, of the products and then of attention; on several cards the sums between them; and the time
that a layer takes however little it has to do.

The parts of bandwidth and peak that engines reach, the times of a layer and of a sum, and the interval are those of
public benchmarks (``tests/golden/serving/speed.csv``, which were parted by source before any error was looked at; those
marked derived, every source with the same weight). They are of no model, card or engine. ``reports/serving_speed.md``
has all of them beside the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from graphmem.devices import Device
from graphmem.errors import UsageError
from graphmem.serving.base import Served, ServedModel
from graphmem.serving.stored import experts_of, kind_of, sized
from graphmem.serving.values import count, mapping

#: Parts of the memory's bandwidth and of the tensor cores' peak that engines reach.
_BANDWIDTH_REACHED, _PEAK_REACHED = 0.9, 0.55
#: Seconds of a layer's kernels that wait for each other, and of one sum over cards that has nothing to move.
_LAYER_SECONDS, _SUM_SECONDS = 80e-6, 20e-6
#: Measured speeds over the predicted one: those of eight tenths of the derived points' weight lie between these, and of
#: the points that were kept back so many.
SLOW, FAST, HELD = 0.7, 1.1, "70 of 81"
#: The first cards with products of eight bits twice as fast as those of 16.
_EIGHT_BITS_SINCE = (8, 9)


@dataclass(frozen=True)
class Roofline:
    """The work of one card of an engine, and its rates. ``read_bytes``: weights of every step, ``expert_bytes`` those
    of all experts, of which a token chooses the part ``chosen``; ``token_flops`` and ``row_flops``: operations of a
    token, and of one whose logits are asked for; ``kept_bytes`` and ``attention_flops``: of a token of context.
    ``sum_bytes``: of a token's sums over cards, once around the ring. Rates are of a second."""

    read_bytes: float
    expert_bytes: float
    chosen: float
    token_flops: float
    row_flops: float
    kept_bytes: float
    attention_flops: float
    sum_bytes: float
    fixed_seconds: float
    bandwidth: float = field(repr=False)
    peak: float = field(repr=False)
    attention_peak: float = field(repr=False)
    link: float = field(repr=False)

    def seconds(self, tokens: int, rows: int, context: float, pairs: float) -> float:
        """Of a step of so many tokens, logits for ``rows``; ``context``: tokens whose keys and values are read,
        ``pairs``: of a token with one that it attends to."""
        read = self.read_bytes + self.expert_bytes * (1 - (1 - self.chosen) ** tokens)
        products = max(read / self.bandwidth, (tokens * self.token_flops + rows * self.row_flops) / self.peak)
        attention = max(context * self.kept_bytes / self.bandwidth, pairs * self.attention_flops / self.attention_peak)
        return products + attention + tokens * self.sum_bytes / self.link + self.fixed_seconds

    def answering(self, requests: int, context: float) -> float:
        """Seconds of a step in which each of so many requests gets a token, all with so much context."""
        return self.seconds(requests, requests, requests * context, requests * context)

    def reading(self, prompts: int, tokens: int) -> float:
        """Seconds of a step that reads so many prompts of so many tokens from their beginning."""
        return self.seconds(prompts * tokens, prompts, prompts * tokens, prompts * tokens * tokens / 2)


def of_engine(model: ServedModel, device: Device, served: Served, quantization: str | None) -> Roofline:
    """The roofline of an engine's answer. Raises as :func:`roofline`."""
    longest = int(served.settings["max_model_len"])
    kept = served.request_blocks(longest) * served.kv_cache.block_bytes / longest
    return roofline(model, device, served.cards, kept, quantization)


def roofline(model: ServedModel, device: Device, cards: int, kept_bytes: float, quantization: str | None) -> Roofline:
    """The roofline of a model on so many cards that each keep ``kept_bytes`` of a token. Raises :class:`UsageError` for
    a card whose rates are not known, and for a model or a quantisation whose products are not listed."""
    kind = kind_of(model)
    model = replace(model, config={**model.config, "num_nextn_predict_layers": 0})  # a draft's, which is not run
    if device.tensor_teraflops is None or device.memory_bandwidth is None or device.link_bandwidth is None:
        raise UsageError(f"the peak of {device.name} is not in the table")
    experts, _, of_token = experts_of(model)
    chosen = of_token / experts if experts else 0.0
    read = of_experts = flops = row = 0.0
    for matrix, size in sized(model, quantization, cards=cards):
        operations = 2 * matrix.numel * matrix.count / matrix.cut(cards)
        if ".experts" in matrix.name:
            of_experts += size
            flops += operations * chosen
        else:
            read += size
            flops += operations * (matrix.name != "lm_head")
            row += operations * (matrix.name == "lm_head")
    hidden, layers = count(model, "hidden_size"), count(model, "num_hidden_layers")
    if not row:  # the embeddings are the head
        row = 2 * count(model, "vocab_size") * hidden / cards
        read += row
    peak = device.tensor_teraflops * 1e12 * _PEAK_REACHED
    eight = _in_eight_bits(model, quantization) and (device.compute_capability or (0, 0)) >= _EIGHT_BITS_SINCE
    return Roofline(
        read, of_experts, chosen, flops, row, kept_bytes, layers * _attention(model, kind) / cards,
        sum_bytes=2 * layers * 2 * (cards - 1) / cards * hidden * 2,
        fixed_seconds=layers * (_LAYER_SECONDS + (2 * _SUM_SECONDS if cards > 1 else 0)),
        bandwidth=device.memory_bandwidth * _BANDWIDTH_REACHED, peak=2 * peak if eight else peak,
        attention_peak=peak, link=device.link_bandwidth,
    )  # fmt: skip


def _attention(model: ServedModel, kind: str) -> int:
    """Operations of one token with one that it attends to, in a layer: scores, and values that they weigh."""
    heads = count(model, "num_attention_heads")
    if kind.startswith("deepseek"):
        return heads * (4 * count(model, "kv_lora_rank") + 2 * count(model, "qk_rope_head_dim"))
    return 4 * heads * count(model, "head_dim", max(1, count(model, "hidden_size") // heads))


def _in_eight_bits(model: ServedModel, quantization: str | None) -> bool:
    """True if products are computed in eight bits: FP8; weights of four or eight bits alone are computed in 16."""
    config = mapping(model, "quantization_config")
    method = config.get("quant_method") or quantization
    return method == "fp8" or "float-quantized" in str(config.get("format")) or config.get("quant_algo") == "FP8"
