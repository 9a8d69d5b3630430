"""llama.cpp: a GGUF file's layers on one card, its KV cache, its compute buffer.

Weights and the KV cache are exact sums, as the engine allocates them (ggml-org/llama.cpp at 0c1e57098, which comes with
llama-cpp-python 0.3.36: ``src/llama-model.cpp``, ``src/llama-kv-cache.cpp``, ``ggml/src/ggml-cuda/ggml-cuda.cu``). The
compute buffer is a formula over the stages of its graph (``src/llama-graph.cpp``), held by the figures of public logs.
The memory of ggml's pools while kernels run is in no log and is not counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphmem.base.documents import shown
from graphmem.base.searching import largest
from graphmem.devices import Loads
from graphmem.errors import UsageError
from graphmem.serving.base import KVCache, Part, Question, Served, ServedModel
from graphmem.serving.gguf import BY_NAME, GGUF, Tensor
from graphmem.serving.logs import Log, Reader, figure, settings_in, whole_number
from graphmem.serving.options import Option, flag, one_of, options_of, whole
from graphmem.units import GIB, MIB

#: Bytes that tensors are aligned to on a card, and elements that rows of quantised ones are rounded up to
#: (``ggml_backend_cuda_buffer_type_get_alignment``, ``MATRIX_ROW_PADDING``).
_ALIGNMENT, _ROW = 128, 512
#: Cells of the cache come in such steps (``llama_context``).
_CELLS = 256
#: Types that ``--cache-type-k`` and ``-v`` take (common/arg.cpp).
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
#: Architectures whose graphs are like Llama's, or with the named difference: of so many layers one sees everything, the
#: others a window (``load_swa_pattern``, src/models).
_WINDOWS: Mapping[str, int] = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt-oss": 2}
#: Those most of whose layers keep a state of each sequence (``src/llama-memory-recurrent.cpp``), and those whose graph
#: has stages that are not followed.
_STATES = frozenset(("qwen35", "qwen35moe", "qwen3next"))
_OTHER_GRAPHS = _STATES | {"gemma4"}
_FOLLOWED = frozenset(
    (
        "llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gptneox", "gemma", "starcoder2", "stablelm", "internlm2",
        "command-r", "olmo", "granite", "glm4", "smollm3", "deepseek2", "phi3", *_WINDOWS, *_STATES,
    )
)  # fmt: skip
#: Hidden states that are alive while attention scores are: the layer's input and residual, queries, and what they
#: become; two more where queries, keys and values are one product (observed: GPT-NeoX, Phi 3).
_ALIVE, _ALIVE_FUSED = 4, 6
#: Of the feed-forward layer: gate, up and what they become, which is no operator in place (``ggml_op_can_inplace``,
#: ggml/src/ggml-alloc.c); and hidden states beside them (observed: Qwen 3).
_WIDE, _BESIDE_WIDE = 3, 4
#: Hidden states that are kept where embeddings are pooled: all of them, and the same in the other order
#: (``build_pooling``, src/llama-graph.cpp).
_POOLED = 2
_MOST_LAYERS = 1 << 12
_LONGEST_EXPRESSION = 500


@dataclass(frozen=True)
class _Model:
    """Sizes that the metadata tell. ``wide`` and ``narrow``: values of a head's key and value in layers that see all,
    and in those with a window; ``caching``: layers that have a cache of their own, of which one in ``interval`` is for
    tokens, the others' is ``state`` bytes of each sequence."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: tuple[int, ...]
    wide: tuple[int, int]
    narrow: tuple[int, int]
    interval: int
    caching: int
    state: int
    feed_forward: int
    experts_used: int
    vocabulary: int
    trained: int
    window: int
    latent: bool
    fused: bool

    def sees_all(self, layer: int) -> bool:
        """True if a layer keeps every token (``llama_hparams::is_swa``)."""
        pattern = _WINDOWS.get(self.architecture)
        return not self.window or pattern is None or layer % pattern == pattern - 1

    def keeps_tokens(self, layer: int) -> bool:
        """True if a layer has keys and values of its own."""
        return layer < self.caching and layer % self.interval == self.interval - 1

    def of_token(self, layer: int) -> tuple[int, int]:
        """Values of a token's key and value."""
        key, value = self.wide if self.sees_all(layer) else self.narrow
        return (key, 0) if self.latent else (key * self.kv_heads[layer], value * self.kv_heads[layer])


@dataclass(frozen=True)
class _Settings:
    """The context's parameters, by the engine's own names; and whether embeddings are pooled, and expressions of the
    names of tensors that stay on the host."""

    n_gpu_layers: int
    ctx_size: int
    parallel: int
    kv_unified: bool
    ubatch_size: int
    n_outputs_max: int
    cache_type_k: str
    cache_type_v: str
    flash_attn: bool
    swa_full: bool
    kv_offload: bool
    pooled: bool
    on_host: tuple[str, ...] = ()

    @property
    def each(self) -> int:
        """Cells that one request can have."""
        return self.ctx_size if self.kv_unified else self.ctx_size // self.parallel

    def shown(self, model: _Model) -> dict[str, Any]:
        """For an answer."""
        own = {name: value for name, value in vars(self).items() if name not in ("pooled", "on_host")}
        about = {"max_model_len": self.each, "max_num_seqs": self.parallel, "architecture": model.architecture}
        return own | about


OPTIONS = {
    "n_gpu_layers": Option(lambda name, text: _layers(name, text)), "ctx_size": Option(whole(0), "max_model_len", 0),
    "parallel": Option(whole(1, 256), "max_num_seqs"), "batch_size": Option(whole(), default=2048),
    "ubatch_size": Option(whole(), default=512), "cache_type_k": Option(one_of(*_CACHE_TYPES), default="f16"),
    "cache_type_v": Option(one_of(*_CACHE_TYPES), default="f16"),
    "flash_attn": Option(one_of("on", "off", "auto", "true", "false"), default="auto"), "kv_unified": Option(flag),
    "no_kv_offload": Option(flag, default=False), "swa_full": Option(flag, default=False),
    "n_outputs_max": Option(whole()), "cpu_moe": Option(flag), "n_cpu_moe": Option(whole(0, _MOST_LAYERS)),
    "embeddings": Option(flag, default=False),
    "override_tensor": Option(lambda name, text: _overrides(name, text), default=()),
}  # fmt: skip
#: Other spellings.
SHORT = {
    "ngl": "n_gpu_layers", "gpu_layers": "n_gpu_layers", "c": "ctx_size", "np": "parallel", "b": "batch_size",
    "ub": "ubatch_size", "nkvo": "no_kv_offload", "cmoe": "cpu_moe", "ncmoe": "n_cpu_moe", "ot": "override_tensor",
    "ctk": "cache_type_k", "ctv": "cache_type_v", "fa": "flash_attn", "kvu": "kv_unified", "embedding": "embeddings",
    # Of those that change nothing on the card; "fit" is for what would not fit as it is asked.
    "lv": "verbosity", "cram": "cache_ram", "ctxcp": "ctx_checkpoints", "cb": "cont_batching", "fitt": "fit_target",
    "fitc": "fit_ctx", "nocb": "no_cont_batching", "s": "seed", "to": "timeout", "rea": "reasoning", "lm": "load_mode",
    "nr": "no_repack", "sps": "slot_prompt_similarity", "dt": "defrag_thold",
}  # fmt: skip

#: Names of the context's parameters as logs have them -> of the options.
_LOGGED = {
    "n_ctx": "ctx_size", "n_batch": "batch_size", "n_ubatch": "ubatch_size", "n_seq_max": "parallel",
    "flash_attn": "flash_attn", "kv_unified": "kv_unified", "n_outputs_max": "n_outputs_max",
}  # fmt: skip
_SWITCH = {"0": "off", "1": "on", "enabled": "on", "disabled": "off"}


def _logged(lines: Sequence[str]) -> dict[str, str]:
    """Parameters of the context, layers on the card, and the types of the cache."""
    found: dict[str, str] = {}
    repeating, is_output_there = None, False
    for line in lines:
        if " = " in line and ("context" in line or "llama_new_context" in line):
            made = settings_in(line.rpartition(": ")[2])
            found |= {_LOGGED[name]: text for name, text in made.items() if name in _LOGGED}
        elif match := re.search(r"offload(?:ed (\d+)/\d+ layers|ing (\d+) repeating layers)", line):
            repeating = match[2] or repeating
            found["n_gpu_layers"] = match[1] or ""
        elif "offloading output layer" in line or "offloading non-repeating layers" in line:
            is_output_there = True
        elif match := re.search(r"K \((\w+)\):.*V \((\w+)\):", line):
            found |= {"cache_type_k": match[1], "cache_type_v": match[2]}
        elif match := re.search(r"loaded meta data with .* from (\S+\.gguf)", line):
            found["model"] = match[1]
    if repeating is not None and not is_output_there:  # versions that began with the layers
        found |= {"n_gpu_layers": str(int(repeating) + 1), "override_tensor": "^output=CPU"}
    found["flash_attn"] = _SWITCH.get(found.get("flash_attn", "auto"), found.get("flash_attn", "auto"))
    if "ubatch_size" in found:  # versions that do not print it reserve logits for all tokens
        found.setdefault("n_outputs_max", found["ubatch_size"])
    return found


#: Names of sizes as logs print them -> those of a file's metadata, behind the architecture's name.
_PRINTED = {
    "n_layer": "block_count", "n_embd": "embedding_length", "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv", "n_embd_head_k": "attention.key_length", "n_ff": "feed_forward_length",
    "n_embd_head_v": "attention.value_length", "n_swa": "attention.sliding_window", "n_ctx_train": "context_length",
    "n_expert_used": "expert_used_count", "n_ff_exp": "expert_feed_forward_length",
    "n_embd_head_k_swa": "attention.key_length_swa", "n_embd_head_v_swa": "attention.value_length_swa",
    "ssm_d_conv": "ssm.conv_kernel", "ssm_d_inner": "ssm.inner_size", "ssm_d_state": "ssm.state_size",
    "ssm_n_group": "ssm.group_count",
}  # fmt: skip
_SIZE = re.compile(r"(?:print_info|llm_load_print_meta): (\w+) += (\S+|\[[\d, ]{1,20000}\])$")
_ENTRY = re.compile(r"- kv +\d+: +(\S+) +(?:[iu]\d+|str|arr\[\w+,(\d+)\]) += (\S+)")
_TENSOR = re.compile(r"- tensor +\d+: +(\S+) +(\w+) +\[([\d, ]+)\]")
#: Architectures whose queries, keys and values are one product in the file.
_FUSED = ("phi3", "gptneox")


def _model_in(lines: Sequence[str]) -> tuple[ServedModel, frozenset[str]] | None:
    """The model by what the loader prints of a file's metadata, and the figures that this cannot tell: without a list
    of its tensors, the weights."""
    values: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    layout: list[Tensor] = []
    for line in lines:
        if match := _ENTRY.search(line):
            number = whole_number(match[2] or match[3])
            values[match[1]] = match[3] if number is None else number
        elif match := _SIZE.search(line.rstrip()):
            values["general.architecture"] = match[2] if match[1] == "arch" else values.get("general.architecture")
            numbers = [whole_number(one.strip()) for one in match[2].strip("[]").split(",")]
            if None not in numbers:
                sizes[match[1]] = numbers if match[2].startswith("[") else numbers[0]
        elif (match := _TENSOR.search(line)) and match[2] in BY_NAME:
            shape = tuple(number for one in match[3].split(",") if (number := whole_number(one.strip())) is not None)
            layout.append(Tensor(match[1], shape, match[2], _row(match[2], math.prod(shape))))
    architecture = values.get("general.architecture")
    if architecture is None:
        return None
    values |= {f"{architecture}.{_PRINTED[name]}": size for name, size in sizes.items() if name in _PRINTED}
    words, wide = (
        sizes.get("n_vocab", values.get("tokenizer.ggml.tokens")),
        values.get(f"{architecture}.embedding_length"),
    )
    if not isinstance(words, int) or not isinstance(wide, int):
        return None
    is_whole = bool(layout)
    if not is_whole:
        fused = ["blk.0.attn_qkv.weight"] if architecture in _FUSED else []
        layout = [Tensor(name, (wide, words), "f16", 0) for name in ("token_embd.weight", *fused)]
    file = GGUF({one.name: one.bytes for one in layout}, metadata=values, layout=tuple(layout))
    name = "as the log prints the file's metadata" + ("" if is_whole else ", without its tensors")
    config = {**values, "model_type": f"gguf: {architecture}"}
    unknown = {"weights": not is_whole, "compute buffer": architecture in _OTHER_GRAPHS}
    return ServedModel(f"{architecture}, {name}", config, file), frozenset(one for one in unknown if unknown[one])


#: Places whose buffers are counted, by what the cache is on.
_CARDS = r"(?:CUDA|ROCm|Vulkan|SYCL|Metal|MTL)\d*"


def _adds_up(log: Log) -> dict[str, float]:
    """The cards' parts of the cache as the whole of it."""
    parts = [log.printed[name].value for name in ("keys", "values") if name in log.printed]
    return {"KV buffer": sum(parts)} if len(parts) == 2 else {}


#: Buffers of all cards; lines of old versions leave out "model".
_READER = Reader(
    engine="llamacpp",
    begins=("llama_model_loader: loaded meta data",),
    version=re.compile(r"build: (\d+) \("),
    settings=_logged,
    model_in=_model_in,
    adds_up=_adds_up,
    figures=(
        figure("weights", "buffer size", r"load_tensors: +(?:CUDA|ROCm)\d+ (?:model )?buffer size = +# MiB", MIB, sum),
        figure("KV buffer", "KV buffer size", _CARDS + " KV buffer size = +# MiB", MIB, sum),
        figure("keys", "V (", r"K \(\w+\): +# MiB", MIB, sum),
        figure("values", "V (", r"V \(\w+\): +# MiB", MIB, sum),
        figure("states", "RS buffer size", _CARDS + " RS buffer size = +# MiB", MIB, sum),
        figure("compute buffer", "compute buffer size", r"(?:CUDA|ROCm)\d+ compute buffer size = +# MiB", MIB, sum),
    ),
)


class LlamaCpp:
    """The engine."""

    name = "llamacpp"
    title = "llama.cpp"
    newest = "0.3"
    log = _READER

    def serve(self, question: Question) -> Served:
        """See :class:`graphmem.serving.base.Engine`."""
        file = question.model.checkpoint
        if not isinstance(file, GGUF):
            raise UsageError(f"{question.model.name}: llama.cpp reads GGUF files; give one")
        model = _sizes(question.model, file)
        settings = _settings(question, model)
        return _answer(question, file, model, settings)


def _sizes(served: ServedModel, file: GGUF) -> _Model:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FOLLOWED:
        raise UsageError(
            f"{served.name}: architecture {shown(architecture)} is not followed; accepted: "
            f"{', '.join(sorted(_FOLLOWED))}"
        )

    def value(name: str, otherwise: int | None = None, most: int = 1 << 24) -> int:
        found = file.metadata.get(f"{architecture}.{name}", otherwise)
        if type(found) is not int or not 0 <= found <= most:
            raise UsageError(
                f"{served.name}: {architecture}.{name} is {shown(found)}; accepted: a whole number up to {most}"
            )
        return found

    layers = max(1, value("block_count", most=_MOST_LAYERS))
    heads = max(1, value("attention.head_count"))
    kv_heads = _by_layer(served, file, f"{architecture}.attention.head_count_kv", heads, layers)
    hidden = value("embedding_length")
    latent = bool(value("attention.key_length_mla", 0)) and bool(value("attention.value_length_mla", 0))
    embedding = next((tensor for tensor in file.layout if tensor.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) < 2:
        raise UsageError(f"{served.name}: no tensor token_embd.weight")
    key, wide = value("attention.key_length", hidden // heads), value("attention.value_length", hidden // heads)
    of_group = value("ssm.state_size", 0)
    inner = value("ssm.inner_size", 0)
    convolved = (max(1, value("ssm.conv_kernel", 1)) - 1) * (inner + 2 * value("ssm.group_count", 0) * of_group)
    return _Model(
        architecture=architecture, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, wide=(key, wide),
        narrow=(value("attention.key_length_swa", key), value("attention.value_length_swa", wide)),
        interval=max(1, value("full_attention_interval", 4 if architecture in _STATES else 1)),
        caching=layers - min(layers, value("attention.shared_kv_layers", 0)), state=4 * (convolved + of_group * inner),
        feed_forward=value("expert_feed_forward_length", 0) or value("feed_forward_length", 0),
        experts_used=value("expert_used_count", 0), vocabulary=embedding.shape[1],
        trained=max(1, value("context_length", 4096, most=1 << 30)),
        window=value("attention.sliding_window", 4096 if architecture == "gemma2" else 0, most=1 << 30),
        latent=latent, fused=any(tensor.name == "blk.0.attn_qkv.weight" for tensor in file.layout),
    )  # fmt: skip


def _layers(name: str, text: str) -> int:
    """A number of layers, or all of them, which ``auto`` begins with."""
    return _MOST_LAYERS if text in ("all", "auto") else whole(0, _MOST_LAYERS)(name, text)


def _by_layer(served: ServedModel, file: GGUF, name: str, otherwise: int, layers: int) -> tuple[int, ...]:
    found = file.metadata.get(name, otherwise)
    values = list(found) if isinstance(found, list) else [found] * layers
    if len(values) < layers or not all(type(one) is int and 0 <= one <= 1 << 20 for one in values):
        raise UsageError(f"{served.name}: {name} is {shown(found)}; accepted: a whole number, or one for each layer")
    return tuple(values[:layers])


def _settings(question: Question, model: _Model) -> _Settings:
    found = options_of(question, LlamaCpp, OPTIONS, SHORT)
    slots = found.get("parallel", 4)
    unified = found.get("kv_unified", "parallel" not in found)  # the server's own choice is four that share
    context = _context(found["ctx_size"] or model.trained, slots, unified)
    flash, value_type = found["flash_attn"] in ("on", "auto", "true"), found["cache_type_v"]
    if not flash and value_type not in ("f32", "f16", "bf16"):
        raise UsageError("quantized V cache was requested, but this requires Flash Attention: give --flash-attn on")
    ubatch = min(found["ubatch_size"], found["batch_size"], context)
    return _Settings(
        min(found.get("n_gpu_layers", model.layers + 1), model.layers + 1), context, slots, unified, ubatch,
        min(found.get("n_outputs_max", slots), ubatch), found["cache_type_k"], value_type, flash, found["swa_full"],
        kv_offload=not found["no_kv_offload"], pooled=found["embeddings"],
        on_host=(*found["override_tensor"], *_experts_on_host(model, found)),
    )  # fmt: skip


def _context(cells: int, slots: int, unified: bool) -> int:
    """Cells of the cache, which come in steps, for every slot where they do not share them."""
    whole_context = _rounded(cells, _CELLS)
    return whole_context if unified else slots * _rounded(max(1, whole_context // slots), _CELLS)


#: Tensors of experts (``LLM_FFN_EXPS_REGEX``, common/common.h).
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def _experts_on_host(model: _Model, found: Mapping[str, Any]) -> tuple[str, ...]:
    """Expressions of the experts that ``--cpu-moe`` and ``--n-cpu-moe`` keep there (common/arg.cpp)."""
    layers = model.layers if found.get("cpu_moe") else found.get("n_cpu_moe", 0)
    return tuple(rf"blk\.{layer}{_EXPERTS}" for layer in range(min(layers, model.layers)))


def _overrides(name: str, text: str) -> tuple[str, ...]:
    """``--override-tensor``: expressions whose tensors go to the host; those that stay on the card say nothing."""
    found = []
    for part in text.split(","):
        expression, _, place = part.rpartition("=")
        try:
            re.compile(expression)
        except re.error:
            expression = ""
        if not expression or len(expression) > _LONGEST_EXPRESSION or not re.fullmatch(r"CPU|CUDA0", place):
            raise UsageError(
                f"--{name} {shown(text)}; accepted: EXPRESSION=CPU or EXPRESSION=CUDA0, with commas between"
            )
        if place == "CPU":
            found.append(expression)
    return tuple(found)


def _rounded(value: int, step: int) -> int:
    return -(-value // step) * step


def weights_on_card(file: GGUF, layers: int, gpu_layers: int, on_host: Sequence[str] = ()) -> int:
    """Bytes of the card's model buffer: the last ``gpu_layers`` of the layers and the output, which counts as one of
    them; the input's embeddings stay on the host, and are there a second time where the output uses them. Tensors that
    an expression of ``on_host`` finds are not there."""
    first = max(layers + 1 - gpu_layers, 0)
    head = any(tensor.name == "output.weight" for tensor in file.layout)
    expressions = [re.compile(one) for one in on_host]

    def is_there(name: str) -> bool:
        if any(one.search(name) for one in expressions):
            return False
        block = _block(name)
        if block is not None:
            return block >= first
        again = name == "token_embd.weight" and not head
        return gpu_layers > 0 and (again or name.startswith(("output", "rope")))

    return sum(_allocated(tensor) for tensor in file.layout if is_there(tensor.name))


def _block(name: str) -> int | None:
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "blk" and len(parts) == 3 and parts[1].isdigit() and len(parts[1]) < 6 else None


def _allocated(tensor: Tensor) -> int:
    """``ggml_backend_cuda_buffer_type_get_alloc_size`` and the alignment."""
    elements, size = BY_NAME[tensor.kind]
    extra = (_ROW - tensor.shape[0] % _ROW) % _ROW if elements > 1 else 0
    return _rounded(tensor.bytes + extra // elements * size, _ALIGNMENT)


def _row(kind: str, elements: int) -> int:
    block, size = BY_NAME[kind]
    return -(-elements // block) * size


def _cells(model: _Model, settings: _Settings, layer: int) -> int:
    """Cells of a layer's cache (``llama_kv_cache_iswa``)."""
    if model.sees_all(layer) or settings.swa_full:
        return settings.ctx_size
    streams = 1 if settings.kv_unified else settings.parallel
    each = settings.ctx_size // streams
    reach = model.window * (settings.parallel if settings.kv_unified else 1) + settings.ubatch_size
    return streams * _rounded(min(each, reach), _CELLS)


def kv_bytes(model: _Model, settings: _Settings) -> int:
    """Bytes of the card's KV buffer: the layers that are there."""
    total = 0
    for layer in _layers_there(model, settings) if settings.kv_offload else ():
        if model.keeps_tokens(layer):
            key, value = model.of_token(layer)
            rows = _row(settings.cache_type_k, key) + (_row(settings.cache_type_v, value) if value else 0)
            total += _cells(model, settings, layer) * rows
    return total


def state_bytes(model: _Model, settings: _Settings) -> int:
    """Bytes of the card's buffer of states, in fp32: one of every slot in each layer that keeps no tokens."""
    layers = _layers_there(model, settings) if settings.kv_offload else ()
    return model.state * settings.parallel * sum(not model.keeps_tokens(layer) for layer in layers)


def _layers_there(model: _Model, settings: _Settings) -> range:
    return range(max(model.layers + 1 - settings.n_gpu_layers, 0), model.layers)


def compute_bytes(model: _Model, settings: _Settings) -> int:
    """The card's compute buffer: the largest stage of the graph over one micro-batch, in fp32. Without flash attention
    the scores of all cells; the mask; the feed-forward layer; the logits of the rows that are asked for."""
    if not settings.n_gpu_layers:
        return 0
    tokens = settings.ubatch_size
    hidden = 4 * tokens * model.hidden
    cells = settings.each
    mask = cells * tokens * (2 if settings.flash_attn else 4)
    alive = _ALIVE_FUSED if model.fused else _ALIVE
    scores = 0 if settings.flash_attn else 4 * cells * tokens * model.heads
    rows = max(1, model.experts_used)
    wide = _WIDE * 4 * tokens * model.feed_forward * rows + (hidden * model.experts_used)
    stages = [mask + scores + alive * hidden, mask + wide + _BESIDE_WIDE * hidden]
    if settings.n_gpu_layers > 0:
        kept = 1 + (_POOLED if settings.pooled else 0)
        stages.append(4 * settings.n_outputs_max * model.vocabulary + kept * hidden)
    return max(stages)


def _answer(question: Question, file: GGUF, model: _Model, settings: _Settings) -> Served:
    device = question.device
    weights = weights_on_card(file, model.layers, settings.n_gpu_layers, settings.on_host)
    compute = compute_bytes(model, settings)
    cache, states = kv_bytes(model, settings), state_bytes(model, settings)
    outside = device.outside(Loads())
    made = f"a formula: {settings.ubatch_size} tokens, {settings.n_outputs_max} rows of logits"
    parts = (
        Part("CUDA context", sum(one.bytes for one in outside), "; ".join(one.name for one in outside)),
        Part("weights", weights, f"{settings.n_gpu_layers} of {model.layers + 1} layers"),
        Part("compute buffer", compute, made),
        *([Part("states", states, f"of {settings.parallel} sequences, in fp32")] if states else []),
    )
    available = device.capacity_bytes - sum(part.bytes for part in parts)
    blocks = settings.ctx_size // _CELLS
    longest = _longest(model, settings, available)
    return Served(
        engine=LlamaCpp.title, version=LlamaCpp.newest, model=question.model.name, gpu=device.name, cards=1,
        settings=settings.shown(model), total_bytes=device.capacity_bytes, requested_bytes=device.capacity_bytes,
        weights_bytes=weights, parts=parts,
        kv_cache=KVCache(
            available_bytes=available, block_bytes=cache // blocks, block_size=_CELLS, blocks=blocks,
            tokens=settings.ctx_size, concurrency=settings.ctx_size / settings.each, longest=longest,
            groups=_groups(model),
        ),
        request_blocks=lambda length: max(1, -(-length // _CELLS)) if settings.kv_unified else settings.each // _CELLS,
        refusal=_refusal(question, file, model, settings, available, cache, longest),
        notes=_notes(model, settings, cache), basis="logs",
    )  # fmt: skip


def _groups(model: _Model) -> tuple[tuple[str, int], ...]:
    keeping = [layer for layer in range(model.layers) if model.keeps_tokens(layer)]
    whole_layers = sum(map(model.sees_all, keeping))
    words = "latent attention" if model.latent else "full attention"
    found = [(words, whole_layers), (f"sliding window of {model.window}", len(keeping) - whole_layers)]
    return tuple(one for one in found if one[1])


def _longest(model: _Model, settings: _Settings, available: int) -> int:
    """The largest context that fits beside everything else, in steps of 256; 0 for none."""
    spare = available + compute_bytes(model, settings)

    def fits(steps: int) -> bool:
        context = _context(_CELLS * steps, settings.parallel, settings.kv_unified)
        tried = replace(settings, ctx_size=context)
        return kv_bytes(model, tried) + compute_bytes(model, tried) <= spare

    return _CELLS * largest(fits, max(model.trained, settings.ctx_size) // _CELLS)


def _refusal(
    question: Question, file: GGUF, model: _Model, settings: _Settings, available: int, cache: int, longest: int
) -> str | None:
    if cache <= available:
        return None
    needed = question.device.capacity_bytes - available + cache
    would = f"--ctx-size {longest} would fit" if longest else _fewer_layers(question, file, model, settings)
    return (
        f"cudaMalloc failed: out of memory: {needed / GIB:.2f} GiB of {question.device.capacity_bytes / GIB:.2f} GiB "
        f"on {question.device.name}; {would}"
    )


def _fewer_layers(question: Question, file: GGUF, model: _Model, settings: _Settings) -> str:
    context = sum(figure.bytes for figure in question.device.outside(Loads()))
    for layers in range(settings.n_gpu_layers - 1, -1, -1):
        tried = replace(settings, n_gpu_layers=layers)
        weights = weights_on_card(file, model.layers, layers, settings.on_host)
        taken = weights + compute_bytes(model, tried) + kv_bytes(model, tried)
        if taken + context <= question.device.capacity_bytes:
            return f"--n-gpu-layers {layers} would fit"
    return "nothing of it fits"


def _notes(model: _Model, settings: _Settings, cache: int) -> tuple[str, ...]:
    notes = [
        f"weights and the KV cache ({cache / GIB:.2f} GiB on the card) are sums of what the header says, equal to "
        "public logs; the compute buffer is a formula over the stages of Llama's graph, equal to nine public logs",
        "the version is that of llama-cpp-python, 0.3.36",
        "not counted: ggml's pools of temporary buffers, which no log prints",
    ]
    if model.experts_used or model.architecture in _OTHER_GRAPHS:
        notes.append(f"nothing holds the compute buffer of {model.architecture}, or of experts")
    if settings.on_host:
        notes.append(
            "tensors that stay on the host: their products are computed there, or with copies that no log prints"
        )
    if not settings.kv_offload:
        whole = kv_bytes(model, replace(settings, kv_offload=True))
        notes.append(f"the KV cache ({whole / GIB:.2f} GiB) is on the host; attention is computed there")
    if settings.n_outputs_max < settings.ubatch_size and settings.n_gpu_layers:
        more = compute_bytes(model, replace(settings, n_outputs_max=settings.ubatch_size)) - compute_bytes(
            model, settings
        )
        notes.append(
            "servers before June 2026 reserve logits for every token of a micro-batch: for those --n-outputs-max "
            f"{settings.ubatch_size}, {more / MIB:,.0f} MiB more"
        )
    if settings.n_gpu_layers <= model.layers:
        notes.append("with layers on the host the card also takes copies of what passes between them, not counted")
    return tuple(notes)


ENGINE: Any = LlamaCpp()
