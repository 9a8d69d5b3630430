"""Weights of a decoder as they lie in a checkpoint, by its configuration: the packed values of a quantisation, its
scales, zeros and shapes, and the tensors it leaves as they are.

Names of tensors are those of transformers' models; layouts those of the writers: AutoAWQ 0.2 (``awq/modules/linear/
gemm.py``), AutoGPTQ 0.7 and GPTQModel (``nn_modules/qlinear``), bitsandbytes 0.45 (``functional.QuantState.as_dict``,
``nn/modules.py``), compressed-tensors 0.9 (``compressors/quantized_compressors``), transformers 5.23
(``integrations/finegrained_fp8.py``, ``integrations/mxfp4.py``), TensorRT Model Optimizer 0.23 (``export/
quant_utils.py``).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphmem.base.documents import shown
from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import as_object, count, counted, mapping, matches

#: Decoders whose tensors are listed here.
FAMILIES = frozenset((
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "deepseek_v2", "deepseek_v3",
    "gpt_oss",
))  # fmt: skip
#: Values of a block that bitsandbytes scales together, and of its scales where they are quantised too.
_NF4_BLOCK, _NESTED_BLOCK = 64, 256
#: Bytes of a number of 16 bits, which scales have where nothing else is said.
_HALF = 2


@dataclass(frozen=True)
class Matrix:
    """A product's weight of ``outputs`` x ``inputs``, ``count`` times; ``bias``: whether it has one. ``name``: the
    module's, of the first layer that has it, as configurations exclude it. ``parts``: into how many it can be cut for
    tensor parallelism, None for any number."""

    name: str
    outputs: int
    inputs: int
    count: int = 1
    bias: bool = False
    parts: int | None = None

    @property
    def numel(self) -> int:
        """Values of one."""
        return self.outputs * self.inputs

    def cut(self, cards: int) -> int:
        """The parts that so many cards cut it into."""
        return cards if self.parts is None else min(cards, self.parts)


def stored(model: ServedModel, quantization: str | None = None, width: int = _HALF, cards: int = 1) -> int:
    """Bytes of the tensors in a checkpoint of this configuration, whose plain tensors have ``width`` bytes a value; of
    ``cards`` under tensor parallelism the share of one.

    ``quantization``: a method that the configuration does not name itself, with its usual settings. Raises
    :class:`UsageError` for a model or a quantisation that is not listed here.
    """
    total = (_tables(model) * width) // cards + _norms(model) * width + _corrections(model) * 4
    return total + sum(size for _, size in sized(model, quantization, width, cards))


def sized(
    model: ServedModel, quantization: str | None = None, width: int = _HALF, cards: int = 1
) -> Iterator[tuple[Matrix, int]]:
    """Every product's weight with the bytes of all its ``count`` on one of ``cards``. Raises as :func:`stored`."""
    config = dict(mapping(model, "quantization_config"))
    if quantization is not None and not config:
        config = {"quant_method": quantization, **_USUAL.get(quantization, {})}
    takes, packed = _method(model, config, width) if config else (lambda _: False, lambda _: 0)
    for matrix in matrices(model):
        biases = matrix.outputs * width if matrix.bias else 0
        cut = matrix.cut(cards)
        if takes(matrix):
            yield matrix, matrix.count * packed(matrix) // cut + matrix.count * biases // cut
        else:
            yield matrix, matrix.count * (matrix.numel * width + biases) // cut


# --- tensors ----------------------------------------------------------------------------------------------------------


def matrices(model: ServedModel) -> Iterator[Matrix]:
    """Every product's weight; the head, where it is not the embedding's."""
    kind = kind_of(model)
    layers, hidden = count(model, "num_hidden_layers") + _drafting(model, kind), count(model, "hidden_size")
    yield from _attention(model, kind, layers, hidden)
    yield from _feed_forward(model, kind, layers, hidden)
    if not _tied(model, kind):
        yield Matrix("lm_head", count(model, "vocab_size"), hidden)
    if further := _drafting(model, kind):  # reads the last layer's output beside the next token, has its own head
        yield Matrix("lm_head", hidden, 2 * hidden, further)
        yield Matrix("lm_head", count(model, "vocab_size"), hidden, further)


def _drafting(model: ServedModel, kind: str) -> int:
    """Further layers of DeepSeek-V3's checkpoints, which predict a token more."""
    return count(model, "num_nextn_predict_layers", 0, least=0) if kind == "deepseek_v3" else 0


def kind_of(model: ServedModel, accepted: frozenset[str] = FAMILIES) -> str:
    """The model's type. Raises :class:`UsageError` where it is none of the accepted ones."""
    kind = model.config.get("model_type")
    if not isinstance(kind, str) or kind not in accepted:
        raise UsageError(
            f"{model.name}: model_type {shown(kind)} is not followed here; accepted: {', '.join(sorted(accepted))}"
        )
    return kind


def _tied(model: ServedModel, kind: str) -> bool:
    tied = model.config.get("tie_word_embeddings")
    return kind.startswith("gemma") if tied is None else tied is True


def _attention(model: ServedModel, kind: str, layers: int, hidden: int) -> Iterator[Matrix]:
    at = "model.layers.0.self_attn."
    heads = count(model, "num_attention_heads")
    if kind.startswith("deepseek"):
        rope, nope = count(model, "qk_rope_head_dim"), count(model, "qk_nope_head_dim")
        value, latent = count(model, "v_head_dim"), count(model, "kv_lora_rank")
        query = model.config.get("q_lora_rank")
        if query is None:
            yield Matrix(f"{at}q_proj", heads * (rope + nope), hidden, layers)
        else:
            rank = counted(model, "q_lora_rank", query)
            yield Matrix(f"{at}q_a_proj", rank, hidden, layers, parts=1)
            yield Matrix(f"{at}q_b_proj", heads * (rope + nope), rank, layers)
        yield Matrix(f"{at}kv_a_proj_with_mqa", latent + rope, hidden, layers, parts=1)
        yield Matrix(f"{at}kv_b_proj", heads * (nope + value), latent, layers)
        yield Matrix(f"{at}o_proj", hidden, heads * value, layers)
        return
    kv_heads = count(model, "num_key_value_heads", heads)
    size = count(model, "head_dim", max(1, hidden // heads))
    biased = kind in ("qwen2", "gpt_oss") or model.config.get("attention_bias") is True
    yield Matrix(f"{at}q_proj", heads * size, hidden, layers, biased)
    yield Matrix(f"{at}k_proj", kv_heads * size, hidden, layers, biased, kv_heads)
    yield Matrix(f"{at}v_proj", kv_heads * size, hidden, layers, biased, kv_heads)
    yield Matrix(f"{at}o_proj", hidden, heads * size, layers, biased and kind != "qwen2")


_GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class _Experts:
    """Where a family's configuration has the number of its experts and their width, how many a token chooses where it
    does not say, and names of modules: of what chooses, of the first expert, and of its products."""

    number: str
    width: str
    chosen: int
    router: str
    first: str = ""
    names: Sequence[str] = _GATED


_DEEPSEEK = _Experts("n_routed_experts", "moe_intermediate_size", 8, "mlp.gate", "mlp.experts.0")
_EXPERTS = {
    "mixtral": _Experts(
        "num_local_experts", "intermediate_size", 2, "block_sparse_moe.gate", "block_sparse_moe.experts.0",
        ("w1", "w3", "w2"),
    ),
    "qwen3_moe": _Experts("num_experts", "moe_intermediate_size", 8, "mlp.gate", "mlp.experts.0"),
    "gpt_oss": _Experts("num_local_experts", "intermediate_size", 4, "mlp.router"),
    "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK,
}  # fmt: skip


def experts_of(model: ServedModel) -> tuple[int, int, int]:
    """(experts of a layer, their width, experts that a token chooses); of a dense model 0, its width and 1."""
    known = _EXPERTS.get(str(model.config.get("model_type")))
    if known is None:
        return 0, count(model, "intermediate_size"), 1
    chosen = count(model, "num_experts_per_tok", known.chosen)
    return count(model, known.number), count(model, known.width), chosen


def _feed_forward(model: ServedModel, kind: str, layers: int, hidden: int) -> Iterator[Matrix]:
    """Of DeepSeek's the first layers are dense, the others have experts of their own and shared ones."""
    known, at = _EXPERTS.get(kind), "model.layers.0."
    if known is None:
        yield from _gated(f"{at}mlp", _GATED, hidden, count(model, "intermediate_size"), layers)
        return
    experts, width, _ = experts_of(model)
    if kind.startswith("deepseek"):
        dense = min(layers, count(model, "first_k_dense_replace", 0, least=0))
        yield from _gated(f"{at}mlp", _GATED, hidden, count(model, "intermediate_size"), dense)
        at, layers = "model.layers.3.", layers - dense
    yield Matrix(f"{at}{known.router}", experts, hidden, layers, kind == "gpt_oss", 1)
    if kind == "gpt_oss":
        yield Matrix(f"{at}mlp.experts.gate_up_proj", 2 * width, hidden, layers * experts, True)
        yield Matrix(f"{at}mlp.experts.down_proj", hidden, width, layers * experts, True)
    else:
        yield from _gated(f"{at}{known.first}", known.names, hidden, width, layers * experts)
    if kind.startswith("deepseek") and (shared := count(model, "n_shared_experts", 0, least=0)):
        yield from _gated(f"{at}mlp.shared_experts", _GATED, hidden, shared * width, layers)


def _gated(at: str, names: Sequence[str], hidden: int, width: int, times: int) -> Iterator[Matrix]:
    gate, up, down = names
    yield Matrix(f"{at}.{gate}", width, hidden, times)
    yield Matrix(f"{at}.{up}", width, hidden, times)
    yield Matrix(f"{at}.{down}", hidden, width, times)


def _tables(model: ServedModel) -> int:
    """Values of embeddings, which are never quantised here."""
    tables = 1 + _drafting(model, kind_of(model))
    return tables * count(model, "vocab_size") * count(model, "hidden_size")


def _norms(model: ServedModel) -> int:
    """Values of norms and attention sinks."""
    kind = kind_of(model)
    layers, hidden = count(model, "num_hidden_layers"), count(model, "hidden_size")
    norms, drafting = {"gemma2": 4}.get(kind, 2), _drafting(model, kind)
    layers += drafting
    found = drafting * 3 * hidden + layers * norms * hidden + hidden
    if kind in ("qwen3", "qwen3_moe"):
        heads = count(model, "num_attention_heads")
        found += layers * 2 * count(model, "head_dim", max(1, hidden // heads))
    if kind == "gpt_oss":
        found += layers * count(model, "num_attention_heads")
    if kind.startswith("deepseek"):
        query = model.config.get("q_lora_rank")
        found += layers * (
            count(model, "kv_lora_rank") + (0 if query is None else counted(model, "q_lora_rank", query))
        )
    return found


def _corrections(model: ServedModel) -> int:
    """Values in fp32: DeepSeek-V3's corrections of experts' scores."""
    if kind_of(model) != "deepseek_v3":
        return 0
    layers = count(model, "num_hidden_layers") + _drafting(model, "deepseek_v3")
    return max(0, layers - count(model, "first_k_dense_replace", 0, least=0)) * experts_of(model)[0]


# --- quantisations ----------------------------------------------------------------------------------------------------


#: Bytes of a weight as a quantisation packs it.
_Packed = Callable[[Matrix], int]


@dataclass(frozen=True)
class _Method:
    """A quantisation: what reads its settings, of a model whose plain tensors have so many bytes a value; the keys that
    name the modules it leaves as they are; and whether it can be applied to a weight at all."""

    packed: Callable[[ServedModel, Mapping[str, Any], int], _Packed]
    excluded: tuple[str, ...] = ()
    applies: Callable[[Matrix], bool] = lambda matrix: matrix.name != "lm_head"


#: What a method has where the configuration names it alone.
_USUAL: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"bits": 4, "group_size": 128},
    "fp8": {},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "mxfp4": {},
}


def _method(model: ServedModel, config: Mapping[str, object], width: int) -> tuple[Callable[[Matrix], bool], _Packed]:
    """(whether a weight is packed, its bytes then) by the quantisation that a configuration names. Raises
    :class:`UsageError`."""
    name = config.get("quant_method")
    name = "bitsandbytes" if name is None and (config.get("load_in_4bit") or config.get("load_in_8bit")) else name
    method = _METHODS.get(name) if isinstance(name, str) else None
    if method is None:
        raise UsageError(f"quantization {shown(name)} is not followed here; accepted: {', '.join(sorted(_METHODS))}")
    listed = [given for key in method.excluded if isinstance(given := config.get(key), list)]
    excluded = [one for given in listed for one in given if isinstance(one, str)]

    def takes(matrix: Matrix) -> bool:
        return method.applies(matrix) and not any(_is_named(matrix.name, one) for one in excluded)

    return takes, method.packed(model, config, width)


def _whole(model: ServedModel, config: Mapping[str, Any], name: str, otherwise: int, least: int = 1) -> int:
    return counted(model, f"quantization_config's {name}", config.get(name), otherwise, least=least)


def _groups(inputs: int, group: int) -> int:
    return 1 if group < 1 else -(-inputs // group)


def _grouped(model: ServedModel, config: Mapping[str, object], width: int) -> _Packed:
    """AWQ's: packed values, and of every group of inputs packed zeros and scales in 16 bits."""
    bits, group = _whole(model, config, "bits", 4), _whole(model, config, "group_size", 128, -1)

    def of(matrix: Matrix) -> int:
        scales = _groups(matrix.inputs, group) * matrix.outputs
        return (matrix.numel + scales) * bits // 8 + scales * _HALF

    return of


def _gptq(model: ServedModel, config: Mapping[str, object], width: int) -> _Packed:
    """The same with the order of groups (``g_idx``), which is written whether it is used or not; and with a bias for
    every product, which AutoGPTQ up to 0.7.1 adds (``_utils.make_quant``), GPTQModel does not."""
    quantizer = str(as_object(config.get("meta")).get("quantizer", ""))
    added = 0 if "gptqmodel" in quantizer.lower() else _HALF
    packed = _grouped(model, config, width)
    return lambda matrix: packed(matrix) + 4 * matrix.inputs + (0 if matrix.bias else added * matrix.outputs)


def _bitsandbytes(model: ServedModel, config: Mapping[str, object], width: int) -> _Packed:
    if config.get("load_in_8bit"):  # values, the largest of every row in fp32, and one byte that names the order
        return lambda matrix: matrix.numel + 4 * matrix.outputs + 1
    nested = config.get("bnb_4bit_use_double_quant") is True
    kind = config.get("bnb_4bit_quant_type", "fp4")

    def of(matrix: Matrix) -> int:
        blocks = -(-matrix.numel // _NF4_BLOCK)
        found = matrix.numel // 2 + 16 * 4 + _state_bytes(matrix, str(kind), nested, width)
        return found + (blocks + 4 * -(-blocks // _NESTED_BLOCK) + 256 * 4 if nested else 4 * blocks)

    return of


def _state_bytes(matrix: Matrix, kind: str, nested: bool, width: int) -> int:
    """The text beside a 4-bit weight (``QuantState.as_dict``); 19 characters are counted for the offset of nested
    scales, one or two more or less than there are."""
    dtype = {2: "bfloat16", 4: "float32"}[width]
    text = (
        f'{{"quant_type": "{kind}", "blocksize": 64, "dtype": "{dtype}", "shape": [{matrix.outputs}, {matrix.inputs}]'
    )
    more = (
        ', "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.12345678901234567' if nested else ""
    )
    return len(text) + len(more) + 1


def _fp8(model: ServedModel, config: Mapping[str, object], width: int) -> _Packed:
    """Values with a scale in fp32 for every block, or one for all; Qwen's files have scales of blocks in 16 bits. A
    static scheme has one more, of the inputs."""
    block = config.get("weight_block_size")
    static = 4 if config.get("activation_scheme") == "static" else 0
    if block is None:
        return lambda matrix: matrix.numel + 4 + static
    if not (isinstance(block, list) and len(block) == 2):
        raise UsageError(f"{model.name}: weight_block_size is {shown(block)}; accepted: two whole numbers")
    rows, columns = (counted(model, "weight_block_size", size) for size in block)
    size = _HALF if kind_of(model).startswith("qwen") else 4
    return lambda matrix: matrix.numel + size * -(-matrix.outputs // rows) * -(-matrix.inputs // columns) + static


def _compressed(model: ServedModel, config: Mapping[str, object], width: int) -> _Packed:
    """The first group of the configuration, which products share; several are refused."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UsageError(f"{model.name}: config_groups of {shown(groups)}; accepted: one group for all products")
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UsageError(f"{model.name}: its config_groups say nothing of weights")
    form = group.get("format") or config.get("format")
    inputs = group.get("input_activations")
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
    bits = counted(model, "num_bits", weights.get("num_bits"), 8)
    size = -1 if weights.get("strategy") != "group" else counted(model, "group_size", weights.get("group_size"), 128)
    per_row = weights.get("strategy") != "tensor"

    def packed(matrix: Matrix) -> int:
        of = _groups(matrix.inputs, size)
        words = -(-matrix.inputs * bits // 32)
        zeros = 0 if weights.get("symmetric", True) else -(-matrix.outputs * bits // 32) * 4 * of
        order = 4 * matrix.inputs if weights.get("actorder") == "group" else 0
        return matrix.outputs * (4 * words + of * width) + zeros + order + 2 * 8  # and its shape, twice 64 bits

    def bytewise(matrix: Matrix) -> int:
        scales = matrix.outputs * _groups(matrix.inputs, size) if per_row else 1
        return matrix.numel + width * scales + (width if static else 0)

    if form == "nvfp4-pack-quantized":
        return lambda matrix: _nvfp4(matrix, static)
    if form not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
        raise UsageError(f"{model.name}: format {shown(form)} of compressed-tensors is not followed here")
    return packed if form == "pack-quantized" else bytewise


def _nvfp4(matrix: Matrix, static: bool) -> int:
    """Two values a byte, a scale of eight bits for 16 of them, one in fp32 for all, and one of the inputs."""
    return matrix.numel // 2 + matrix.outputs * -(-matrix.inputs // 16) + 4 + (4 if static else 0)


def _modelopt(model: ServedModel, config: Mapping[str, object], width: int) -> _Packed:
    algorithm = config.get("quant_algo")
    if algorithm == "NVFP4":
        return lambda matrix: _nvfp4(matrix, static=True)
    if algorithm == "FP8":
        return lambda matrix: matrix.numel + 4 + 4
    raise UsageError(f"{model.name}: quant_algo {shown(algorithm)} is not followed here; accepted: NVFP4, FP8")


def _mxfp4(model: ServedModel, config: Mapping[str, object], width: int) -> _Packed:
    """Two values a byte, and a scale of eight bits for 32 of them."""
    return lambda matrix: matrix.numel // 2 + matrix.outputs * -(-matrix.inputs // 32)


def _is_product(matrix: Matrix) -> bool:
    return matrix.name != "lm_head" and not matrix.name.endswith((".gate", ".router"))


#: The head stays as it is, as all of these leave it.
_METHODS: dict[str, _Method] = {
    "awq": _Method(_grouped, ("modules_to_not_convert",)),
    "gptq": _Method(_gptq, ("modules_in_block_to_not_quantize",), _is_product),
    "bitsandbytes": _Method(_bitsandbytes, ("llm_int8_skip_modules",)),
    "fp8": _Method(_fp8, ("modules_to_not_convert", "ignored_layers"), _is_product),
    "compressed-tensors": _Method(_compressed, ("ignore",)),
    "modelopt": _Method(_modelopt, ("ignore", "exclude_modules")),
    "mxfp4": _Method(_mxfp4, applies=lambda matrix: ".experts" in matrix.name),
}


def _is_named(module: str, excluded: str) -> bool:
    """True if a part of its name is excluded, or a pattern with ``*`` or an expression behind ``re:`` finds it. Of
    layers the first one stands for all, so numbers of layers are not compared."""
    if excluded.startswith("re:"):
        return matches(excluded[3:], module)
    plain = re.sub(r"\.layers\.\d+\.", ".layers.0.", excluded)
    module = re.sub(r"\.layers\.\d+\.", ".layers.0.", module)
    return (
        fnmatch.fnmatchcase(module, plain) if "*" in plain else f".{plain}." in f".{module}." or module.endswith(plain)
    )
