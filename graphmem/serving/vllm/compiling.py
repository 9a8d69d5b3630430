"""The memory that torch.compile takes when it meets a model first.

Inductor times its kernels while it compiles (``triton.autotune_at_compile_time``): it makes example arguments for each,
by the names that the piece's code has for them, keeps one from the first kernel that takes it to the last (torch 2.13,
_inductor/codegen/wrapper.py, ``kernel_autotune_example_args``), and writes a buffer of the size of the second-level
cache before every run (``InductorBenchmarker``). The kernels that turn queries and keys are timed apart first and then
as one (combo kernels), after which the cache is emptied. A tensor that a kernel writes in place is copied for every
run.

The kernels of a piece are those that the recorded starts of Llama (one rank) and Qwen 3 (two) show: the norm of values
that are looked up or were reduced, the gate, the sum and norm after the feed-forward layer, and the rotation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphmem.serving.vllm.layers import VOCAB_PADDING, cdiv
from graphmem.serving.vllm.models.base import Family, Shape
from graphmem.serving.vllm.models.decoder import Decoder
from graphmem.serving.vllm.models.pieces import Plan, Residual
from graphmem.serving.vllm.quantization import Excluding, Float8
from graphmem.serving.vllm.run import Run, Tensor

#: What the names of arguments in eight bits end in: no example of them can be drawn, so one of 16 bits is, and
#: converted (``rand_strided``, torch/_dynamo/testing.py).
_EIGHT_BITS = " in eight bits"
#: Values up to which a kernel is put together with others (``LARGE_NUMELS``, codegen/triton_combo_kernel.py).
_PUT_TOGETHER = 51_200_000


@dataclass(frozen=True)
class Kernel:
    """A kernel by its arguments: names and bytes. ``timed``: it has several configurations and was not met before;
    ``copied``: bytes it writes in place."""

    arguments: tuple[tuple[str, int], ...]
    timed: bool = True
    copied: int = 0


def compile_cold(run: Run, model: Family, shape: Shape) -> None:
    """The compilation of all pieces of a model; the three that differ are the first, one between, and the last. Of
    models that are not like those recorded only the first kernel is known. Queries that attention takes in eight bits
    are written so by the kernel that turns them (``query_quant``, layers/attention/attention.py)."""
    run.enter("torch.compile")
    plan = None if isinstance(model, Decoder) and model.style.norm != "rms" else model.plan()
    if not _is_known(run, plan):
        for kernel in (Kernel(()), _looked_up(run, shape) if plan is None else _entered(run, shape, plan)):
            _time(run, (kernel,))
        return
    assert plan is not None
    turns, together = _rotations(run, shape, head_norms=plan.head_norms, quantised=run.narrow_queries)
    apart = run.batch_limits.tokens * shape.heads // run.tp * shape.head_dim > _PUT_TOGETHER
    for kernel in turns if apart else (*turns, together):
        _time(run, (kernel,))
    run.empty_cache()
    if plan.scales is not None and run.tp > 1:
        pieces = _narrow_pieces(run, shape, plan, turns[::-1] if apart else (together,))
    elif plan.layers[0].fed is None:
        pieces = _expert_pieces(run, shape, together)
    else:
        pieces = _pieces(run, shape, together, gated=plan.layers[0].gated)
    for piece in pieces:
        _time(run, piece)


def _is_known(run: Run, plan: Plan | None) -> bool:
    """Whether the kernels of such pieces were recorded."""
    if plan is None or plan.tables:
        return False
    return plan.way is Residual.BY_NORMS or (plan.way is Residual.BEFORE and run.tp == 1)


def _time(run: Run, kernels: Sequence[Kernel]) -> None:
    """The kernels of a piece, one after the other."""
    last = {name: at for at, kernel in enumerate(kernels) for name, _ in kernel.arguments}
    held: dict[str, Tensor] = {}
    for at, kernel in enumerate(kernels):
        for name, size in kernel.arguments:
            if name not in held:
                drawn = [run.new(2 * size)] if name.endswith(_EIGHT_BITS) else []
                held[name] = run.new(size, f"example of {name}")
                run.free(*drawn)
        _run(run, kernel)
        gone = [name for name in held if last[name] == at]
        run.free(*[held.pop(name) for name in gone])


def _run(run: Run, kernel: Kernel) -> None:
    """Once to see that it runs, then with the buffer that is written before every run."""
    cache = run.device.l2_cache_bytes
    if kernel.copied:
        run.temporary(kernel.copied)
    written = [run.new(cache)] if kernel.timed and cache else []
    if kernel.copied:
        run.temporary(kernel.copied)
    run.free(*written)


def _rotations(run: Run, shape: Shape, *, head_norms: bool, quantised: bool) -> tuple[tuple[Kernel, ...], Kernel]:
    """(the kernels that turn queries and keys, in the order they are timed; both as one)."""
    tokens, size = run.batch_limits.tokens, shape.itemsize
    queries = max(1, shape.heads // run.tp) * shape.head_dim
    keys = max(1, shape.kv_heads // run.tp) * shape.head_dim
    norms = [(("norm of " + what, shape.head_dim * size),) if head_norms else () for what in ("queries", "keys")]
    both = ("queries, keys and values", tokens * (queries + 2 * keys) * size)
    where = (("positions", tokens * 8), ("table", shape.rope_positions * shape.rotary_dim * size))
    turned, other = ("turned queries", tokens * queries * size), ("turned keys", tokens * keys * size)
    if quantised:
        turned = (turned[0] + _EIGHT_BITS, tokens * queries)
    first, second = Kernel((both, *norms[0], *where, turned)), Kernel((both, *norms[1], *where, other))
    if head_norms:
        return (first, second), Kernel((both, *norms[0], *where, *norms[1], turned, other))
    return (second, first), Kernel((both, *where, other, turned))


def _pieces(run: Run, shape: Shape, rotation: Kernel, *, gated: bool = True) -> Iterator[tuple[Kernel, ...]]:
    """An activation that is not ``gated`` is written where its input is."""
    tokens, size = run.batch_limits.tokens, shape.itemsize
    hidden, weight = tokens * shape.hidden * size, ("weight", shape.hidden * size)
    wide = tokens * (shape.intermediate // run.tp) * size
    first, residual = ("what attention returned", hidden), ("residual", hidden)
    yield _looked_up(run, shape), rotation

    def fed(*, timed: bool) -> tuple[Kernel, ...]:
        normed = Kernel(
            (first, residual, ("weight of the first norm", weight[1]), _input(shape, "normed", hidden)), timed
        )
        activated = (("gate and up", 2 * wide), _input(shape, "activated", wide)) if gated else (("up", wide),)
        return normed, Kernel(activated, timed)

    last = (("what the feed-forward layer returned", hidden), weight)
    yield (*fed(timed=True), Kernel((*last, first, residual, ("sum", hidden), ("normed again", hidden))), rotation)
    yield (*fed(timed=False), Kernel((*last, first, residual), copied=hidden))


def _narrow_pieces(run: Run, shape: Shape, plan: Plan, rotations: tuple[Kernel, ...]) -> Iterator[tuple[Kernel, ...]]:
    """Of several ranks, whose kernels write what products read in eight bits, with a scale of each row (a recorded
    start of Llama on two)."""
    tokens = run.batch_limits.tokens
    hidden, weight = tokens * plan.hidden, ("weight", plan.hidden)
    wide = tokens * (shape.intermediate // run.tp)

    def written(name: str, values: int) -> tuple[tuple[str, int], ...]:
        scales = (("scales of " + name, tokens * plan.scales),) if plan.scales else ()
        return (name + _EIGHT_BITS, values), *scales

    kept = (("sum over the ranks", hidden), ("residual", hidden))
    normed = written("normed", hidden // shape.itemsize)
    fed = (
        Kernel((("attention's", tokens * plan.queries), *written("attended", tokens * plan.queries // shape.itemsize))),
        Kernel((*kept, ("weight of the first norm", plan.hidden), *normed)),
        Kernel((("gate and up", 2 * wide * shape.itemsize), *written("activated", wide))),
    )
    again = tuple(replace(kernel, timed=False) for kernel in fed)
    last, sums = ("second sum over the ranks", hidden), (("sum", hidden), ("normed again", hidden))
    yield Kernel((("embedded", hidden), weight, *normed)), *rotations
    after = Kernel((last, *kept, weight, *(sums if plan.scales else sums[:1]), *written("second", hidden // 2)))
    yield *fed, after, *(replace(kernel, timed=False) for kernel in rotations)
    yield *again, Kernel((last, *kept, weight), copied=hidden)


def _expert_pieces(run: Run, shape: Shape, rotation: Kernel) -> Iterator[tuple[Kernel, ...]]:
    """As a recorded start of Qwen 3 with experts shows: these are an operator of the engine's own, and the sum before
    them is kept beside its norm. Kernels of one configuration are not timed."""
    width = shape.hidden * shape.itemsize
    hidden, weight, other = run.batch_limits.tokens * width, ("weight", width), ("weight of the first norm", width)
    kept = (("what attention returned", hidden), ("residual", hidden))
    before = Kernel((*kept, other, ("sum before", hidden), ("normed", hidden)), timed=False)
    after = (("what experts returned", hidden), weight, *kept)
    yield _looked_up(run, shape), rotation
    yield before, Kernel((*after, ("sum", hidden), ("normed again", hidden)), timed=False), rotation
    yield before, Kernel(after, timed=False)


def _looked_up(run: Run, shape: Shape) -> Kernel:
    """Embeddings and their norm. One rank looks them up in the same kernel, so there is a second table of embeddings;
    with several that is an operator of the engine's own."""
    tokens, size = run.batch_limits.tokens, shape.itemsize
    hidden, weight = tokens * shape.hidden * size, ("weight", shape.hidden * size)
    if run.tp > 1:
        return Kernel((("embedded", hidden), weight, ("normed", hidden)))
    table = cdiv(shape.vocab, VOCAB_PADDING) * VOCAB_PADDING * shape.hidden * size
    return Kernel(
        (("ids", tokens * 4), ("embeddings", table), weight, ("embedded", hidden), _input(shape, "normed", hidden)),
        timed=False,
    )


def _entered(run: Run, shape: Shape, plan: Plan) -> Kernel:
    """The same of a captured model: timed where cosines and sines of all layers are made beside it, and one kernel with
    those where embeddings are not normed first. Seen in recorded starts (OLMo 2, Arcee), not found in Inductor's
    source."""
    found = _looked_up(run, shape)
    if not plan.tables:
        return found
    if plan.way is not Residual.BEHIND or run.tp > 1:
        return replace(found, timed=True)
    tables = tuple((f"table {number}", run.batch_limits.tokens * one) for number, one in enumerate(plan.tables))
    ids, table, _, embedded, _ = found.arguments
    return Kernel((ids, table, embedded, *tables))


def _input(shape: Shape, name: str, size: int) -> tuple[str, int]:
    """The tensor that a kernel writes for a product, of so many bytes in 16 bits: where the engine itself quantises,
    and the card multiplies eight bits, the kernel quantises it too (a recorded start of Qwen 3)."""
    method = shape.linear.method if isinstance(shape.linear, Excluding) else None
    if isinstance(method, Float8) and method.online and method.native:
        return name + _EIGHT_BITS, size // shape.itemsize
    return name, size
