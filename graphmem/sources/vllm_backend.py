"""transformers' model as vLLM's own backend for such models makes it and runs it, from a capture.

Followed from vllm 0.32.0, ``model_executor/models/transformers`` (``base.py``, ``causal.py``, ``fusers``): the model is
made on the meta device, its layers are replaced by the engine's own, and what is left of its code runs as it is. So
that code is run here on fake tensors, with modules in place of the engine's that only return what those return; what
the engine's own layers allocate beside it is theirs to say.

What is found out by reading the code there is found out by running it here: which projections read one input, what
the activation between them is, which modules are root-mean-square norms.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from graphmem.base.documents import shown
from graphmem.errors import SourceError, UsageError, first_line
from graphmem.trace import Category, EventKind, Place, Trace

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Tokens of the two runs that tell how much of each allocation is for one.
_FEW, _TWICE = 1024, 2048
#: Tokens of the run that is watched for what can be fused.
_WATCHED = 8
#: The operator that modules in place of the engine's use, and nothing else in their names' place.
_EMPTY = "aten.empty.memory_format"
#: What attention is called among the layers.
_ATTENTION = "attention"
#: Activations that have a kernel which also multiplies (``_ACTIVATION_AND_MUL_REGISTRY``, layers/activation.py), by
#: the names of transformers' and torch's classes.
_MULTIPLYING = ("SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh")


@dataclass(frozen=True)
class Layer:
    """A layer of the engine's in place of some of the model's, or a ``parameter`` of one that runs as it is.
    Those that are ``left`` are made last. Sizes are one rank's; ``reduces``: what it returns is summed over the ranks,
    ``gathers``: it is put side by side, ``splits``: what it is given is this rank's part of what the others have too.
    """

    kind: Literal["linear", "embedding", "norm", "zero-centered norm", "parameter", "left"]
    name: str
    inputs: int = 0
    outputs: tuple[int, ...] = ()
    bias: bool = False
    reduces: bool = False
    gathers: bool = False
    splits: bool = False
    bytes: int = 0


@dataclass(frozen=True)
class Happening:
    """One event: a storage is ``new``, of so many bytes and so many more for every token; is ``attended``, a new one
    that attention writes; is ``returned`` by the layer ``name``; or goes (``free``). ``cublas``: a product that is not
    the engine's own asks for cuBLAS's workspace."""

    kind: Literal["new", "returned", "attended", "free", "cublas"]
    storage: int
    name: str = ""
    bytes: int = 0
    token_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Backend:
    """What the backend does with a model. ``making``: while it is made, before any layer is; storages that stay are
    buffers. ``output`` is the storage of the last hidden states. ``heads``, ``kv_heads`` and ``head_dim``: of one rank,
    of every layer of ``attention``. ``own_code``: the engine runs code of its own, which this stands for."""

    architecture: str
    version: str
    making: tuple[Happening, ...]
    layers: tuple[Layer, ...]
    forward: tuple[Happening, ...]
    output: int
    attention: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    own_code: bool = False


#: What the engine reads of a configuration, by the names that transformers' classes have for it.
_READ = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "max_position_embeddings", "intermediate_size", "tie_word_embeddings", "sliding_window", "layer_types",
    "final_logit_softcapping", "use_sliding_window",
)  # fmt: skip


def values_of_class(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The configuration with its class's defaults, and by the names that most have. Raises :class:`SourceError`."""
    _, config = _configured(values, name)
    found = {key: getattr(config, key, None) for key in _READ}
    return {**values, **{key: value for key, value in found.items() if value is not None}}


def _configured(values: dict[str, Any], name: str) -> tuple[str, Any]:
    """(transformers' version, its configuration without how weights are quantised)."""
    try:
        import transformers
    except Exception as error:
        raise SourceError(
            f"{name}: model_type {shown(values.get('model_type'))} is captured with transformers' own code; install it "
            f"with: pip install 'graphmem[hf]' ({first_line(error)})"
        ) from None
    from graphmem.sources.huggingface import configured, offline

    plain = {key: one for key, one in values.items() if key != "quantization_config"}
    with offline():
        return transformers.__version__, configured(transformers, plain, name)


def followed(values: dict[str, Any], name: str, dtype: str, tp: int, *, own_code: bool = False) -> Backend:
    """The backend on one of ``tp`` ranks; ``own_code``: fused as the engine's own models are.

    Raises :class:`SourceError` for a configuration that transformers does not know, :class:`UsageError` for a model
    that the backend does not run or that is not followed.
    """
    from graphmem.base.versions import installed_version
    from graphmem.capture.session.run import Subject, capture_subject
    from graphmem.devices import device_named
    from graphmem.sources.base import Sizes
    from graphmem.sources.huggingface import offline
    from graphmem.training import Inference

    version, config = _configured(values, name)
    torch_version = installed_version()
    if torch_version is None:
        raise SourceError(f"{name}: a capture runs PyTorch; install it with: pip install 'graphmem[hf]'")
    making = _Making(config, name, dtype, tp, own_code=own_code)
    with offline():
        captured = capture_subject(
            Subject(making.run, Sizes(), Inference(), name, iterations=1),
            device=device_named("H100"),
            torch_version=torch_version,
        )
    return making.read(captured.trace, version)


class _Making:
    """The model while it is made, replaced and run."""

    def __init__(self, config: Any, name: str, dtype: str, tp: int, *, own_code: bool) -> None:
        self.config, self.name, self.dtype, self.tp, self.own_code = config, name, dtype, tp, own_code
        self.layers: list[Layer] = []
        #: Names of layers in the order of their calls, "" for operators of modules that stand for others.
        self.called: list[str] = []
        #: Layers of attention by number: (module, heads, heads of keys, width of a head).
        self.attended: dict[int, tuple[str, int, int, int]] = {}
        self.architecture = ""

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, _: Any) -> None:
        """Everything, on the pretended card. Calls of ``empty_cache`` mark its parts: one when the model is made, one
        before and one after each run."""
        import torch
        from transformers import AutoModel

        from graphmem.capture.patches import Patches

        patches = Patches()
        dtype = getattr(torch, self.dtype)
        self.config.dtype = dtype
        self.modules = _modules(self.called)
        try:
            with torch.no_grad(), self._registered():
                with torch.device("cuda"), _parameters_on_meta(patches):
                    model = AutoModel.from_config(self.config, dtype=dtype)
                self.architecture = type(model).__name__
                torch.cuda.empty_cache()
                self._check(model)
                _materialised(model, dtype)
                self._replaced(model, _watched(model, own_code=self.own_code))
                self.called.clear()
                if self.own_code:
                    _turned_in_place(patches, model)
                for tokens in (_FEW, _TWICE):
                    output = _run(model, tokens)
                    torch.cuda.empty_cache()
                    del output
        finally:
            patches.undo()

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        """Attention under a name of its own, which has no mask."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = f"graphmem_engine_{id(self)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        self.config._attn_implementation = name
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)

    def _attend(self, module: nn.Module, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> tuple[Any, None]:
        """``vllm_attention_forward``: heads side by side, and an output of the queries' width."""
        import torch

        layer = getattr(module, "layer_idx", len(self.attended))
        width = query.shape[-1]
        self.attended[layer] = (getattr(module, "_graphmem_name", ""), query.shape[1], key.shape[1], width)
        tokens, narrow = query.shape[-2], value.shape[-1] < width
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        query, key, value = (one.reshape(tokens, -1) for one in (query, key, value))
        if narrow:  # values are padded to the width of queries, and the output cut again
            value = torch.nn.functional.pad(value.view(-1, value.shape[-1]), (0, width - value.shape[-1]))
        self.called.append(_ATTENTION)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        # Some models want heads apart, which the backend does not give them.
        return (output.view(1, tokens, -1, width) if self.own_code else output), None

    def _check(self, model: nn.Module) -> None:
        """Raises :class:`UsageError` for what the capture does not follow."""
        from transformers import AutoModelForCausalLM

        generates = type(self.config) in AutoModelForCausalLM._model_mapping
        if not generates or getattr(self.config, "is_encoder_decoder", False):
            raise UsageError(f"{self.name}: {self.architecture} is no decoder of text, which is what is served here")
        experts = [name for name, one in model.named_parameters() if one.ndim == 3]
        if experts or any(name.rsplit(".", 1)[-1] == "experts" for name, _ in model.named_modules()):
            raise UsageError(
                f"{self.name}: {self.architecture} has experts; of architectures that are captured only dense decoders "
                "are followed"
            )
        if any(getattr(module, "is_causal", True) is False for module in model.modules()):
            raise UsageError(
                f"{self.name}: {self.architecture} attends in both directions; what has no KV cache is not served here"
            )

    # --- replacing ----------------------------------------------------------------------------------------------------

    def _replaced(self, model: nn.Module, seen: _Seen) -> None:
        """``recursive_replace``, then the parameters that are left (``init_parameters``)."""
        import torch

        plan = {f"model.{pattern}": style for pattern, style in (model.tp_plan or {}).items()}
        sizes = {one for key, one in vars(self.config).items() if "vocab_size" in key and isinstance(one, int)}
        table = model.get_input_embeddings()
        for name, module in model.named_modules():
            module._graphmem_name = f"model.{name}"
        own: set[str] = set()

        def replace(module: nn.Module, prefix: str) -> None:
            for name, child in list(module.named_children()):
                path = f"{prefix}.{name}"
                if isinstance(child, torch.nn.Linear):
                    style = next((one for pattern, one in plan.items() if re.match(pattern, path)), "replicate")
                    setattr(module, name, self._linear(child, path, style))
                elif isinstance(child, torch.nn.Embedding) and (child is table or child.num_embeddings in sizes):
                    self._embedding(child, path)
                    own.add(f"{path}.weight")
                elif type(child) is torch.nn.LayerNorm and child.elementwise_affine and child.bias is not None:
                    for one, parameter in child.named_parameters():
                        self._kept(f"{path}.{one}", parameter)
                        own.add(f"{path}.{one}")
                elif (kind := seen.norms.get(path)) is not None:
                    self._norm(module, name, path, kind)
                elif path in seen.activations and not isinstance(child, self.modules.Gated):
                    setattr(module, name, self.modules.Normed(""))
                else:
                    self._fused(child, path, seen)
                    replace(child, path)

        replace(model, "model")
        for name, parameter in model.named_parameters():
            if f"model.{name}" not in own:
                self._kept(f"model.{name}", parameter, "left")

    def _kept(self, name: str, parameter: torch.Tensor, kind: Literal["parameter", "left"] = "parameter") -> None:
        self.layers.append(Layer(kind, name, bytes=parameter.numel() * parameter.element_size()))

    def _linear(self, linear: nn.Linear, path: str, style: str) -> nn.Module:
        """``replace_linear_class``."""
        inputs, outputs, several = linear.in_features, linear.out_features, self.tp > 1
        columns, rows = style in ("colwise", "colwise_gather_output"), style in ("rowwise", "rowwise_split_input")
        self._made(
            path, inputs // self.tp if rows else inputs, (outputs // self.tp if columns else outputs,),
            bias=linear.bias is not None, reduces=rows, gathers=several and style == "colwise_gather_output",
            splits=several and style == "rowwise_split_input",
        )  # fmt: skip
        return self.modules.Product(path, outputs if style != "colwise" else outputs // self.tp)

    def _made(
        self, name: str, inputs: int, outputs: tuple[int, ...], *, bias: bool, reduces: bool = False,
        gathers: bool = False, splits: bool = False,
    ) -> None:  # fmt: skip
        self.layers.append(
            Layer("linear", name, inputs, outputs, bias, reduces and self.tp > 1, gathers=gathers, splits=splits)
        )

    def _embedding(self, table: nn.Embedding, path: str) -> None:
        """``replace_embedding_class``: one that inherits from the plain class keeps what it does beside looking up."""
        import torch

        if isinstance(table, self.modules.LookedUp):  # tied ones are met more than once
            return
        self.layers.append(Layer("embedding", path, table.num_embeddings, (table.embedding_dim,)))
        looked_up, kind = self.modules.LookedUp, type(table)
        table.__class__ = looked_up if kind is torch.nn.Embedding else type(kind.__name__, (kind, looked_up), {})

    def _norm(self, parent: nn.Module, name: str, path: str, kind: str) -> None:
        weight = getattr(getattr(parent, name), "weight", None)
        width = 0 if weight is None else weight.shape[0]
        if not width:
            return
        self.layers.append(Layer("norm" if kind == "rms" else "zero-centered norm", path, width))
        setattr(parent, name, self.modules.Normed(path))

    def _fused(self, module: nn.Module, path: str, seen: _Seen) -> None:
        """The projections of a module that read one input become one."""
        gated = seen.gated.get(path)
        if gated is not None:
            self._gate(module, path, gated)
            return
        packed = seen.packed.get(path)
        if packed is not None:
            first, last, gated = *packed, self.modules.Gated()
            module.forward = lambda given: module.get_submodule(last)(gated(module.get_submodule(first)(given)))
        together = seen.together.get(path)
        if together is not None:
            self._side_by_side(module, path, together)

    def _gate(self, module: nn.Module, path: str, gated: _Gated) -> None:
        """``GLUFuser``: gate and up in one product, the activation multiplies, what follows is shared by rows."""
        gate = module.get_submodule(gated.gate)
        each = gate.out_features // self.tp
        merged = f"{path}.gate_up_proj"
        self._made(merged, gate.in_features, (each, each), bias=gate.bias is not None)
        setattr(module, gated.gate, self.modules.Product(merged, 2 * each))
        setattr(module, gated.up, self.modules.Absent())
        setattr(module, gated.act, self.modules.Gated())
        if gated.down is not None:
            down = module.get_submodule(gated.down)
            setattr(module, gated.down, self._linear(down, f"{path}.{gated.down}", "rowwise"))

    def _side_by_side(self, module: nn.Module, path: str, together: _Together) -> None:
        """``QKVFuser`` and ``MergedColumnParallelFuser``: one product, cut."""
        linears = [module.get_submodule(name) for name in together.names]
        least = together.head_dim or 1
        sizes = tuple(max(least, one.out_features // self.tp) for one in linears)
        merged = f"{path}.{'qkv_proj' if together.head_dim else 'merged_proj'}"
        self._made(merged, linears[0].in_features, sizes, bias=linears[0].bias is not None)
        shared = self.modules.Shared(merged, sizes)
        for at, name in enumerate(together.names):
            setattr(module, name, self.modules.Part(shared, at))
        module.register_forward_hook(lambda *_: shared.let_go())
        if together.out is not None:
            out = module.get_submodule(together.out)
            setattr(module, together.out, self._linear(out, f"{path}.{together.out}", "rowwise"))

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, trace: Trace, version: str) -> Backend:
        """What was recorded."""
        marks = [at for at, kind in enumerate(trace.kinds) if kind == EventKind.EMPTY_CACHE]
        if len(marks) != 6:
            raise UsageError(f"{self.name}: the run of {self.architecture} was not recorded to its end")
        making = self._happenings(trace, 0, marks[0], iter(()))
        names = iter(self.called)
        few, output = self._ran(trace, marks[2], marks[3], names)
        twice, _ = self._ran(trace, marks[4], marks[5], names)
        layers = range(len(self.attended))
        if set(self.attended) != set(layers) or len(self.attended) != self.config.num_hidden_layers:
            missing = next((one for one in range(self.config.num_hidden_layers) if one not in self.attended), 0)
            raise UsageError(
                f"{self.name}: layer {missing} of {self.architecture} does not go through transformers' attention "
                "interface, which is all that vLLM's backend handles, and what is captured here"
            )
        kinds = {self.attended[one][1:] for one in layers}
        if len(kinds) > 1:
            raise UsageError(f"{self.name}: layers of attention whose heads differ are not followed")
        heads, kv_heads, head_dim = kinds.pop()
        return Backend(
            self.architecture, version, tuple(making), tuple(self.layers), tuple(self._affine(few, twice)), output,
            tuple(self.attended[one][0] for one in layers), heads, kv_heads, head_dim,
        )  # fmt: skip

    def _ran(self, trace: Trace, start: int, stop: int, names: Iterator[str]) -> tuple[list[Happening], int]:
        """(what happened in a run, the storage of its output): of the hidden states, the last that stayed."""
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
                found.append(Happening("new", numbers[subject], operator.module, storage.bytes))
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


# --- modules in place of the engine's ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Modules:
    Product: Any
    Part: Any
    Shared: Any
    Normed: Any
    Gated: Any
    Absent: Any
    LookedUp: Any


def _modules(called: list[str]) -> _Modules:
    """Classes of modules, made where torch is there. Each call that makes a tensor appends to ``called`` the name of
    the layer that returns it, "" for one that stays an operator."""
    import torch

    def made(name: str, given: Any, *shape: int, dtype: Any = None) -> Any:
        called.append(name)
        return torch.empty(shape, dtype=dtype or given.dtype, device=given.device)

    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    class Product(Named):
        """A product of so many columns."""

        def __init__(self, name: str, width: int) -> None:
            super().__init__(name)
            self.width = width

        def forward(self, given: Any) -> Any:
            return made(self.name, given, *given.shape[:-1], self.width)

    class Shared:
        """A product that several modules have parts of. It is alive until the module around them returns."""

        def __init__(self, name: str, sizes: tuple[int, ...]) -> None:
            self.name, self.sizes = name, sizes
            self.parts: Any = None

        def part(self, at: int, given: Any) -> Any:
            if self.parts is None:
                whole = made(self.name, given, *given.shape[:-1], sum(self.sizes))
                self.parts = whole.split(list(self.sizes), -1)
            return self.parts[at]

        def let_go(self) -> None:
            self.parts = None

    class Part(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, shared: Any, at: int) -> None:
            super().__init__()
            self.shared, self.at = shared, at

        def forward(self, given: Any) -> Any:
            return self.shared.part(self.at, given)

    class Normed(Named):
        def forward(self, given: Any) -> Any:
            return made(self.name, given, *given.shape)

    class Gated(torch.nn.Module):  # type: ignore[misc]
        """The activation of the first half, times the second."""

        def forward(self, given: Any) -> Any:
            return made("", given, *given.shape[:-1], given.shape[-1] // 2)

    class Absent(torch.nn.Module):  # type: ignore[misc]
        """A factor that was multiplied by already."""

        def forward(self, given: Any) -> Any:
            return _Multiplied()

    class LookedUp(torch.nn.Embedding):  # type: ignore[misc]
        def forward(self, given: Any) -> Any:
            return made(self._graphmem_name, given, *given.shape, self.embedding_dim, dtype=self.weight.dtype)

    return _Modules(Product, Part, Shared, Normed, Gated, Absent, LookedUp)


class _Multiplied:
    """What a tensor is multiplied by without effect; anything else that is done with it is an error."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") not in ("mul", "__mul__", "__rmul__"):
            raise UsageError("a gated layer whose gate does more than multiply is not followed")
        return next(one for one in args if not isinstance(one, cls))


# --- watching ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gated:
    gate: str
    up: str
    act: str
    down: str | None


@dataclass(frozen=True)
class _Together:
    """Projections that become one; ``head_dim``: of queries, keys and values, 0 for others."""

    names: tuple[str, ...]
    head_dim: int
    out: str | None


@dataclass
class _Seen:
    """What can be fused, by the names of the modules around it."""

    gated: dict[str, _Gated] = field(default_factory=dict)
    together: dict[str, _Together] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)
    packed: dict[str, tuple[str, str]] = field(default_factory=dict)
    activations: set[str] = field(default_factory=set)


def _watched(model: nn.Module, *, own_code: bool) -> _Seen:
    """The model is run once, and what its modules are given and return is looked at.

    The engine's ``own_code`` also has one kernel for the norms and the activations of its models, whatever they are,
    and for gates that are packed with what they are multiplied by.
    """
    import torch

    given: dict[int, tuple[Any, ...]] = {}
    returned: dict[int, Any] = {}

    def look(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        given[id(module)] = (*arguments, *keywords.values())
        returned[id(module)] = output[0] if isinstance(output, tuple) and output else output

    hooks = [one.register_forward_hook(look, with_kwargs=True) for one in model.modules()]
    try:
        _run(model, _WATCHED)
    finally:
        for hook in hooks:
            hook.remove()
    seen = _Seen()
    for name, module in model.named_modules():
        path = f"model.{name}"
        linears = {
            one: child for one, child in module.named_children()
            if isinstance(child, torch.nn.Linear) and id(child) in given
        }  # fmt: skip
        if len(linears) >= 2:
            _look_at(seen, path, module, linears, given, returned)
            if own_code and (packed := _packed(module, linears)):
                seen.packed[path] = packed
        elif next(module.children(), None) is None and (kind := _norm_kind(module, any_norm=own_code)):
            seen.norms[path] = kind
        elif own_code and type(module) in _activations():
            seen.activations.add(path)
    return seen


def _activations() -> set[type]:
    """Activations of transformers' own, which are one kernel each in the engine."""
    from transformers.activations import ACT2CLS

    return {one[0] if isinstance(one, tuple) else one for one in ACT2CLS.values()}


def _look_at(
    seen: _Seen, path: str, module: nn.Module, linears: dict[str, Any], given: dict[int, tuple[Any, ...]],
    returned: dict[int, Any],
) -> None:  # fmt: skip
    by_input: dict[int, list[str]] = {}
    for name, linear in linears.items():
        by_input.setdefault(id(given[id(linear)][0]), []).append(name)
    for names in by_input.values():
        gated = _gated_of(module, names, linears, given, returned)
        if gated is not None:
            seen.gated[path] = gated
            return
    entered = {id(one) for one in given.get(id(module), ())}
    groups = [names for source, names in by_input.items() if len(names) >= 2 and source in entered]
    if len(groups) != 1:
        return
    names = groups[0]
    head_dim = getattr(module, "head_dim", 0) or 0
    order = _queries_first(names, linears)
    if head_dim and order is not None and all(linears[one].out_features % head_dim == 0 for one in order):
        last = returned.get(id(module))
        out = next((one for one, linear in linears.items() if returned[id(linear)] is last), None)
        if out is not None and (out in names or linears[out].in_features != linears[order[0]].out_features):
            out = None
        seen.together[path] = _Together(order, head_dim, out)
    elif len({linears[one].bias is None for one in names}) == 1:
        seen.together[path] = _Together(tuple(names), 0, None)


def _gated_of(
    module: nn.Module, names: list[str], linears: dict[str, Any], given: dict[int, tuple[Any, ...]],
    returned: dict[int, Any],
) -> _Gated | None:  # fmt: skip
    """Two projections of one width, an activation of the first's output, and the one that reads their product."""
    if len(names) != 2 or len({linears[one].out_features for one in names}) != 1:
        return None
    for act, child in module.named_children():
        if type(child).__name__ not in _MULTIPLYING or len(given.get(id(child), ())) != 1:
            continue
        gate = next((one for one in names if returned[id(linears[one])] is given[id(child)][0]), None)
        if gate is not None:
            up = next(one for one in names if one != gate)
            width = linears[gate].out_features
            down = next((one for one, at in linears.items() if one not in names and at.in_features == width), None)
            return _Gated(gate, up, act, down)
    return None


def _queries_first(names: list[str], linears: dict[str, Any]) -> tuple[str, ...] | None:
    """Three projections as queries, keys and values: the wider is of queries; None for others."""
    widths = [linears[one].out_features for one in names]
    if len(names) != 3 or len({linears[one].bias is None for one in names}) != 1:
        return None
    if len(set(widths)) == 1:
        return tuple(names)
    wide = [one for one, width in zip(names, widths, strict=True) if width == max(widths)]
    rest = [one for one in names if one not in wide]
    if len(wide) != 1 or linears[rest[0]].out_features != linears[rest[1]].out_features:
        return None
    return (wide[0], *rest)


def _packed(module: nn.Module, linears: dict[str, Any]) -> tuple[str, str] | None:
    """(the projection that gate and what it multiplies share, the one that reads their product)."""
    if len(linears) != 2 or not any(type(child).__name__ in _MULTIPLYING for child in module.children()):
        return None
    (first, wide), (last, narrow) = sorted(linears.items(), key=lambda item: -item[1].out_features)
    return (first, last) if wide.out_features == 2 * narrow.in_features else None


def _norm_kind(module: nn.Module, *, any_norm: bool) -> str | None:
    """``rms`` for a root-mean-square norm of one weight (or ``any_norm`` of a class of the model's own), and
    ``zero-centered`` where that is of one more than it."""
    import torch

    if len(list(module.parameters())) != 1 or getattr(module, "weight", None) is None or module.weight.ndim != 1:
        return None
    try:
        graph = torch.fx.symbolic_trace(module).graph
    except Exception:  # what cannot be traced is not fused by the engine either
        return None
    called = {str(getattr(node.target, "__name__", node.target)) for node in graph.nodes}
    if "rms_norm" in called:
        return "rms"
    if any_norm and type(module).__name__.endswith("Norm") and "mean" in called and called & {"sub", "var"}:
        return "rms"
    if "mean" not in called or not called & {"rsqrt", "pow"} or called & {"sub", "var", "std"}:
        return None
    centered = any(
        str(getattr(node.target, "__name__", node.target)) == "add" and 1 in node.args[:2] for node in graph.nodes
    )
    return "zero-centered" if centered else "rms"


# --- parts of the run -------------------------------------------------------------------------------------------------


def _run(model: nn.Module, tokens: int) -> Any:
    """``Base.forward``: a batch of one flattened text, its hidden states."""
    import torch

    ids, positions = (torch.zeros((1, tokens), dtype=torch.int64, device="cuda") for _ in range(2))
    torch.cuda.empty_cache()
    return model(input_ids=ids, position_ids=positions, use_cache=False, return_dict=False)[0]


def _materialised(model: nn.Module, dtype: Any) -> None:
    """Parameters on the card, where operators find them."""
    import torch

    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            data = torch.empty(parameter.shape, dtype=dtype, device="cuda")
            setattr(module, name, torch.nn.Parameter(data, requires_grad=False))


def _turned_in_place(patches: Any, model: nn.Module) -> None:
    """Queries and keys are turned where they are, as the engine's kernel does it."""
    module = sys.modules[type(model).__module__]
    if hasattr(module, "apply_rotary_pos_emb"):
        patches.set(module, "apply_rotary_pos_emb", lambda queries, keys, *_, **__: (queries, keys))


@contextlib.contextmanager
def _parameters_on_meta(patches: Any) -> Iterator[None]:
    """``init_on_device_without_buffers``: a parameter is made on the card, and at once
    moved from there: to the host here, where fake tensors take nothing."""
    import torch

    register = torch.nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if parameter is not None:
            kept = torch.nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=False)
            module._parameters[name] = kept

    patches.set(torch.nn.Module, "register_parameter", registered)
    try:
        yield
    finally:
        patches.undo()
