"""A model in vLLM's backend for transformers: its layers, and the allocations around them, as values without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: The name of the module that makes cosines and sines, whatever the model calls it.
ROTARY = "rotary_emb"


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a layer: how many, how many a token is sent to, their width, and the width of those that every
    token is sent to (0: none). ``grouped``: they are chosen by groups; ``shared_gate``: what every token is sent to is
    multiplied by a gate of its own; ``bias``: the router and every expert have biases; ``router_bytes``,
    ``score_bytes``: of an element of the router's weight and of its scores where they are wider than the model's.
    ``routed``: the engine's own router sends the tokens, else the model's code does. ``holds_scores``: the model's code
    holds the router's scores until the experts return; else they are made and let go within. ``holds_shared``: what
    every token is sent to holds its gate's product until it returns. ``least``: the width that slices are padded to.
    ``gated``: three products, else two; ``wide_elsewhere``: the router is in fp32 on cards whose kernels do not make
    it so (``force_fp32_compute`` of ``GateLinear``)."""

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    first: int = 0
    every: int = 1
    dense_layers: tuple[int, ...] = ()
    correction_bias: bool = False
    grouped: bool = False
    shared_gate: bool = False
    bias: bool = False
    router_bytes: int = 0
    score_bytes: int = 0
    routed: bool = True
    holds_scores: bool = False
    holds_shared: bool = True
    least: int = 0
    gated: bool = True
    wide_elsewhere: bool = False

    def in_layer(self, index: int) -> bool:
        """True if the layer has experts."""
        return index >= self.first and (index + 1) % self.every == 0 and index not in self.dense_layers


@dataclass(frozen=True)
class StateSizes:
    """A layer of states: the ``kernel`` of its convolution; Mamba 2's heads, their width, the groups that share
    projections, the ``size`` of a state for each element of a head, and the tokens of a chunk; whether what is gated
    is ``normed``, and what is projected ``scaled``. A ``delta`` net's are those of values, its ``groups`` heads of
    keys, and ``size`` the width of those. Without heads a convolution alone, of so many channels."""

    kernel: int
    conv_bias: bool
    bias: bool
    heads: int = 0
    head_dim: int = 0
    groups: int = 0
    size: int = 0
    chunk: int = 0
    normed: bool = True
    scaled: bool = False
    delta: bool = False


@dataclass(frozen=True)
class Layer:
    """A layer of the engine's in place of some of the model's, or a ``parameter`` of one that runs as it is.
    Those that are ``left`` are made last. Sizes are one rank's; ``reduces``: what it returns is summed over the ranks,
    ``gathers``: it is put side by side, ``splits``: what it is given is this rank's part of what the others have too.
    """

    kind: Literal[
        "linear", "embedding", "norm", "zero-centered norm", "parameter", "left", "experts", "states", "latent"
    ]
    name: str
    inputs: int = 0
    outputs: tuple[int, ...] = ()
    bias: bool = False
    reduces: bool = False
    gathers: bool = False
    splits: bool = False
    bytes: int = 0
    experts: ExpertShape | None = None
    states: StateSizes | None = None


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
    """A model in the backend. ``making``: while it is made, before any layer is; storages that stay are
    buffers. ``output`` is the storage of the last hidden states. ``heads``, ``kv_heads`` and ``head_dim``: of one rank,
    of every layer of ``attention``, the widest where they differ. ``cached``: heads of keys and their width of each
    layer then, none of one that reads another's keys. ``own_code``: the engine runs code of its own, which this stands
    for. ``sums_in_place``: residuals are summed where they are."""

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
    cached: tuple[tuple[int, int], ...] = ()
    #: Width of values where it is not that of keys.
    value_dim: int = 0
    sums_in_place: bool = False
    #: Whether it reads in both directions, so that nothing is kept of what it has read.
    encodes: bool = False
