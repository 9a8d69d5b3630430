"""The engine's two model runners: the buffers they keep, and the runs that find their peak.

Followed from vllm 0.32.0: V2 is ``v1/worker/gpu`` (``model_runner``, ``states``, ``input_batch``, ``sample``,
``structured_outputs``), V1 is ``v1/worker/gpu_model_runner.py`` with ``gpu_input_batch.py`` and ``block_table.py``.
Buffers that V2 keeps in pinned host memory (UVA) take nothing here. Every line of sizes is one ``__init__``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from graphmem.serving.vllm.graphs import block_table_bytes
from graphmem.serving.vllm.layers import cdiv
from graphmem.serving.vllm.models.base import Family, Shape
from graphmem.serving.vllm.models.experts import balance, rearrange
from graphmem.serving.vllm.models.mamba import state_index
from graphmem.serving.vllm.run import Batch, Run, Tensor
from graphmem.serving.vllm.sampling import log_probabilities, processed_logits
from graphmem.serving.vllm.speculation import NGram, Speculator
from graphmem.trace import Category

#: sample/logit_bias.py: MAX_NUM_ALLOWED_TOKEN_IDS, MAX_NUM_LOGIT_BIAS_TOKENS (twice: ids and values), stop ids.
_LOGIT_BIAS = (1024, 1024, 1024, 128)
#: VLLM_MAX_BAD_WORDS_TOTAL_TOKENS, and VLLM_MAX_NUM_BAD_WORDS offsets with one more (envs.py).
_BAD_WORDS = (1024, 129)
#: MAX_LOGPROB_TOKEN_IDS (vllm/sampling_params.py).
_LOGPROB_IDS = 128
#: Rows from which ``torch.sort`` sorts by segment (``sort_stable``, ATen/native/cuda/SortStable.cu).
_SORTED_BY_SEGMENT = 128
#: Columns of a block of the Gumbel sampler (sample/gumbel.py).
_GUMBEL_BLOCK = 1024


class ModelRunner(ABC):
    """The memory that a runner adds to the model's."""

    name: str
    #: Whether the sampler leaves logits where they are: older ones sort them.
    unsorted: bool = True
    #: Whether it is Triton's kernel that leaves them, which has a buffer of its own, and not FlashInfer's.
    buffered: bool = True
    #: Whether the model returns states instead of tokens, and nothing is sampled.
    pools: bool = False
    #: Whether such a model reads in both directions.
    encodes: bool = False
    #: Whether the profile run samples once more with all that sampling may be asked for.
    samples_twice: bool = False

    def __init__(self, run: Run, batch: Batch, shape: Shape, speculator: Speculator | None = None) -> None:
        self.run, self.batch, self.shape, self.speculator = run, batch, shape, speculator
        self.drafted = speculator.draft.tokens if speculator is not None else 0

    @abstractmethod
    def make(self) -> None:
        """Buffers made before the weights are loaded."""

    @abstractmethod
    def after_loading(self, model: Family) -> None:
        """Buffers made after it."""

    @abstractmethod
    def profile(self, model: Family, forward: Callable[[int], Tensor]) -> None:
        """``profile_run``: one step of the most tokens by this forward pass of it, then logits and the sampler."""

    def buffers(self, name: str, *sizes: int) -> None:
        """Tensors that stay."""
        self.run.enter(name)
        for size in sizes:
            self.run.new(size, name, Category.BUFFER)


class V2(ModelRunner):
    """``v1/worker/gpu/model_runner.py``."""

    name = "V2"

    def make(self) -> None:
        tokens, requests = self.batch.tokens, self.batch.requests
        if isinstance(self.speculator, NGram):
            self.buffers("tokens of all requests", requests * self.batch.length * 4)
        # Tokens so far, computed tokens, sampled and drafted tokens (64 bits), next prompt tokens.
        drafted = [requests * self.drafted * 8] if self.drafted else []
        self.buffers("request states", requests * 4, requests * 4, requests * 8, *drafted, requests * 4)
        if self.speculator is not None:
            self.speculator.make()
        # Ids, positions, padding; starts of queries, lengths, lengths under context parallelism.
        self.buffers(
            "input buffers", tokens * 4, tokens * 8, tokens, (requests + 1) * 4, requests * 4, requests * 4
        )  # fmt: skip

    def after_loading(self, model: Family) -> None:
        tokens, shape = self.batch.tokens, self.shape
        if shape.encoder is not None:  # mm/encoder_runner.py: ids have become embeddings before the model sees them
            self.run.enter("input embeddings")
            model.give(self.run.new(tokens * shape.hidden * shape.itemsize, "input embeddings", Category.BUFFER))
        if shape.position_rows:  # mm/rope.py, with a place more
            self.buffers("positions of M-RoPE", shape.position_rows * (tokens + 1) * 8)
        if shape.crosses:
            self.buffers("lengths of what was encoded", self.batch.requests * 4)
        state_index(self.run, self.shape)
        if self.encodes:  # a block table and slots that nobody reads (model_states/encoder_only.py)
            self.buffers("attention metadata", self.batch.requests * 4, tokens * 8)
        if self.shape.own.last and not self.pools:
            self._sampling_buffers()
        balance(self.run, self.shape)
        if not self.shape.own.first:
            model.receive(self.batch.tokens)

    def _sampling_buffers(self) -> None:
        requests, vocab = self.batch.requests, self.shape.vocab
        mask = requests * cdiv(vocab, 32) * 4
        self.buffers("penalties: prompt mask", mask)
        self.buffers("penalties: counts of generated tokens", requests * vocab * 4)
        self.buffers("logit bias", *(requests * count * 4 for count in _LOGIT_BIAS))
        self.buffers("bad words", *(requests * count * 4 for count in _BAD_WORDS))
        self.buffers("log probabilities of given ids", requests * _LOGPROB_IDS * 4)
        self.buffers("structured outputs: indices", requests * (1 + self.drafted) * 4)
        self.buffers("structured outputs: grammar mask", mask * (1 + self.drafted))

    def profile(self, model: Family, forward: Callable[[int], Tensor]) -> None:
        run, rows = self.run, self.batch.profiled_requests
        run.enter("dummy batch")
        batch = self._dummy_batch(rows)
        tokens = self.batch.tokens
        if self.speculator is not None:
            tokens -= self.batch.requests * self.speculator.draft.extra_slots
        hidden = forward(tokens)
        if not self.shape.own.last:
            model.send(hidden)  # the batch stays: nobody takes ``execute_model_state`` on such a rank
            return
        tapped = model.taken() if self.speculator is not None else []
        if self.speculator is not None:
            numbers = [run.new(rows * 4) for _ in range(2)]
            self.speculator.propose(rows, tokens, tapped)
            run.free(*numbers)
        run.enter("sampled hidden states")
        indices = run.new(rows * 8)
        sampled = run.new(rows * self.shape.hidden * self.shape.itemsize, "sampled hidden states")
        run.free(indices, *batch, *reversed(tapped))
        rearrange(run, self.shape)
        if not self.pools:
            logits = model.logits(rows)
            run.enter("sampler")
            again = self._dummy_batch(rows)
            self._sample(rows)
            if self.samples_twice:
                self._sample(rows, logits)
            run.free(*again, logits)
        run.free(hidden, sampled)

    def _dummy_batch(self, rows: int) -> list[Tensor]:
        """``InputBatch.make_dummy``: requests by row, positions within them, indices of logits, and their sums."""
        return [self.run.new(size) for size in (rows * 8, rows * 4, rows * 4, (rows + 1) * 4)]

    def _sample(self, rows: int, logits: Tensor | None = None) -> None:
        """``Sampler``: positions and ids of the rows, and the best of every block of columns; with ``logits`` as where
        requests ask for all it has."""
        run, vocab = self.run, self.shape.vocab
        positions, ids = (run.replacing(run.new(rows * 8), run.new(rows * size)) for size in (8, 4))
        processed, limits = processed_logits(run, rows, vocab) if logits is not None else ([], [])
        blocks = rows * cdiv(vocab, _GUMBEL_BLOCK)
        best, scores = run.new(blocks * 8), run.new(blocks * 4)
        chosen, sampled = run.new(rows * 8), run.new(rows * 8)
        run.free(chosen, best, scores, *limits)
        if logits is not None:
            log_probabilities(run, rows, vocab, logits)
        run.free(sampled, positions, ids, *processed)


class V1(ModelRunner):
    """``v1/worker/gpu_model_runner.py``."""

    name = "V1"

    def make(self) -> None:
        tokens, requests, batch = self.batch.tokens, self.batch.requests, self.batch
        # The least probability's is left out where tokens are drafted (v1/sample/logits_processor).
        self.buffers("logits processors", *([] if self.speculator is not None else [requests * 4]), 4)
        self.buffers("block table", block_table_bytes(batch, batch.block_size), tokens * 8)
        # Temperature, top-p, top-k and three penalties.
        self.buffers("sampling parameters", *[requests * 4] * 6)
        self.buffers("input buffers", tokens * 4, tokens * 8, tokens, (requests + 1) * 4, *[requests * 4] * 3)
        self.buffers("input buffers", tokens * 8, requests * 8, requests * 4, requests * 4)
        self.run.enter("input embeddings")
        size = tokens * self.shape.hidden * self.shape.itemsize
        self._embeddings = self.run.new(size, "input embeddings", Category.BUFFER)
        self.buffers("input buffers", tokens, requests, requests * 4, requests * 4)
        if self.shape.position_rows:
            self.buffers("positions of M-RoPE", self.shape.position_rows * (tokens + 1) * 8)
        self.buffers("input buffers", max(requests + 1, tokens) * 8)

    def after_loading(self, model: Family) -> None:
        if self.shape.encoder is not None:
            model.give(self._embeddings)

    def profile(self, model: Family, forward: Callable[[int], Tensor]) -> None:
        run, rows = self.run, self.batch.profiled_requests
        if not self.shape.own.first:
            model.receive(self.batch.tokens)
        hidden = forward(self.batch.tokens)
        run.enter("sampled hidden states")
        if self.pools:
            run.free(hidden)
            return
        indices, width = run.new(rows * 8), rows * self.shape.hidden * self.shape.itemsize
        if not self.shape.own.last:
            run.free(indices)
            model.send(hidden)
            return
        sampled = run.replacing(indices, run.new(width, "sampled hidden states"))
        noise = run.new(width, "random hidden states")
        logits = model.logits(rows)
        run.enter("sampler")
        parameters = [run.new(size) for size in (rows * 4, rows * 4, rows * 8, rows * 4, rows * 4, rows * 4)]
        self._sample(rows, first=True)
        first = run.new(rows * 4, "sampled tokens")
        self._sample(rows, first=False)
        run.temporary(rows * 4)
        drafted = self._reject_drafts(rows, logits) if self.speculator is not None else [logits]
        run.free(noise, *drafted, *parameters, hidden, first, sampled)

    def _reject_drafts(self, rows: int, logits: Tensor) -> list[Tensor]:
        """``RejectionSampler`` on one drafted token of each request and the one after it: with some of them sampled,
        then with the likeliest of all (v1/sample/rejection_sampler.py). Logits are new ones."""
        run, row = self.run, self.shape.vocab * self.shape.itemsize
        kept = [run.new(size) for size in (rows * 4, rows * 4, rows * 4, rows * 4, rows * 4, rows * 8)]
        kept.append(run.new(2 * rows * row, "logits of drafts"))
        run.free(logits)
        for sampled in (True, False):
            held = [self._copied(rows, row)]
            held.append(run.new(rows * self.shape.vocab * 4, "raw logits"))
            self._sample(rows, first=False, greedy=not sampled)
            held.append(run.new(rows * 4))
            target = self._copied(rows, row)
            held.append(run.replacing(target, run.new(rows * self.shape.vocab * 4, "logits of drafts in fp32")))
            held.append(run.new(rows * self.shape.vocab * 4, "processed logits"))
            if sampled:
                run.temporary(rows * 4, rows * 8, rows * 4, rows * 4)
            held.append(run.new(rows * 8, "accepted tokens"))
            if sampled:
                self._recover(rows)
            else:
                run.temporary(rows * 8)
            run.free(*held)
        return kept

    def _copied(self, rows: int, row: int) -> Tensor:
        """Rows of the logits, by index."""
        return self.run.replacing(self.run.new(rows * 8), self.run.new(rows * row))

    def _recover(self, rows: int) -> None:
        """Tokens in place of rejected ones: probabilities, noise, and the rest of the target's."""
        run, wide = self.run, rows * self.shape.vocab * 4
        small = [run.new(size) for size in (rows, rows * 8, rows * 8)]
        probabilities = run.new(wide, "probabilities")
        noise, left = run.new(wide, "exponential noise"), run.new(wide, "what is left of probabilities")
        recovered = run.new(rows * 4)
        run.free(noise, left, *small, probabilities, recovered)

    def _sample(self, rows: int, *, first: bool, greedy: bool = False) -> None:
        """``Sampler`` (v1/sample/sampler.py): logits in fp32, the likeliest tokens, top-k and top-p, probabilities, and
        exponential noise of their size. Top-k and top-p are in place by a Triton kernel whose buffer stays
        (ops/topk_topp_triton.py: a row of logits for each multiprocessor), before that by a sort."""
        run, wide = self.run, rows * self.shape.vocab * 4
        logits = run.new(wide, "logits in fp32")
        likeliest = run.new(rows * 8)
        if greedy:
            run.free(likeliest, logits)
            return
        run.temporary(rows, 4, rows * 4)
        kept = [] if self.unsorted else [self._sorted(rows)]
        if first and self.buffered:
            for size in (run.device.sm_count * self.shape.vocab * 4, 800, 800):
                run.new(size, "top-k and top-p buffer", Category.WORKSPACE)
        probabilities = run.new(wide, "probabilities")
        noise = run.new(wide, "exponential noise")
        chosen = run.new(rows * 8)
        run.free(noise, probabilities)
        run.temporary(rows)
        run.free(chosen, *kept, likeliest, logits)

    def _sorted(self, rows: int) -> Tensor:
        """The logits that are left: all of them are sorted with their places, and put back (``apply_top_k_top_p``).
        From 128 rows on the sort is one of segments, which takes places of 64 bits and room for both; below, of all as
        pairs of place and row, twice (ATen/native/cuda/SortStable.cu)."""
        run, items = self.run, rows * self.shape.vocab
        values, places = run.new(items * 4, "sorted logits"), run.new(items * 8, "places of sorted logits")
        if rows >= _SORTED_BY_SEGMENT:
            run.temporary(items * 8, items * (4 + 8))
        else:
            run.temporary(items * 8, items * 8, items * 4, items * (4 + 8))
        run.temporary(items)
        run.temporary(items * 4)
        return run.replacing(values, places, run.new(items * 4, "logits that are left"))


RUNNERS: dict[str, type[ModelRunner]] = {runner.name: runner for runner in (V1, V2)}
