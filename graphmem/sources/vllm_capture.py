"""transformers' model while vLLM's backend makes it, replaces its layers and runs it: the capture behind
:mod:`graphmem.sources.vllm_backend`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from graphmem.capture.patches import Patches
from graphmem.errors import UsageError
from graphmem.sources.vllm_experts import blocks, shape_of, stand_in
from graphmem.sources.vllm_fusing import Fusable, Gate, Inline, Together, fusable
from graphmem.sources.vllm_layers import ROTARY, Backend, Happening, Layer
from graphmem.sources.vllm_modules import (
    Absent,
    Block,
    Calls,
    Carried,
    Gated,
    LookedUp,
    Normed,
    Part,
    Product,
    Sent,
    Shared,
    Sums,
    look_up,
)
from graphmem.sources.vllm_states import states
from graphmem.trace import Category, EventKind, Place, Trace

if TYPE_CHECKING:
    from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

#: Tokens of the two runs that tell how much of each allocation is for one.
_FEW, _TWICE = 1024, 2048
#: Bytes of an element in fp32.
_WIDE = 4
#: Tokens of the run that is watched for what can be fused.
_WATCHED = 8
#: The operator that modules in place of the engine's use, and nothing else in their names' place.
_EMPTY = "aten.empty.memory_format"
#: ``model_type`` whose feed-forward layers give the product of gate and up no name of its own, so that the activation
#: lets it go; the engine's others keep it until they return (vllm 0.32.0, model_executor/models). StableLM's do too;
#: there the code of transformers keeps as much elsewhere, an output of attention that nobody reads any more.
_LETTING_GO = frozenset((
    "afmoe", "falcon_h1", "granitemoehybrid", "granitemoeshared", "hyperclovax", "internlm3", "iquestcoder",
    "llama", "llama4_text", "ministral3", "mistral", "stablelm",
))  # fmt: skip
#: ``model_type`` whose layers return a residual beside the sum of it, which the next layer does not read.
_RETURNING = frozenset(("cohere", "cohere2", "cohere2_moe", "exaone4", "granitemoehybrid", "hyperclovax", "phimoe"))
#: ``model_type`` whose layers keep what attention is given until they return, among its arguments (``attn_kwargs``).
_HOLDING = frozenset(("axk1", "glm4_moe_lite"))
#: ``model_type`` whose values are kept as narrow as they are (``set_head_size_v``), not padded to the keys' width.
_NARROW_VALUES = frozenset(("mimo_v2_flash",))
#: ``model_type`` whose queries and keys are normed together, in fp32 unless ranks share them out.
_NORMED_TOGETHER = frozenset(("minimax_m2",))
#: ``model_type`` whose own code attends before its states, and sums residuals by torch operators.
_BESIDE = "falcon_h1"
#: ``model_type`` whose layers return hidden states and residual apart, though their norms sum them out of place.
_CARRYING = frozenset(("nemotron",))
#: Classes of norms whose input the engine's own code makes fp32 first.
_IN_FP32 = frozenset(("Llama4TextL2Norm",))
#: How the engine's own code shares out products whose results transformers' plans gather, or whose inputs they split.
_PLAIN_SHARES = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
#: What modules of attention call the heads they have, and the widths of these.
_WIDTHS = (
    "hidden_size", "embed_dim", "split_size", "all_head_size", "num_heads", "num_attention_heads",
    "num_key_value_heads", "num_kv_heads",
)  # fmt: skip
#: The name of attention among the layers.
_ATTENTION = "attention"


class Making:
    """The model while it is made, replaced and run."""

    def __init__(
        self, config: PreTrainedConfig, name: str, dtype: str, tp: int, *, own_code: bool, latent: bool = False
    ) -> None:
        self.config, self.name, self.dtype, self.tp, self.own_code = config, name, dtype, tp, own_code
        #: Whether attention with latent keys is a layer of the engine's, and the modules that are replaced by one.
        self.latent, self.latents = latent, list[str]()
        self.layers: list[Layer] = []
        #: Names of layers in the order of their calls, "" for operators of modules that stand for others.
        self.called = Calls()
        #: Layers of attention by number: (module, heads, heads of keys, width of a head).
        self.attended: dict[int, tuple[str, int, int, int]] = {}
        #: The same of every call, as layers that run several times have a cache for each (HRM).
        self._passes: list[tuple[str, int, int, int]] = []
        #: Keys that were seen, while the model is watched; and layers whose keys were seen before, which cache none.
        self._keys: list[Tensor] | None = []
        self._value_dim = 0
        self._packed_keys: set[nn.Module] = set()
        self._sharing: set[int] = set()
        self._turning: set[str] = set()
        self.architecture = ""
        #: Whether it attends in both directions, so that nothing is kept of what it has read.
        self.encodes = False

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, _: object) -> None:
        """Everything, on the pretended card: with the engine's attention, which has no mask, once it is in place.
        Calls of ``empty_cache`` mark its parts: one when the model is made, one
        before and one after each run."""
        from transformers import AutoModel

        patches = Patches()
        dtype = getattr(torch, self.dtype)
        self.config.dtype = dtype
        try:
            with torch.no_grad(), self._registered():
                with torch.device("cuda"), _parameters_on_meta(patches):
                    model = self._made(AutoModel, dtype)
                self.architecture = type(model).__name__
                torch.cuda.empty_cache()
                self._check(model)
                if self.encodes:  # the engine pools by code of its own, behind the model
                    model.pooler = None
                self._experts = blocks(model)
                self._states = states(model) if self.own_code else {}
                for block in self._experts.values():
                    stand_in(block.experts)
                for layer in model.layers if self.own_code and self.config.model_type == _BESIDE else ():
                    layer.forward = functools.partial(_attending_first, layer)
                for path in self._states:
                    stand_in(model.get_submodule(path.removeprefix("model.")))
                _materialised(model, dtype)
                seen = fusable(
                    model, lambda: _run(model, _WATCHED), own_code=self.own_code, attended=self.attended,
                    heads=self.config.num_attention_heads,
                )  # fmt: skip
                self._keys, self._sums_in_place = None, seen.sums_in_place and self.config.model_type != _BESIDE
                self._replace_all(model, seen)
                self._packed_keys = _keep_packed(model) if not self.own_code else set()
                self.called.clear()
                self.config._attn_implementation = self._attention
                if self.own_code:
                    _turned_in_place(patches, model)
                for tokens in (_FEW, _TWICE):
                    self._passes.clear()
                    with self._handing_on(model):
                        output = _run(model, tokens)
                    torch.cuda.empty_cache()
                    del output
        finally:
            patches.undo()

    @contextlib.contextmanager
    def _handing_on(self, model: nn.Module) -> Iterator[None]:
        """Layers hand on hidden states as the engine's own do: residuals are summed where they are, and those that are
        returned though nobody reads them live as long as the next layer runs."""
        layers = next((one for one in model.modules() if isinstance(one, nn.ModuleList)), ())
        held: list[object] = []

        def hold(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], __: object) -> None:
            held[:] = args[:1] or [kwargs["hidden_states"]]

        hooks = []
        if self.own_code and self.config.model_type in _RETURNING:
            hooks = [layer.register_forward_hook(hold, with_kwargs=True) for layer in layers]
        if self._sums_in_place:
            with Sums(self.called) as sums:
                self.called.sums = sums
                hooks += [layer.register_forward_hook(sums.leave_layer) for layer in layers]
                yield
            self.called.sums = None
        elif self.own_code and self.config.model_type in _CARRYING:
            with Carried() as carried:
                hooks += [layer.register_forward_hook(carried.leave_layer) for layer in layers]
                yield
        else:
            yield
        held.clear()
        for hook in hooks:
            hook.remove()

    def _made(self, kind: type[AutoModel], dtype: torch.dtype) -> PreTrainedModel:
        """The model. Raises :class:`UsageError` for one that vLLM's backend does not handle because it has a class of
        its own for each way to attend."""
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights():
                made: PreTrainedModel = kind.from_config(self.config, dtype=dtype)
        except KeyError as error:
            if error.args != (self.config._attn_implementation,):
                raise
            if not self.own_code:
                raise UsageError(
                    f"{self.name}: {self.config.model_type} does not go through transformers' attention interface, "
                    "which is all that vLLM's backend handles"
                ) from None
            self.config._attn_implementation = "eager"
            with no_init_weights():
                made = kind.from_config(self.config, dtype=dtype)
        if self.own_code:
            _linear_instead(made)
        return made.eval()

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        """Attention under a name of its own, which has no mask."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = f"graphmem_engine_{id(self)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        self.config._attn_implementation = self._attention = name
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        """``vllm_attention_forward``: heads side by side, and an output of the queries' width."""
        layer = getattr(module, "layer_idx", len(self.attended))
        width = query.shape[-1]
        self.attended[layer] = (getattr(module, "_graphmem_name", ""), query.shape[1], key.shape[1], width)
        self._passes.append(self.attended[layer])
        if self._keys is not None:
            if any(one is key for one in self._keys):
                self._sharing.add(layer)
            self._keys.append(key)
        if module in self._packed_keys:
            self.called.append(_ATTENTION)
            width = query.shape[1] * module.v_head_dim
            return torch.empty((query.shape[-2], width), dtype=query.dtype, device=query.device), None
        tokens, wide, narrow = query.shape[-2], value.shape[-1], value.shape[-1] < width
        if narrow and self.own_code and self.config.model_type in _NARROW_VALUES:
            self._value_dim = wide
            self.called.append(_ATTENTION)
            shape = (1, tokens, query.shape[1], wide)
            return torch.empty(shape, dtype=query.dtype, device=query.device), None
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        query, key, value = (one.reshape(tokens, -1) for one in (query, key, value))
        if narrow:  # values are padded to the width of queries, and the output cut again
            value = torch.nn.functional.pad(value.view(-1, value.shape[-1]), (0, width - value.shape[-1]))
        self.called.append(_ATTENTION)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if narrow:
            output, width = output.view(-1, width)[..., :wide].reshape(tokens, -1), wide
        # Some models want heads apart, which the backend does not give them.
        return (output.view(1, tokens, -1, width) if self.own_code else output), None

    def _check(self, model: nn.Module) -> None:
        """Raises :class:`UsageError` for what the capture does not follow."""
        from transformers import AutoModelForCausalLM

        self.encodes = any(getattr(module, "is_causal", True) is False for module in model.modules())
        reads = self.encodes or type(self.config) in AutoModelForCausalLM._model_mapping
        if not reads or getattr(self.config, "is_encoder_decoder", False):
            raise UsageError(
                f"{self.name}: {self.architecture} is neither a decoder of text nor an encoder of it, which is what "
                "is served here"
            )
        if self.encodes and not self.own_code:
            raise UsageError(
                f"{self.name}: {self.architecture} reads in both directions, which is followed where the engine has "
                "code of its own for it"
            )
        if self.own_code and getattr(model, "_tied_weights_keys", None):
            raise UsageError(f"{self.name}: layers of {self.architecture} share their weights, which is not followed")

    # --- replacing ----------------------------------------------------------------------------------------------------

    def _replace_all(self, model: nn.Module, seen: Fusable) -> None:
        """``recursive_replace``, then the parameters that are left (``init_parameters``)."""
        shared = _PLAIN_SHARES if self.own_code else {}  # no layer of its own puts a part's result together
        self._plan = {f"model.{one}": shared.get(style, style) for one, style in (model.tp_plan or {}).items()}
        if self.own_code and self.tp > 1:
            hidden = int(self.config.hidden_size)
            self._plan |= {} if self._plan else _attention_plan(model, self.tp)
            self._plan |= _feed_forward_plan(model, hidden, self._plan)
        self._vocabularies = {
            one for key, one in vars(self.config).items() if "vocab_size" in key and isinstance(one, int)
        }
        self._table, self._own = model.get_input_embeddings(), set[str]()
        self._wide, self._weightless = seen.wide, seen.weightless
        for name, module in model.named_modules():
            module._graphmem_name = f"model.{name}"
        self._turning = {name for name, module in model.named_modules() if hasattr(module, "inv_freq")}
        if not self.own_code:  # before all others (``MoEMixin.recursive_replace``)
            for path, block in list(self._experts.items()):
                self._of_experts(path, routed=block.is_routed and path not in seen.several)
        self._replace(model, "model", seen)
        for name, parameter in model.named_parameters():
            if f"model.{name}" not in self._own:
                self._kept(f"model.{name}", parameter, "left")
        if self.encodes:
            self._heads(model)

    def _heads(self, model: PreTrainedModel) -> None:
        """What the class of the configuration has behind the encoder, which is in fp32 (``head_dtype``,
        config/model.py), as is what it pools by."""
        import transformers

        named = (getattr(self.config, "architectures", None) or [""])[0]
        kind = getattr(transformers, named, None)
        if kind is None or isinstance(model, kind):
            return
        with torch.device("meta"):
            whole = kind(self.config)
        inner = f"{whole.base_model_prefix}."
        for name, parameter in whole.named_parameters():
            if not name.startswith(inner) or name.startswith(f"{inner}pooler."):
                self.layers.append(Layer("left", name, bytes=parameter.numel() * _WIDE))

    def _replace(self, module: nn.Module, prefix: str, seen: Fusable) -> None:
        """``recursive_replace``: replace the layers below ``module`` in place by the engine's own, each noted in
        :attr:`layers`: linear ones as the plan shares them out, embeddings, norms, fused activations."""
        for name, child in list(module.named_children()):
            path = f"{prefix}.{name}"
            if path in self._experts:
                if self.own_code:
                    self._of_experts(path)
                made = Block(self.called, path, seen.several.get(path, 0))
                setattr(module, name, self._then_normed(made, child, path, seen))
            elif path in self._states:
                width = int(self.config.hidden_size)
                self.layers.append(Layer("states", path, width, states=self._states[path]))
                self._own |= {f"{path}.{one}" for one, _ in child.named_parameters()}
                block = Block(self.called, path, keeps=True)
                if self.config.model_type != _BESIDE:
                    _hold(block, module)  # as ``output``, a name of its own
                setattr(module, name, block)
            elif self.latent and hasattr(child, "kv_a_proj_with_mqa"):
                made = self._latent(child, path)
                if self.config.model_type in _HOLDING:
                    _hold_input(made, module)
                setattr(module, name, made)
            elif isinstance(child, nn.Linear):
                style = next((one for pattern, one in self._plan.items() if re.match(pattern, path)), "replicate")
                setattr(module, name, self._linear(child, path, style))
            elif self._has_engine_layer(child):
                self._keep_or_look_up(child, path)
            elif (kind := seen.norms.get(path)) is not None:
                self._norm(module, name, path, kind)
            elif path in seen.activations and not isinstance(child, Gated):
                setattr(module, name, Normed(self.called, ""))
            else:
                self._fused(child, path, seen)
                self._replace(child, path, seen)
        if self.encodes and (positions := getattr(module, "position_ids", None)) is not None:
            self._kept(f"{prefix}.position_ids", positions)

    def _of_experts(self, path: str, *, routed: bool = True) -> None:
        """A layer of experts, router and all, or the experts alone."""
        block = self._experts[path]
        lets_go = self.own_code and self.config.model_type in _LETTING_GO
        shape = shape_of(block, self.config, self._wide, own_code=self.own_code, routed=routed, lets_go=lets_go)
        module = block.module
        if not routed:
            del self._experts[path]
            path, module = f"{path}.{block.inner}", block.experts
            setattr(block.module, block.inner, Sent(self.called, path))
        self.layers.append(Layer("experts", path, int(self.config.hidden_size), experts=shape))
        self._own |= {f"{path}.{name}" for name, _ in module.named_parameters()}

    def _then_normed(self, block: Block, module: nn.Module, path: str, seen: Fusable) -> nn.Module:
        """The experts, and the norm of what they return where the module around them has one."""
        name = next((name for name, _ in module.named_children() if f"{path}.{name}" in seen.norms), None)
        if name is None or not self.own_code:
            return block
        self._norm(module, name, f"{path}.{name}", seen.norms[f"{path}.{name}"])
        return nn.Sequential(block, module.get_submodule(name))

    def _latent(self, module: nn.Module, path: str) -> nn.Module:
        """Latent attention, which is one layer of the engine's own (``MultiHeadLatentAttentionWrapper``,
        layers/mla.py)."""
        heads, width = self.config.num_attention_heads // self.tp, module.kv_a_proj_with_mqa.out_features
        self.layers.append(Layer("latent", path, int(self.config.hidden_size)))
        self._own |= {f"{path}.{name}" for name, _ in module.named_parameters()}
        self.attended[len(self.latents)] = (path, heads, heads, width)
        self.latents.append(path)
        return Block(self.called, path, several=2)

    def _has_engine_layer(self, module: nn.Module) -> bool:
        """Whether it is an embedding of tokens, or a layer norm, which the engine has as layers of its own."""
        if isinstance(module, nn.Embedding):
            return self.encodes or module is self._table or module.num_embeddings in self._vocabularies
        return type(module) is nn.LayerNorm and module.elementwise_affine and module.bias is not None

    def _keep_or_look_up(self, module: nn.Module, path: str) -> None:
        if isinstance(module, nn.Embedding):
            self._embedding(module, path)
            self._own.add(f"{path}.weight")
            return
        for name, parameter in module.named_parameters():
            self._kept(f"{path}.{name}", parameter)
            self._own.add(f"{path}.{name}")

    def _kept(self, name: str, parameter: torch.Tensor, kind: Literal["parameter", "left"] = "parameter") -> None:
        self.layers.append(Layer(kind, name, bytes=parameter.numel() * parameter.element_size()))

    def _linear(self, linear: nn.Linear, path: str, style: str) -> nn.Module:
        """``replace_linear_class``."""
        inputs, outputs, several = linear.in_features, linear.out_features, self.tp > 1
        columns, rows = style in ("colwise", "colwise_gather_output"), style in ("rowwise", "rowwise_split_input")
        made = (outputs // self.tp if columns else outputs,)
        self.layers.append(
            Layer(
                "linear", path, inputs // self.tp if rows else inputs, made, linear.bias is not None,
                reduces=several and rows, gathers=several and style == "colwise_gather_output",
                splits=several and style == "rowwise_split_input",
            )
        )  # fmt: skip
        width = outputs if style != "colwise" else outputs // self.tp
        return Product(self.called, path, width, linear.weight)

    def _embedding(self, table: nn.Embedding, path: str) -> None:
        """``replace_embedding_class``."""
        if isinstance(table, LookedUp):  # tied ones are met more than once
            return
        self.layers.append(Layer("embedding", path, table.num_embeddings, (table.embedding_dim,)))
        look_up(table, self.called)

    def _norm(self, parent: nn.Module, name: str, path: str, kind: str) -> None:
        norm = getattr(parent, name)
        weight = getattr(norm, "weight", None)
        if weight is not None:
            self.layers.append(Layer("norm" if kind == "rms" else "zero-centered norm", path, weight.shape[0]))
        elif self.own_code and path in self._weightless:  # of ones, which are no parameter (layers/layernorm.py)
            self.layers.append(Layer("norm", path, self._weightless[path]))
        named = path if weight is not None else ""
        wide = self.own_code and type(norm).__name__ in _IN_FP32
        made = Normed(self.called, named, weight, own_code=self.own_code, in_fp32=wide)
        if self.own_code and self.config.model_type in _NORMED_TOGETHER and name == "q_norm" and self.tp == 1:
            made.beside = self.config.num_key_value_heads * self.config.head_dim
        setattr(parent, name, made)

    def _fused(self, module: nn.Module, path: str, seen: Fusable) -> None:
        """The projections of a module that read one input become one."""
        gated = seen.gates.get(path)
        if gated is not None:
            self._gate(module, path, gated)
            return
        packed = seen.packed.get(path)
        if packed is not None:
            first, last, gated = *packed, Gated(self.called)
            module.forward = lambda given, *_: module.get_submodule(last)(gated(module.get_submodule(first)(given)))
        inline = seen.inline.get(path)
        if inline is not None:
            self._inline(module, path, inline, seen.several.get(path, 0))
        together = seen.together.get(path)
        if together is not None:
            self._side_by_side(module, path, together)

    def _inline(self, module: nn.Module, path: str, inline: Inline, several: int) -> None:
        """Attention of the module's own: one product, attention as elsewhere, and the product of its result."""
        if len(inline.projections) > 1:
            self._side_by_side(module, path, Together(inline.projections, inline.head_dim, inline.out))
        layer, heads, wide = len(self.attended), inline.heads // self.tp, inline.heads * inline.head_dim // self.tp
        self.attended[layer] = (path, heads, max(1, inline.kv_heads // self.tp), inline.head_dim)

        def forward(hidden_states: Tensor, *_: object, **__: object) -> object:
            own = [module.get_submodule(name)(hidden_states) for name in inline.projections]
            self.called.append(_ATTENTION)
            shape = (*hidden_states.shape[:-1], wide)
            attended = torch.empty(shape, dtype=hidden_states.dtype, device=hidden_states.device)
            result = module.get_submodule(inline.out)(attended)
            del attended, own
            result = result + result if inline.is_added else result
            return (result, *[None] * (several - 1)) if several else result

        module.forward = forward

    def _gate(self, module: nn.Module, path: str, gated: Gate) -> None:
        """``GLUFuser``: gate and up in one product, the activation multiplies, what follows is shared by rows."""
        gate = module.get_submodule(gated.gate)
        each = gate.out_features // self.tp
        merged = f"{path}.gate_up_proj"
        self.layers.append(Layer("linear", merged, gate.in_features, (each, each), gate.bias is not None))
        product = Product(self.called, merged, 2 * each)
        if self.own_code and self.config.model_type not in _LETTING_GO:
            _hold(product, module)
        setattr(module, gated.gate, product)
        if gated.down is not None:
            down = module.get_submodule(gated.down)
            setattr(module, gated.down, self._linear(down, f"{path}.{gated.down}", "rowwise"))
        multiplied = Gated(self.called)
        if gated.act:
            setattr(module, gated.up, Absent())
            setattr(module, gated.act, multiplied)
        else:
            delattr(module, gated.up)
            module.forward = lambda given, *_: module.get_submodule(str(gated.down))(multiplied(product(given)))

    def _side_by_side(self, module: nn.Module, path: str, together: Together) -> None:
        """``QKVFuser`` and ``MergedColumnParallelFuser``: one product, cut."""
        linears = [module.get_submodule(name) for name in together.names]
        least = together.head_dim or 1
        sizes = tuple(max(least, one.out_features // self.tp) for one in linears)
        merged = f"{path}.{'qkv_proj' if together.head_dim else 'merged_proj'}"
        self.layers.append(Layer("linear", merged, linears[0].in_features, sizes, linears[0].bias is not None))
        shared = Shared(self.called, merged, sizes)
        for at, name in enumerate(together.names):
            setattr(module, name, Part(shared, at))
        module.register_forward_hook(lambda *_: shared.let_go())
        if together.out is not None:
            out = module.get_submodule(together.out)
            setattr(module, together.out, self._linear(out, f"{path}.{together.out}", "rowwise"))

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, trace: Trace, version: str) -> Backend:
        """The backend as it was recorded."""
        marks = [at for at, kind in enumerate(trace.kinds) if kind == EventKind.EMPTY_CACHE]
        if len(marks) != 6:
            raise UsageError(f"{self.name}: the run of {self.architecture} was not recorded to its end")
        making = self._happenings(trace, 0, marks[0], iter(()))
        names = iter(self.called)
        few, output = self._ran(trace, marks[2], marks[3], names)
        twice, _ = self._ran(trace, marks[4], marks[5], names)
        if len(self._passes) == self.config.num_hidden_layers > len(self.attended):
            self.attended = dict(enumerate(self._passes))
        layers = sorted(self.attended)
        if not self._states and layers != list(range(self.config.num_hidden_layers)):
            missing = next((one for one in range(self.config.num_hidden_layers) if one not in self.attended), 0)
            raise UsageError(
                f"{self.name}: layer {missing} of {self.architecture} does not go through transformers' attention "
                "interface, which is all that vLLM's backend handles, and what is captured here"
            )
        if self.tp > 1 and any(self.attended[one][1] == self.config.num_attention_heads for one in layers):
            raise UsageError(
                f"{self.name}: transformers' {self.architecture} says not how its attention is shared out over ranks, "
                "so that it is followed with --tensor-parallel-size 1 only"
            )
        heads, kv_heads, head_dim = max((self.attended[one][1:] for one in layers), key=lambda one: one[0] * one[2])
        cached = [(0, 0) if one in self._sharing else self.attended[one][2:] for one in layers]
        return Backend(
            self.architecture, version, tuple(making), tuple(self.layers), tuple(self._affine(few, twice)), output,
            tuple(self.attended[one][0] for one in layers), heads, kv_heads, head_dim,
            cached=tuple(cached) if len(set(cached)) > 1 else (), value_dim=self._value_dim,
            sums_in_place=self._sums_in_place, encodes=self.encodes,
        )  # fmt: skip

    def _ran(self, trace: Trace, start: int, stop: int, names: Iterator[str]) -> tuple[list[Happening], int]:
        """(the happenings of a run, the storage of its output): of the hidden states, the last that stayed."""
        found = self._happenings(trace, start + 1, stop, names)
        gone = {one.storage for one in found if one.kind == "free"}
        stayed = [one.storage for one in found if one.kind not in ("free", "cublas") and one.storage not in gone]
        if not stayed:
            raise UsageError(f"{self.name}: {self.architecture} returned no hidden states")
        return found, stayed[-1]

    def _happenings(self, trace: Trace, start: int, stop: int, names: Iterator[str]) -> list[Happening]:
        """Events between two marks; tensors that modules in place of layers made are theirs, in the order of calls."""
        found: list[Happening] = []
        numbers: dict[int, int] = {}
        for at in range(start, stop):
            kind, subject = trace.kinds[at], int(trace.subjects[at])
            if kind not in (EventKind.ALLOC, EventKind.FREE) or trace.storages[subject].place is not Place.DEVICE:
                continue
            storage, operator = trace.storages[subject], trace.operators[trace.event_operators[at]]
            if kind == EventKind.FREE:
                if subject in numbers:
                    found.append(Happening("free", numbers[subject]))
                continue
            if storage.category is Category.WORKSPACE:
                found.append(Happening("cublas", -1))
                continue
            numbers[subject] = len(numbers)
            name = next(names, "") if operator.name == _EMPTY else ""
            if name == _ATTENTION:
                found.append(Happening("attended", numbers[subject], operator.module, storage.bytes))
            elif name:
                found.append(Happening("returned", numbers[subject], name, storage.bytes))
            else:
                named = ROTARY if operator.module in self._turning else operator.module
                found.append(Happening("new", numbers[subject], named, storage.bytes))
        return found

    def _affine(self, few: list[Happening], twice: list[Happening]) -> Iterator[Happening]:
        """The happenings of any number of tokens."""
        twice = [one for one in twice if one.kind != "cublas"]
        alike = [one for one in few if one.kind != "cublas"]
        if [(one.kind, one.storage, one.name) for one in alike] != [(one.kind, one.storage, one.name) for one in twice]:
            raise UsageError(f"{self.name}: {self.architecture} runs otherwise with more tokens, which is not followed")
        others = iter(twice)
        for one in few:
            if one.kind == "cublas":
                yield one
                continue
            each, left = divmod(next(others).bytes - one.bytes, _TWICE - _FEW)
            if left:
                raise UsageError(f"{self.name}: what {one.name} takes does not grow with the tokens")
            yield Happening(one.kind, one.storage, one.name, one.bytes - each * _FEW, each)


# --- parts of the run -------------------------------------------------------------------------------------------------


def _run(model: nn.Module, tokens: int) -> Tensor:
    """``Base.forward``: a batch of one flattened text, its hidden states."""
    ids, positions = (torch.zeros((1, tokens), dtype=torch.int64, device="cuda") for _ in range(2))
    torch.cuda.empty_cache()
    return model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=False)[0]


def _attention_plan(model: nn.Module, tp: int) -> dict[str, str]:
    """How attention is shared out where the model's class does not say: by heads. What its modules know of their widths
    becomes one rank's."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        linears = [f"model.{name}.{one}$" for one, each in module.named_modules() if isinstance(each, nn.Linear)]
        if not name.endswith(("attn", "attention")) or len(linears) < 2:
            continue
        plan |= dict.fromkeys(linears[:-1], "colwise") | {linears[-1]: "rowwise"}
        for each in module.modules():
            for width in _WIDTHS:
                if isinstance(size := getattr(each, width, None), int) and size % tp == 0:
                    setattr(each, width, size // tp)
    return plan


def _feed_forward_plan(model: nn.Module, hidden: int, known: dict[str, str]) -> dict[str, str]:
    """How feed-forward layers are shared out that the plan does not name: what reads hidden states and makes more of
    them by columns, and what makes hidden states again by rows."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        linears = {f"model.{name}.{one}": each for one, each in module.named_children() if isinstance(each, nn.Linear)}
        own = {path: "colwise" for path, each in linears.items() if each.in_features == hidden != each.out_features}
        own |= {path: "rowwise" for path, each in linears.items() if each.out_features == hidden != each.in_features}
        if name.endswith(("attn", "attention")) or len(set(own.values())) < 2:
            continue
        plan |= {f"{path}$": style for path, style in own.items() if not any(re.match(one, path) for one in known)}
    return plan


def _attending_first(layer: nn.Module, hidden_states: Tensor, **given: object) -> tuple[Tensor]:
    """``FalconH1ParallelHybrid`` (models/falcon_h1.py): what both parts return is held to the end."""
    given.pop("mamba_attention_mask")
    residual = hidden_states
    hidden_states = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(hidden_states=hidden_states * layer.attention_in_multiplier, **given)
    scanned = layer.mamba(hidden_states * layer.ssm_out_multiplier)
    hidden_states = attended * layer.attn_out_multiplier + scanned * layer.ssm_out_multiplier
    hidden_states = hidden_states + residual
    residual = hidden_states
    hidden_states = layer.pre_ff_layernorm(hidden_states)
    hidden_states = layer.feed_forward(hidden_states)
    return (residual + hidden_states,)


def _hold(product: nn.Module, module: nn.Module) -> None:
    """What the product returns lives until the module around it returns."""
    held: list[Tensor] = []
    product.register_forward_hook(lambda _, __, output: held.append(output))
    module.register_forward_hook(lambda *_: held.clear())


def _keep_packed(model: nn.Module) -> set[nn.Module]:
    """The modules of latent attention, whose keys and values go packed into the engine's (``MLAFuser``,
    transformers/fusers/mla.py)."""
    found = {module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")}
    for module in found:
        module.expand_kv = lambda packed, turned: (packed, turned)
    return found


def _linear_instead(model: nn.Module) -> None:
    """Linear layers whose weights transformers has the other way round (``Conv1D``) as those that they are."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Conv1D":
                setattr(module, name, nn.Linear(child.nx, child.nf, device="meta"))


def _hold_input(block: nn.Module, module: nn.Module) -> None:
    """The input of the block lives until the module around it returns."""
    held: list[object] = []
    block.register_forward_pre_hook(lambda _, args, kwargs: held.extend((*args, *kwargs.values())), with_kwargs=True)
    module.register_forward_hook(lambda *_: held.clear())


def _materialised(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters on the card, where operators find them."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            data = torch.empty(parameter.shape, dtype=dtype, device="cuda")
            setattr(module, name, torch.nn.Parameter(data, requires_grad=False))


def _turned_in_place(patches: Patches, model: nn.Module) -> None:
    """Queries and keys are turned where they are, as the engine's kernel does it."""
    module = sys.modules[type(model).__module__]
    for name in ("apply_rotary_pos_emb", "apply_rotary_emb"):
        if not hasattr(module, name):
            continue
        alone = list(inspect.signature(getattr(module, name)).parameters)[1:2] == ["cos"]  # queries, or keys
        patches.set(module, name, _same if alone else _same_two)
    for name in ("build_alibi_tensor", "build_mpt_alibi_tensor"):  # slopes are computed in the kernel
        if hasattr(module, name):
            patches.set(module, name, lambda *_, **__: None)


def _same(one: Tensor, *_: object, **__: object) -> Tensor:
    return one


def _same_two(one: Tensor, other: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return one, other


@contextlib.contextmanager
def _parameters_on_meta(patches: Patches) -> Iterator[None]:
    """``init_on_device_without_buffers``: a parameter is made on the card, and at once
    moved from there: to the host here, where fake tensors take nothing."""
    register = torch.nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            kept = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
            module._parameters[name] = kept

    patches.set(torch.nn.Module, "register_parameter", registered)
    try:
        yield
    finally:
        patches.undo()
