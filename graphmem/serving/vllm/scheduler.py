"""vLLM's scheduler, step by step: which requests compute how many tokens, who takes blocks, who is preempted.

Followed from vllm 0.32.0, ``v1/core/sched/{scheduler,async_scheduler}.py``, ``v1/core/kv_cache_manager.py`` and
``v1/core/block_pool.py``: first come, first served; chunked prefill; preemption by recomputing; prefix caching, as far
as a request finds its own blocks again (prompts have nothing in common here), and not for models with several groups of
layers. Not followed: priorities, speculative decoding, connectors, encoders. Tokens are counted, never made.
"""

from __future__ import annotations

from collections import deque

from graphmem.serving.base import Batch, Request
from graphmem.serving.vllm.kv_cache import Layout
from graphmem.serving.vllm.layers import cdiv


class _State:
    """A request in the engine. Counts are tokens, but for blocks."""

    __slots__ = (
        "blocks", "cached", "computed", "finished", "generated", "in_flight", "last", "number", "output",
        "placeholders", "prompt", "removed", "room", "running", "stale", "tokens",
    )  # fmt: skip

    def __init__(self, number: int, request: Request, groups: int) -> None:
        self.number = number
        self.prompt, self.output = request.prompt, request.output
        self.tokens = request.prompt  #: known ones: the prompt and what was generated
        self.generated = self.computed = 0
        self.placeholders = 0  #: sampled in steps that have not come back
        self.in_flight = self.stale = 0
        self.blocks = self.cached = 0  #: held; of these, those found again by their hash
        self.removed = [0] * groups  #: blocks of a window's group that were given back
        self.room = 0  #: tokens that its blocks hold; 0 where a look is needed at each step
        self.last = 0  #: computed tokens from which its end is near
        self.running = self.finished = False


class FreeBlocks:
    """``FreeKVCacheBlockQueue``: who is next to be taken. Blocks that nobody will look for are only counted; those of a
    preempted request are found again until they are taken, its last ones first."""

    def __init__(self, blocks: int) -> None:
        self.count = blocks
        self._queue: deque[list[int]] = deque([[-1, blocks]])  #: (request or -1, blocks)
        self._kept: dict[int, list[int]] = {}

    def put_first(self, blocks: int) -> None:
        """Blocks without a hash: the next ones to be taken."""
        if blocks:
            self.count += blocks
            if self._queue and self._queue[0][0] < 0:
                self._queue[0][1] += blocks
            else:
                self._queue.appendleft([-1, blocks])

    def put_last(self, blocks: int, request: int = -1) -> None:
        """Blocks with a hash; with a ``request``, it may come back for them."""
        if not blocks:
            return
        self.count += blocks
        if request < 0 and self._queue and self._queue[-1][0] < 0:
            self._queue[-1][1] += blocks
            return
        entry = [request, blocks]
        self._queue.append(entry)
        if request >= 0:
            self._kept[request] = entry

    def take(self, blocks: int) -> None:
        """The first so many, which are there."""
        self.count -= blocks
        while blocks:
            entry = self._queue[0]
            taken = min(blocks, entry[1])
            entry[1] -= taken
            blocks -= taken
            if not entry[1]:
                self._queue.popleft()
                self._kept.pop(entry[0], None)

    def kept(self, request: int) -> int:
        """Blocks that the request would find again."""
        entry = self._kept.get(request)
        return entry[1] if entry else 0

    def take_back(self, request: int, blocks: int) -> None:
        """The request takes so many of its own; nobody looks for the rest."""
        entry = self._kept.pop(request, None)
        if entry is not None:
            self.count -= blocks
            entry[0] = -1
            entry[1] -= blocks


class Scheduler:
    """See :class:`graphmem.serving.base.Scheduler`."""

    rules = (
        "the scheduler is vLLM 0.32's, whatever the version: first come, first served; no two prompts begin alike, so "
        "prefix caching helps only those that were preempted"
    )

    def __init__(
        self, layout: Layout, blocks: int, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        batches_in_flight: int = 2, prefix_caching: bool = True,
    ) -> None:  # fmt: skip
        self._layout = layout
        self._block_size = layout.block_size
        self._specs = tuple(group.spec for group in layout.groups)
        self._plain = tuple(spec.window for spec in self._specs) == (None,)
        self._most_requests, self._most_tokens = max_num_seqs, max_num_batched_tokens
        self._longest = max_model_len
        self.batches_in_flight = batches_in_flight
        self._asynchronous = batches_in_flight > 1
        self._caching = prefix_caching and self._plain
        self.blocks = max(0, blocks - 1)  #: one is the null block
        self._free = FreeBlocks(self.blocks)
        self._running: list[_State] = []
        self._waiting: deque[_State] = deque()
        self.lost_tokens = 0
        if not self._plain:
            self.rules += "; with several groups of layers not even those, which the engine would help"

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.blocks - self._free.count

    @property
    def running(self) -> int:
        """Requests that are in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that are not, preempted ones among them."""
        return len(self._waiting)

    def fits(self, request: Request) -> bool:
        """True if the request could ever run alone."""
        last = min(request.prompt + request.output, self._longest)
        return 0 < request.prompt < self._longest and self._admission(last) <= self.blocks

    def add(self, number: int, request: Request) -> None:
        """A request arrives; ``number`` names it from now on."""
        state = _State(number, request, len(self._specs))
        state.last = min(state.prompt + state.output, self._longest) - 2
        self._waiting.append(state)

    def schedule(self) -> Batch:
        """The next step's batch (``Scheduler.schedule``)."""
        batch = Batch(self._most_tokens, [], [], [])  # total is what is left until the end
        running, size = self._running, self._block_size
        index = 0
        while index < len(running) and batch.total > 0:
            state = running[index]
            index += 1
            after = state.computed + 1
            if after == state.tokens + state.placeholders and after < state.room and after < state.last:
                self._choose(batch, state, 1)  # one more token, where there is room: what most are, most of the time
                continue
            tokens = self._next_tokens(state, batch.total)
            if not tokens:
                continue
            if not self._make_room(state, tokens, batch.preempted):
                break
            state.room = state.blocks * size if self._plain else 0
            self._choose(batch, state, tokens)
        if not batch.preempted:
            self._admit(batch)
        batch.total = self._most_tokens - batch.total
        return batch

    def _choose(self, batch: Batch, state: _State, tokens: int) -> None:
        """Add tokens of a request to the batch; they count as computed from now on (``_update_after_schedule``)."""
        batch.total -= tokens
        state.computed += tokens
        state.in_flight += tokens
        batch.context += state.computed
        batch.pairs += tokens * state.computed - tokens * (tokens - 1) // 2
        sampled = state.computed >= state.tokens + state.placeholders
        if sampled and self._asynchronous:
            state.placeholders += 1
        batch.entries.append((state, tokens, sampled))

    def _next_tokens(self, state: _State, budget: int) -> int:
        if state.placeholders and state.computed + 2 - state.placeholders >= state.prompt + state.output:
            return 0  # its last token is under way
        left = state.tokens + state.placeholders - state.computed
        return min(left, budget, self._longest - state.computed - 1)

    def _make_room(self, state: _State, tokens: int, preempted: list[int]) -> bool:
        """Slots for a running request: whoever came last makes room. False where that is the request itself."""
        while not self._allocate(state, state.computed + tokens):
            victim = self._running.pop()
            self._preempt(victim)
            preempted.append(victim.number)
            if victim is state:
                return False
        return True

    def _allocate(self, state: _State, tokens: int) -> bool:
        """``KVCacheManager.allocate_slots`` for so many tokens in all."""
        needed = cdiv(tokens, self._block_size) if self._plain else self._windowed(state, tokens)
        missing = needed - state.blocks
        if missing > 0:
            if missing > self._free.count:
                return False
            self._free.take(missing)
            state.blocks = needed
        self._cache(state, min(tokens, state.tokens))
        return True

    def _windowed(self, state: _State, tokens: int) -> int:
        """Blocks of all groups; those before a window are given back first, as far as steps have come back."""
        needed = 0
        for number, spec in enumerate(self._specs):
            size, held = self._block_size * spec.times, state.removed[number]
            skipped = spec.unread(max(0, state.computed - state.in_flight)) // size
            if skipped > held and state.blocks:
                state.removed[number] = skipped
                state.blocks -= skipped - held
                self._free.put_last(skipped - held)
            needed += cdiv(tokens, size) - state.removed[number]
        return needed

    def _cache(self, state: _State, tokens: int) -> None:
        if self._caching:
            state.cached = max(state.cached, tokens // self._block_size)

    def _preempt(self, state: _State) -> None:
        """``_preempt_request``: all blocks are given back, and everything is computed again."""
        state.running = False
        self.lost_tokens += state.computed
        self._give_back(state, state.number)
        state.computed = state.placeholders = 0
        state.stale = state.in_flight
        self._waiting.appendleft(state)

    def _give_back(self, state: _State, owner: int = -1) -> None:
        cached = min(state.cached, state.blocks)
        self._free.put_first(state.blocks - cached)
        self._free.put_last(cached, owner)
        state.blocks = state.cached = state.room = 0
        state.removed = [0] * len(self._specs)

    def _admit(self, batch: Batch) -> None:
        """Requests that wait, in their order, while all that they have fits (``scheduler_reserve_full_isl``)."""
        skipped: list[_State] = []
        while batch.total > 0 and self._waiting and len(self._running) < self._most_requests:
            state = self._waiting[0]
            if state.stale:  # a token of before its preemption is still under way
                skipped.append(self._waiting.popleft())
                continue
            if self._admission(min(state.tokens, self._longest)) > self._free.count:
                break
            found = min(self._free.kept(state.number), (state.tokens - 1) // self._block_size)
            start = found * self._block_size
            tokens = min(state.tokens - start, batch.total)
            if self._first_blocks(start + tokens) > self._free.count:
                break
            self._free.take_back(state.number, found)
            self.lost_tokens -= start
            state.blocks = state.cached = found
            state.computed = start
            self._allocate(state, start + tokens)
            state.room = state.blocks * self._block_size if self._plain else 0
            self._waiting.popleft()
            state.running = True
            self._running.append(state)
            batch.admitted.append(state.number)
            self._choose(batch, state, tokens)
        self._waiting.extendleft(reversed(skipped))

    def _first_blocks(self, tokens: int) -> int:
        return sum(cdiv(tokens, self._block_size * spec.times) for spec in self._specs)

    def _admission(self, tokens: int) -> int:
        """Blocks that a request is admitted by (``max_admission_blocks_per_request``)."""
        return sum(
            min(cdiv(tokens, self._block_size * spec.times), self._layout.group_blocks(spec, self._longest))
            for spec in self._specs
        )

    def update(self, batch: Batch) -> list[int]:
        """A batch comes back: a token for each request that is no longer in its prompt. Those that are finished
        (``update_from_output``)."""
        finished: list[int] = []
        for state, tokens, sampled in batch.entries:
            if state.finished:
                continue
            state.in_flight -= tokens
            stale = state.stale > 0
            if stale:
                state.stale -= tokens
            if sampled:
                self._token(state, stale)
                if state.finished:
                    finished.append(state.number)
        if finished:
            running = [state for state in self._running if not state.finished]
            if len(self._running) - len(running) < len(finished):  # one that was preempted: few are, and many may wait
                self._waiting = deque(state for state in self._waiting if not state.finished)
            self._running = running
        return finished

    def _token(self, state: _State, stale: bool) -> None:
        state.tokens += 1
        state.generated += 1
        if self._asynchronous:
            if not stale:
                state.placeholders -= 1
            if state.running and not (state.computed - state.placeholders) % self._block_size:
                self._cache(state, state.computed - state.placeholders)
        if state.generated >= state.output or state.tokens >= self._longest:
            state.finished = True
            if state.running:
                self._give_back(state)
            else:
                self._free.take_back(state.number, 0)
