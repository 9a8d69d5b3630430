"""Layers of experts: ``FusedMoE`` with Triton's kernels (vllm 0.32.0, layers/fused_moe).

Its scratch is the engine's own: one tensor for all layers, as large as the largest asked for, which stays
(v1/worker/workspace.py). So it is consumed, and no part of the peak.
"""

from __future__ import annotations

from collections.abc import Callable

from graphmem.serving.vllm.layers import Linear, Unquantized, cdiv
from graphmem.serving.vllm.marlin import marlin_locks, marlin_sums
from graphmem.serving.vllm.models.base import Shape
from graphmem.serving.vllm.models.feed_forward import FeedForward, Style
from graphmem.serving.vllm.run import Run, Tensor
from graphmem.sources.vllm_layers import ExpertShape
from graphmem.trace import Category

#: Rows that triton_kernels sort together.
_TILE = 128
#: Tiles of Marlin's, and the share of one that an expert's tokens do not fill (``fused_marlin_moe``).
_MARLIN_TILES, _MARLIN_FULL = (8, 16, 32, 48, 64), 0.9
#: VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD (envs.py).
_BESIDE_TOKENS = 256
#: Indices that are kept of every permuted token, and tokens of a tile of CUB's radix sort (384 threads, 16 each).
_PERMUTED, _SORTED = 7, 6144
#: VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE (envs.py).
_MOST_FOUR_BITS = 163_840
#: Experts that one kernel chooses among without scratch.
_MOST_FUSED = 256


class Experts:
    """A router and its experts, whose weights are two tensors; and experts that every token is sent to."""

    def __init__(self, run: Run, name: str, shape: Shape, experts: ExpertShape) -> None:
        self.run, self.name, self.shape, self.experts = run, name, shape, experts
        size, plain = shape.itemsize, Unquantized(shape.itemsize)
        self.method = shape.linear.of(f"{name}.experts")
        computes = run.device.capability
        wide = experts.wide_elsewhere and computes != (9, 0) and computes[0] != 10
        self.router_bytes, self.parts = 4 if wide else experts.router_bytes, 1 + experts.gated
        slices = run.experts.slices
        width = max(experts.width // slices, experts.least * (slices > 1))
        self.hidden, self.width = self.method.padded(shape.hidden, width)
        self.local = cdiv(experts.count + run.experts.redundant, run.experts.ranks)
        if experts.routed:
            routed = self.router_bytes or size
            self.gate = Linear(
                run, f"{name}.gate", shape.hidden, [experts.count], Unquantized(routed), routed, bias=experts.bias
            )  # fmt: skip
        if experts.correction_bias:
            run.new(experts.count * 4, f"{name}.gate.e_score_correction_bias")
        gate: Linear | None = None
        if experts.shared_gate:
            gate = Linear(run, f"{name}.shared_expert_gate", shape.hidden, [1], plain, size)
        self.shared: FeedForward | None = None
        if experts.shared_width:
            holds = Style(holds_gate_up=experts.holds_shared, gated=experts.gated)
            self.shared = FeedForward(
                run, f"{name}.shared_experts", shape, holds, experts.shared_width, reduces=False, gate=gate,
                whole=run.experts.sliced,
            )  # fmt: skip
        if run.experts.ranks > 1:  # which experts are here (fused_moe/expert_map_manager.py)
            run.new((experts.count + run.experts.redundant) * 4, f"{name}.experts.map", Category.BUFFER)
        self.method.make_experts(run, f"{name}.experts", self.local, self.hidden, self.width, self.parts)
        if experts.bias:
            for part, width in (("w13", self.parts * self.width), ("w2", self.hidden)):
                label = f"{name}.experts.{part}_bias"
                run.named[label] = run.new(self.local * width * size, label)

    def finish(self) -> None:
        """After loading."""
        if self.shared is not None:
            self.shared.finish()
        self.method.finish_experts(self.run, f"{self.name}.experts", self.local)
        if self.method.by_cutlass:
            for part in ("inputs and outputs", "products", "gate and up"):
                self.run.new(self.local * 8, f"{self.name}.experts.strides of {part}", Category.BUFFER)

    def __call__(self, tokens: int) -> Tensor:
        """The output; the input is the caller's."""
        run = self.run
        if not run.experts.sliced:
            return self.own(tokens, run.all_reduce)
        row, slice_of = self.shape.hidden * self.shape.itemsize, cdiv(tokens, run.tp)
        whole = slice_of * run.tp * row  # padded; a slice of what was padded is a view of it
        kept = run.new(slice_of * row if tokens % run.tp == 0 else whole, "slice of tokens")
        output = self.own(slice_of)
        return run.replacing(output, kept, run.new(whole, "gathered slices"))

    def own(self, tokens: int, reduce: Callable[[Tensor], Tensor] = lambda output: output) -> Tensor:
        """The output of this rank's tokens, of this rank's share of every expert; what is added up is there until the
        sum is reduced (``MoERunner.forward``)."""
        run, size, chosen = self.run, self.shape.itemsize, self.experts.chosen
        if not self.experts.routed:
            output = run.new(tokens * self.shape.hidden * size, "experts' output")
            self._multiply(tokens)
            return reduce(output)
        shared = self._beside(tokens)
        scores = self._scores(tokens)
        if shared is None and self.shared is not None:
            shared = self.shared(tokens)
        run.enter(f"{self.name}.experts")
        if self.method.by_triton:
            return run.replacing(scores, reduce(self._sorted(tokens)))
        held = [run.new(tokens * self.hidden * size, "padded tokens")] if self.hidden != self.shape.hidden else []
        weights, ids = run.new(tokens * chosen * 4), run.new(tokens * chosen * 4)
        if not self.experts.grouped:
            run.temporary(tokens * chosen * 4, *self._softmax_scratch(tokens))
        if run.experts.balanced:  # ids of copies (``eplb_map_to_physical_and_record``)
            ids = run.replacing(ids, run.new(tokens * chosen * 4))
        output = run.new(tokens * self.hidden * size, "experts' output")
        self._multiply(tokens)
        run.free(weights, ids)
        if self.experts.holds_scores:
            held.append(scores)
        else:
            run.free(scores)
        if shared is None:
            return run.replacing(*held, reduce(output))
        total = reduce(run.new(shared.bytes, "experts' and shared output", Category.ACTIVATION))
        return run.replacing(*held, shared, output, total)

    def _scores(self, tokens: int) -> Tensor:
        """``GateLinear``: inputs are made as wide as its weight (layers/fused_moe/router/gate_linear.py)."""
        run, experts, size = self.run, self.experts, self.shape.itemsize
        if self.router_bytes <= size:
            if experts.score_bytes <= size:
                return self.gate(tokens)
            run.enter(self.gate.name)
            return run.matmul(tokens * experts.count * experts.score_bytes)
        wide = run.new(tokens * self.shape.hidden * self.router_bytes, "tokens as wide as the router")
        return run.replacing(wide, self.gate(tokens))

    def _beside(self, tokens: int) -> Tensor | None:
        """The output of the shared experts, where batches are small: before the rest, on a stream of its own
        (``SharedExperts.maybe_forward_async``, fused_moe/runner/shared_experts.py)."""
        if self.shared is None or tokens > _BESIDE_TOKENS:
            return None
        self.run.leave_default_stream()
        with self.run.beside():
            return self.shared(tokens)

    def _multiply(self, tokens: int) -> None:
        """Experts on the tokens of all replicas, which are gathered with their weights and ids (``AgRsAll2AllManager``,
        device_communicators/all2all.py); their sums are scattered into the output that is there already."""
        run, size, chosen = self.run, self.shape.itemsize, self.experts.chosen
        replicas = run.experts.data * (run.tp if run.experts.sliced else 1)
        total, gathered = tokens * replicas, []
        if replicas > 1:
            gathered.append(run.new(total * self.shape.hidden * size, "tokens of all replicas"))
            gathered += [run.new(total * chosen * 4, "experts of tokens of all replicas") for _ in range(2)]
        gathered += [run.new(one, "quantised tokens") for one in self.method.narrowed(total, self.hidden)]
        if self.method.in_four_bits:
            self._multiply_in_four_bits(total * chosen)
            run.free(*reversed(gathered))
            return
        wide, row = max(self.parts * self.width, self.hidden), total * chosen * size
        if run.keeps_scratch:
            run.scratch(row * (max(self.width, self.hidden) + wide))
        else:  # ``fused_experts`` (fused_moe/fused_moe.py)
            gathered += [run.new(row * values, "experts' products") for values in (wide, self.width)]
        if self.method.by_cutlass:
            self._permute(total * chosen)
            run.free(*reversed(gathered))
            return
        count, tile = self.experts.count + run.experts.redundant, self._tile(total)
        padded = total * chosen + count * (tile - 1)
        aligned = [run.new(one) for one in (padded * 4, cdiv(padded, tile) * 4, 4)]
        run.temporary((count + 1) * 4)
        run.free(*[run.new(one, "quantised products") for one in self.method.narrowed(total * chosen, self.width)])
        if self.method.by_marlin:
            marlin_locks(run)
            for columns in (self.parts * self.width, self.hidden):
                marlin_sums(run, columns, tile, padded)
        run.free(*reversed(aligned), *reversed(gathered))

    def _multiply_in_four_bits(self, rows: int) -> None:
        """``run_cutlass_moe_fp4`` (fused_moe/experts/cutlass_moe.py): rows are copied in the order of their experts and
        quantised, with room for the scales of as many tokens as there may be, and put back and weighed in the end."""
        run, size, chosen, inner = self.run, self.shape.itemsize, self.experts.chosen, self.parts * self.width
        run.scratch(rows * size * (max(2 * inner, self.hidden) + inner))
        counts = [self.local + 1, self.local + 1, self.local * 3, self.local * 3, rows, rows]
        held = [run.new(one * 4) for one in counts]
        held.append(run.new(rows * self.hidden * size, "rows by expert"))
        for width in (self.hidden, self.width):
            run.temporary(rows * width // 2, _MOST_FOUR_BITS * chosen * cdiv(width // 16, 4) * 4)
        held.append(run.new(rows * self.hidden * size, "rows put back"))
        weights = run.new(rows * size)
        held.append(run.replacing(weights, run.new(rows * self.hidden * size, "weighed")))
        run.temporary(rows // chosen * self.hidden * size)
        run.free(*reversed(held))

    def _permute(self, rows: int) -> None:
        """Tokens in the order of their experts, by indices that stay for all layers (``MoEPermuteScratch``,
        fused_moe/moe_permute_unpermute.py), with what CUB sorts them by: counts of 256 digits, of every tile and in
        all. Sizes of the products come and go."""
        run = self.run
        run.once("offsets of experts", (self.local + 1) * 8)
        for number in range(_PERMUTED):
            run.once(f"indices {number} of permuted tokens", rows * 4)
        run.once("sorting of permuted tokens", (cdiv(rows, _SORTED) + 1) * 256 * 4 + 256)
        run.temporary(self.local * 12, self.local * 12)

    def _sorted(self, tokens: int) -> Tensor:
        """Tokens sorted by expert, and products that nothing keeps (``triton_kernel_moe_forward``,
        fused_moe/experts/gpt_oss_triton_kernels_moe.py, with third_party/triton_kernels: topk.py, routing.py,
        reduction_details/reduce_bitmatrix.py and matmul_ogs.py)."""
        run, size, count = self.run, self.shape.itemsize, self.experts.count
        rows, words = tokens * self.experts.chosen, cdiv(count, 32) * 32
        chosen = [run.new(one) for one in (rows * size, rows * 2, words // 32 * cdiv(tokens, 32) * 32 * 4)]
        counts = run.new(cdiv(count, 128) * 128 * 4)
        chosen += [run.new(one) for one in (words * cdiv(tokens, _TILE) * _TILE // 32 * 4, count * 4)]
        tiles = rows if rows <= count else count - 1 - (count - rows - 1) // 16
        places = [run.new(one) for one in (2 * rows * 4, rows * size)]
        places += [run.new(one) for one in (5 * cdiv(count + 1, 512) * 512 * 4, 4 * cdiv(tiles, 512) * 512 * 4)]
        run.free(*chosen)
        output = run.new(tokens * self.hidden * size, "experts' output")
        gated = run.new(rows * self.width * size, "experts' products")
        run.temporary(rows * self.hidden * size)
        run.free(gated, counts, *places)
        return output

    def _tile(self, tokens: int) -> int:
        """Rows of a tile of the kernels: Marlin's are the fewer the fewer tokens an expert has."""
        if not self.method.by_marlin:
            return self.method.tile
        rows = tokens * self.experts.chosen / self.local
        return next((one for one in _MARLIN_TILES if rows / one < _MARLIN_FULL), _MARLIN_TILES[-1])

    def _softmax_scratch(self, tokens: int) -> list[int]:
        """The memory in fp32 of choosing among so many experts where they are no power of two up to 256
        (``topk_softmax``, csrc/moe/topk_softmax_kernels.cu)."""
        count = self.experts.count
        return [] if count <= _MOST_FUSED and count & (count - 1) == 0 else [tokens * count * 4]


#: Copies that an expert can have and one more, and steps whose load is remembered (distributed/eplb/eplb_state.py,
#: ``MAX_EXPERT_REDUNDANCY``; config/parallel.py, ``window_size``).
_SLOTS, _WINDOW = 1024, 1000


def balance(run: Run, shape: Shape) -> None:
    """``--enable-eplb``: where every expert's copies are, their load in the last steps, and room for the experts of one
    layer while they are moved (``EplbState.add_model``)."""
    experts = shape.experts
    if experts is None or not run.experts.balanced:
        return
    run.enter("expert parallelism load balancer")
    layers = sum(experts.in_layer(index) for index in shape.own.layers)
    copies = experts.count + run.experts.redundant
    made = [run.new(size) for size in (copies * 8, experts.count * _SLOTS * 8, experts.count * 8)]
    sizes = (copies * 8, experts.count * _SLOTS * 8, experts.count * 8, copies * 4, _WINDOW * copies * 4)
    for size in sizes:
        run.new(layers * size, "load of experts", Category.BUFFER)
    run.new(4, "load of experts", Category.BUFFER)
    run.new(1, "load of experts", Category.BUFFER)
    _make_layer(run, shape, "experts on their way")
    run.new(layers * experts.count * 8, "load of experts", Category.BUFFER)
    run.free(*made)


def _make_layer(run: Run, shape: Shape, name: str) -> list[Tensor]:
    """The experts of one layer."""
    assert shape.experts is not None
    local = cdiv(shape.experts.count + run.experts.redundant, run.experts.ranks)
    width = shape.experts.width // run.experts.slices
    return shape.linear.of(name).make_experts(run, name, local, shape.hidden, width, 1 + shape.experts.gated)


def rearrange(run: Run, shape: Shape) -> None:
    """``EplbState.rearrange`` while the engine profiles: the load in the last steps by expert, its sum, and room to
    gather the experts of a layer into (distributed/eplb/{eplb_state,rebalance_execute}.py), each weight's by way of a
    flat copy of those of all ranks (``ProcessGroupNCCL::allgather``)."""
    experts = shape.experts
    if experts is None or not run.experts.balanced:
        return
    run.enter("expert parallelism load balancer")
    layers = sum(experts.in_layer(index) for index in shape.own.layers)
    copies = experts.count + run.experts.redundant
    load = run.new(_WINDOW * layers * (experts.count + 1) * 4, "load by expert")
    run.temporary(layers * copies, layers * copies * 8)
    total = run.new(layers * experts.count * 8, "sum of the load")
    run.temporary(_WINDOW * layers * experts.count * 8)
    gathered = _make_layer(run, shape, "experts that are gathered")
    for weight in gathered:
        run.temporary(run.experts.ranks * weight.bytes)
    run.free(*gathered, load, total)
