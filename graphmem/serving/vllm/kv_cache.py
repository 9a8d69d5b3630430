"""The blocks that the engine cuts the remaining memory into: kinds of layers, groups, tokens, and requests that fit.

Followed from vllm 0.32.0, ``v1/core/kv_cache_utils.py`` and ``v1/kv_cache_interface.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphmem.base.searching import largest
from graphmem.errors import UsageError
from graphmem.serving.vllm.layers import cdiv
from graphmem.serving.vllm.models.base import NO_CACHE, Shape

#: Bytes of an element of the KV cache by ``--kv-cache-dtype`` (``STR_DTYPE_TO_TORCH_DTYPE``, utils/torch_utils.py);
#: auto is the model's.
CACHE_DTYPES = {
    "auto": 0, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """One kind of layer: bytes of a page (one layer's part of a block), and the tokens it keeps, None for all.
    ``states``: a page is the state of a request, which has so many however long it is; 0 for keys and values.
    ``in_chunks``: the window begins anew after as many tokens. ``times``: a block has so many times the tokens, where
    that makes its page as large as others (``unify_kv_cache_spec_page_size``)."""

    page_bytes: int
    window: int | None = None
    states: int = 0
    in_chunks: bool = False
    times: int = 1

    def unread(self, computed: int) -> int:
        """The first so many tokens, which nobody reads once so many are computed (``get_num_skipped_tokens``)."""
        if self.window is None:
            return 0
        return computed // self.window * self.window if self.in_chunks else max(0, computed - self.window + 1)


@dataclass(frozen=True)
class Group:
    """Layers that share a table of blocks. ``own``: how many of them this stage of a pipeline has, None for all."""

    spec: Spec
    layers: int
    own: int | None = None
    #: Bytes of this rank's part of a block where its layers' pages differ.
    mixed_bytes: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of this rank's part of a block."""
        if self.mixed_bytes is not None:
            return self.mixed_bytes
        return (self.layers if self.own is None else self.own) * self.spec.page_bytes


@dataclass(frozen=True)
class Layout:
    """The groups of a model, and how far a step may run ahead."""

    groups: tuple[Group, ...]
    block_size: int
    tokens_in_flight: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: groups take the same ones, so the widest decides."""
        return max((group.block_bytes for group in self.groups), default=0)

    def request_blocks(self, length: int) -> int:
        """Blocks of one request of so many tokens. A layer with a window keeps those before it and those being
        computed, and one block more, since it need not begin with one."""
        return sum(self.group_blocks(group.spec, length) for group in self.groups)

    def group_blocks(self, spec: Spec, length: int) -> int:
        """Blocks of one request of so many tokens in a group."""
        window, size = spec.window, self.block_size * spec.times
        if spec.states:
            return spec.states
        if window is None:
            return cdiv(length, size)
        if spec.in_chunks:
            return cdiv(min(window + self.tokens_in_flight, length), size)
        return cdiv(min(window - 1 + self.tokens_in_flight, length), size) + 1

    def blocks(self, available: int) -> int:
        """Blocks in so many bytes."""
        return max(0, available // self.block_bytes) if self.groups else 0

    def needed(self, length: int) -> int:
        """Bytes that one request of this length needs (``_check_enough_kv_cache_memory``)."""
        return self.request_blocks(length) * self.block_bytes

    def concurrency(self, blocks: int, length: int) -> float:
        """Requests of this length in so many blocks."""
        return blocks / self.request_blocks(length) if self.groups else 0.0

    def longest(self, available: int, most: int) -> int:
        """The longest request that fits, 0 for none (``_estimate_max_model_len_from_groups``)."""
        return largest(lambda length: self.needed(length) <= available, most) if self.groups else 0


def layout_of(
    shape: Shape,
    tp: int,
    block_size: int,
    cache_bytes: int,
    tokens_in_flight: int,
    draft: Shape | None = None,
    *,
    prefixes: bool = True,
    encoded: int = 0,
) -> Layout:
    """The groups of a model of this shape (``get_kv_cache_groups``): of all stages' layers together, whichever has
    them. ``encoded``: the most tokens of an encoder's, which a request has blocks for where layers attend to them."""
    if shape.state is not None:
        specs, block_size = _state_specs(shape, tp, block_size, cache_bytes, prefixes=prefixes)
    else:
        specs = [
            _spec(shape, tp, block_size, cache_bytes, window, heads)
            for window, heads in zip(shape.windows, shape.cached or (None,) * shape.layers, strict=True)
            if heads != NO_CACHE
        ]
    if shape.crosses:
        specs += [replace(one, states=cdiv(encoded, block_size)) for one in specs]
    if draft is not None:  # on the last stage, as its layers are
        specs += [_spec(draft, tp, block_size, cache_bytes, window) for window in draft.windows]
    own = shape.own
    last = len(specs) if own.last else own.layers.stop
    return Layout(tuple(_grouped(specs, range(own.layers.start, last))), block_size, tokens_in_flight)


def _state_specs(shape: Shape, tp: int, block_size: int, cache_bytes: int, *, prefixes: bool) -> tuple[list[Spec], int]:
    """(the layers' kinds, tokens of a block). Beside states a block of attention has as many tokens as make it no
    smaller than a state, which is padded to it (``_align_hybrid_block_size``, platforms/interface.py); where prefixes
    are kept a request has three states (``MambaSpec.max_memory_usage_bytes``, mode align)."""
    assert shape.state is not None
    page = shape.state.shared(tp).page_bytes
    drafted = shape.state.drafted
    if not shape.attends:
        return [Spec(page, states=1 + drafted)] * shape.layers, block_size
    token = _spec(shape, tp, 1, cache_bytes, None).page_bytes
    step = block_size if shape.latent is None else max(block_size, _LATENT_STEP)
    size = max(block_size, cdiv(page, step * token) * step)
    states = (_ALIGNED_STATES + shape.state.checkpoints if prefixes else 1) + drafted
    attention, state = Spec(size * token), Spec(size * token, states=states)
    if shape.states:
        return [attention] * len(shape.attends) + [state] * shape.states, size
    return [attention if layer in shape.attends else state for layer in range(shape.layers)], size


#: Tokens that blocks of latent keys are a multiple of beside states (``_align_hybrid_block_size``).
_LATENT_STEP = 128
#: States of a request where prefixes are kept (``MambaSpec.max_memory_usage_bytes``).
_ALIGNED_STATES = 2


def _spec(
    shape: Shape, tp: int, block_size: int, cache_bytes: int, window: int | None, heads: tuple[int, int] | None = None
) -> Spec:
    """Of a layer with so many ``heads`` of keys of such a width, where it has others than the rest."""
    if shape.latent is not None:  # compressed keys and their rotated part, whole on every rank
        return Spec(block_size * (shape.latent.kv_rank + shape.latent.rope) * cache_bytes)
    kv_heads, head_dim = heads or (shape.kv_heads, shape.head_dim)
    size = block_size * max(1, kv_heads // tp) * (head_dim + (shape.value_dim or head_dim)) * cache_bytes
    return Spec(size, window, in_chunks=window is not None and shape.in_chunks)


def _grouped(specs: Sequence[Spec], own: range) -> list[Group]:
    """Layers of one kind, cut into groups of as many layers as the rarest kind has; of the commonest where that has not
    half as many again (``_get_kv_cache_groups_uniform_page_size``). The last group of a kind may be padded."""
    if len({spec.window for spec in specs}) == 1 and len({spec.page_bytes for spec in specs}) > 1:
        # Alike but for their pages (``UniformTypeKVCacheSpecs``): one group.
        sizes = [spec.page_bytes for layer, spec in enumerate(specs) if layer in own]
        return [Group(specs[0], len(specs), len(sizes), sum(sizes))]
    largest_page = max(spec.page_bytes for spec in specs)
    if any(largest_page % spec.page_bytes for spec in specs):
        raise UsageError("windows of attention beside layers whose pages do not divide the largest are not followed")
    specs = [replace(one, page_bytes=largest_page, times=largest_page // one.page_bytes) for one in specs]
    kinds: dict[Spec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    least, most = min(counts), max(counts)
    size = most if most < 1.5 * least else least
    groups = []
    for spec, layers in kinds.items():
        number = cdiv(len(layers), size)
        for index in range(number):
            chosen = layers[index::number]
            groups.append(Group(spec, len(chosen), sum(layer in own for layer in chosen)))
    return groups
