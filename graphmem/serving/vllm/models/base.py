"""A model family as the engine uses it, and the shape that its configuration describes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from graphmem.errors import UsageError
from graphmem.serving.base import ServedModel
from graphmem.serving.values import count, counted
from graphmem.serving.vllm.layers import Embedding, LinearMethod
from graphmem.serving.vllm.lora import Adapters, Slots
from graphmem.serving.vllm.run import Batch, Run, Tensor
from graphmem.sources.vllm_layers import Backend, ExpertShape

if TYPE_CHECKING:
    from graphmem.serving.vllm.encoders.budget import Items
    from graphmem.serving.vllm.models.pieces import Plan

#: What a call of attention allocates for so many tokens, and a context in which a compiled piece runs.
Attend: TypeAlias = Callable[[int], None]
Piece: TypeAlias = Callable[[], AbstractContextManager[None]]


#: The heads of keys of a layer that reads the keys and values of another, and their width.
NO_CACHE = (0, 0)
#: What tells rotary tables of windows from those of all positions, where a model has both (Gemma 3).
LOCAL_ROPE = "local"


class Family(ABC):
    """A model of one rank. Making it asks for its weights."""

    run: Run
    head: Embedding
    #: Whether logits are capped.
    soft_cap: bool = False
    #: Tensors that a step returns: a stage of a pipeline hands on the residual too.
    hands_on: int = 1
    #: Layers that are followed for all but the largest size of graphs: the others are as the second, and find its
    #: memory free.
    followed_layers: int = 4

    @abstractmethod
    def finish(self) -> None:
        """``process_weights_after_loading`` of every layer, in order."""

    def adapt(self, adapters: Adapters) -> list[Slots]:
        """Room for adapters in every layer that can have one, in order. Raises :class:`UsageError` where the family is
        not followed with them."""
        raise UsageError("--enable-lora is followed for dense decoders of attention and gated feed-forward layers only")

    @abstractmethod
    def forward(self, tokens: int) -> Tensor:
        """The last hidden states of so many tokens, without attention."""

    def compiled(self, tokens: int, attend: Attend, piece: Piece, layers: int | None = None) -> Tensor:
        """The same as torch.compile makes it: in pieces, attention between them, of all layers or of the first. As
        without a compiler where Inductor's code of the family is not followed."""
        with piece():
            return self.forward(tokens)

    def plan(self) -> Plan | None:
        """What is followed of it in compiled pieces; None where torch.compile's are not known."""
        return None

    def receive(self, tokens: int) -> None:
        """Room for the tensors that the pipeline's stage before this one sends. Raises :class:`UsageError` where the
        family is not followed in a pipeline."""
        raise UsageError("--pipeline-parallel-size is followed for decoders like Llama's only")

    def give(self, embeddings: Tensor) -> None:
        """Embeddings come from this buffer, not from ids. Raises :class:`UsageError` where the family is not followed
        with an encoder."""
        raise UsageError("an encoder is followed before decoders like Llama's only: add --language-model-only")

    def tap(self, layers: tuple[int, ...]) -> None:
        """Hidden states after these layers are kept in every step. Raises :class:`UsageError`."""
        if layers:
            raise UsageError("EAGLE-3 is followed for decoders like Llama's only")

    def taken(self) -> list[Tensor]:
        """The tensors kept in the last step; the caller lets them go."""
        return []

    def send(self, hidden: Tensor) -> None:
        """Let go of the tensors that were sent to the next stage."""
        self.run.free(hidden)

    def logits(self, rows: int) -> Tensor:
        """``compute_logits`` of so many hidden states."""
        return self.head.logits(rows, soft_cap=self.soft_cap)


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: widths of the compressed queries (0: they are not) and keys, and of heads."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, kw_only=True)
class StateShape(ABC):
    """Layers of states, each of a fixed size for a request. ``conv_bytes`` and ``state_bytes``: of an element kept of
    the convolution and of the state."""

    conv_bytes: int = 2
    state_bytes: int = 2
    #: Tokens that are drafted for a request, each of which may leave a state; and states of a prompt's checkpoint.
    drafted: int = 0
    checkpoints: int = 0

    @abstractmethod
    def shared(self, tp: int) -> StateShape:
        """One rank's share."""

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """The bytes kept for one request (``MambaStateShapeCalculator``, layers/mamba/mamba_utils.py)."""


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: its layers, and whether it has the modules before the first and after the last."""

    layers: range
    first: bool = True
    last: bool = True


def stages(layers: int, count: int) -> tuple[Stage, ...]:
    """The layers of each stage (``get_pp_indices``, distributed/utils.py): equal shares, the remainder to the stages
    before the last, from the back."""
    sizes = [layers // count] * count
    for back in range(2, layers % count + 2):
        sizes[-back] += 1
    starts = [sum(sizes[:index]) for index in range(count)]
    return tuple(
        Stage(range(start, start + size), index == 0, index == count - 1)
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


class Tower(ABC):
    """An encoder of one rank. Making it asks for its weights."""

    @abstractmethod
    def inputs(self) -> Tensor:
        """The inputs that the engine profiles with, put on the card."""

    @abstractmethod
    def encode(self) -> list[Tensor]:
        """The embeddings of it, which stay until the language model has run."""


class Encoder(ABC):
    """The encoder that a configuration describes. ``deep``: its layers whose states go to the language model's first
    layers as well; ``items``: the input of the engine's profile run."""

    items: Items
    deep: tuple[int, ...] = ()

    @abstractmethod
    def tower(self, run: Run, batch: Batch) -> Tower:
        """Its weights on this rank."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model as the engine reads them. ``windows``: of each layer, the tokens it attends to, None for
    all. ``attends``: the layers of attention among those of states. ``encoder``: the encoder before the model where it
    takes images, and gives it embeddings instead of ids. ``position_rows``: positions of one token, where it has more
    than one (M-RoPE). ``backend``: a capture of transformers' model where that is followed; ``soft_cap``: its logits
    are capped."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    itemsize: int
    linear: LinearMethod
    tied: bool
    windows: tuple[int | None, ...]
    rope_positions: int
    rotary_dim: int
    ropes: tuple[object, ...] = (None,)
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    rope_scaled: bool = False
    rope_linear: bool = False
    #: Rows of a rotary table that are of short texts' factors, before those of long ones' (``longrope``).
    rope_short: int = 0
    stage: Stage | None = None
    state: StateShape | None = None
    attends: tuple[int, ...] = ()
    #: Layers of states where they are not all the others.
    states: int = 0
    encoder: Encoder | None = None
    #: How the encoder keeps its weights; None: as they are.
    encoder_linear: LinearMethod | None = None
    position_rows: int = 0
    #: Layers that predict further tokens, which are loaded where they are to draft.
    predicts: int = 0
    soft_cap: bool = False
    backend: Backend | None = None
    #: Heads of keys and their width of each layer where layers differ.
    cached: tuple[tuple[int, int], ...] = ()
    #: Width of values where the cache has them narrower than keys.
    value_dim: int = 0
    #: Bytes of an element of rotary tables that are wider than the model until they are used first.
    rope_bytes: int = 0
    #: Whether layers attend to what an encoder made too, which has blocks of its own.
    crosses: bool = False
    #: Whether compressed-tensors is imported by the model's own file, before anything is made on the card.
    imports_compressed: bool = False
    #: Bytes of the parameters that a model that pools has behind its layers.
    pooled: tuple[int, ...] = ()
    #: Whether windows begin anew after as many tokens.
    in_chunks: bool = False

    @property
    def own(self) -> Stage:
        """This rank's stage of the pipeline; all layers where there is none."""
        return self.stage or Stage(range(self.layers))

    def rope_of(self, layer: int) -> object:
        """A key that is equal for layers with the same rotary table."""
        return self.ropes[layer % len(self.ropes)]


def plain_shape(model: ServedModel, itemsize: int, linear: LinearMethod, **own: Any) -> Shape:
    """The sizes by the names that most configurations have; ``own``: fields that this family has otherwise. Raises
    :class:`UsageError` for a missing value."""
    config, hidden, layers = model.config, count(model, "hidden_size"), count(model, "num_hidden_layers")
    heads = own.get("heads") or count(model, "num_attention_heads")
    head_dim = own.get("head_dim") or counted(model, "head_dim", config.get("head_dim") or hidden // heads)
    positions = own.get("positions") or count(model, "max_position_embeddings")
    usual: dict[str, Any] = {
        "kind": config.get("model_type"), "hidden": hidden, "layers": layers, "heads": heads, "head_dim": head_dim,
        "kv_heads": own.get("kv_heads") or count(model, "num_key_value_heads", heads),
        "intermediate": own.get("intermediate") or count(model, "intermediate_size"),
        "vocab": count(model, "vocab_size"), "positions": positions, "itemsize": itemsize, "linear": linear,
        "tied": bool(config.get("tie_word_embeddings")), "windows": (None,) * layers, "rope_positions": positions,
        "rotary_dim": head_dim, "attention_bias": bool(config.get("attention_bias")),
    }  # fmt: skip
    return Shape(**{**usual, **own})
